//! A mock of vLLM: the processes, the OpenAI API, the gRPC health and the deaths of a real engine
//! in a few megabytes, with a model that is a pure function ([`lastgasp_tests::model`]).
//!
//! `main` is an API server. It starts its engine core, and the other processes of a real tree, as
//! children of the same executable ([`role`]). What it serves is in [`http`], how it looks on the
//! wire in [`wire`], how it dies in [`lifecycle`].

#![forbid(unsafe_code)]

mod args;
mod core;
mod core_client;
mod freeze;
mod health;
mod http;
mod ipc;
mod lifecycle;
mod phase;
mod role;
mod tree;
mod wire;

use std::io::{self, Read};
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use lastgasp_tests::model::Frontend;

use crate::args::{Args, CoreSettings};
use crate::role::{Role, set_comm};

fn main() -> ExitCode {
    let role = Role::current();
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "mock_engine=info".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).with_ansi(false).init();
    let result = match role {
        Some(role) => child(&role),
        None => api_server(),
    };
    result.unwrap_or_else(|error| {
        tracing::error!(%error, "ends");
        ExitCode::FAILURE
    })
}

fn api_server() -> io::Result<ExitCode> {
    let args = Args::parse();
    if let Err(problem) = args.check() {
        eprintln!("mock-engine: {problem}");
        return Ok(ExitCode::from(2));
    }
    set_comm(match args.frontend {
        Frontend::Python => "vllm",
        Frontend::Rust => "vllm-rs",
    })?;
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        // The name of a thread in a real API server: a thread's exit is not the process's.
        .thread_name("ZMQbg/IO/0")
        .enable_all()
        .build()?
        .block_on(lifecycle::run(args))
}

fn child(role: &Role) -> io::Result<ExitCode> {
    role.take_comm()?;
    match role {
        Role::EngineCore { socket, settings } => core::run(socket, settings)?,
        Role::Headless { socket, settings } => return headless(socket, settings),
        Role::ResourceTracker => drop(io::stdin().read_to_end(&mut Vec::new())),
        Role::Compiler { millis } => std::thread::sleep(Duration::from_millis(*millis)),
    }
    Ok(ExitCode::SUCCESS)
}

/// The launcher between the Rust frontend and the engine core, which takes its time to notice
/// that its child is gone.
fn headless(socket: &str, settings: &CoreSettings) -> io::Result<ExitCode> {
    let role = Role::EngineCore { socket: socket.to_owned(), settings: settings.clone() };
    let status = role.spawn()?.wait()?;
    std::thread::sleep(settings.launcher_linger);
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

//! `lastgasp-router`, see the library.
#![forbid(unsafe_code)]

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;
use lastgasp_router::app;
use lastgasp_router::cli::{Args, LogFormat};
use tracing_subscriber::EnvFilter;

/// sysexits(3): the command line is wrong.
const USAGE: u8 = 64;

/// Follows NATS. Requests are served by other threads.
#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => {
            _ = error.print();
            let asked = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
            return if asked { ExitCode::SUCCESS } else { ExitCode::from(USAGE) };
        }
    };
    let filter = match EnvFilter::try_new(&args.log) {
        Ok(filter) => filter,
        Err(error) => {
            eprintln!("--log {}: {error}", args.log);
            return ExitCode::from(USAGE);
        }
    };
    let (lines, flush) = lastgasp_process::log::start();
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        // A log that cannot be written, on a disk that is full, is no reason to end.
        .log_internal_errors(false)
        .with_writer(lines);
    match args.log_format {
        LogFormat::Text => log.init(),
        LogFormat::Json => log.json().init(),
    }
    let exit = app::run(args).await;
    drop(flush);
    exit
}

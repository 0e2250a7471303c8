//! A process of the node is stuck in the kernel and holds its memory locked: reading its command line or
//! environment waits for as long as it is stuck. On a node with a sick GPU or disk there are such processes.

use std::path::Path;

use lastgasp_protocol::WorkerState;
use lastgasp_tests::binaries;
use lastgasp_tests::daemon::{Daemon, DaemonConfig, HealthConfig};
use lastgasp_tests::discovery::Discovery;
use lastgasp_tests::engine::Engine;
use lastgasp_tests::matrix;
use lastgasp_tests::nats::Nats;
use lastgasp_tests::process::{GIVE_UP, Process};
use lastgasp_tests::ready::Ready;
use nix::sys::signal::Signal;
use serde_json::Value;
use tokio::process::Command;

/// A process that is stuck, and its server.
struct Stuck {
    /// Ends it when it is dropped.
    server: Process,
    pid: u32,
}

impl Stuck {
    /// Waits until it is stuck. It starts `program` before.
    async fn new(name: &str, program: &[&str], folder: &Path) -> Self {
        let mut command = Command::new(binaries::find("stuck-process").unwrap());
        command.args(program).current_dir(folder);
        let mut server = Process::spawn(name, command, folder).unwrap();
        let log = folder.join(format!("{name}.log"));
        let said = async {
            loop {
                let said = std::fs::read_to_string(&log).unwrap_or_default();
                if let Some(pid) = said.lines().find_map(|line| line.strip_prefix("stuck ")?.parse().ok()) {
                    return pid;
                }
                tokio::task::yield_now().await;
            }
        };
        let pid =
            tokio::time::timeout(GIVE_UP, said).await.unwrap_or_else(|_| panic!("not stuck: {}", server.log_tail()));
        server.record([pid]);
        Self { server, pid }
    }
}

fn warnings(status: &Value) -> String {
    status["warnings"].to_string()
}

#[tokio::test]
async fn the_daemon_is_ready_says_who_is_stuck_and_finds_what_is_restarted() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let stuck = Stuck::new("stuck", &[], path).await;
    let nats = Nats::start(path).await.unwrap();
    let discovery = Discovery::watch(&nats).await.unwrap();
    let engine = Engine::start("alpha", &[], path).await.unwrap();
    let (http, grpc) = (engine.ready.http.port().to_string(), engine.ready.grpc.unwrap().port().to_string());
    // Workers are found by their environment, and may declare themselves: each reads of everybody.
    let config = DaemonConfig::new("node-a", &nats.url(), "required", path).with(&engine).declared_by(u32::MAX - 9);
    let daemon = Daemon::start(&config, path).await.unwrap();
    discovery.listed("alpha", WorkerState::Serving).await.unwrap();

    let named = format!("stuck-process (pid {}) has held its memory locked", stuck.pid);
    daemon.status_when("who is stuck", |status| warnings(status).contains(&named)).await.unwrap();
    daemon.counts("lastgasp_stuck_processes", 1.0).await.unwrap();

    engine.signal_root(Signal::SIGKILL);
    discovery.removed("alpha").await.unwrap();
    drop(engine);
    let again = Engine::start("alpha", &["--port", &http, "--grpc-port", &grpc], path).await.unwrap();
    discovery.listed("alpha", WorkerState::Serving).await.unwrap();
    again.signal_core(Signal::SIGKILL);
    discovery.removed("alpha").await.unwrap();

    drop(stuck.server);
    daemon.status_when("it is not stuck", |status| !warnings(status).contains(&named)).await.unwrap();
    matrix::row(
        "A process of the node holds its memory locked",
        "a daemon that starts then is ready, says who it is, and finds what is restarted",
        "it was, it did",
    );
}

/// The parent of a worker's root is looked at when the root is found.
#[tokio::test]
async fn a_root_whose_parent_is_stuck_holds_up_nobody_elses_death() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let nats = Nats::start(path).await.unwrap();
    let discovery = Discovery::watch(&nats).await.unwrap();
    let beta = Engine::start("beta", &[], path).await.unwrap();
    let config = DaemonConfig::new("node-a", &nats.url(), "required", path).with(&beta);
    let declared = path.join("alpha").display().to_string();
    let ready = path.join("alpha.ready.json");
    let (variable, engine) = (format!("LASTGASP_WORKER={declared}"), binaries::find("mock-engine").unwrap());
    let engine = [engine.to_str().unwrap(), "--grpc-port", "0", "--ready-file", ready.to_str().unwrap()];
    let mut parent = Stuck::new("parent", &[&["env", variable.as_str()], &engine[..]].concat(), path).await;
    let alpha: Ready = parent.server.ready_file(&ready).await.unwrap();
    parent.server.record(alpha.pids());
    let grpc = format!("http://{}", alpha.grpc.unwrap());
    let config = config.with_vllm("alpha", &declared, format!("http://{}", alpha.http), HealthConfig::grpc(grpc));

    let daemon = Daemon::start(&config, path).await.unwrap();
    discovery.listed("alpha", WorkerState::Serving).await.unwrap();
    discovery.listed("beta", WorkerState::Serving).await.unwrap();
    let named = format!("(pid {}) has held its memory locked", parent.pid);
    daemon.status_when("who is stuck", |status| warnings(status).contains(&named)).await.unwrap();
    beta.signal_core(Signal::SIGKILL);
    discovery.removed("beta").await.unwrap();
    assert_eq!(discovery.removals("alpha"), 0);
    matrix::row(
        "The parent of a worker's root holds its memory locked",
        "another worker's death is withdrawn meanwhile",
        "it was",
    );
}

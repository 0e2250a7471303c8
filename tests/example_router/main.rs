//! The router of `docs/examples/router.py` does what the contract asks, beside a real daemon and a
//! real nats-server: it lists the workers, hears of a death, and the daemon hears its answers.
//!
//! Installs nats-py into a virtual environment under `target/`, hence ignored; `cargo xtask test`
//! runs it: `cargo test -p lastgasp-tests --test example_router -- --ignored`.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::process::Stdio;

use lastgasp_protocol::WorkerState;
use lastgasp_tests::daemon::{Daemon, DaemonConfig};
use lastgasp_tests::discovery::Discovery;
use lastgasp_tests::engine::Engine;
use lastgasp_tests::nats::Nats;
use lastgasp_tests::process::GIVE_UP;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};

/// A Python that has the package.
fn python() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("example-router");
    let python = folder.join("bin/python");
    let done = folder.join("installed");
    if !done.exists() {
        let run = |command: &mut std::process::Command| assert!(command.status().unwrap().success(), "{command:?}");
        run(std::process::Command::new("python3").args(["-m", "venv"]).arg(&folder));
        run(std::process::Command::new(&python).args(["-m", "pip", "install", "--quiet", "nats-py>=2.14"]));
        std::fs::write(done, "").unwrap();
    }
    python
}

/// The example, running.
struct Example {
    _process: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Example {
    fn start(nats: &Nats) -> Self {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/examples/router.py");
        let mut process = Command::new(python())
            .arg(script)
            .args([&nats.url(), "example.1"])
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().expect("piped")).lines();
        Self { _process: process, lines }
    }

    /// The next line that says this of this worker.
    async fn says(&mut self, what: &str, key: &str) -> Value {
        let found = async {
            loop {
                let line = self.lines.next_line().await.unwrap().expect("it goes on");
                let said: Value = serde_json::from_str(&line).unwrap();
                if said["what"] == what && said["key"] == key {
                    return said;
                }
            }
        };
        tokio::time::timeout(GIVE_UP, found).await.unwrap_or_else(|_| panic!("it does not say {what} of {key}"))
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "installs a Python package"]
async fn it_lists_workers_and_answers_a_move() {
    tokio::task::spawn_blocking(python).await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let discovery = Discovery::watch(&nats).await.unwrap();
    let engine = Engine::start("alpha", &[], folder.path()).await.unwrap();
    // A name that is no plain token: both sides have to escape it alike.
    let key = "node=2Ea.alpha";
    let config = DaemonConfig::new("node.a", &nats.url(), "auto", folder.path()).with(&engine);
    let daemon = Daemon::start(&config, folder.path()).await.unwrap();
    discovery.listed("alpha", WorkerState::Serving).await.unwrap();

    let mut example = Example::start(&nats);
    let listed = example.says("worker", key).await;
    assert_eq!((&listed["state"], &listed["endpoint"]), (&json!("serving"), &json!(engine.endpoint())));

    assert!(engine.core.signal(Signal::SIGKILL));
    let moved = example.says("move", key).await;
    assert_eq!(moved["mode"], "lost");
    // The signal or the deletion, whichever was first; the daemon hears the answers all the same.
    daemon.counts("lastgasp_router_answers_total{phase=\"received\"}", 1.0).await.unwrap();
    daemon.counts("lastgasp_router_answers_total{phase=\"done\"}", 1.0).await.unwrap();
    let heard = |certificate: &lastgasp_protocol::Certificate| certificate.routers_done >= 1;
    let certificate = discovery.certificate("alpha", heard).await.unwrap();
    assert_eq!((certificate.routers_received, certificate.routers_done), (1, 1));
}

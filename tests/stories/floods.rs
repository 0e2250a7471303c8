//! A process does something in a loop that the kernel reports: it opens and closes a listener, or takes one name after
//! the other. Other workers die meanwhile, and that is what counts.

use std::path::Path;

use async_nats::jetstream::kv::Operation;
use futures_util::StreamExt as _;
use lastgasp_protocol::{NODES_BUCKET, WorkerState};
use lastgasp_tests::binaries;
use lastgasp_tests::daemon::{Daemon, DaemonConfig, HealthConfig};
use lastgasp_tests::discovery::Discovery;
use lastgasp_tests::engine::Engine;
use lastgasp_tests::matrix;
use lastgasp_tests::nats::Nats;
use lastgasp_tests::process::{GIVE_UP, Identity, Process};
use lastgasp_tests::ready::Ready;
use nix::sys::signal::Signal;
use tokio::process::Command;
use tokio::sync::watch;

/// Threads that looks at processes and ports may take, and some that come and go.
const MORE_THREADS: usize = 48;

fn threads(daemon: &Daemon) -> usize {
    std::fs::read_dir(format!("/proc/{}/task", daemon.process.identity.pid)).map_or(0, Iterator::count)
}

/// The node's lease, as NATS shows it.
#[derive(Clone, Copy, Default)]
struct Lease {
    renewals: usize,
    has_lapsed: bool,
}

async fn lease(nats: &Nats) -> watch::Receiver<Lease> {
    let client = nats.client().await.unwrap();
    let leases = async_nats::jetstream::new(client).get_key_value(NODES_BUCKET).await.unwrap();
    let mut changes = leases.watch_all().await.unwrap();
    let (seen, lease) = watch::channel(Lease::default());
    tokio::spawn(async move {
        while let Some(Ok(change)) = changes.next().await {
            seen.send_modify(|lease| {
                // A key that has lived out its time leaves a marker without a value.
                lease.has_lapsed |= change.operation != Operation::Put || change.value.is_empty();
                lease.renewals += 1;
            });
        }
    });
    lease
}

/// Kills the engine's core while a flood goes on, and waits until that is withdrawn. The daemon renews its lease before
/// and after that, and takes no more threads than it may.
async fn a_death_is_withdrawn(engine: &Engine, name: &str, daemon: &Daemon, discovery: &Discovery, nats: &Nats) {
    let before = threads(daemon);
    let mut lease = lease(nats).await;
    let mut renewed = async || {
        let now = lease.borrow().renewals;
        let more = lease.wait_for(|lease| lease.renewals >= now + 3);
        let lease = tokio::time::timeout(GIVE_UP, more).await.expect("three more renewals").unwrap();
        assert!(!lease.has_lapsed);
        threads(daemon)
    };
    let mut most = renewed().await;
    engine.signal_core(Signal::SIGKILL);
    discovery.removed(name).await.unwrap();
    most = most.max(renewed().await);
    assert!(most <= before + MORE_THREADS, "{most} threads, {before} before");
    let status = daemon.status().await.unwrap();
    assert_eq!((&status["nats"], &status["lease"]), (&"connected".into(), &"held".into()), "{status:#}");
}

fn flood(arguments: &[&str], user: u32, name: &str, folder: &Path) -> Process {
    let mut command = Command::new("setpriv");
    command
        .args(["--clear-groups", "--reuid", &user.to_string()])
        .arg(binaries::find("victim").unwrap())
        .args(arguments);
    Process::spawn(name, command, folder).unwrap()
}

#[tokio::test]
async fn a_stranger_opens_and_closes_the_port_of_a_worker_at_another_address() {
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let discovery = Discovery::watch(&nats).await.unwrap();
    let alpha = Engine::start("alpha", &[], folder.path()).await.unwrap();
    let config = DaemonConfig::new("node-a", &nats.url(), "required", folder.path()).with(&alpha);
    let daemon = Daemon::start(&config, folder.path()).await.unwrap();
    discovery.listed("alpha", WorkerState::Serving).await.unwrap();

    let port = alpha.ready.http.port().to_string();
    let _flood = flood(&["listener-flood", &port], 65534, "flood", folder.path());
    a_death_is_withdrawn(&alpha, "alpha", &daemon, &discovery, &nats).await;
    matrix::row(
        "A process of another user opens and closes a worker's port in a loop, at another address, and the worker dies",
        "it is withdrawn; the lease holds, and threads stay few",
        "withdrawn; lease held",
    );
}

#[tokio::test]
async fn three_processes_of_another_workers_tree_rename_themselves() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let nats = Nats::start(path).await.unwrap();
    let discovery = Discovery::watch(&nats).await.unwrap();
    let ready = path.join("noisy.ready.json");
    let declared = path.join("noisy").display().to_string();
    let script = r#""$1" --grpc-port 0 --ready-file "$2" &
        for n in 1 2 3; do "$3" rename-flood & echo $! >> floods; done
        wait"#;
    let mut shell = Command::new("sh");
    shell.args(["-c", script, "sh"]).arg(binaries::find("mock-engine").unwrap()).arg(&ready);
    shell.arg(binaries::find("victim").unwrap()).env("LASTGASP_WORKER", &declared).current_dir(path);
    let mut root = Process::spawn("noisy", shell, path).unwrap();
    let engine: Ready = root.ready_file(&ready).await.unwrap();
    root.record(engine.pids());
    let floods = std::fs::read_to_string(path.join("floods")).unwrap();
    let floods: Vec<u32> = floods.lines().map(|pid| pid.parse().unwrap()).collect();
    assert!(floods.iter().all(|pid| Identity::of(*pid).is_some_and(|flood| flood.is_alive())));
    root.record(floods);
    let omega = Engine::start("omega", &[], path).await.unwrap();
    let health = HealthConfig::grpc(format!("http://{}", engine.grpc.unwrap()));
    let config = DaemonConfig::new("node-a", &nats.url(), "required", path).with(&omega);
    let config = config.with_vllm("noisy", &declared, format!("http://{}", engine.http), health);
    let daemon = Daemon::start(&config, path).await.unwrap();
    for name in ["omega", "noisy"] {
        discovery.listed(name, WorkerState::Serving).await.unwrap();
    }

    a_death_is_withdrawn(&omega, "omega", &daemon, &discovery, &nats).await;
    matrix::row(
        "Three processes of one worker's tree rename themselves in a loop, and another worker dies",
        "it is withdrawn; the lease holds, and threads stay few",
        "withdrawn; lease held",
    );
}

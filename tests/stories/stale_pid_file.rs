//! A pid file names a process that has nothing to do with the engine, and `on_lost` would kill it.

use std::path::Path;
use std::time::{Duration, SystemTime};

use lastgasp_tests::daemon::{Daemon, DaemonConfig};
use lastgasp_tests::engine::Engine;
use lastgasp_tests::matrix;
use lastgasp_tests::nats::Nats;
use lastgasp_tests::process::Process;
use nix::sys::signal::Signal;
use serde_json::Value;
use tokio::process::Command;

/// An engine, an unrelated process, and the file that names it.
struct Mistaken {
    engine: Engine,
    unrelated: Process,
    daemon: Daemon,
}

impl Mistaken {
    async fn new(folder: &Path, nats: &Nats, written: impl FnOnce(&Path)) -> Self {
        let mut command = Command::new("sleep");
        command.arg("1000");
        let unrelated = Process::spawn("unrelated", command, folder).unwrap();
        let engine = Engine::start("alpha", &[], folder).await.unwrap();
        Self::about(engine, unrelated, folder, nats, written).await
    }

    async fn about(
        engine: Engine,
        unrelated: Process,
        folder: &Path,
        nats: &Nats,
        written: impl FnOnce(&Path),
    ) -> Self {
        let file = folder.join("engine.pid");
        std::fs::write(&file, unrelated.identity.pid.to_string()).unwrap();
        written(&file);
        let mut config = DaemonConfig::new("node-a", &nats.url(), "required", folder).with_pid_file_of(&engine, &file);
        for worker in &mut config.worker {
            (worker.on_lost, worker.reap_grace_ms) = ("kill-tree".into(), 0);
            worker.health.hang_window_ms = Some(3000);
        }
        let daemon = Daemon::start(&config, folder).await.unwrap();
        Self { engine, unrelated, daemon }
    }
}

/// The engine hangs and is lost, and the process that the file names lives on.
async fn it_is_spared(Mistaken { engine, unrelated, daemon }: &Mistaken) {
    daemon.status_when("it serves", |status| status["workers"][0]["state"] == "serving").await.unwrap();

    engine.signal_root(Signal::SIGSTOP);

    let spared =
        |event: &Value| event["summary"].as_str().is_some_and(|summary| summary.starts_with("kill_tree unproven"));
    daemon.event("what is not done", spared).await.unwrap();
    assert!(unrelated.identity.is_alive());
    daemon.counts(r#"lastgasp_actions_total{action="kill_tree",outcome="unproven"}"#, 1.0).await.unwrap();
}

fn set_back(file: &Path) {
    let file = std::fs::File::options().write(true).open(file).unwrap();
    file.set_modified(SystemTime::now() - Duration::from_secs(86_400)).unwrap();
}

#[tokio::test]
async fn what_was_not_proven_to_be_the_worker_is_not_killed() {
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    it_is_spared(&Mistaken::new(folder.path(), &nats, |_| {}).await).await;
    matrix::row(
        "A pid file names an unrelated process, and on_lost kills the tree",
        "nothing is killed that was not proven to be the worker",
        "the unrelated process lives",
    );
}

#[tokio::test]
async fn a_pid_file_that_is_older_than_its_process_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let Mistaken { daemon, .. } = Mistaken::new(folder.path(), &nats, set_back).await;
    let refused = |status: &Value| status["workers"][0]["reason"].as_str().unwrap().contains("is older than process");
    let status = daemon.status_when("why it has no process", refused).await.unwrap();
    assert_eq!(status["workers"][0]["root"], Value::Null, "{status:#}");
}

/// A clock that was set since makes every file look older or younger.
#[tokio::test]
async fn a_pid_file_that_only_seems_older_is_believed_once_the_engine_listens() {
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let engine = Engine::start("alpha", &[], folder.path()).await.unwrap();
    let file = folder.path().join("engine.pid");
    std::fs::write(&file, engine.ready.root_pid.to_string()).unwrap();
    set_back(&file);
    let config = DaemonConfig::new("node-a", &nats.url(), "required", folder.path()).with_pid_file_of(&engine, &file);
    let daemon = Daemon::start(&config, folder.path()).await.unwrap();
    let serves = |status: &Value| status["workers"][0]["state"] == "serving";
    let status = daemon.status_when("it serves", serves).await.unwrap();
    assert_eq!(status["workers"][0]["root"]["tgid"], engine.ready.root_pid, "{status:#}");
}

/// The same address in another network namespace is another's.
#[tokio::test]
async fn a_listener_of_another_network_namespace_proves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let engine = Engine::start("alpha", &[], folder.path()).await.unwrap();
    let port = engine.ready.http.port().to_string();
    let listens = folder.path().join("listens");
    nix::unistd::mkfifo(&listens, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let script = r#"ip link set lo up; exec perl -MIO::Socket::INET -e "$1" "$2" > listens"#;
    let listen = r#"my $socket = IO::Socket::INET->new(LocalAddr => "127.0.0.1", LocalPort => shift, Listen => 5) or die;
        print "listens"; close STDOUT; sleep 1000"#;
    let mut command = Command::new("unshare");
    command.args(["--net", "sh", "-c", script, "sh", listen, &port]).current_dir(folder.path());
    let unrelated = Process::spawn("unrelated", command, folder.path()).unwrap();
    assert_eq!(tokio::fs::read_to_string(&listens).await.unwrap(), "listens");

    it_is_spared(&Mistaken::about(engine, unrelated, folder.path(), &nats, |_| {}).await).await;
}

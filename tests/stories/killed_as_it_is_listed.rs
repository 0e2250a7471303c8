//! An engine is killed in the moment in which a daemon that has just started lists it.

use lastgasp_protocol::{CauseKind, WorkerState};
use lastgasp_tests::daemon::{Daemon, DaemonConfig};
use lastgasp_tests::discovery::Discovery;
use lastgasp_tests::engine::Engine;
use lastgasp_tests::matrix;
use lastgasp_tests::nats::Nats;
use nix::sys::signal::Signal;

/// The daemon reads what an earlier one may have left while it writes its own: its own record is not
/// one that somebody left.
#[tokio::test]
async fn it_is_withdrawn_once_and_the_certificate_says_who_killed_it() {
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let discovery = Discovery::watch(&nats).await.unwrap();
    for round in 0..8 {
        let name = format!("worker-{round}");
        // The frontend would not notice the death of its core for an hour.
        let arguments = ["--frontend", "rust", "--rust-notice-ms", "3600000"];
        let engine = Engine::start(&name, &arguments, folder.path()).await.unwrap();
        let config = DaemonConfig::new("node-a", &nats.url(), "required", folder.path()).with(&engine);
        let daemon = Daemon::start(&config, folder.path()).await.unwrap();
        discovery.listed(&name, WorkerState::Serving).await.unwrap();
        engine.signal_core(Signal::SIGKILL);

        discovery.removed(&name).await.unwrap();
        let certificate = discovery.certificate(&name, |_| true).await.unwrap();
        assert_eq!(certificate.cause.kind, CauseKind::ProcessKilled, "{certificate:#?}");
        assert!(!daemon.process.log_tail().contains("no daemon watched"), "{}", daemon.process.log_tail());
        assert_eq!(discovery.removals(&name), 1);
    }
    matrix::row(
        "An engine is killed at the moment it is listed",
        "withdrawn once, certified with its killer",
        "8 of 8 withdrawn once and certified",
    );
}

//! The daemon is there before anything else is: before NATS, and before the engines.

use lastgasp_protocol::WorkerState;
use lastgasp_tests::daemon::{Daemon, DaemonConfig};
use lastgasp_tests::discovery::Discovery;
use lastgasp_tests::engine::Engine;
use lastgasp_tests::matrix;
use lastgasp_tests::nats::Nats;
use nix::sys::signal::Signal;
use serde_json::Value;

fn state(status: &Value) -> &str {
    status["workers"][0]["state"].as_str().unwrap_or_default()
}

#[tokio::test]
async fn before_nats_it_watches_and_what_happened_is_made_up_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let mut nats = Nats::start(path).await.unwrap();
    nats.stop();
    let alpha = Engine::start("alpha", &[], path).await.unwrap();
    let config = DaemonConfig::new("node-a", &nats.url(), "required", path).with(&alpha);

    let daemon = Daemon::start(&config, path).await.unwrap();
    daemon.status_when("alpha serves", |status| state(status) == "serving").await.unwrap();
    alpha.signal_core(Signal::SIGKILL);
    let lost = daemon.status_when("alpha is lost", |status| state(status) == "lost").await.unwrap();
    assert_ne!(lost["nats"], "connected", "{lost:#}");
    nats.resume().await.unwrap();

    let discovery = Discovery::watch(&nats).await.unwrap();
    let certificate = discovery.certificate("alpha", |_| true).await.unwrap();
    assert_eq!(certificate.cause.signal, Some(9));
    daemon.status_when("the lease", |status| status["lease"] == "held").await.unwrap();
    assert!(discovery.history("alpha").iter().all(|seen| seen.record.is_none()), "the dead are not listed");
    matrix::row(
        "The daemon starts while there is no NATS, and an engine dies before there is",
        "the death is seen and certified; the dead worker is never listed",
        &format!("certificate {}; {} records of it in discovery", certificate.cause, discovery.history("alpha").len()),
    );
}

#[tokio::test]
async fn before_the_engine_it_waits_for_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let nats = Nats::start(path).await.unwrap();
    let discovery = Discovery::watch(&nats).await.unwrap();
    // Its addresses, and that it was found by, are those of one that is gone.
    let mut former = Engine::start("alpha", &[], path).await.unwrap();
    let config = DaemonConfig::new("node-a", &nats.url(), "required", path).with(&former);
    let (http, grpc) = (former.ready.http.port().to_string(), former.ready.grpc.unwrap().port().to_string());
    former.process.end();

    let daemon = Daemon::start(&config, path).await.unwrap();
    let status = daemon.status().await.unwrap();
    assert_eq!(status["workers"][0]["reason"], "no process found yet", "{status:#}");
    let alpha = Engine::start("alpha", &["--port", &http, "--grpc-port", &grpc], path).await.unwrap();

    discovery.listed("alpha", WorkerState::Serving).await.unwrap();
    alpha.signal_root(Signal::SIGKILL);
    discovery.removed("alpha").await.unwrap();
    matrix::row(
        "The daemon starts before the engine does",
        "the worker is listed when it serves, and withdrawn when it dies",
        &format!("listed, then withdrawn {} time", discovery.removals("alpha")),
    );
}

//! `lastgasp run --sidecar`: one engine, one pod, pidfds only.

use lastgasp_protocol::WorkerState;
use lastgasp_tests::HarnessError;
use lastgasp_tests::client::LiveStream;
use lastgasp_tests::daemon::{Daemon, DaemonConfig};
use lastgasp_tests::discovery::Discovery;
use lastgasp_tests::engine::Engine;
use lastgasp_tests::model::Endpoint;
use lastgasp_tests::nats::Nats;
use lastgasp_tests::process::Process;
use lastgasp_tests::reference::Reference;
use lastgasp_tests::router::Router;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::process::Command;

use crate::scene::was_moved;

const NODE: &str = "node-a";

/// A pod. The fields are dropped from first to last.
struct Pod {
    sidecar: Daemon,
    engine: Engine,
    config: DaemonConfig,
    folder: TempDir,
}

impl Pod {
    /// An engine of this name and its sidecar, and the worker is listed.
    async fn new(name: &str, arguments: &[&str], nats: &Nats, discovery: &Discovery) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let arguments = [&["--tokens-per-second", "100"], arguments].concat();
        let engine = Engine::start(name, &arguments, folder.path()).await.unwrap();
        let pod = format!("{name}-pod");
        let config = DaemonConfig::new(NODE, &nats.url(), "auto", folder.path()).with(&engine).beside(&pod, 1800);
        let sidecar = Daemon::start(&config, folder.path()).await.unwrap();
        let record = discovery.listed(name, WorkerState::Serving).await.unwrap();
        assert_eq!(record.node.as_str(), format!("{NODE}/{pod}"));
        Self { sidecar, engine, config, folder }
    }

    async fn exit_code(&mut self) -> Option<i32> {
        self.sidecar.process.exited().await.unwrap().code()
    }
}

struct Asked(LiveStream, Reference);

impl Asked {
    /// Asks for an answer that takes seconds, and reads its first tokens.
    async fn new(router: &Router, of: &Engine) -> Self {
        let body = json!({
            "model": "tiny", "prompt": "one", "max_tokens": 300, "temperature": 0, "ignore_eos": true, "return_token_ids": true
        });
        let mut stream = router.stream(Endpoint::Completions, &body).await.unwrap();
        stream.tokens(10).await.unwrap();
        Self(stream, Reference::of(Endpoint::Completions, &body, &of.dialect()).unwrap())
    }

    /// Reads it to its end; whether it was moved.
    async fn finish(self) -> bool {
        let transcript = self.0.finish().await.unwrap();
        self.1.assert_equals(&transcript);
        was_moved(&transcript)
    }
}

/// Withdrawn, moved, certified, and then the sidecar ends with 1. Started again it waits for the
/// engine, and registers it.
#[tokio::test]
async fn its_engine_is_lost_and_comes_back() {
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let discovery = Discovery::watch(&nats).await.unwrap();
    let mut alpha = Pod::new("alpha", &[], &nats, &discovery).await;
    let first = discovery.listed("alpha", WorkerState::Serving).await.unwrap().incarnation;
    let router = Router::start("router-1", &nats.url(), 3, folder.path()).await.unwrap();
    let asked = Asked::new(&router, &alpha.engine).await;
    let beta = Pod::new("beta", &[], &nats, &discovery).await;
    let status = alpha.sidecar.status().await.unwrap();
    assert_eq!((status["death_source"].as_str(), status["node"].as_str()), (Some("pidfd"), Some("node-a/alpha-pod")));

    alpha.engine.signal_core(Signal::SIGKILL);

    assert!(asked.finish().await, "it goes on elsewhere");
    assert_eq!(alpha.exit_code().await, Some(1));
    discovery.removed("alpha").await.unwrap();
    assert_eq!((discovery.removals("alpha"), discovery.removals("beta")), (1, 0));
    let certificate = discovery.certificate("alpha", |_| true).await.unwrap();
    assert_eq!((certificate.incarnation, certificate.streams.moved), (first.clone(), 1));
    drop(beta);

    // Kubelet starts the sidecar at once, and the engine loads for a while.
    let (http, grpc) =
        (alpha.engine.ready.http.port().to_string(), alpha.engine.ready.grpc.unwrap().port().to_string());
    alpha.engine.kill_tree();
    alpha.sidecar = Daemon::start(&alpha.config, alpha.folder.path()).await.unwrap();
    let addresses = ["--port", &http, "--grpc-port", &grpc, "--load-ms", "500"];
    alpha.engine = Engine::start("alpha", &addresses, alpha.folder.path()).await.unwrap();
    let second = discovery.listed("alpha", WorkerState::Serving).await.unwrap().incarnation;
    assert_ne!(second, first);
}

/// Kubelet sends SIGTERM to every container of a pod that is deleted. The sidecar sees its engine
/// to its end.
#[tokio::test]
async fn its_pod_is_deleted() {
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let discovery = Discovery::watch(&nats).await.unwrap();
    let drains = ["--frontend", "rust", "--shutdown-timeout", "60", "--drain-linger-ms", "200"];
    let mut pod = Pod::new("alpha", &drains, &nats, &discovery).await;
    let router = Router::start("router-1", &nats.url(), 3, folder.path()).await.unwrap();
    let asked = Asked::new(&router, &pod.engine).await;

    assert!(pod.sidecar.process.identity.signal(Signal::SIGTERM));
    pod.engine.signal_root(Signal::SIGTERM);

    discovery.listed("alpha", WorkerState::Draining).await.unwrap();
    assert!(!asked.finish().await, "it had the time to end where it was");
    assert_eq!(pod.engine.process.exited().await.unwrap().code(), Some(0));
    assert_eq!(pod.exit_code().await, Some(0));
    discovery.removed("alpha").await.unwrap();
    assert_eq!(discovery.removals("alpha"), 1);
    let certificate = discovery.certificate("alpha", |_| true).await.unwrap();
    assert_eq!((certificate.streams.moved, certificate.streams.failed), (0, 0));
}

/// An engine that never comes: the sidecar ends, with a code of its own.
#[tokio::test]
async fn its_engine_does_not_serve_in_time() {
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let discovery = Discovery::watch(&nats).await.unwrap();
    let engine = Engine::start("alpha", &[], folder.path()).await.unwrap();
    let config = DaemonConfig::new(NODE, &nats.url(), "auto", folder.path()).with(&engine).beside("pod", 1);
    drop(engine);

    // It may be over before its ready file was looked at.
    match Daemon::start(&config, folder.path()).await {
        Ok(mut sidecar) => assert_eq!(sidecar.process.exited().await.unwrap().code(), Some(75)),
        Err(HarnessError::Ended { status, .. }) => assert!(status.ends_with("75"), "{status}"),
        Err(error) => panic!("{error}"),
    }
    assert!(discovery.history("alpha").is_empty());
}

/// One that crashes while it loads is not lost: it has never been there, and is waited for.
#[tokio::test]
async fn its_engine_crashes_while_it_loads() {
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let discovery = Discovery::watch(&nats).await.unwrap();
    let engine = Engine::start("alpha", &[], folder.path()).await.unwrap();
    let config = DaemonConfig::new(NODE, &nats.url(), "auto", folder.path()).with(&engine).beside("pod", 1800);
    let (http, grpc) = (engine.ready.http.port().to_string(), engine.ready.grpc.unwrap().port().to_string());
    let mut loads = Command::new("sleep");
    loads.arg("1000").env("LASTGASP_WORKER", &engine.declared);
    drop(engine);
    let loads = Process::spawn("loads", loads, folder.path()).unwrap();
    let sidecar = Daemon::start(&config, folder.path()).await.unwrap();
    let state = |state: &'static str| move |status: &Value| status["workers"][0]["state"] == state;
    sidecar.status_when("it loads", |status| status["workers"][0]["root"]["tgid"] == loads.identity.pid).await.unwrap();

    drop(loads);
    sidecar.status_when("it crashed", state("lost")).await.unwrap();
    let addresses = ["--port", &http, "--grpc-port", &grpc];
    let _engine = Engine::start("alpha", &addresses, folder.path()).await.unwrap();
    discovery.listed("alpha", WorkerState::Serving).await.unwrap();
    sidecar.status_when("it serves", state("serving")).await.unwrap();
}

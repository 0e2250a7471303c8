//! A real Prometheus scrapes a daemon and a router while an engine dies, and every panel of the
//! dashboards in `deploy/grafana/` has something to show.
//!
//! Needs the `prometheus` beside the promtool that `cargo xtask test` fetches, hence ignored.
#![forbid(unsafe_code)]

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use lastgasp_protocol::WorkerState;
use lastgasp_tests::daemon::{Daemon, DaemonConfig};
use lastgasp_tests::discovery::Discovery;
use lastgasp_tests::engine::Engine;
use lastgasp_tests::model::Endpoint;
use lastgasp_tests::nats::{Nats, free_port};
use lastgasp_tests::process::{GIVE_UP, Process};
use lastgasp_tests::router::Router;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

/// Panels about what does not happen here: nothing is reaped, declared, retried, lost or refused,
/// and there is neither a Dynamo nor an Infera.
const EMPTY: [&str; 12] = [
    "Acts",
    "Declarations",
    "Dynamo",
    "Faults of NATS",
    "Infera",
    "Losses",
    "Warnings",
    "Notifications to sinks",
    "Processes that outlive their worker",
    "Records and bodies refused, log lines lost",
    "Retries",
    "Withdrawals held back",
];

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs prometheus: cargo xtask test fetches it"]
async fn every_panel_shows_a_death() {
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let discovery = Discovery::watch(&nats).await.unwrap();
    let mut config = DaemonConfig::new("node-a", &nats.url(), "auto", folder.path());
    let mut engines = Vec::new();
    for name in ["alpha", "beta"] {
        let engine = Engine::start(name, &["--tokens-per-second", "100"], folder.path()).await.unwrap();
        config = config.with(&engine);
        engines.push(engine);
    }
    let daemon = Daemon::start(&config, folder.path()).await.unwrap();
    for name in ["alpha", "beta"] {
        discovery.listed(name, WorkerState::Serving).await.unwrap();
    }
    let router = Router::start("router-1", &nats.url(), 3, folder.path()).await.unwrap();
    let prometheus = Prometheus::start(&[daemon.ready.metrics, router.address], folder.path()).await;
    // What an increase begins at.
    prometheus.shows("lastgasp_worker_state{state=\"serving\"} == 1").await;
    prometheus.shows("lastgasp_router_workers == 2").await;

    let body = json!({
        "model": "tiny", "prompt": "one", "max_tokens": 300, "temperature": 0, "ignore_eos": true, "stream": true
    });
    let mut stream = router.stream(Endpoint::Completions, &body).await.unwrap();
    stream.tokens(10).await.unwrap();
    let worker = stream.transcript.worker.clone().expect("the router says which worker it chose");
    let engine = engines.iter().find(|engine| worker.ends_with(engine.process.name())).expect("one of the two");
    assert!(engine.core.signal(Signal::SIGKILL));
    stream.finish().await.unwrap();
    prometheus.shows("lastgasp_router_migration_gap_seconds_count == 1").await;
    prometheus.shows("lastgasp_router_answers_total{phase=\"done\"} >= 1").await;
    prometheus.shows("increase(lastgasp_evidence_to_withdrawn_seconds_count[1m]) > 0").await;

    for path in ["fleet.json", "node.json"] {
        for (title, expression) in panels(path) {
            let found = prometheus.ask(&filled(&expression, daemon.ready.metrics)).await;
            let empty = found.as_array().is_none_or(Vec::is_empty);
            assert!(!empty || EMPTY.contains(&title.as_str()), "{path}: {title} shows nothing: {expression}");
        }
    }
}

/// Title and expression of every panel.
fn panels(path: &str) -> Vec<(String, String)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/grafana").join(path);
    let dashboard: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let mut panels = Vec::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().into_iter().flatten() {
            panels.push((panel["title"].as_str().unwrap().to_owned(), target["expr"].as_str().unwrap().to_owned()));
        }
    }
    assert!(panels.len() > 8, "{panels:?}");
    panels
}

/// With values for what Grafana fills in.
fn filled(expression: &str, instance: SocketAddr) -> String {
    let expression = expression.replace("$__rate_interval", "1m").replace("$__range", "1h");
    expression.replace("=~\"$instance\"", "=~\".*\"").replace("$instance", &instance.to_string())
}

struct Prometheus {
    _process: Process,
    address: SocketAddr,
}

impl Prometheus {
    /// Starts one that scrapes these every second.
    async fn start(targets: &[SocketAddr], folder: &Path) -> Self {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, free_port().unwrap()));
        let targets: Vec<String> = targets.iter().map(SocketAddr::to_string).collect();
        let config = json!({
            "global": { "scrape_interval": "1s", "scrape_timeout": "1s" },
            "scrape_configs": [{ "job_name": "lastgasp", "static_configs": [{ "targets": targets }] }]
        });
        // JSON is YAML.
        let file = folder.join("prometheus.yaml");
        std::fs::write(&file, config.to_string()).unwrap();
        let promtool = std::env::var_os("LASTGASP_PROMTOOL").map_or_else(|| "promtool".into(), PathBuf::from);
        let mut command = tokio::process::Command::new(promtool.with_file_name("prometheus"));
        command.arg("--config.file").arg(&file).arg("--storage.tsdb.path").arg(folder.join("tsdb"));
        command.arg(format!("--web.listen-address={address}"));
        let process = Process::spawn("prometheus", command, folder).unwrap();
        Self { _process: process, address }
    }

    /// The result of an expression; nothing while it does not answer yet.
    async fn ask(&self, expression: &str) -> Value {
        let url = format!("http://{}/api/v1/query", self.address);
        let Ok(response) = reqwest::Client::new().get(url).query(&[("query", expression)]).send().await else {
            return Value::Null;
        };
        let answer: Value = response.json().await.unwrap_or_default();
        assert_ne!(answer["status"], "error", "{expression}: {answer}");
        answer["data"]["result"].clone()
    }

    /// Waits until an expression has a result.
    async fn shows(&self, expression: &str) {
        let deadline = Instant::now() + GIVE_UP;
        while self.ask(expression).await.as_array().is_none_or(Vec::is_empty) {
            assert!(Instant::now() < deadline, "Prometheus does not show {expression}");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
}

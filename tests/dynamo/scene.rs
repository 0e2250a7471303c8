//! A sink of `kind = "dynamo"` without the rest of the daemon, and instances of Dynamo as it sees them.

use std::io::BufRead as _;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use lastgasp::config::{DynamoBackend, DynamoConfig};
use lastgasp::core::ProcessId;
use lastgasp::metrics::Metrics;
use lastgasp::notify::dynamo::Dynamo;
use lastgasp::notify::{BridgeReport, NotificationKind, Notifier};
use lastgasp_protocol::CauseKind;
use lastgasp_tests::process::Identity;
use lastgasp_tests::{binaries, process};
use serde_json::json;
use tokio::sync::mpsc;

use crate::notifications::{self, name};

/// A process that listens on a port, as the worker of an instance does.
pub(crate) struct Instance {
    child: Child,
    pub(crate) process: ProcessId,
    pub(crate) id: u64,
    port: u16,
}

impl Instance {
    pub(crate) fn start(id: u64) -> Self {
        let victim = binaries::find("victim").unwrap();
        let mut child =
            Command::new(victim).arg("accept").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        std::io::BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let port = line.trim().strip_prefix("ready ").unwrap().parse().unwrap();
        let Identity { pid, start_ticks } = Identity::of(child.id()).unwrap();
        Self { child, process: ProcessId { tgid: pid, start_ticks }, id, port }
    }

    pub(crate) fn end(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Keys and values of its records, in the order of the keys.
    pub(crate) fn records(&self) -> [(String, String); 2] {
        let id = self.id;
        let place = format!("dynamo/backend/generate/{id:x}");
        let endpoint = json!({
            "type": "Endpoint", "component": "backend", "endpoint": "generate", "namespace": "dynamo",
            "instance_id": id, "transport": {"tcp": format!("127.0.0.1:{}/{id:x}/dynamo/backend/generate", self.port)},
            "device_type": "cuda", "request_plane_codec": "msgpack",
        });
        let card = json!({
            "type": "Model", "namespace": "dynamo", "component": "backend", "endpoint": "generate", "instance_id": id,
            "card_json": {"display_name": "tiny", "slug": "tiny"},
        });
        [(format!("v1/instances/{place}"), endpoint.to_string()), (format!("v1/mdc/{place}"), card.to_string())]
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        self.end();
    }
}

/// A running sink.
pub(crate) struct Sink {
    pub(crate) notifier: Notifier,
    pub(crate) metrics: Metrics,
    reports: mpsc::UnboundedReceiver<BridgeReport>,
}

impl Sink {
    pub(crate) fn of(backend: DynamoBackend) -> Self {
        let metrics = Metrics::new();
        let config = DynamoConfig { name: "dynamo-0".into(), backend, queue: 16 };
        let (report, reports) = mpsc::unbounded_channel();
        let report = Arc::new(move |one| drop(report.send(one)));
        let side = tokio::runtime::Handle::current();
        let dynamo = Dynamo::start(&config, &side, &metrics, report);
        let notifier = Notifier::start(&[], Vec::new(), vec![dynamo], &side, &metrics);
        Self { notifier, metrics, reports }
    }

    /// A worker begins a life; its instance is found by its process.
    pub(crate) async fn watch(&self, worker: &str, instance: &Instance) {
        self.notifier.known(&name(worker), "", None);
        self.notifier.lives(&name(worker), vec![instance.process]);
        self.knows(worker, 1).await;
    }

    /// Waits until so many instances of the worker are known.
    pub(crate) async fn knows(&self, worker: &str, instances: i64) {
        let gauge = self.metrics.dynamo_instances.with_label_values(&[worker]);
        until(&format!("{instances} instances of {worker}"), async || gauge.get() == instances).await;
    }

    /// These workers are lost for one cause; what was done about them.
    pub(crate) async fn lose(&mut self, workers: &[&str], kind: CauseKind) -> Vec<String> {
        assert_eq!(self.notifier.out_of_dynamo(&notifications::lost(workers, kind)), 1);
        let mut done = Vec::new();
        for _ in workers {
            done.push(self.done().await);
        }
        done
    }

    /// What was done next.
    pub(crate) async fn done(&mut self) -> String {
        notifications::done(&mut self.reports).await
    }

    /// Our own record of the worker stands.
    pub(crate) fn listed(&mut self, worker: &str, event: NotificationKind, epoch: u64) {
        self.notifier.tell(notifications::listed(worker, event, epoch));
    }

    /// Waits until this has become of the records of so many workers.
    pub(crate) async fn counts(&self, outcome: &str, workers: u64) {
        let counter = self.metrics.dynamo_records.with_label_values(&[outcome]);
        until(outcome, async || counter.get() == workers).await;
    }
}

pub(crate) async fn until(what: &str, holds: impl AsyncFn() -> bool) {
    let held = async {
        while !holds().await {
            tokio::time::sleep(std::time::Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(process::GIVE_UP, held).await.unwrap_or_else(|_| panic!("{what}"));
}

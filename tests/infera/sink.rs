//! A sink of `kind = "infera"` without the rest of the daemon.

use std::sync::Arc;
use std::time::Duration;

use lastgasp::config::{EtcdConfig, InferaConfig, NatsConfig};
use lastgasp::metrics::Metrics;
use lastgasp::notify::infera::Infera;
use lastgasp::notify::{BridgeReport, NotificationKind, Notifier};
use lastgasp_protocol::CauseKind;
use lastgasp_tests::nats::Nats;
use lastgasp_tests::process::GIVE_UP;
use tempfile::TempDir;
use tokio::sync::mpsc;

use crate::notifications::{self, name};
use crate::standin::{cancel_subject, request_subject};

/// A running sink that watches some workers.
pub(crate) struct Sink {
    pub(crate) notifier: Notifier,
    pub(crate) metrics: Metrics,
    pub(crate) client: async_nats::Client,
    reports: mpsc::UnboundedReceiver<BridgeReport>,
    pub(crate) nats: Nats,
    _folder: TempDir,
}

impl Sink {
    /// Watches these workers, each by its id, and remembers so many requests of each.
    pub(crate) async fn watching(workers: &[(&str, &str)], max_requests: usize, etcd: Option<String>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let nats = Nats::start(folder.path()).await.unwrap();
        let metrics = Metrics::new();
        let config = InferaConfig {
            name: "infera-0".into(),
            nats: NatsConfig { url: nats.url(), login: lastgasp_protocol::login::Login::default() },
            etcd: etcd.map(|url| EtcdConfig { url, prefix: "/infera/workers".into() }),
            max_requests,
            max_age: Duration::from_secs(3600),
            stand_in: true,
            queue: 16,
        };
        let (report, reports) = mpsc::unbounded_channel();
        let report = Arc::new(move |one| drop(report.send(one)));
        let (side, node) = (tokio::runtime::Handle::current(), name("gpu-a"));
        let infera = Infera::start(&config, &node, &side, &metrics, report).unwrap();
        let notifier = Notifier::start(&[], vec![infera], Vec::new(), &side, &metrics);
        let client = nats.client().await.unwrap();
        for (worker, id) in workers {
            notifier.known(&name(worker), id, None);
        }
        let sink = Self { notifier, metrics, client, reports, nats, _folder: folder };
        for (worker, id) in workers {
            sink.is_heard(worker, id).await;
        }
        sink
    }

    /// Waits until what is asked of a worker is heard.
    async fn is_heard(&self, worker: &str, id: &str) {
        let heard = async {
            while self.remembered(worker) == 0 {
                self.ask(id, "_INBOX.first").await;
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            while self.remembered(worker) > 0 {
                self.client.publish(cancel_subject(id), "_INBOX.first".into()).await.unwrap();
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(GIVE_UP, heard).await.expect("it hears what is asked");
    }

    /// Asks as Infera's router does.
    pub(crate) async fn ask(&self, id: &str, inbox: &'static str) {
        self.ask_for(id, inbox, r#"{"stream":true}"#).await;
    }

    /// The same, with this request.
    pub(crate) async fn ask_for(&self, id: &str, inbox: &'static str, request: &'static str) {
        self.client.publish_with_reply(request_subject(id), inbox, request.into()).await.unwrap();
    }

    pub(crate) fn remembered(&self, worker: &str) -> i64 {
        self.metrics.infera_remembered.with_label_values(&[worker]).get()
    }

    pub(crate) async fn remembers(&self, worker: &str, requests: i64) {
        let remembers = async {
            while self.remembered(worker) != requests {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let waited = tokio::time::timeout(GIVE_UP, remembers).await;
        waited.unwrap_or_else(|_| panic!("{worker}: {} remembered", self.remembered(worker)));
    }

    /// These workers are lost for one cause; what was done about them.
    pub(crate) async fn lose(&mut self, workers: &[&str], kind: CauseKind) -> Vec<String> {
        assert_eq!(self.notifier.lost(&notifications::lost(workers, kind)), 1);
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

    /// A record of the worker stands.
    pub(crate) fn listed(&mut self, worker: &str, event: NotificationKind, epoch: u64) {
        self.notifier.tell(notifications::listed(worker, event, epoch));
    }

    pub(crate) fn lost(&self, kind: &str) -> u64 {
        let losses = self.metrics.losses();
        losses.iter().find(|loss| loss.hop == "infera" && loss.kind == kind).map_or(0, |loss| loss.count)
    }
}

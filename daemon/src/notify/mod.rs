//! Notifications to what does not read NATS: a load balancer, a router of another make, a pager.
//!
//! A notification says what discovery says by then: a record that stands, or that is gone, acknowledged
//! by the server. The supervisor only puts a notification into a queue that has a bound. Everything else
//! happens on the side thread: one lane per sink and place, a time limit, retries with growing
//! pauses. A notification that cannot be delivered is counted and said, and holds up nobody but the
//! notifications behind it.

pub mod dynamo;
mod etcd;
mod exec;
mod handle;
pub mod infera;
mod webhook;

use lastgasp_protocol::ClosedName as _;
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use lastgasp_protocol::{Cause, CauseKind, Certificate, Incarnation, Name, WorkerState};
use serde::Serialize;
use tokio::sync::mpsc;

use self::dynamo::Dynamo;
use self::infera::Infera;
use crate::config::{NotifyConfig, NotifyKind};
use crate::core::ProcessId;
use crate::losses::Loss;
use crate::metrics::Metrics;

/// Pauses between tries: the first one, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));

/// A bridge could not make a change: another try follows.
pub(crate) const FAILED: &str = "failed";

/// What came of a try to deliver a notification.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
pub(crate) enum Delivery {
    /// The sink has it.
    Delivered,
    /// It failed, and another try follows.
    Retried,
    /// The sink does not want it.
    Refused,
    /// Every try failed.
    GivenUp,
}

/// What a notification tells.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, strum::IntoStaticStr, strum::VariantArray, strum::VariantNames,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum NotificationKind {
    /// The worker is listed and takes new work.
    Serving,
    /// It is listed and takes no new work for now.
    Unready,
    /// It is listed, takes no new work, and is leaving.
    Draining,
    /// It is not listed any more. The certificate tells as much as is known by then.
    Withdrawn,
    /// Its death certificate is complete.
    Certificate,
}

impl From<WorkerState> for NotificationKind {
    fn from(state: WorkerState) -> Self {
        match state {
            WorkerState::Serving => Self::Serving,
            WorkerState::Unready => Self::Unready,
            WorkerState::Draining => Self::Draining,
        }
    }
}

/// What a sink gets, as JSON.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Notification {
    /// Always [`lastgasp_protocol::SCHEMA`].
    pub schema: u32,
    /// What it tells.
    pub event: NotificationKind,
    /// When.
    pub at: Timestamp,
    /// Name of the node.
    pub node: Name,
    /// Name of the worker.
    pub worker: Name,
    /// Where routers reach, or reached, it.
    pub endpoint: String,
    /// What it serves.
    pub models: Vec<String>,
    /// Which life.
    pub incarnation: Incarnation,
    /// Which listing of that life.
    pub epoch: u64,
    /// Why it was withdrawn.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cause: Option<Cause>,
    /// Who died, of what; with `withdrawn`, as far as it is known by then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub certificate: Option<Box<Certificate>>,
}

/// A worker that is not listed any more.
#[derive(Debug, Clone)]
pub struct Lost {
    /// Its name.
    pub worker: Name,
    /// Which life.
    pub incarnation: Incarnation,
    /// Why.
    pub cause: Option<Cause>,
}

/// Who else has a discovery or routers of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum System {
    /// See [`infera`].
    Infera,
    /// See [`dynamo`].
    Dynamo,
}

/// What was done about a worker, for its certificate.
#[derive(Debug)]
pub struct BridgeReport {
    /// To whom, or where.
    pub system: System,
    /// Its name.
    pub worker: Name,
    /// The life that was lost; `None`: it only drains.
    pub lost: Option<Incarnation>,
    /// What was done.
    pub detail: String,
}

/// Takes what was done, on any thread.
pub type Report = Arc<dyn Fn(BridgeReport) + Send + Sync>;

/// Whether a life that was lost for this will not serve again, as a rule: some of it is near-certain
/// evidence that is taken back now and then.
#[must_use]
pub const fn is_final(kind: CauseKind) -> bool {
    match kind {
        CauseKind::ProcessKilled
        | CauseKind::ProcessCrashed
        | CauseKind::ProcessExited
        | CauseKind::OomKilled
        | CauseKind::ProcessGone
        | CauseKind::Replaced
        | CauseKind::GpuFault
        | CauseKind::ListenerClosed
        | CauseKind::Terminated => true,
        CauseKind::ConnectionRefused
        | CauseKind::NotServing
        | CauseKind::NotReady
        | CauseKind::Hung
        | CauseKind::Commanded => false,
    }
}

/// One try.
#[derive(Debug, thiserror::Error)]
enum DeliveryFailure {
    /// Another try may succeed.
    #[error("{0}")]
    Later(String),
    /// It would be refused again.
    #[error("refused: {0}")]
    Refused(String),
}

/// All sinks. Dropped, what is still in their queues is lost.
#[derive(Debug)]
pub struct Notifier {
    sinks: Vec<Sink>,
    inferas: Vec<Infera>,
    dynamos: Vec<Dynamo>,
    metrics: Metrics,
    /// What the last notification said of the listing of each worker, so that a renewal is no news.
    said: HashMap<Name, (Incarnation, u64, NotificationKind)>,
}

#[derive(Debug)]
struct Sink {
    config: Arc<NotifyConfig>,
    lanes: Vec<mpsc::Sender<Arc<Notification>>>,
}

impl Notifier {
    /// Starts the lanes of every sink on the runtime of `side`.
    #[must_use]
    pub fn start(
        configs: &[NotifyConfig],
        inferas: Vec<Infera>,
        dynamos: Vec<Dynamo>,
        side: &tokio::runtime::Handle,
        metrics: &Metrics,
    ) -> Self {
        let sinks = configs.iter().cloned().map(|config| {
            let config = Arc::new(config);
            let lane = |_| {
                let (sender, receiver) = mpsc::channel(config.queue);
                side.spawn(lane(Arc::clone(&config), receiver, metrics.clone()));
                sender
            };
            let lanes = (0..config.concurrency).map(lane).collect();
            Sink { config, lanes }
        });
        Self { sinks: sinks.collect(), inferas, dynamos, metrics: metrics.clone(), said: HashMap::new() }
    }

    /// Whether there is anybody to tell.
    #[must_use]
    pub const fn is_idle(&self) -> bool {
        self.sinks.is_empty() && self.inferas.is_empty() && self.dynamos.is_empty()
    }

    /// Whether there is an Infera, which reports what it did.
    #[must_use]
    pub const fn reports(&self) -> bool {
        !self.inferas.is_empty()
    }

    /// Whether Dynamo's discovery is changed, which says what became of it.
    #[must_use]
    pub const fn has_dynamo(&self) -> bool {
        !self.dynamos.is_empty()
    }

    /// A worker is known, with its id in Infera, and its instance in Dynamo if that is configured.
    pub fn known(&self, worker: &Name, infera_id: &str, dynamo_instance: Option<u64>) {
        self.tell_inferas(&infera::InferaCommand::Watch(worker.clone(), infera_id.to_owned()));
        self.tell_dynamos(&dynamo::DynamoCommand::Watch(worker.clone(), dynamo_instance));
    }

    /// A worker has begun a life, or has another companion: the root, and what else belongs to it.
    pub fn lives(&self, worker: &Name, processes: Vec<ProcessId>) {
        self.tell_dynamos(&dynamo::DynamoCommand::Lives(worker.clone(), processes));
    }

    /// A worker will not be heard of again.
    pub fn forget(&mut self, worker: &Name) {
        self.said.remove(worker);
        self.tell_inferas(&infera::InferaCommand::Forget(worker.clone()));
        self.tell_dynamos(&dynamo::DynamoCommand::Forget(worker.clone()));
    }

    /// A worker would serve, though it is not listed yet.
    pub fn recovers(&self, worker: &Name) {
        self.tell_inferas(&infera::InferaCommand::Recovers(worker.clone()));
    }

    /// These are withdrawn for one cause, still run, and hand over what can be moved. How many reports will
    /// come of each.
    pub fn hands_over(&self, leaving: &[Lost]) -> usize {
        self.tell_inferas(&infera::InferaCommand::HandsOver(leaving.to_vec()))
    }

    /// These are over and withdrawn, for one cause. How many reports will come of each.
    pub fn lost(&self, lost: &[Lost]) -> usize {
        self.tell_inferas(&infera::InferaCommand::Lost(lost.to_vec()))
    }

    /// These are lost, for what was seen at one time, whatever our own discovery says by now. How many
    /// reports will come of each.
    pub fn out_of_dynamo(&self, lost: &[Lost]) -> usize {
        self.tell_dynamos(&dynamo::DynamoCommand::Lost(lost.to_vec()))
    }

    fn tell_inferas(&self, command: &infera::InferaCommand) -> usize {
        self.inferas.iter().filter(|infera| infera.0.tell(command.clone())).count()
    }

    fn tell_dynamos(&self, command: &dynamo::DynamoCommand) -> usize {
        self.dynamos.iter().filter(|dynamo| dynamo.0.tell(command.clone())).count()
    }

    /// Puts a notification into the queues. Never waits; where there is no room it is lost, and counted.
    pub fn tell(&mut self, notification: Notification) {
        self.put(notification, true);
    }

    /// The same, of a record that another verdict on the same worker has overtaken on its way: nothing
    /// changes in Dynamo's discovery, which did not wait for the record at that verdict.
    pub fn tell_overtaken(&mut self, notification: Notification) {
        self.put(notification, false);
    }

    fn put(&mut self, notification: Notification, is_present: bool) {
        match notification.event {
            NotificationKind::Certificate => {}
            NotificationKind::Withdrawn => _ = self.said.remove(&notification.worker),
            listed => {
                let news = (notification.incarnation.clone(), notification.epoch, listed);
                if self.said.insert(notification.worker.clone(), news.clone()) == Some(news) {
                    return;
                }
                let worker = notification.worker.clone();
                if listed == NotificationKind::Serving {
                    self.tell_inferas(&infera::InferaCommand::Serves(worker.clone()));
                    if is_present {
                        self.tell_dynamos(&dynamo::DynamoCommand::Serves(worker));
                    }
                } else {
                    if listed == NotificationKind::Draining {
                        self.tell_inferas(&infera::InferaCommand::Drains(worker.clone()));
                    }
                    if is_present {
                        self.tell_dynamos(&dynamo::DynamoCommand::Leaves(worker));
                    }
                }
            }
        }
        let notification = Arc::new(notification);
        for Sink { config, lanes } in &self.sinks {
            if !config.on.contains(&notification.event) {
                continue;
            }
            // Notifications of one worker stay in order.
            let mut hasher = DefaultHasher::new();
            notification.worker.hash(&mut hasher);
            let lane = usize::try_from(hasher.finish() % lanes.len() as u64).unwrap_or_default();
            if lanes[lane].try_send(Arc::clone(&notification)).is_err() {
                tracing::error!(sink = config.name, worker = %notification.worker, event = notification.event.as_str(), "notification lost: the sink's queue is full");
                self.metrics.lose(Loss::NotificationQueue, 1);
            }
        }
    }

    /// Notifications that are in queues or under way: what is lost if the daemon ends now.
    #[must_use]
    pub fn waiting(&self) -> usize {
        let lanes = self.sinks.iter().flat_map(|sink| &sink.lanes);
        lanes.map(|lane| lane.max_capacity() - lane.capacity()).sum()
    }
}

/// Delivers what comes, one after the other, until the notifier is dropped.
async fn lane(config: Arc<NotifyConfig>, mut notifications: mpsc::Receiver<Arc<Notification>>, metrics: Metrics) {
    let client = match &config.kind {
        NotifyKind::Webhook(hook) => Some(webhook::Client::new(hook)),
        NotifyKind::Exec { .. } => None,
    };
    while let Some(notification) = notifications.recv().await {
        deliver(&config, client.as_ref(), &notification, &metrics).await;
    }
}

async fn deliver(
    config: &NotifyConfig,
    client: Option<&webhook::Client>,
    notification: &Notification,
    metrics: &Metrics,
) {
    let body = serde_json::to_vec(notification).expect("texts, numbers and lists of them");
    let count = |outcome: Delivery| {
        metrics.notifications.with_label_values(&[config.name.as_str(), outcome.as_str()]).inc();
    };
    let (mut pause, longest) = PAUSES;
    for attempt in 1..=config.attempts {
        let once = async {
            match (&config.kind, client) {
                (NotifyKind::Exec { command }, _) => exec::run(command, &body).await,
                (NotifyKind::Webhook(hook), Some(client)) => client.post(hook, body.clone()).await,
                (NotifyKind::Webhook(_), None) => unreachable!("a webhook's lane has a client"),
            }
        };
        let tried = tokio::time::timeout(config.timeout, once).await;
        let failure = match tried {
            Ok(Ok(())) => return count(Delivery::Delivered),
            Ok(Err(failure)) => failure,
            Err(_) => DeliveryFailure::Later(format!("no end within {} ms", config.timeout.as_millis())),
        };
        let last = attempt == config.attempts || matches!(failure, DeliveryFailure::Refused(_));
        let (sink, worker, event) = (config.name.as_str(), &notification.worker, notification.event.as_str());
        if last {
            tracing::error!(sink, %worker, event, attempt, error = %failure, "notification lost: the sink refused it, or every try failed");
            metrics.lose(Loss::Notification, 1);
            return count(if matches!(failure, DeliveryFailure::Refused(_)) {
                Delivery::Refused
            } else {
                Delivery::GivenUp
            });
        }
        tracing::warn!(sink, %worker, event, attempt, error = %failure, "notification not delivered yet: another try follows");
        count(Delivery::Retried);
        // The daemons of a fleet do not all come back at once.
        tokio::time::sleep(pause + Duration::from_millis(u64::from(std::process::id()) % 100)).await;
        pause = (pause * 2).min(longest);
    }
}

#[cfg(test)]
mod tests {
    use strum::VariantArray as _;

    use super::*;

    pub(super) fn notification(worker: &str, event: NotificationKind) -> Notification {
        Notification {
            schema: lastgasp_protocol::SCHEMA,
            event,
            at: "2026-11-29T17:00:00Z".parse().unwrap(),
            node: Name::new("gpu-a").unwrap(),
            worker: Name::new(worker).unwrap(),
            endpoint: "http://10.0.0.7:8000".into(),
            models: vec!["tiny".into()],
            incarnation: Incarnation::new("a-1-2").unwrap(),
            epoch: 1,
            cause: None,
            certificate: None,
        }
    }

    fn config(command: &[&str], attempts: u32, queue: usize) -> NotifyConfig {
        NotifyConfig {
            name: "exec-0".into(),
            kind: NotifyKind::Exec { command: command.iter().map(|&part| part.to_owned()).collect() },
            on: NotificationKind::VARIANTS.to_vec(),
            timeout: Duration::from_secs(5),
            attempts,
            concurrency: 1,
            queue,
        }
    }

    fn counted(metrics: &Metrics, outcome: &str) -> u64 {
        metrics.notifications.with_label_values(&["exec-0", outcome]).get()
    }

    fn lost(metrics: &Metrics, kind: &str) -> u64 {
        metrics.losses().into_iter().find(|loss| loss.hop == "notify" && loss.kind == kind).map_or(0, |loss| loss.count)
    }

    #[test]
    fn the_json_has_the_names_that_scripts_rely_on() {
        let json = serde_json::to_value(notification("vllm-0", NotificationKind::Withdrawn)).unwrap();
        assert_eq!(
            json,
            serde_json::json!({
                "schema": 1, "event": "withdrawn", "at": "2026-11-29T17:00:00Z", "node": "gpu-a", "worker": "vllm-0",
                "endpoint": "http://10.0.0.7:8000", "models": ["tiny"], "incarnation": "a-1-2", "epoch": 1,
            })
        );
    }

    #[tokio::test(start_paused = true)]
    async fn what_fails_is_tried_again_and_then_given_up() {
        let metrics = Metrics::new();
        deliver(&config(&["false"], 3, 1), None, &notification("w", NotificationKind::Serving), &metrics).await;
        assert_eq!((counted(&metrics, "retried"), counted(&metrics, "given_up")), (2, 1));
        assert_eq!(lost(&metrics, "delivery"), 1);
    }

    #[tokio::test]
    async fn a_queue_that_is_full_loses_what_comes_and_says_so() {
        let metrics = Metrics::new();
        let mut notifier = Notifier::start(
            &[config(&["cat"], 1, 2)],
            Vec::new(),
            Vec::new(),
            &tokio::runtime::Handle::current(),
            &metrics,
        );
        // Nobody takes anything out before this task waits.
        for worker in ["a", "b", "c", "d"] {
            notifier.tell(notification(worker, NotificationKind::Withdrawn));
        }
        assert_eq!((lost(&metrics, "queue"), notifier.waiting()), (2, 2));
    }

    #[tokio::test]
    async fn a_renewed_listing_is_no_news() {
        let metrics = Metrics::new();
        let mut notifier = Notifier::start(
            &[config(&["cat"], 1, 16)],
            Vec::new(),
            Vec::new(),
            &tokio::runtime::Handle::current(),
            &metrics,
        );
        for event in [
            NotificationKind::Serving,
            NotificationKind::Serving,
            NotificationKind::Withdrawn,
            NotificationKind::Serving,
        ] {
            notifier.tell(notification("a", event));
        }
        assert_eq!(notifier.waiting(), 3);
    }

    #[tokio::test]
    async fn a_sink_gets_only_what_it_asks_for() {
        let metrics = Metrics::new();
        let only = NotifyConfig { on: vec![NotificationKind::Withdrawn], ..config(&["cat"], 1, 16) };
        let mut notifier =
            Notifier::start(&[only], Vec::new(), Vec::new(), &tokio::runtime::Handle::current(), &metrics);
        notifier.tell(notification("a", NotificationKind::Serving));
        notifier.tell(notification("a", NotificationKind::Withdrawn));
        assert_eq!(notifier.waiting(), 1);
    }

    #[tokio::test]
    async fn a_record_that_was_overtaken_changes_nothing_in_dynamos_discovery() {
        let metrics = Metrics::new();
        let (handle, mut commands) = handle::Handle::new("dynamo-0", 1, &metrics);
        let side = tokio::runtime::Handle::current();
        let mut notifier = Notifier::start(&[], Vec::new(), vec![Dynamo(handle)], &side, &metrics);
        notifier.tell_overtaken(notification("a", NotificationKind::Serving));
        notifier.tell_overtaken(notification("a", NotificationKind::Draining));
        notifier.tell(Notification { epoch: 2, ..notification("a", NotificationKind::Serving) });
        assert!(matches!(commands.recv().await, Some(dynamo::DynamoCommand::Serves(_))));
        assert!(commands.try_recv().is_err());
    }
}

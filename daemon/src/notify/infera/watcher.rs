//! The task of one sink: what it hears on Infera's NATS, and what it does about a loss.

use lastgasp_protocol::ClosedName as _;
use std::collections::HashMap;
use std::time::Duration;

use async_nats::{Client, ConnectOptions, Event, HeaderMap, Message, Subject, Subscriber};
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::future::join_all;
use lastgasp_protocol::{Mode, Name};
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_stream::StreamMap;

use super::etcd::{Etcd, EtcdChange};
use super::frames::{self, ErrorFrame};
use super::inboxes::Inboxes;
use super::{FrameKind, InferaCommand};
use crate::config::InferaConfig;
use crate::effects::nats::{self, NatsError};
use crate::losses::Loss;
use crate::metrics::Metrics;
use crate::notify::FAILED;
use crate::notify::etcd::EtcdError;
use crate::notify::{BridgeReport, Lost, Report, System, is_final};

/// Messages of one subject that wait for this task. Each holds a whole request until it is looked at.
const UNREAD: usize = 256;
/// How long discovery may hold up the frames, and how long the server of NATS may take them.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long discovery may hold up an answer in a lost worker's place.
const STAND_IN_PATIENCE: Duration = Duration::from_millis(200);
/// How often discovery is tried again, and old inboxes are forgotten.
const TICK: Duration = Duration::from_secs(1);
/// For how long discovery is tried again. The lease of a dead wrapper has lapsed by then (30 s), and
/// a wrapper that was started again has not registered yet.
const TRY_AGAIN_FOR: Duration = Duration::from_secs(25);

/// What is heard of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Topic {
    Request,
    Cancellation,
}

/// What is to become of a worker's record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    Delete,
    Drain,
    Restore,
}

struct InferaWorker {
    id: String,
    inboxes: Inboxes,
    /// It is lost: the frame that answers in its place.
    stand_in: Option<ErrorFrame>,
    /// Its record says that it drains, and we wrote that.
    drained: bool,
    /// What could not be done yet, and since when.
    owed: Option<(Change, Instant)>,
}

struct Watcher {
    config: InferaConfig,
    client: Client,
    etcd: Option<Etcd>,
    workers: HashMap<Name, InferaWorker>,
    heard: StreamMap<(Name, Topic), Subscriber>,
    metrics: Metrics,
    report: Report,
}

/// How Infera's NATS is reached.
pub(super) fn options(config: &InferaConfig, node: &Name, metrics: &Metrics) -> Result<ConnectOptions, NatsError> {
    let (sink, metrics) = (config.name.clone(), metrics.clone());
    Ok(nats::patient_login(&config.nats, node)?.subscription_capacity(UNREAD).event_callback(move |event| {
        if matches!(event, Event::SlowConsumer(_)) {
            metrics.lose(Loss::InferaRequest, 1);
        }
        tracing::info!(sink, %event, "Infera's NATS");
        async {}
    }))
}

/// Works until the sink is dropped.
pub(super) async fn watch(
    config: InferaConfig,
    options: ConnectOptions,
    mut commands: mpsc::Receiver<InferaCommand>,
    metrics: Metrics,
    report: Report,
) {
    let servers: Vec<&str> = config.nats.url.split(',').map(str::trim).collect();
    let client = match options.connect(servers).await {
        Ok(client) => client,
        Err(error) => {
            tracing::error!(sink = config.name, %error, "cannot use Infera's NATS: Infera's routers hear of no death on this node");
            return;
        }
    };
    let etcd = config.etcd.as_ref().map(|etcd| Etcd::new(&etcd.url, &etcd.prefix));
    let (workers, heard) = (HashMap::new(), StreamMap::new());
    let mut watcher = Watcher { config, client, etcd, workers, heard, metrics, report };
    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            command = commands.recv() => match command {
                Some(command) => watcher.command(command).await,
                None => return,
            },
            _ = tick.tick() => watcher.tick().await,
            Some(((worker, topic), message)) = watcher.heard.next() => watcher.hear(&worker, topic, &message).await,
        }
    }
}

impl Watcher {
    async fn command(&mut self, command: InferaCommand) {
        match command {
            InferaCommand::Watch(worker, id) => self.begin(worker, id).await,
            InferaCommand::Forget(worker) => {
                for topic in [Topic::Request, Topic::Cancellation] {
                    self.heard.remove(&(worker.clone(), topic));
                }
                self.workers.remove(&worker);
                let _ = self.metrics.infera_remembered.remove_label_values(&[worker.as_str()]);
            }
            InferaCommand::Recovers(worker) => self.recovers(&worker),
            InferaCommand::Serves(worker) => {
                self.recovers(&worker);
                if self.workers.get(&worker).is_some_and(|worker| worker.drained) {
                    self.change(&[(worker, Change::Restore)]).await;
                }
            }
            InferaCommand::Drains(worker) => {
                if self.etcd.is_some() {
                    let done = self.change(&[(worker.clone(), Change::Drain)]).await;
                    let detail = done.into_iter().next().unwrap_or_default();
                    (self.report)(BridgeReport { system: System::Infera, worker, lost: None, detail });
                }
            }
            InferaCommand::HandsOver(leaving) => self.end_streams(leaving, Mode::Handover).await,
            InferaCommand::Lost(lost) => self.end_streams(lost, Mode::Lost).await,
        }
    }

    async fn begin(&mut self, worker: Name, id: String) {
        for (topic, subject) in
            [(Topic::Request, frames::requests(&id)), (Topic::Cancellation, frames::cancellations(&id))]
        {
            // Refused only once the connection is given up for good.
            match self.client.subscribe(subject).await {
                Ok(subscriber) => _ = self.heard.insert((worker.clone(), topic), subscriber),
                Err(error) => {
                    tracing::error!(sink = self.config.name, %worker, %error, "cannot subscribe to the worker's requests")
                }
            }
        }
        let worker_state = InferaWorker { id, inboxes: Inboxes::default(), stand_in: None, drained: false, owed: None };
        self.workers.insert(worker, worker_state);
    }

    /// It answers by itself again.
    fn recovers(&mut self, worker: &Name) {
        if let Some(state) = self.workers.get_mut(worker) {
            state.stand_in = None;
            // Its record may be a new life's.
            state.owed = None;
        }
    }

    async fn hear(&mut self, worker: &Name, topic: Topic, message: &Message) {
        let Some(state) = self.workers.get_mut(worker) else { return };
        match topic {
            Topic::Cancellation => {
                if let Some(inbox) = frames::cancelled(&message.payload) {
                    state.inboxes.remove(&inbox);
                }
            }
            Topic::Request => {
                let Some(inbox) = frames::inbox(message) else {
                    tracing::debug!(%worker, "request without an inbox: no frame can end it");
                    return self.metrics.lose(Loss::InferaRequest, 1);
                };
                if let Some(frame) = state.stand_in.clone() {
                    if !self.has_registered_again(worker).await {
                        if self.config.stand_in {
                            self.end(&inbox, &frame, FrameKind::StandIn).await;
                        }
                        return;
                    }
                    self.recovers(worker);
                }
                let movable = frames::is_movable(&message.payload);
                let Some(state) = self.workers.get_mut(worker) else { return };
                if !state.inboxes.insert(inbox, movable, self.config.max_requests, Instant::now()) {
                    self.metrics.lose(Loss::InferaRequest, 1);
                }
            }
        }
        self.count(worker);
    }

    /// A record that takes work, where ours is gone, is a new life's. Its wrapper writes it before the
    /// daemon has heard that the engine serves.
    async fn has_registered_again(&self, worker: &Name) -> bool {
        let (Some(etcd), Some(state)) = (&self.etcd, self.workers.get(worker)) else { return false };
        if state.owed.is_some() {
            return false;
        }
        let asked = tokio::time::timeout(STAND_IN_PATIENCE, etcd.is_active(&state.id)).await;
        matches!(asked, Ok(Ok(true)))
    }

    fn count(&self, worker: &Name) {
        let remembered = self.workers.get(worker).map_or(0, |state| state.inboxes.len());
        let gauge = self.metrics.infera_remembered.with_label_values(&[worker.as_str()]);
        gauge.set(i64::try_from(remembered).unwrap_or(i64::MAX));
    }

    /// All of one cause: first out of discovery, then every stream of theirs, or at a handover those that
    /// can be moved, then what still runs of them.
    async fn end_streams(&mut self, lost: Vec<Lost>, mode: Mode) {
        let mut ended = Vec::new();
        let mut changes = Vec::new();
        for Lost { worker, incarnation, cause } in lost {
            let Some(state) = self.workers.get_mut(&worker) else {
                (self.report)(BridgeReport {
                    system: System::Infera,
                    worker,
                    lost: Some(incarnation),
                    detail: "not watched".to_owned(),
                });
                continue;
            };
            let is_final = mode == Mode::Lost && cause.as_ref().is_some_and(|cause| is_final(cause.kind));
            changes.push((worker.clone(), if is_final { Change::Delete } else { Change::Drain }));
            let (frame, inboxes) = match mode {
                // It answers by itself what comes, and what goes on.
                Mode::Handover => (ErrorFrame::draining(), state.inboxes.take_movable()),
                Mode::Lost => {
                    let frame = ErrorFrame::of(cause.as_ref());
                    // From here on its requests are answered, so that none falls between.
                    state.stand_in = Some(frame.clone());
                    (frame, state.inboxes.take())
                }
            };
            ended.push((worker, incarnation, state.id.clone(), frame, inboxes));
        }
        let discovery = if self.etcd.is_some() { self.change(&changes).await } else { Vec::new() };
        let mut results = Vec::new();
        for (worker, _, _, frame, inboxes) in &ended {
            let mut sent = 0;
            for inbox in inboxes {
                // Where one does not leave, those behind it do not either.
                if !self.end(inbox, frame, FrameKind::End).await {
                    break;
                }
                sent += 1;
            }
            if sent < inboxes.len() {
                tracing::error!(%worker, lost = inboxes.len() - sent, "Infera's NATS did not take all frames for its routers");
                self.metrics.lose(Loss::InferaEndFrame, (inboxes.len() - sent) as u64);
            }
            self.count(worker);
            results.push(sent);
        }
        // The wrapper answers a cancellation with a frame of its own, which must not be the first one.
        self.flush().await;
        for (_, _, id, _, inboxes) in &ended {
            for inbox in inboxes {
                let payload = Bytes::copy_from_slice(inbox.as_bytes());
                if !self.send(FrameKind::Cancel, frames::cancellations(id), None, payload).await {
                    break;
                }
            }
        }
        self.flush().await;
        let mut discovery = discovery.into_iter();
        for ((worker, incarnation, id, frame, inboxes), sent) in ended.into_iter().zip(results) {
            let text = String::from_utf8_lossy(&frame.payload).into_owned();
            let record = discovery.next().map(|done| format!("{done}; ")).unwrap_or_default();
            let go_on = self.workers.get(&worker).map_or(0, |state| state.inboxes.len());
            let go_on = if go_on > 0 { format!("; {go_on} go on") } else { String::new() };
            let detail = format!("{id}: {record}{sent} of {} inboxes got \"{text}\"{go_on}", inboxes.len());
            tracing::info!(sink = self.config.name, %worker, detail, "frames sent to Infera's routers");
            (self.report)(BridgeReport { system: System::Infera, worker, lost: Some(incarnation), detail });
        }
    }

    /// Ends the answer that is awaited there.
    async fn end(&self, inbox: &str, frame: &ErrorFrame, kind: FrameKind) -> bool {
        let ErrorFrame { headers, payload } = frame.clone();
        self.send(kind, inbox.to_owned().into(), Some(headers), payload).await
    }

    /// `false`: it does not leave, because the server has not taken what went before.
    async fn send(&self, kind: FrameKind, subject: Subject, headers: Option<HeaderMap>, payload: Bytes) -> bool {
        let sent = async {
            match headers {
                Some(headers) => self.client.publish_with_headers(subject, headers, payload).await,
                None => self.client.publish(subject, payload).await,
            }
        };
        let sent = matches!(tokio::time::timeout(PATIENCE, sent).await, Ok(Ok(())));
        if sent {
            self.metrics.infera_frames.with_label_values(&[kind.as_str()]).inc();
        }
        sent
    }

    async fn flush(&self) {
        if !matches!(tokio::time::timeout(PATIENCE, self.client.flush()).await, Ok(Ok(()))) {
            tracing::warn!(sink = self.config.name, "Infera's NATS does not answer: frames for its routers wait");
        }
    }

    /// Changes records, all at the same time; in words what became of each.
    async fn change(&mut self, changes: &[(Name, Change)]) -> Vec<String> {
        let Some(etcd) = &self.etcd else { return Vec::new() };
        let workers = &self.workers;
        let one = async |(worker, change): &(Name, Change)| -> Result<EtcdChange, EtcdError> {
            let Some(InferaWorker { id, .. }) = workers.get(worker) else { return Ok(EtcdChange::Absent) };
            let done = async {
                match change {
                    Change::Delete => etcd.delete(id).await,
                    Change::Drain => etcd.drain(id).await,
                    Change::Restore => etcd.restore(id).await,
                }
            };
            tokio::time::timeout(PATIENCE, done).await.unwrap_or(Err(EtcdError::Answer("no answer in time")))
        };
        let done = join_all(changes.iter().map(one)).await;
        let mut words = Vec::new();
        for ((worker, change), done) in changes.iter().zip(done) {
            let Some(state) = self.workers.get_mut(worker) else { continue };
            let outcome = match done {
                Ok(done) => {
                    state.owed = None;
                    match done {
                        EtcdChange::Drained => state.drained = true,
                        EtcdChange::Restored | EtcdChange::Deleted => state.drained = false,
                        EtcdChange::Absent | EtcdChange::Changed => {}
                    }
                    done.as_str()
                }
                Err(error) => {
                    tracing::warn!(sink = self.config.name, %worker, %error, "the worker's record in Infera's etcd is unchanged: another try follows");
                    let since = state.owed.map_or_else(Instant::now, |(_, since)| since);
                    state.owed = Some((*change, since));
                    FAILED
                }
            };
            self.metrics.infera_records.with_label_values(&[outcome]).inc();
            words.push(format!("record {outcome}"));
        }
        words
    }

    async fn tick(&mut self) {
        let now = Instant::now();
        let mut owed = Vec::new();
        for (worker, state) in &mut self.workers {
            state.inboxes.prune(self.config.max_age, now);
            match state.owed {
                Some((change, since)) if now.duration_since(since) < TRY_AGAIN_FOR => {
                    owed.push((worker.clone(), change));
                }
                Some(_) => {
                    state.owed = None;
                    tracing::error!(sink = self.config.name, %worker, "the worker's record in Infera's etcd is unchanged: etcd did not answer");
                    self.metrics.lose(Loss::InferaRecord, 1);
                }
                None => {}
            }
        }
        for worker in self.workers.keys() {
            self.count(worker);
        }
        if !owed.is_empty() {
            self.change(&owed).await;
        }
    }
}

//! What a daemon says to NATS, without the engines: its own code for the lease, the records, the signals
//! and the list of routers, over a connection of its own.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use lastgasp::config::NatsConfig;
use lastgasp::core::WorkerId;
use lastgasp::effects::discovery::{Desired, LOOK, Ledger, Present, Registrar, WriteOutcome};
use lastgasp::effects::lease::{self, LeaseEvent};
use lastgasp::effects::nats::{self, Buckets};
use lastgasp::effects::signals::{self, Signals};
use lastgasp::effects::troubles::Troubles;
use lastgasp::metrics::Metrics;
use lastgasp_protocol::kv::{Bucket, Change, backoff, jittered};
use lastgasp_protocol::{
    Action, Cause, CauseKind, Incarnation, LeaseKind, MigrateSignal, Mode, Name, RecordedProcess, SCHEMA, WorkerRecord,
    WorkerRef, WorkerState, Writer,
};
use lastgasp_tests::HarnessError;
use lastgasp_tests::process::GIVE_UP;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinSet;

/// Workers of a node.
pub(super) const WORKERS: usize = 8;
/// The daemon's default.
pub(super) const LEASE: Duration = Duration::from_secs(6);

/// What the server has acknowledged of every worker.
#[derive(Debug, Default)]
pub(super) struct Ledgers {
    /// By worker: since when the record stands, or does not.
    known: Mutex<HashMap<WorkerId, (Instant, bool)>>,
    changed: Notify,
}

impl Ledgers {
    /// Collects for as long as somebody reports.
    pub(super) fn keep(mut outcomes: mpsc::UnboundedReceiver<(WorkerId, WriteOutcome)>) -> Arc<Self> {
        let ledgers = Arc::new(Self::default());
        let kept = Arc::clone(&ledgers);
        tokio::spawn(async move {
            while let Some((worker, outcome)) = outcomes.recv().await {
                let listed = match outcome {
                    WriteOutcome::Listed { .. } => true,
                    WriteOutcome::Withdrawn { .. } => false,
                    WriteOutcome::Failed { error, .. } => {
                        tracing::debug!(error, "tried again");
                        continue;
                    }
                    WriteOutcome::OutOfService { .. } | WriteOutcome::WasDraining { .. } => continue,
                };
                let mut known = kept.known.lock().unwrap_or_else(PoisonError::into_inner);
                known.insert(worker, (Instant::now(), listed));
                drop(known);
                kept.changed.notify_waiters();
            }
        });
        ledgers
    }

    /// Waits until the record of a worker stands, or does not, for as long as the server acknowledges any;
    /// returns since when.
    pub(super) async fn is(&self, worker: WorkerId, listed: bool) -> Result<Instant, HarnessError> {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let known = self.known.lock().unwrap_or_else(PoisonError::into_inner).get(&worker).copied();
            match known {
                Some((at, is)) if is == listed => return Ok(at),
                _ if tokio::time::timeout(GIVE_UP, changed).await.is_err() => {
                    let what = if listed { "listed" } else { "withdrawn" };
                    return Err(HarnessError::GaveUp(format!("worker {} to be {what}", worker.0)));
                }
                _ => {}
            }
        }
    }
}

/// One worker of a node.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) id: WorkerId,
    pub(super) name: Name,
    registrar: Registrar,
    /// How many lives it has had.
    lives: u32,
}

/// One node.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) name: Name,
    pub(super) workers: Vec<Worker>,
    signals: Signals,
    lease: tokio::task::AbortHandle,
    _tasks: JoinSet<()>,
}

impl Node {
    /// Starts the daemon's parts, and lists all workers.
    pub(super) async fn start(
        index: u32,
        url: &str,
        replicas: usize,
        outcomes: mpsc::UnboundedSender<(WorkerId, WriteOutcome)>,
    ) -> Result<Self, HarnessError> {
        let name = Name::new(format!("node-{index:05}")).expect("letters and digits");
        let failed = |error: Box<dyn std::error::Error + Send + Sync>| HarnessError::Nats(error);
        let config = NatsConfig { url: url.to_owned(), login: Default::default() };
        let troubles = Troubles::default();
        let connected = nats::connect(&config, &name, troubles.clone()).await;
        let (client, connection) = connected.map_err(|error| failed(error.into()))?;
        let (opened_tx, mut opened) = watch::channel(None);
        let (nodes_tx, nodes) = watch::channel(None);
        let (lease_tx, mut leases) = mpsc::unbounded_channel();
        let (routers_tx, routers) = watch::channel(HashSet::new());
        let (answers_tx, mut answers) = mpsc::unbounded_channel();
        let (workers_tx, workers) = watch::channel(None);
        let nobody = Present { asked: tokio::time::Instant::now(), keys: HashSet::new() };
        let (present_tx, present) = watch::channel(Arc::new(nobody));
        let own = lease::own_lease(name.clone()).map_err(|source| HarnessError::Io { what: "/proc".into(), source })?;

        let mut tasks = JoinSet::new();
        tasks.spawn(nats::keep_open(client.clone(), replicas, connection.clone(), troubles.clone(), opened_tx));
        let lease = tasks.spawn(lease::keep(own, LEASE, nodes, troubles, lease_tx));
        let signals = Signals::new(client, routers, answers_tx, Metrics::new()).await;
        let signals = signals.map_err(|error| failed(error.into()))?;
        tasks.spawn(async move { while answers.recv().await.is_some() {} });
        let filter = format!("{}.*", name.token());
        tasks.spawn(async move {
            let Ok(found) = opened.wait_for(Option::is_some).await.map(|opened| opened.clone()) else { return };
            let Some((_, Buckets { workers, nodes, routers })) = found else { return };
            nodes_tx.send_replace(Some(nodes));
            tokio::spawn(signals::follow_routers(routers, routers_tx));
            tokio::spawn(own_records(workers.clone(), filter, present_tx));
            while let Some(event) = leases.recv().await {
                if event == LeaseEvent::Held && workers_tx.borrow().is_none() {
                    workers_tx.send_replace(Some(workers.clone()));
                }
            }
        });
        let ledger = Ledger { bucket: workers, connection, present };
        let workers = (0..WORKERS).map(|worker| {
            let id = WorkerId(index * WORKERS as u32 + worker as u32);
            let worker = Name::new(format!("vllm-{worker}")).expect("letters and digits");
            let key = lastgasp_protocol::worker_key(&name, &worker);
            let registrar = Registrar::spawn(id, key, ledger.clone(), outcomes.clone());
            Worker { id, name: worker, registrar, lives: 0 }
        });
        let workers = workers.collect();
        let mut node = Self { name, workers, signals, lease, _tasks: tasks };
        (0..WORKERS).for_each(|worker| node.begin_life(worker));
        Ok(node)
    }

    /// A worker is started, for the first time or in place of one that died.
    pub(super) fn begin_life(&mut self, worker: usize) {
        self.workers[worker].lives += 1;
        let Worker { id, name, lives, .. } = &self.workers[worker];
        let record = WorkerRecord {
            schema: SCHEMA,
            node: self.name.clone(),
            worker: name.clone(),
            incarnation: incarnation(*id, *lives),
            epoch: 1,
            state: WorkerState::Serving,
            deadline: None,
            writer: Writer::Daemon,
            lease: LeaseKind::Node,
            engine: "vllm".to_owned(),
            models: vec!["Qwen/Qwen3-0.6B".to_owned()],
            endpoint: format!("http://10.{}.{}.{}:8000", id.0 >> 16, id.0 >> 8 & 255, id.0 & 255),
            registered_at: None,
            labels: Default::default(),
            processes: vec![RecordedProcess { pid: id.0, start_ticks: 4711, title: "VLLM::EngineCore".to_owned() }],
            commanded: None,
        };
        let desired = Desired::Listed { record: Box::new(record), drain_for: None, taken_back: false };
        self.workers[worker].registrar.want(desired);
    }

    /// Which life of a worker this is.
    pub(super) fn life(&self, worker: usize) -> Incarnation {
        incarnation(self.workers[worker].id, self.workers[worker].lives)
    }

    /// These workers die at once: what a daemon does about it, in its order. Without `signalled`, only the
    /// records say so.
    pub(super) fn die(&self, workers: &[usize], certificate: String, signalled: bool) {
        let references = workers.iter().map(|worker| WorkerRef {
            worker: self.workers[*worker].name.clone(),
            incarnation: self.life(*worker),
            epoch: 1,
            revision: 0,
        });
        let signal = MigrateSignal {
            schema: SCHEMA,
            node: self.name.clone(),
            action: Action::Move,
            mode: Some(Mode::Lost),
            certificate,
            workers: references.collect(),
            cause: Cause::of(CauseKind::ProcessKilled),
        };
        if signalled {
            self.signals.send(&signal);
        }
        for worker in workers {
            let absent = Desired::Absent { incarnation: self.life(*worker), commanded: None };
            self.workers[*worker].registrar.want(absent);
        }
    }

    /// The node loses its power: nobody renews its lease any more.
    pub(super) fn vanish(&self) {
        self.lease.abort();
    }
}

fn incarnation(worker: WorkerId, life: u32) -> Incarnation {
    Incarnation::new(format!("5f0c1d2e-{}-{life}", worker.0)).expect("short enough")
}

/// Follows a node's keys as its daemon does.
async fn own_records(bucket: Bucket, filter: String, present: watch::Sender<Arc<Present>>) {
    let mut attempts = 0;
    while !present.is_closed() {
        if attempts > 0 {
            tokio::time::sleep(backoff(attempts)).await;
        }
        attempts += 1;
        let Ok(mut changes) = bucket.watch(&filter).await else { continue };
        let pause = jittered(LOOK);
        let mut look = tokio::time::interval_at(tokio::time::Instant::now() + pause, pause);
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                change = changes.next() => match change {
                    Some(Ok(Change::Entry(_))) => {}
                    Some(Ok(Change::Listed)) => attempts = 0,
                    Some(Err(_)) | None => break,
                },
                _ = look.tick() => {
                    let asked = tokio::time::Instant::now();
                    let Ok(keys) = bucket.keys(&filter).await else { break };
                    present.send_replace(Arc::new(Present { asked, keys: keys.into_iter().collect() }));
                }
            }
        }
    }
}

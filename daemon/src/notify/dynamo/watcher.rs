//! The task of one sink: which instances its workers are, and what it does about their records.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::time::Duration;

use futures_util::future::join_all;
use lastgasp_protocol::Name;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior};

use super::records::Record;
use super::stores::{Done, Seen, Store, StoreError};
use super::{Command, owners};
use crate::config::DynamoConfig;
use crate::core::ProcessId;
use crate::losses::Loss;
use crate::metrics::Metrics;
use crate::notify::{Lost, Report, System, Told, is_final};
use crate::sensors::proc;

/// Records that wait for this task.
const UNREAD: usize = 1024;
/// How long discovery may hold up what breaks a hung worker's connections.
const PATIENCE: Duration = Duration::from_secs(1);
/// How often discovery is tried again.
const TICK: Duration = Duration::from_secs(1);
/// For how long. The lease of a dead worker has lapsed by then (30 s).
const TRY_AGAIN_FOR: Duration = Duration::from_secs(60);

/// What is to become of a worker's records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    Withdraw,
    Restore,
}

#[derive(Default)]
struct Worker {
    configured: Option<u64>,
    /// The root of its life, and its companion.
    processes: Vec<ProcessId>,
    /// The instances that it is, each with the process that listens for it; none for one that is
    /// configured.
    instances: BTreeMap<u64, Option<ProcessId>>,
    /// It must not be listed: what its instances write now goes too.
    is_out: bool,
    /// What was deleted, for a worker that may come back.
    kept: Vec<Record>,
    /// What could not be done yet, to what, and since when.
    owed: Option<(Change, Vec<Record>, Instant)>,
}

struct Watcher {
    config: DynamoConfig,
    store: Store,
    workers: HashMap<Name, Worker>,
    records: BTreeMap<String, Record>,
    /// There is an instance, or a process, that may belong together with another one.
    is_unmatched: bool,
    metrics: Metrics,
    report: Report,
}

/// Which process of a worker an instance is.
type Matched = Vec<(Name, u64, ProcessId)>;

/// Works until the sink is dropped.
pub(super) async fn watch(
    config: DynamoConfig,
    mut commands: mpsc::Receiver<Command>,
    metrics: Metrics,
    report: Report,
) {
    let store = Store::new(&config.backend);
    let (sender, mut seen) = mpsc::channel(UNREAD);
    tokio::spawn(store.clone().follow(config.name.clone(), sender));
    let (workers, records) = (HashMap::new(), BTreeMap::new());
    let mut watcher = Watcher { config, store, workers, records, is_unmatched: false, metrics, report };
    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut matching: Option<JoinHandle<Matched>> = None;
    loop {
        if matching.is_none() && std::mem::take(&mut watcher.is_unmatched) {
            matching = Some(watcher.find_owners());
        }
        tokio::select! {
            biased;
            command = commands.recv() => match command {
                Some(command) => watcher.command(command).await,
                None => return,
            },
            Some(one) = seen.recv() => watcher.see(one),
            matched = async { matching.as_mut().expect("it is asked for only then").await }, if matching.is_some() => {
                matching = None;
                watcher.matched(matched.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic())));
            }
            _ = tick.tick() => watcher.tick().await,
        }
    }
}

impl Watcher {
    async fn command(&mut self, command: Command) {
        match command {
            Command::Watch(name, configured) => {
                let instances = configured.map(|instance| (instance, None)).into_iter().collect();
                self.workers.insert(name.clone(), Worker { configured, instances, ..Worker::default() });
                self.count(&name);
            }
            Command::Forget(name) => {
                self.workers.remove(&name);
                let _ = self.metrics.dynamo_instances.remove_label_values(&[name.as_str()]);
            }
            Command::Lives(name, processes) => self.lives(&name, processes),
            Command::Serves(name) => {
                let Some(worker) = self.workers.get_mut(&name) else { return };
                worker.is_out = false;
                // What is owed of an earlier life stays so.
                let instances = &worker.instances;
                worker.owed.take_if(|owed| owed.1.iter().all(|record| instances.contains_key(&record.instance)));
                let kept = std::mem::take(&mut worker.kept);
                if !kept.is_empty() {
                    self.change(vec![(name, Change::Restore, kept)]).await;
                }
            }
            Command::Leaves(name) => {
                let (taken, known) = self.take_out(&name);
                let done = self.change(vec![(name.clone(), Change::Withdraw, taken)]).await.concat();
                if known > 0 {
                    (self.report)(Told { system: System::Dynamo, worker: name, lost: None, detail: done });
                }
            }
            Command::Lost(lost) => self.lose(lost).await,
        }
    }

    fn lives(&mut self, name: &Name, processes: Vec<ProcessId>) {
        let Some(worker) = self.workers.get_mut(name) else { return };
        if worker.processes.first() != processes.first() {
            // Its predecessor's records are exactly those that are still owed.
            worker.instances = worker.configured.map(|instance| (instance, None)).into_iter().collect();
            worker.kept.clear();
            worker.is_out = false;
        }
        worker.processes = processes;
        self.is_unmatched = true;
        self.count(name);
    }

    fn see(&mut self, seen: Seen) {
        match seen {
            Seen::All(records) => {
                self.records = records.into_iter().map(|record| (record.key.clone(), record)).collect();
                self.is_unmatched = true;
            }
            Seen::Put(record) => {
                let out = self.workers.values_mut().find(|worker| {
                    worker.is_out && worker.owed.is_none() && worker.instances.contains_key(&record.instance)
                });
                if let Some(worker) = out {
                    worker.owed = Some((Change::Withdraw, vec![record.clone()], Instant::now()));
                }
                self.is_unmatched |= record.address.is_some() && !self.records.contains_key(&record.key);
                self.records.insert(record.key.clone(), record);
            }
            Seen::Gone(key) => _ = self.records.remove(&key),
        }
    }

    /// Looks for the processes of instances that are nobody's yet, on a blocking thread.
    fn find_owners(&self) -> JoinHandle<Matched> {
        let known: HashSet<u64> = self.workers.values().flat_map(|worker| worker.instances.keys().copied()).collect();
        let unknown: BTreeSet<(u64, (IpAddr, u16))> = self
            .records
            .values()
            .filter(|record| !known.contains(&record.instance))
            .filter_map(|record| Some((record.instance, record.address?)))
            .collect();
        let workers: Vec<(Name, Vec<ProcessId>)> =
            self.workers.iter().map(|(name, worker)| (name.clone(), worker.processes.clone())).collect();
        tokio::task::spawn_blocking(move || {
            let mut matched = Vec::new();
            for (instance, address) in unknown {
                for (name, processes) in &workers {
                    if let Some(owner) = owners::owner(processes, address) {
                        matched.push((name.clone(), instance, owner));
                    }
                }
            }
            matched
        })
    }

    fn matched(&mut self, matched: Matched) {
        for (name, instance, owner) in matched {
            // It may have begun another life meanwhile.
            let Some(worker) = self.workers.get_mut(&name).filter(|_| proc::is_alive(owner)) else { continue };
            worker.instances.insert(instance, Some(owner));
            tracing::info!(sink = self.config.name, worker = %name, instance = %format_args!("{instance:x}"), pid = owner.tgid, "its instance in Dynamo");
            self.count(&name);
        }
    }

    fn count(&self, name: &Name) {
        let instances = self.workers.get(name).map_or(0, |worker| worker.instances.len());
        let gauge = self.metrics.dynamo_instances.with_label_values(&[name.as_str()]);
        gauge.set(i64::try_from(instances).unwrap_or(i64::MAX));
    }

    /// From now on it must not be listed: its records, and how many instances it is known to be.
    fn take_out(&mut self, name: &Name) -> (Vec<Record>, usize) {
        let Some(worker) = self.workers.get_mut(name) else { return (Vec::new(), 0) };
        worker.is_out = true;
        let of_it = |record: &&Record| worker.instances.contains_key(&record.instance);
        (self.records.values().filter(of_it).cloned().collect(), worker.instances.len())
    }

    /// All of one cause at the same time.
    async fn lose(&mut self, lost: Vec<Lost>) {
        let changes: Vec<_> =
            lost.iter().map(|lost| (lost.worker.clone(), Change::Withdraw, self.take_out(&lost.worker).0)).collect();
        let done = self.change(changes).await;
        for (Lost { worker: name, incarnation, cause }, done) in lost.into_iter().zip(done) {
            let mut detail = done;
            if let Some(worker) = self.workers.get_mut(&name) {
                if cause.is_some_and(|cause| is_final(cause.kind)) {
                    worker.kept.clear();
                }
                let ids: Vec<String> = worker.instances.keys().map(|instance| format!("{instance:x}")).collect();
                match ids.as_slice() {
                    [] => "no instance of it is known".clone_into(&mut detail),
                    ids => detail = format!("{}: {detail}", ids.join(", ")),
                }
            }
            tracing::info!(sink = self.config.name, worker = %name, detail, "Dynamo's discovery");
            (self.report)(Told { system: System::Dynamo, worker: name, lost: Some(incarnation), detail });
        }
    }

    /// Changes records, those of all workers at the same time; in words what became of each.
    async fn change(&mut self, changes: Vec<(Name, Change, Vec<Record>)>) -> Vec<String> {
        let store = &self.store;
        let workers = &self.workers;
        let one = async |name: &Name, change: Change, records: &[Record]| -> Result<(Done, Vec<Record>), Failure> {
            let done = async {
                match change {
                    Change::Withdraw => store.withdraw(records).await,
                    // Whoever is gone must not be listed again, whatever it said last.
                    Change::Restore if !workers.get(name).is_some_and(|worker| worker.has(records)) => {
                        Ok((Done::Absent, Vec::new()))
                    }
                    Change::Restore => Ok((store.restore(records).await?, Vec::new())),
                }
            };
            tokio::time::timeout(PATIENCE, done).await.map_err(|_| Failure::Late)?.map_err(Failure::Store)
        };
        let done = join_all(changes.iter().map(|(name, change, records)| one(name, *change, records))).await;
        let mut words = Vec::new();
        for ((name, change, records), done) in changes.into_iter().zip(done) {
            let Some(worker) = self.workers.get_mut(&name) else {
                words.push("it is not known".to_owned());
                continue;
            };
            let owed = worker.owed.take().filter(|owed| owed.0 == change);
            let since = owed.as_ref().map_or_else(Instant::now, |owed| owed.2);
            let mut number = records.len();
            let outcome = match done {
                Ok((done, deleted)) => {
                    match done {
                        Done::Deleted => {
                            number = deleted.len();
                            for record in deleted {
                                self.records.remove(&record.key);
                                worker.keep(record);
                            }
                        }
                        // A try that was not answered may have been heard.
                        Done::Absent if change == Change::Withdraw && owed.is_some() => {
                            records.into_iter().for_each(|record| worker.keep(record));
                        }
                        // Before it is heard of: the next loss may come first.
                        Done::Restored => {
                            self.records.extend(records.into_iter().map(|record| (record.key.clone(), record)));
                        }
                        Done::Changed if change == Change::Withdraw => worker.owed = Some((change, records, since)),
                        _ => {}
                    }
                    done.as_str()
                }
                Err(error) => {
                    tracing::warn!(sink = self.config.name, worker = %name, %error, "its records cannot be changed yet");
                    worker.owed = Some((change, records, since));
                    "failed"
                }
            };
            self.metrics.dynamo_records.with_label_values(&[outcome]).inc();
            words.push(format!("{number} records {outcome}"));
        }
        words
    }

    async fn tick(&mut self) {
        let now = Instant::now();
        let mut owed = Vec::new();
        for (name, worker) in &mut self.workers {
            match &worker.owed {
                Some((change, records, since)) if now.duration_since(*since) < TRY_AGAIN_FOR => {
                    owed.push((name.clone(), *change, records.clone()));
                }
                Some(_) => {
                    worker.owed = None;
                    tracing::error!(sink = self.config.name, worker = %name, "its records were not changed: Dynamo's discovery did not take it");
                    self.metrics.lose(Loss::DynamoRecord, 1);
                }
                None => {}
            }
        }
        if !owed.is_empty() {
            self.change(owed).await;
        }
    }
}

impl Worker {
    /// It was deleted, as it stands here.
    fn keep(&mut self, record: Record) {
        self.kept.retain(|kept| kept.key != record.key);
        self.kept.push(record);
    }

    /// Whether every process behind these records lives.
    fn has(&self, records: &[Record]) -> bool {
        records.iter().all(|record| match self.instances.get(&record.instance) {
            Some(Some(owner)) => proc::is_alive(*owner),
            Some(None) => true,
            None => false,
        })
    }
}

/// Why nothing became of it.
#[derive(Debug, thiserror::Error)]
enum Failure {
    /// It takes too long.
    #[error("no answer within {} s", PATIENCE.as_secs())]
    Late,
    /// The store says so.
    #[error(transparent)]
    Store(StoreError),
}

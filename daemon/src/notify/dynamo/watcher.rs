//! The task of one sink: which instances its workers are, and what it does about their records.

use lastgasp_protocol::ClosedName as _;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::net::IpAddr;
use std::time::Duration;

use futures_util::future::join_all;
use lastgasp_protocol::Name;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior};

use super::records::Record;
use super::stores::{Seen, Store, StoreChange, StoreError};
use super::{DynamoCommand, owners};
use crate::config::DynamoConfig;
use crate::core::ProcessId;
use crate::losses::Loss;
use crate::metrics::Metrics;
use crate::notify::FAILED;
use crate::notify::{BridgeReport, Lost, Report, System};
use crate::sensors::proc;

/// Records that wait for this task.
const UNREAD: usize = 1024;
/// How long one change of discovery may take.
const PATIENCE: Duration = Duration::from_secs(1);
/// How often discovery is tried again.
const TICK: Duration = Duration::from_secs(1);
/// For how long. The lease of a dead worker has lapsed by then (30 s).
const TRY_AGAIN_FOR: Duration = Duration::from_secs(60);

#[derive(Default)]
struct DynamoWorker {
    configured: Option<u64>,
    /// The root of its life, and its companion.
    processes: Vec<ProcessId>,
    /// The instances that it is, each with the process that listens for it; none for one that is
    /// configured.
    instances: BTreeMap<u64, Option<ProcessId>>,
    /// It must not be listed: what its instances write now goes too.
    is_out: bool,
    /// What was deleted in this life, for it may go on; by key.
    kept: BTreeMap<String, Record>,
    /// Since when that is to be put back.
    returns: Option<Instant>,
}

/// A record that has to go.
struct Debt {
    worker: Name,
    /// Of this life.
    life: Option<ProcessId>,
    record: Record,
    since: Instant,
    /// It was tried, and that was not answered: it may be gone.
    is_unsure: bool,
}

pub(super) struct Watcher {
    config: DynamoConfig,
    store: Store,
    workers: HashMap<Name, DynamoWorker>,
    /// All records by key. Those of known instances have their values.
    records: BTreeMap<String, Record>,
    /// What has to go, by key; those of earlier lives and of forgotten workers too.
    debts: BTreeMap<String, Debt>,
    /// Keys of records whose process is not looked for yet.
    unmatched: BTreeSet<String>,
    /// Those for which that failed: it is tried again with the next tick.
    later: BTreeSet<String>,
    /// Why it failed last.
    failed: Option<String>,
    metrics: Metrics,
    report: Report,
}

/// What came of a look for the processes of instances.
pub(super) struct OwnersLook {
    keys: BTreeSet<String>,
    workers: Vec<(Name, Vec<ProcessId>)>,
    /// By place in `workers`.
    found: Vec<(usize, u64, ProcessId)>,
    failed: Option<io::Error>,
}

/// Works until the sink is dropped.
pub(super) async fn watch(
    config: DynamoConfig,
    mut commands: mpsc::Receiver<DynamoCommand>,
    metrics: Metrics,
    report: Report,
) {
    let store = Store::new(&config.backend);
    let (sender, mut seen) = mpsc::channel(UNREAD);
    tokio::spawn(store.clone().follow(config.name.clone(), sender));
    let mut watcher = Watcher::new(config, store, metrics, report);
    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut looking: Option<JoinHandle<OwnersLook>> = None;
    loop {
        if looking.is_none() {
            looking = watcher.look();
        }
        tokio::select! {
            biased;
            command = commands.recv() => match command {
                Some(command) => watcher.command(command).await,
                None => return,
            },
            Some(one) = seen.recv() => watcher.see(one),
            looked = async { looking.as_mut().expect("it is asked for only then").await }, if looking.is_some() => {
                looking = None;
                let looked = looked.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()));
                watcher.looked(looked).await;
            }
            _ = tick.tick() => watcher.tick().await,
        }
    }
}

impl Watcher {
    pub(super) fn new(config: DynamoConfig, store: Store, metrics: Metrics, report: Report) -> Self {
        Self {
            config,
            store,
            workers: HashMap::new(),
            records: BTreeMap::new(),
            debts: BTreeMap::new(),
            unmatched: BTreeSet::new(),
            later: BTreeSet::new(),
            failed: None,
            metrics,
            report,
        }
    }

    pub(super) async fn command(&mut self, command: DynamoCommand) {
        match command {
            DynamoCommand::Watch(name, configured) => {
                let instances = configured.map(|instance| (instance, None)).into_iter().collect();
                self.workers.insert(name.clone(), DynamoWorker { configured, instances, ..DynamoWorker::default() });
                self.count(&name);
            }
            DynamoCommand::Forget(name) => {
                self.workers.remove(&name);
                let _ = self.metrics.dynamo_instances.remove_label_values(&[name.as_str()]);
            }
            DynamoCommand::Lives(name, processes) => self.lives(&name, processes),
            DynamoCommand::Serves(name) => self.serves(name).await,
            DynamoCommand::Leaves(name) => {
                let known = self.take_out(&name);
                let done = self.withdraw(vec![name.clone()]).await.concat();
                if known > 0 {
                    (self.report)(BridgeReport { system: System::Dynamo, worker: name, lost: None, detail: done });
                }
            }
            DynamoCommand::Lost(lost) => self.lose(lost).await,
        }
    }

    fn lives(&mut self, name: &Name, processes: Vec<ProcessId>) {
        let Some(worker) = self.workers.get_mut(name) else { return };
        if worker.life() != processes.first().copied() {
            // What is still owed of its predecessor stays so. A companion that stays is still what it was,
            // and takes work again with the next engine.
            let former = std::mem::take(worker);
            let stays = |owner: &Option<ProcessId>| {
                owner.is_some_and(|owner| processes.iter().skip(1).any(|process| *process == owner))
            };
            worker.configured = former.configured;
            worker.instances = former.instances.into_iter().filter(|(_, owner)| stays(owner)).collect();
            worker.kept = former.kept.into_iter().filter(|(_, record)| worker.is(record.instance)).collect();
            let (of_it, life) = (|debt: &&mut Debt| debt.worker == *name, processes.first().copied());
            for debt in self.debts.values_mut().filter(of_it).filter(|debt| worker.is(debt.record.instance)) {
                debt.life = life;
            }
            worker.instances.extend(worker.configured.map(|instance| (instance, None)));
        }
        worker.processes = processes;
        let may_be_its = self.records.values().filter(|record| record.address.is_some());
        self.unmatched.extend(may_be_its.map(|record| record.key.clone()));
        self.count(name);
    }

    async fn serves(&mut self, name: Name) {
        let Some(worker) = self.workers.get_mut(&name) else { return };
        worker.is_out = false;
        let life = worker.life();
        for debt in take(&mut self.debts, |debt| debt.worker == name && debt.life == life) {
            if debt.is_unsure {
                worker.keep(debt.record);
            }
        }
        if !worker.kept.is_empty() {
            worker.returns = Some(Instant::now());
            self.restore(vec![name]).await;
        }
    }

    pub(super) fn see(&mut self, seen: Seen) {
        match seen {
            Seen::All(records) => {
                let before = std::mem::take(&mut self.records);
                for record in records {
                    let known = before.get(&record.key);
                    self.note(record, known);
                }
                self.owe();
            }
            Seen::Put(record) => {
                if self.records.get(&record.key).is_some_and(|known| known.revision > record.revision) {
                    return;
                }
                let is_out = self.workers.values().any(|worker| worker.is_out && worker.is(record.instance));
                let known = self.records.remove(&record.key);
                self.note(record, known.as_ref());
                if is_out {
                    self.owe();
                }
            }
            // What we put back is known before what came first is heard.
            Seen::Gone(key, revision) => {
                if self.records.get(&key).is_some_and(|record| record.revision <= revision) {
                    self.records.remove(&key);
                }
            }
        }
    }

    fn note(&mut self, mut record: Record, known: Option<&Record>) {
        if !self.workers.values().any(|worker| worker.is(record.instance)) {
            record.value = Vec::new();
            let is_same = known.is_some_and(|known| record.is_still(known) && record.revision == known.revision);
            if record.address.is_some() && !is_same {
                self.unmatched.insert(record.key.clone());
            }
        }
        self.records.insert(record.key.clone(), record);
    }

    /// Looks for the processes of instances that are nobody's yet, on a blocking thread.
    pub(super) fn look(&mut self) -> Option<JoinHandle<OwnersLook>> {
        let keys = std::mem::take(&mut self.unmatched);
        let unknown: BTreeSet<(u64, (IpAddr, u16))> = keys
            .iter()
            .filter_map(|key| self.records.get(key))
            .filter(|record| !self.workers.values().any(|worker| worker.is(record.instance)))
            .filter_map(|record| Some((record.instance, record.address?)))
            .collect();
        if unknown.is_empty() {
            return None;
        }
        let workers: Vec<(Name, Vec<ProcessId>)> =
            self.workers.iter().map(|(name, worker)| (name.clone(), worker.processes.clone())).collect();
        Some(tokio::task::spawn_blocking(move || {
            let (mut found, mut failed) = (Vec::new(), None);
            for (place, (_, processes)) in workers.iter().enumerate() {
                let (listeners, error) = owners::listeners_of(processes);
                failed = error.or(failed);
                let its = |&(instance, address)| Some((place, instance, owners::owner(&listeners, address)?));
                found.extend(unknown.iter().filter_map(its));
            }
            OwnersLook { keys, workers, found, failed }
        }))
    }

    pub(super) async fn looked(&mut self, OwnersLook { keys, workers, found, failed }: OwnersLook) {
        let failed = failed.map(|error| error.to_string());
        if failed.is_some() {
            self.later.extend(keys);
        }
        if let Some(error) = failed.as_ref().filter(|_| failed != self.failed) {
            tracing::warn!(
                sink = self.config.name,
                error,
                "cannot look at the workers' processes: until it can, the daemon may miss an instance in Dynamo"
            );
        }
        self.failed = failed;
        // What their records say was not kept until now.
        let keys = |instance: u64| {
            let of_it = self.records.values().filter(move |record| record.instance == instance);
            of_it.map(|record| record.key.clone()).collect::<Vec<String>>()
        };
        let found: Vec<_> = found.into_iter().map(|one| (one, keys(one.1))).collect();
        let read = join_all(found.iter().map(|(_, keys)| in_time(self.store.read(keys.clone())))).await;
        for (((place, instance, owner), keys), read) in found.into_iter().zip(read) {
            let (name, processes) = &workers[place];
            // If it has begun another life meanwhile, everything is looked at again.
            let is_present = self.workers.get(name).is_some_and(|worker| worker.processes == *processes);
            match read {
                Ok(records) if is_present && proc::is_alive(owner) => {
                    for key in keys {
                        self.records.remove(&key);
                    }
                    self.records.extend(records.into_iter().map(|record| (record.key.clone(), record)));
                    self.recognize(name, instance, owner);
                }
                Ok(_) => {}
                Err(_) => self.later.extend(keys),
            }
        }
        self.owe();
    }

    /// A worker is this instance.
    fn recognize(&mut self, name: &Name, instance: u64, owner: ProcessId) {
        let Some(worker) = self.workers.get_mut(name) else { return };
        worker.instances.insert(instance, Some(owner));
        let life = worker.life();
        // Where ids come again, it is not its predecessor's any more.
        self.debts.retain(|_, debt| debt.record.instance != instance || debt.life == life);
        tracing::info!(sink = self.config.name, worker = %name, instance = %format_args!("{instance:x}"), pid = owner.tgid, "worker has an instance in Dynamo");
        self.count(name);
    }

    fn count(&self, name: &Name) {
        let instances = self.workers.get(name).map_or(0, |worker| worker.instances.len());
        let gauge = self.metrics.dynamo_instances.with_label_values(&[name.as_str()]);
        gauge.set(i64::try_from(instances).unwrap_or(i64::MAX));
    }

    /// From now on it must not be listed. How many instances it is known to be.
    fn take_out(&mut self, name: &Name) -> usize {
        let Some(worker) = self.workers.get_mut(name) else { return 0 };
        (worker.is_out, worker.returns) = (true, None);
        let known = worker.instances.len();
        self.owe();
        known
    }

    /// Every record of a worker that must not be listed has to go.
    fn owe(&mut self) {
        for (name, worker) in self.workers.iter().filter(|(_, worker)| worker.is_out) {
            let life = worker.life();
            for record in self.records.values().filter(|record| worker.is(record.instance)) {
                let is_same = |debt: &Debt| debt.life == life && debt.record == *record;
                if !self.debts.get(&record.key).is_some_and(is_same) {
                    let (worker, record, since) = (name.clone(), record.clone(), Instant::now());
                    self.debts.insert(record.key.clone(), Debt { worker, life, record, since, is_unsure: false });
                }
            }
        }
    }

    /// All of one cause at the same time.
    async fn lose(&mut self, lost: Vec<Lost>) {
        for lost in &lost {
            self.take_out(&lost.worker);
        }
        let done = self.withdraw(lost.iter().map(|lost| lost.worker.clone()).collect()).await;
        for (Lost { worker: name, incarnation, cause: _ }, done) in lost.into_iter().zip(done) {
            let ids = self.workers.get(&name).map(|worker| worker.instances.keys());
            let ids: Vec<String> = ids.into_iter().flatten().map(|instance| format!("{instance:x}")).collect();
            let detail = match ids.as_slice() {
                [] => "no instance of it is known".to_owned(),
                ids => format!("{}: {done}", ids.join(", ")),
            };
            tracing::info!(sink = self.config.name, worker = %name, detail, "Dynamo's discovery");
            (self.report)(BridgeReport { system: System::Dynamo, worker: name, lost: Some(incarnation), detail });
        }
    }

    /// Deletes what is owed of these workers, all at the same time; in words what became of each.
    async fn withdraw(&mut self, names: Vec<Name>) -> Vec<String> {
        let owed: Vec<Vec<Record>> = names
            .iter()
            .map(|name| self.debts.values().filter(|debt| debt.worker == *name))
            .map(|debts| debts.map(|debt| debt.record.clone()).collect())
            .collect();
        let all = join_all(owed.iter().map(|records| in_time(self.store.withdraw(records)))).await;
        let mut words = Vec::new();
        for ((name, records), done) in names.iter().zip(owed).zip(all) {
            let mut number = records.len();
            let outcome = match done {
                Ok((done, deleted)) => {
                    if done == StoreChange::Deleted {
                        number = deleted.len();
                    }
                    let mut deleted: HashMap<String, Record> =
                        deleted.into_iter().map(|record| (record.key.clone(), record)).collect();
                    for Record { key, .. } in records {
                        let deleted = deleted.remove(&key);
                        if deleted.is_some() || done != StoreChange::Changed {
                            self.settle(&key, deleted);
                        }
                    }
                    done.as_str()
                }
                Err(error) => {
                    tracing::warn!(sink = self.config.name, worker = %name, %error, "the worker's records in Dynamo's discovery are not deleted yet: another try follows");
                    for Record { key, .. } in records {
                        self.debts.entry(key).and_modify(|debt| debt.is_unsure = true);
                    }
                    FAILED
                }
            };
            self.metrics.dynamo_records.with_label_values(&[outcome]).inc();
            words.push(format!("{number} records {outcome}"));
        }
        words
    }

    /// A record is gone, by our hand or by itself.
    fn settle(&mut self, key: &str, deleted: Option<Record>) {
        self.records.remove(key);
        let Some(debt) = self.debts.remove(key) else { return };
        let by_us = deleted.or(debt.is_unsure.then_some(debt.record));
        let of_it = self.workers.get_mut(&debt.worker).filter(|worker| worker.life() == debt.life);
        if let (Some(record), Some(worker)) = (by_us, of_it) {
            worker.keep(record);
        }
    }

    /// Puts back what was deleted of these workers, all at the same time.
    async fn restore(&mut self, names: Vec<Name>) {
        let mut due = Vec::new();
        for name in names {
            let Some(worker) = self.workers.get_mut(&name) else { continue };
            // Whoever is gone must not be listed again, whatever its worker says.
            let kept = std::mem::take(&mut worker.kept);
            worker.kept = kept.into_iter().filter(|(_, record)| worker.has(record.instance)).collect();
            if worker.kept.is_empty() {
                worker.returns = None;
                self.metrics.dynamo_records.with_label_values(&[StoreChange::Absent.as_str()]).inc();
            } else {
                due.push((name, worker.kept.values().cloned().collect::<Vec<Record>>()));
            }
        }
        let all = join_all(due.iter().map(|(_, records)| in_time(self.store.restore(records)))).await;
        for ((name, records), done) in due.into_iter().zip(all) {
            let outcome = match done {
                Ok((done, restored)) => {
                    if let Some(worker) = self.workers.get_mut(&name) {
                        worker.returns = None;
                        worker.kept.clear();
                    }
                    tracing::info!(sink = self.config.name, worker = %name, records = records.len(), outcome = done.as_str(), "worker serves again: its records go back into Dynamo's discovery");
                    // Before it is heard of: the next loss may come first.
                    self.records.extend(restored.into_iter().map(|record| (record.key.clone(), record)));
                    done.as_str()
                }
                Err(error) => {
                    tracing::warn!(sink = self.config.name, worker = %name, %error, "the worker's records are not back in Dynamo's discovery yet: another try follows");
                    FAILED
                }
            };
            self.metrics.dynamo_records.with_label_values(&[outcome]).inc();
        }
    }

    pub(super) async fn tick(&mut self) {
        self.unmatched.append(&mut self.later);
        self.give_up();
        self.prune();
        let owing: BTreeSet<Name> = self.debts.values().map(|debt| debt.worker.clone()).collect();
        if !owing.is_empty() {
            self.withdraw(owing.into_iter().collect()).await;
        }
        let returning = self.workers.iter().filter(|(_, worker)| worker.returns.is_some());
        let returning: Vec<Name> = returning.map(|(name, _)| name.clone()).collect();
        if !returning.is_empty() {
            self.restore(returning).await;
        }
    }

    /// What was tried for too long.
    fn give_up(&mut self) {
        let now = Instant::now();
        let is_over = |since: Instant| now.duration_since(since) >= TRY_AGAIN_FOR;
        let mut given_up = BTreeSet::new();
        for debt in take(&mut self.debts, |debt| is_over(debt.since)) {
            let of_it = self.workers.get_mut(&debt.worker).filter(|worker| worker.life() == debt.life);
            if let (Some(worker), true) = (of_it, debt.is_unsure) {
                worker.keep(debt.record);
            }
            given_up.insert(debt.worker);
        }
        for (name, worker) in &mut self.workers {
            if worker.returns.take_if(|since| is_over(*since)).is_some() {
                given_up.insert(name.clone());
            }
        }
        for worker in given_up {
            tracing::error!(sink = self.config.name, %worker, "the worker's records are unchanged: Dynamo's discovery did not take the change");
            self.metrics.lose(Loss::DynamoRecord, 1);
        }
    }

    /// An instance whose process is dead, as a former sidecar, is nobody's once its records are gone.
    fn prune(&mut self) {
        let (records, mut changed) = (&self.records, Vec::new());
        for (name, worker) in &mut self.workers {
            let known = worker.instances.len();
            worker.instances.retain(|instance, owner| {
                owner.is_none_or(proc::is_alive) || records.values().any(|record| record.instance == *instance)
            });
            if worker.instances.len() < known {
                changed.push(name.clone());
            }
        }
        for name in changed {
            self.count(&name);
        }
    }
}

fn take(debts: &mut BTreeMap<String, Debt>, which: impl Fn(&Debt) -> bool) -> Vec<Debt> {
    let keys: Vec<String> = debts.iter().filter(|(_, debt)| which(debt)).map(|(key, _)| key.clone()).collect();
    keys.iter().filter_map(|key| debts.remove(key)).collect()
}

async fn in_time<T>(change: impl Future<Output = Result<T, StoreError>>) -> Result<T, ChangeFailure> {
    tokio::time::timeout(PATIENCE, change).await.map_err(|_| ChangeFailure::Late)?.map_err(ChangeFailure::Store)
}

impl DynamoWorker {
    /// The root of its present life.
    fn life(&self) -> Option<ProcessId> {
        self.processes.first().copied()
    }

    fn is(&self, instance: u64) -> bool {
        self.instances.contains_key(&instance)
    }

    /// It was deleted, as it stands here. Without its value there is nothing to put back.
    fn keep(&mut self, record: Record) {
        if !record.value.is_empty() {
            self.kept.insert(record.key.clone(), record);
        }
    }

    /// Whether the process behind this instance lives: for one that is configured, as far as is known.
    fn has(&self, instance: u64) -> bool {
        match self.instances.get(&instance) {
            Some(Some(owner)) => proc::is_alive(*owner),
            Some(None) => self.life().is_none_or(proc::is_alive),
            None => false,
        }
    }
}

/// Why nothing became of it.
#[derive(Debug, thiserror::Error)]
enum ChangeFailure {
    /// It takes too long.
    #[error("no answer within {} s", PATIENCE.as_secs())]
    Late,
    /// The store says so.
    #[error(transparent)]
    Store(StoreError),
}

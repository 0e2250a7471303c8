//! Records that this daemon did not write, or an earlier run of it did.
//!
//! A worker that registers itself: its record is adopted with proof that it is its own. The proof
//! is that the endpoint's listening socket belongs to the worker's process tree, and that the
//! record is younger than the process. Without it, anybody who may write a record could have
//! another's worker withdrawn.
//!
//! A record that an earlier daemon left: either its life goes on, then it is taken over as it
//! stands; or it ended while nobody watched, then it is withdrawn now.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use jiff::{SignedDuration, Timestamp};
use lastgasp_protocol::kv::{Bucket, Change, Content, Entry, Expect, Fault, backoff, jittered};
use lastgasp_protocol::{Action, Cause, CauseKind, Mode, Name, RecordedProcess, WorkerRecord, WorkerState, Writer};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior};

use crate::core::{Effect, Evidence, Exit, Kind, Listing, Process, ProcessId, State, WorkerId};
use crate::effects::deaths::MomentKind;
use crate::effects::discovery::{LOOK, Present, RECORD_TTL};
use crate::effects::nats::ConnectionState;
use crate::effects::troubles::Troubles;
use crate::losses::Loss;
use crate::sensors::proc::{self, listeners};

use super::{Message, Supervisor};

/// What an earlier daemon left, and where.
pub(super) struct Inherited {
    left: Left,
    bucket: Bucket,
    /// It was looked at before: registrars know the bucket.
    again: bool,
}

/// The node's keys at the start of this daemon.
#[derive(Default)]
struct Left {
    /// Records that stand, with their revisions.
    records: Vec<(WorkerRecord, u64)>,
    /// Records that were withdrawn.
    ended: Vec<WorkerRecord>,
}

impl Supervisor {
    /// A worker's own record was read. It may come before the process was found, or after.
    pub(super) fn claimed(&mut self, record: WorkerRecord) {
        let Some(worker) = self.workers.named(&record.worker) else { return };
        if self.workers[worker].config.writer != Writer::Worker {
            return;
        }
        let known = self.workers[worker].claimed.replace(record.clone());
        if self.is_over(worker) && known.is_some_and(|known| known.incarnation == record.incarnation) {
            self.end_again(worker, record);
        } else {
            self.prove_claim(worker, true);
        }
    }

    /// A life that is over was listed again by itself: by a server whose engine core is dead, or by a
    /// write that was under way when it died.
    fn end_again(&mut self, worker: WorkerId, record: WorkerRecord) {
        let WorkerRecord { worker: name, incarnation, epoch, .. } = record;
        tracing::warn!(worker = %name, %incarnation, epoch, "worker listed a life that is over: the daemon withdraws the record again");
        let listing = Listing { worker, incarnation, epoch };
        self.carry_out(vec![Effect::Withdraw(listing)], proc::monotonic_now());
    }

    /// Claims whose proof has failed so far: a tree may not have been looked at yet, or the engine
    /// begins to listen only after it has registered.
    pub(super) fn prove_claims(&self) {
        for (worker, slot) in self.workers.iter() {
            if slot.claimed.is_some() && self.core.state(worker) == Some(State::Starting) {
                self.prove_claim(worker, false);
            }
        }
    }

    /// A server writes its answer wherever a request asks for it, also under keys that whoever asked
    /// may not write: what it writes there is no record, and is written over.
    pub(super) fn defaced(&self, worker: &Name) {
        if let Some(worker) = self.workers.named(worker) {
            self.workers[worker].registrar.write_again();
        }
    }

    /// What an earlier daemon left, once it is known which processes there are. Only then may
    /// anything be written over it. A record whose process lives and was not found stands as it is,
    /// and is looked at again after the next scan.
    pub(super) fn inherit(&mut self, inherited: Inherited) {
        if self.ready.is_some() {
            self.inherited = Some(inherited);
            return;
        }
        let Inherited { left: Left { records, ended }, bucket, again } = inherited;
        for record in ended {
            // It was withdrawn, and its root lives on: what was missing then is not to be listed now.
            let Some(worker) = self.workers.named(&record.worker) else { continue };
            let same = self.workers[worker].incarnation == record.incarnation.as_str();
            if let Some(root) = self.processes.root(worker).filter(|_| same && !self.is_over(worker)) {
                self.miss(worker, root, &record.processes);
            }
        }
        let (hidden, records): (Vec<_>, Vec<_>) =
            records.into_iter().partition(|(record, _)| self.is_hidden(record, !again));
        for (record, revision) in records {
            match self.workers.named(&record.worker) {
                Some(worker) => self.inherit_record(worker, record, revision),
                // It is not configured any more, and nobody else would ever renew or end it.
                None => self.delete_unconfigured(&bucket, &record, revision),
            }
        }
        if !hidden.is_empty() {
            let left = Left { records: hidden, ended: Vec::new() };
            self.inherited = Some(Inherited { left, bucket: bucket.clone(), again: true });
        }
        if !again {
            self.registrars.send_replace(Some(bucket));
        }
    }

    /// The process of this record lives, and there was no way to find out more: without descriptors no file of
    /// `/proc` can be read, and kubelet may have yet to vouch for what the process declares. `first`: it is worth a
    /// line in the log.
    fn is_hidden(&self, record: &WorkerRecord, first: bool) -> bool {
        let Some((tgid, start_ticks)) = record.incarnation.process(&self.boot_id) else { return false };
        let process = ProcessId { tgid, start_ticks };
        let unseen = match self.workers.named(&record.worker) {
            Some(worker) => self.processes.root(worker).is_none() && !self.is_over(worker),
            // It may have declared itself. Who may not be asked for want of privileges is another matter.
            None => !proc::can_be_opened(tgid) || self.declarations.is_open(process),
        };
        let hidden = unseen && proc::is_alive(process);
        if hidden && first {
            let WorkerRecord { worker, incarnation, .. } = record;
            tracing::warn!(%worker, %incarnation, "the record's process lives, and the daemon cannot tell yet whose it is: the record stays");
        }
        hidden
    }

    fn inherit_record(&mut self, worker: WorkerId, record: WorkerRecord, revision: u64) {
        let WorkerRecord { incarnation, epoch, state, deadline, commanded, processes, .. } = record;
        let over = self.is_over(worker);
        let slot = &mut self.workers[worker];
        let root = self.processes.root(worker).filter(|_| !over && slot.incarnation == incarnation.as_str());
        if let Some(root) = root {
            tracing::info!(worker = %record.worker, %incarnation, epoch, "record of an earlier daemon taken over: the worker's process lives");
            (slot.revision, slot.epoch, slot.listed) = (revision, epoch, true);
            let now = proc::monotonic_now();
            let effects = self.core.adopted(worker, root, incarnation.clone(), epoch);
            let adopted = !effects.is_empty();
            self.carry_out(effects, now);
            if adopted && state == WorkerState::Draining {
                self.go_on_draining(worker, deadline, commanded);
            } else if adopted {
                // Written once more, so that its TTL is renewed from now on and it says what holds now.
                let listing = Listing { worker, incarnation, epoch };
                let list = Effect::List { listing, state: WorkerState::Serving, drain_for: None };
                self.carry_out(vec![list], now);
            }
            // It has served: a hang is a hang, not a long start.
            self.start_health(worker, root, true);
            self.miss(worker, root, &processes);
            return;
        }
        if slot.signalled.as_ref() == Some(&(incarnation.clone(), epoch)) {
            // It ended under our eyes, before it was known that it had been listed.
            return;
        }
        tracing::warn!(worker = %record.worker, %incarnation, epoch, "worker ended while no daemon watched: the daemon withdraws its record");
        slot.revision = revision;
        let now = proc::monotonic_now();
        let cause = Cause::of(CauseKind::ProcessGone);
        let listing = Listing { worker, incarnation, epoch };
        let gone = "found gone at start".to_owned();
        self.deaths.moment(worker, MomentKind::Evidence, "process_gone", gone, now);
        let mut effects = Vec::new();
        // A successor that serves has replaced the record already, or is about to.
        if matches!(self.core.state(worker), None | Some(State::Starting | State::Lost | State::Left)) {
            effects.push(Effect::Withdraw(listing.clone()));
        }
        effects.push(Effect::Signal { listing, action: Action::Move, mode: Some(Mode::Lost), cause: cause.clone() });
        self.carry_out(effects, now);
        self.send_outgoing();
        self.tell_people();
        self.deaths.over(worker, &cause, now);
    }

    /// The root lives on; critical processes below it may have ended while nobody watched.
    fn miss(&mut self, worker: WorkerId, root: ProcessId, processes: &[RecordedProcess]) {
        let now = proc::monotonic_now();
        let mut missed = Vec::new();
        for RecordedProcess { pid, start_ticks, title } in processes {
            let id = ProcessId { tgid: *pid, start_ticks: *start_ticks };
            if !proc::is_alive(id) {
                tracing::warn!(worker = %self.name(worker), tgid = pid, title, "critical process ended while no daemon watched");
                let process = Process { tgid: *pid, title: title.as_str().into(), root: false };
                let kind = Kind::ProcessGone { process, exit: Exit::Unknown };
                self.evidence(Evidence { worker, root, kind, at: now });
                missed.push(title.as_str());
            }
        }
        // The root may have started another in its place.
        let tree = self.processes.tree(worker).into_iter();
        let there: Vec<_> = tree
            .filter(|tracked| tracked.critical && tracked.id != root && missed.contains(&tracked.title.as_ref()))
            .filter_map(|tracked| self.processes.critical_seen(tracked.id, now))
            .collect();
        for evidence in there {
            self.evidence(evidence);
        }
    }

    fn delete_unconfigured(&self, bucket: &Bucket, record: &WorkerRecord, revision: u64) {
        if self.config.mode == crate::config::Mode::Observe {
            tracing::info!(worker = %record.worker, "record of a worker that is not configured any more is left alone: mode is \"observe\"");
            return;
        }
        tracing::warn!(worker = %record.worker, "record of a worker that is not configured any more is deleted");
        let key = lastgasp_protocol::worker_key(&record.node, &record.worker);
        let ended = record.to_json().into();
        let bucket = bucket.clone();
        tokio::spawn(async move {
            // If it has changed meanwhile, somebody does care for it.
            let _ = bucket.delete(&key, ended, Expect::Revision(revision), RECORD_TTL).await;
        });
    }

    /// Looks for the proof, on a blocking thread. `first`: a failure is worth a line in the log.
    pub(super) fn prove_claim(&self, worker: WorkerId, first: bool) {
        let slot = &self.workers[worker];
        let (Some(root), Some(record)) = (self.processes.root(worker), slot.claimed.clone()) else { return };
        let port = self.workers[worker].config.port;
        let tree: Vec<u32> = self.processes.tree(worker).into_iter().map(|tracked| tracked.id.tgid).collect();
        let messages = self.messages.clone();
        tokio::task::spawn_blocking(move || {
            let younger = record.registered_at.is_some_and(|registered| is_younger(registered, root));
            if younger && listeners::owns_listener(&tree, port).unwrap_or(false) {
                let _ = messages.send(Message::Proven(worker, root, record));
            } else if first {
                tracing::warn!(worker = %record.worker, port, younger, "record not adopted yet: the worker's processes do not hold its port, or the record is older than they are");
            }
        });
    }

    pub(super) fn proven(&mut self, worker: WorkerId, root: ProcessId, record: WorkerRecord) {
        if self.processes.root(worker) != Some(root) {
            return;
        }
        if self.is_over(worker) {
            return self.end_again(worker, record);
        }
        tracing::info!(worker = %record.worker, incarnation = %record.incarnation, "record adopted");
        let effects = self.core.adopted(worker, root, record.incarnation.clone(), record.epoch);
        let adopted = !effects.is_empty();
        self.carry_out(effects, proc::monotonic_now());
        if adopted && record.commanded.is_some() {
            self.go_on_draining(worker, record.deadline, record.commanded);
        }
    }
}

/// Whether something that the server stored at `stored` is younger than the process. The two
/// clocks may differ by a little.
fn is_younger(stored: Timestamp, root: ProcessId) -> bool {
    const CLOCKS_DIFFER: Duration = Duration::from_secs(2);
    let age = proc::age(root).unwrap_or_default() + CLOCKS_DIFFER;
    let started = SignedDuration::try_from(age).ok().and_then(|age| Timestamp::now().checked_sub(age).ok());
    started.is_some_and(|started| stored >= started)
}

/// Follows this node's keys.
pub(super) struct OwnRecords {
    pub(super) node: Name,
    pub(super) bucket: watch::Receiver<Option<Bucket>>,
    pub(super) connection: watch::Receiver<ConnectionState>,
    pub(super) troubles: Troubles,
    /// Where registrars learn what is there.
    pub(super) present: watch::Sender<Arc<Present>>,
    pub(super) messages: mpsc::UnboundedSender<Message>,
}

impl OwnRecords {
    /// Tells once of what an earlier daemon has left, always of records that workers have written,
    /// and after every look of what is there.
    pub(super) async fn follow(mut self) {
        const COST: &str = "workers that register themselves are not seen, and a wiped bucket is not noticed";
        let mut inherited = Some(Left::default());
        let mut attempts = 0;
        loop {
            let Ok(open) = self.bucket.wait_for(Option::is_some).await.map(|bucket| bucket.clone()) else { return };
            let Some(open) = open else { return };
            if self.connection.wait_for(|connection| *connection == ConnectionState::Connected).await.is_err()
                || self.messages.is_closed()
            {
                return;
            }
            if let Err(error) = self.once(&open, &mut inherited, &mut attempts).await {
                self.troubles.bad("own records", Fault::of(&*error), error.to_string(), COST);
                // A bucket that was deleted does not say so to those who watch it.
                if let Err(error) = open.again().await {
                    tracing::debug!(%error, "no bucket, and the daemon cannot make one");
                }
            }
            tokio::time::sleep(backoff(attempts)).await;
            attempts += 1;
        }
    }

    /// One listing and what follows it, until the connection is lost.
    async fn once(
        &mut self,
        bucket: &Bucket,
        inherited: &mut Option<Left>,
        attempts: &mut u32,
    ) -> Result<(), async_nats::Error> {
        let filter = format!("{}.*", self.node.token());
        let asked = Instant::now();
        let mut changes = bucket.watch(&filter).await?;
        let mut listing = Some(HashSet::new());
        let pause = jittered(LOOK);
        let mut look = tokio::time::interval_at(Instant::now() + pause, pause);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut connection = self.connection.clone();
        loop {
            tokio::select! {
                change = changes.next() => match change {
                    None => return Err("the watch ended".into()),
                    Some(Err(error)) => return Err(error.into()),
                    Some(Ok(Change::Entry(entry))) => {
                        if let Some(keys) = &mut listing {
                            keys.insert(entry.key.clone());
                        }
                        self.entry(&entry, inherited);
                    }
                    Some(Ok(Change::Listed)) => {
                        *attempts = 0;
                        self.troubles.good("own records");
                        if let Some(keys) = listing.take() {
                            self.present.send_replace(Arc::new(Present { asked, keys }));
                        }
                        if let Some(left) = inherited.take() {
                            let inherited = Box::new(Inherited { left, bucket: bucket.clone(), again: false });
                            let _ = self.messages.send(Message::Inherited(inherited));
                        }
                    }
                },
                _ = look.tick() => {
                    let asked = Instant::now();
                    let keys = bucket.keys(&filter).await?.into_iter().collect();
                    self.present.send_replace(Arc::new(Present { asked, keys }));
                }
                lost = connection.changed() => return lost.map_err(Into::into),
            }
        }
    }

    fn entry(&self, entry: &Entry, inherited: &mut Option<Left>) {
        let Content::Put(value) = &entry.value else {
            // A tombstone of ours holds the record that it ended.
            if let (Some(left), Ok(record)) = (inherited, WorkerRecord::parse(&entry.key, &entry.payload)) {
                left.ended.push(record);
            }
            return;
        };
        match WorkerRecord::parse(&entry.key, value) {
            Ok(mut record) if record.writer == Writer::Worker => {
                // The server's clock, not the writer's word.
                record.registered_at = Some(entry.stored_at);
                let _ = self.messages.send(Message::Claimed(record));
            }
            Ok(record) => {
                if let Some(left) = inherited {
                    left.records.push((record, entry.revision));
                }
            }
            Err(error) => {
                tracing::warn!(key = entry.key, %error, "record of this node not read");
                let _ = self.messages.send(Message::Lost(Loss::Record));
                if let Some(Ok(worker)) = entry.key.rsplit('.').next().map(Name::from_token) {
                    let _ = self.messages.send(Message::Defaced(worker));
                }
            }
        }
    }
}

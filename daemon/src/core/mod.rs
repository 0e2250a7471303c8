//! The decision core: evidence in, effects out.
//!
//! Synchronous, without sockets and without a clock: time comes in with the input. All policy is
//! here, the part that depends on the kind of evidence in one table, [`ladder`].

mod brake;
mod command;
mod effect;
mod evidence;
mod flapping;
mod ladder;
mod worker;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use lastgasp_protocol::{Cause, Incarnation};

pub(crate) use brake::Held;
use brake::{Brake, NodeBrake};
pub(crate) use command::{Command, RefusedCommand};
pub(crate) use effect::{Effect, Listing, Timer};
pub use effect::{HeldBack, State};
pub(crate) use evidence::{Addressee, Direction, Exit, Nanos, Process};
pub use evidence::{Evidence, GpuPolicy, HealthRole, Kind, ProcessId, WorkerId};
use worker::{Life, Worker};
pub(crate) use worker::{OnNotServing, WorkerPolicy};

/// What is configured for the node as a whole.
#[derive(Debug, Clone)]
pub struct Policy {
    /// How long a lost worker that lives stays unlisted. Doubles with every loss in a row, up to 32
    /// times as long. After the second loss in a row the worker's next process is held down too.
    pub hold_down: Duration,
    /// How long after a fatal signal an exit is expected.
    pub recheck_after: Duration,
    /// Withdrawals per minute on anything but process evidence.
    pub soft_withdrawals_per_minute: u32,
}

/// All workers of the node.
#[derive(Debug)]
pub(crate) struct Core {
    policy: Policy,
    workers: BTreeMap<WorkerId, Worker>,
    soft: VecDeque<Nanos>,
}

impl Core {
    /// A core without workers.
    #[must_use]
    pub(crate) const fn new(policy: Policy) -> Self {
        Self { policy, workers: BTreeMap::new(), soft: VecDeque::new() }
    }

    /// A worker became known. One that is known already keeps its life and has this policy from now on.
    pub(crate) fn add_worker(&mut self, worker: WorkerId, policy: WorkerPolicy) {
        match self.workers.get_mut(&worker) {
            Some(known) => known.policy = policy,
            None => drop(self.workers.insert(worker, Worker::new(worker, policy))),
        }
    }

    /// A worker will not be heard of again. What comes in about it later changes nothing.
    pub(crate) fn forget_worker(&mut self, worker: WorkerId) {
        self.workers.remove(&worker);
    }

    /// A root process was found for a worker.
    pub(crate) fn found(
        &mut self,
        worker: WorkerId,
        root: ProcessId,
        incarnation: Incarnation,
        now: Nanos,
    ) -> Vec<Effect> {
        let mut out = Vec::new();
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.found(root, incarnation, now, self.policy.hold_down, &mut out);
        }
        out
    }

    /// The record of a worker that registers itself was found, with proof that it is its own.
    pub(crate) fn adopted(
        &mut self,
        worker: WorkerId,
        root: ProcessId,
        incarnation: Incarnation,
        epoch: u64,
    ) -> Vec<Effect> {
        let mut out = Vec::new();
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.adopted(root, incarnation, epoch, &mut out);
        }
        out
    }

    /// The record stands under this epoch, because an earlier daemon had listed the same life.
    pub(crate) fn resumed(&mut self, worker: WorkerId, incarnation: &Incarnation, epoch: u64) {
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.resumed(incarnation, epoch);
        }
    }

    /// Evidence came in at `now`. It may be older, and it may be about a life that is over.
    pub(crate) fn evidence(&mut self, evidence: &Evidence, now: Nanos) -> Vec<Effect> {
        self.with_worker(evidence.worker, |worker, policy, brake, out| {
            worker.evidence(evidence, now, policy.hold_down, policy.recheck_after, brake, out);
        })
    }

    /// A timer that [`Effect::Arm`] asked for is due.
    pub(crate) fn fire(&mut self, worker: WorkerId, timer: Timer, now: Nanos) -> Vec<Effect> {
        self.with_worker(worker, |worker, policy, brake, out| {
            worker.fire(timer, now, policy.hold_down, brake, out);
        })
    }

    /// Somebody asks for something. Whoever asks is believed: health and the limits on soft
    /// withdrawals have no say in it.
    ///
    /// # Errors
    /// What is asked for makes no sense where the worker stands; nothing is changed.
    pub(crate) fn command(
        &mut self,
        worker: WorkerId,
        command: Command,
        cause: Cause,
        now: Nanos,
    ) -> Result<Vec<Effect>, RefusedCommand> {
        let worker = self.workers.get_mut(&worker).ok_or(RefusedCommand::NoProcess)?;
        let mut out = Vec::new();
        worker.command(command, cause, now, &mut out)?;
        Ok(out)
    }

    /// This life had been taken out of service before the daemon was started.
    pub(crate) fn still_out_of_service(
        &mut self,
        worker: WorkerId,
        incarnation: &Incarnation,
        cause: Cause,
    ) -> Vec<Effect> {
        let mut out = Vec::new();
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.still_out_of_service(incarnation, cause, &mut out);
        }
        out
    }

    /// Whether somebody has taken this worker's present life out of service.
    #[must_use]
    pub(crate) fn is_out_of_service(&self, worker: WorkerId) -> bool {
        self.workers.get(&worker).and_then(|worker| worker.life.as_ref()).is_some_and(Life::is_out_of_service)
    }

    /// Where a worker stands; `None` while no process was found.
    #[must_use]
    pub(crate) fn state(&self, worker: WorkerId) -> Option<State> {
        self.workers.get(&worker)?.life.as_ref().map(|life| life.state)
    }

    /// What the record of a worker that serves is about.
    #[must_use]
    pub(crate) fn serving(&self, worker: WorkerId) -> Option<Listing> {
        self.workers.get(&worker)?.serving()
    }

    /// Whether this is the present life of a worker, and with an epoch also the listing that is wanted of it.
    #[must_use]
    pub(crate) fn is_present(&self, worker: WorkerId, incarnation: &Incarnation, epoch: Option<u64>) -> bool {
        let life = self.workers.get(&worker).and_then(|worker| worker.life.as_ref());
        life.is_some_and(|life| life.is(incarnation) && epoch.is_none_or(|epoch| life.is_listed_under(epoch)))
    }

    /// The verdict about a worker that is held back, if one is.
    #[must_use]
    pub(crate) fn held_back(&self, worker: WorkerId) -> Option<&Held> {
        self.workers.get(&worker)?.life.as_ref()?.held.as_ref()
    }

    fn with_worker(
        &mut self,
        id: WorkerId,
        act: impl FnOnce(&mut Worker, &Policy, &mut dyn Brake, &mut Vec<Effect>),
    ) -> Vec<Effect> {
        let mut out = Vec::new();
        let about_us = self.about_us();
        let Some(worker) = self.workers.get_mut(&id) else { return out };
        let mut brake = NodeBrake { soft: &mut self.soft, limit: self.policy.soft_withdrawals_per_minute, about_us };
        act(worker, &self.policy, &mut brake, &mut out);
        out
    }

    /// Several probes fail, and they are the majority: a network or a clock of ours has failed.
    fn about_us(&self) -> bool {
        let lives = self.workers.values().filter_map(|worker| worker.life.as_ref()).filter(|life| life.is_probed());
        let (all, failing) =
            lives.fold((0, 0), |(all, failing), life| (all + 1, failing + usize::from(life.unanswered > 0)));
        failing >= 2 && failing * 2 > all
    }
}

#[cfg(test)]
mod tests;

//! From the core's effects to records, signals, certificates and timers.

use lastgasp_protocol::ClosedName as _;
use lastgasp_protocol::{
    Action, Cause, CauseKind, Container, Incarnation, MigrateSignal, Mode, RecordedProcess, SCHEMA, WorkerRecord,
    WorkerRef, WorkerState, Writer,
};

use crate::config::Mode as RunMode;
use crate::core::{Effect, Listing, Nanos, State, Timer, WorkerId};
use crate::effects::deaths::{Deaths, MomentKind};
use crate::effects::discovery::{Desired, WriteOutcome};
use crate::effects::signals::Answered;
use crate::fault;
use crate::losses::Loss;
use crate::metrics::{UNKNOWN_CAUSE, Warning, Withdrawal};
use crate::sensors::proc;

use super::Supervisor;
use super::notifications::Aftermath;

/// How a listing ends.
pub(super) struct Ending {
    cause: Cause,
    mode: Mode,
    /// When the evidence behind it was seen.
    evidence_at: Nanos,
}

/// A signal that this turn of the loop owes. Those with the same cause become one message.
pub(super) struct Outgoing {
    listing: Listing,
    action: Action,
    mode: Option<Mode>,
    cause: Cause,
    /// When the evidence behind it was seen.
    evidence_at: Nanos,
}

impl Supervisor {
    /// Does what the core wants. `evidence_at` is when the evidence behind it was seen.
    ///
    /// Records and signals go first, and everything that only people read waits until they
    /// have left: see [`Supervisor::tell_people`].
    pub(super) fn carry_out(&mut self, effects: Vec<Effect>, evidence_at: Nanos) {
        let changes = self.config.mode == RunMode::Enforce;
        for effect in effects {
            match effect {
                // The key holds another life's record by now: nothing of this one is written over it.
                Effect::List { listing, .. } if self.is_anothers(&listing) => {}
                Effect::List { listing, state, drain_for } if changes => {
                    let record = Box::new(self.record(&listing, state));
                    let slot = &self.workers[listing.worker];
                    let taken_back = slot.taken_back;
                    slot.registrar.want(Desired::Listed { record, drain_for, taken_back });
                }
                Effect::Withdraw(listing) if changes => {
                    let Listing { worker, incarnation, epoch: _ } = listing;
                    self.workers[worker].withdrawing = true;
                    let commanded = self.commanded(worker);
                    self.workers[worker].registrar.want(Desired::Absent { incarnation, commanded });
                    fault::point("withdrawal decided");
                }
                Effect::List { .. } | Effect::Withdraw(_) => {}
                Effect::Signal { listing, action, mode, cause } => {
                    if action == Action::Move {
                        self.workers[listing.worker].signalled = Some((listing.incarnation.clone(), listing.epoch));
                        let mode = mode.unwrap_or(Mode::Lost);
                        self.workers[listing.worker].ending = Some(Ending { cause: cause.clone(), mode, evidence_at });
                    }
                    self.outgoing.push(Outgoing { listing, action, mode, cause, evidence_at });
                }
                Effect::Probe(worker) => {
                    if let Some(health) = &self.workers[worker].health {
                        health.probe();
                    }
                }
                Effect::Recheck { worker, root, process } => self.recheck(worker, root, process),
                Effect::Arm { worker, timer, at } => drop(self.timers.insert((worker, timer), at)),
                note @ (Effect::Changed { .. }
                | Effect::Refined { .. }
                | Effect::Held { .. }
                | Effect::HeldDown { .. }) => {
                    if let Effect::Changed { worker, to: State::Lost | State::Left, cause, .. } = &note {
                        // Now: its successor may be there by the time that people read of it.
                        self.leaves_dynamo(*worker, cause.as_ref());
                    }
                    self.due_notes.push((note, proc::monotonic_now()));
                }
            }
        }
    }

    /// A worker registers itself, and its record is not, or no longer, this listing's.
    fn is_anothers(&self, listing: &Listing) -> bool {
        let slot = &self.workers[listing.worker];
        slot.config.writer == Writer::Worker
            && slot.claimed.as_ref().is_none_or(|claimed| claimed.incarnation != listing.incarnation)
    }

    /// Logs, events, metrics and certificates: what the records and signals of this turn of the
    /// loop need not wait for.
    pub(super) fn tell_people(&mut self) {
        self.leave_dynamo();
        for (effect, at) in std::mem::take(&mut self.due_notes) {
            match effect {
                Effect::Changed { worker, from, to, cause } => self.changed(worker, from, to, cause.as_ref(), at),
                Effect::Refined { worker, cause } => self.deaths.over(worker, &cause, at),
                Effect::HeldDown { worker, losses, until } => {
                    let (name, seconds) = (self.name(worker), until.since(at).as_secs());
                    tracing::warn!(worker = %name, losses, seconds, "worker held down: the daemon lists it later");
                    self.notifications.recovers(name);
                    self.note(name, format!("held down for {seconds} s: lost {losses} times in a row"));
                    self.metrics.warnings.with_label_values(&[Warning::HeldDown.as_str()]).inc();
                }
                Effect::Held { worker, reason, cause } => {
                    let name = self.name(worker);
                    tracing::error!(worker = %name, reason = reason.as_str(), %cause, "withdrawal held back");
                    self.note(name, format!("withdrawal held back ({}): {cause}", reason.as_str()));
                    self.metrics.warnings.with_label_values(&[reason.as_str()]).inc();
                }
                _ => {}
            }
        }
    }

    pub(super) fn recheck_later(&mut self, worker: WorkerId, now: Nanos) {
        self.timers.insert((worker, Timer::Recheck), now.plus(self.config.policy.near_certain_recheck));
    }

    fn changed(&mut self, worker: WorkerId, from: State, to: State, cause: Option<&Cause>, now: Nanos) {
        let name = self.name(worker).clone();
        let why = cause.map(ToString::to_string).unwrap_or_default();
        tracing::info!(worker = %name, from = from.as_str(), to = to.as_str(), cause = %why, "state");
        let because = if why.is_empty() { String::new() } else { format!(": {why}") };
        self.tell_state(&name, format!("{from} -> {to}{because}"));
        self.metrics.set_worker_state(name.as_str(), to);
        let slot = &mut self.workers[worker];
        slot.since = jiff::Timestamp::now();
        slot.reason.clone_from(&why);
        match (from, to) {
            (_, State::Lost | State::Left) => _ = slot.over_since.get_or_insert(now),
            // A new life does not end the former one's orphans.
            (State::Lost | State::Left, State::Starting) => {}
            _ => slot.over_since = None,
        }
        self.deaths.moment(worker, MomentKind::Decision, to.as_str(), why, now);
        match (to, cause) {
            (State::Left | State::Lost, Some(cause)) => {
                self.metrics.deaths.with_label_values(&[cause.kind.as_str()]).inc();
                if from == State::Starting {
                    // Nothing was listed and no router is signalled, but its death has a certificate.
                    if let Some(root) = self.processes.root(worker) {
                        let incarnation =
                            lastgasp_protocol::Incarnation::of_process(&self.boot_id, root.tgid, root.start_ticks);
                        self.deaths.open(
                            worker,
                            &name,
                            &incarnation,
                            0,
                            &Deaths::new_id(),
                            cause,
                            false,
                            self.workers[worker].container.clone(),
                        );
                    }
                }
                self.deaths.over(worker, cause, now);
                self.deaths.remaining(worker, self.remaining(worker));
            }
            (State::Serving | State::Unready | State::Starting, _) => self.deaths.recovered(worker),
            _ => {}
        }
        self.spare_no_more(worker);
        // Who withdraws a worker by hand may want to look at its processes.
        let by_hand = cause.is_some_and(|cause| cause.kind == CauseKind::Commanded);
        match to {
            State::Lost if by_hand => {}
            State::Lost => {
                let aftermath = Aftermath { severs: from != State::Starting };
                if !self.is_spared(worker, cause, aftermath) {
                    self.follow(worker, aftermath, now);
                }
            }
            _ => self.plan_actions(worker, to, now),
        }
    }

    /// What follows a loss, beside records and signals.
    pub(super) fn follow(&mut self, worker: WorkerId, aftermath: Aftermath, now: Nanos) {
        if aftermath.severs {
            self.sever(worker);
        }
        self.plan_actions(worker, State::Lost, now);
    }

    /// Sends what this turn of the loop owes: one message per cause, naming every worker it took.
    pub(super) fn send_outgoing(&mut self) {
        if self.outgoing.is_empty() {
            return;
        }
        let mut outgoing = std::mem::take(&mut self.outgoing);
        while let Some(first) = outgoing.pop() {
            let same = |other: &Outgoing| {
                (other.action, other.mode) == (first.action, first.mode) && other.cause == first.cause
            };
            let (mut group, rest): (Vec<_>, Vec<_>) = outgoing.into_iter().partition(same);
            outgoing = rest;
            group.push(first);
            self.send_signal(&group);
        }
    }

    fn send_signal(&mut self, group: &[Outgoing]) {
        let Some(Outgoing { action, mode, cause, .. }) = group.first() else { return };
        let certificate = Deaths::new_id();
        let observed_only = self.config.mode == RunMode::Observe;
        let signal = MigrateSignal {
            schema: SCHEMA,
            node: self.config.node.clone(),
            action: *action,
            mode: *mode,
            certificate: certificate.clone(),
            workers: group.iter().map(|outgoing| self.worker_ref(&outgoing.listing)).collect(),
            cause: cause.clone(),
        };
        let what = action.as_str();
        if observed_only {
            tracing::warn!(action = what, %cause, workers = signal.workers.len(), "would signal (mode = \"observe\")");
        } else {
            self.signals.send(&signal);
            self.metrics.signals.with_label_values(&[what]).inc();
        }
        let now = proc::monotonic_now();
        for Outgoing { listing, cause, evidence_at, .. } in group {
            let name = self.name(listing.worker).clone();
            let Listing { worker, incarnation, epoch } = listing;
            let container = self.container_of(*worker, incarnation);
            self.deaths.open(*worker, &name, incarnation, *epoch, &certificate, cause, observed_only, container);
            if self.is_over(*worker) {
                self.deaths.over(*worker, cause, now);
                self.deaths.remaining(*worker, self.remaining(*worker));
            }
            if observed_only {
                let record = match action {
                    Action::Drain => "list it as draining",
                    Action::Move => "withdraw its record",
                };
                let would = format!("would {record} and signal {what}");
                self.deaths.moment(*worker, MomentKind::Effect, "observed", would, now);
            } else {
                if *action == Action::Move {
                    self.workers[*worker].death = Some(certificate.clone());
                }
                self.metrics.evidence_to_signalled.observe(now.since(*evidence_at).as_secs_f64());
                self.deaths.moment(*worker, MomentKind::Effect, "signalled", what.to_owned(), now);
            }
        }
        if !observed_only && *mode == Some(Mode::Lost) {
            for Outgoing { listing, cause, .. } in group {
                if !self.workers[listing.worker].withdrawing {
                    self.notify_over(listing.worker, &listing.incarnation, cause);
                }
            }
            self.tell_withdrawn();
        }
    }

    /// Where a life runs, or ran.
    fn container_of(&self, worker: WorkerId, incarnation: &Incarnation) -> Option<Container> {
        let slot = &self.workers[worker];
        let claimed = slot.claimed.as_ref().is_some_and(|record| record.incarnation == *incarnation);
        slot.container.clone().filter(|_| claimed || slot.incarnation == incarnation.as_str())
    }

    fn worker_ref(&self, listing: &Listing) -> WorkerRef {
        let Listing { worker, incarnation, epoch } = listing;
        let slot = &self.workers[*worker];
        WorkerRef {
            worker: self.name(*worker).clone(),
            incarnation: incarnation.clone(),
            epoch: *epoch,
            revision: slot.revision,
        }
    }

    fn record(&self, listing: &Listing, state: WorkerState) -> WorkerRecord {
        let config = &self.workers[listing.worker].config;
        if let Some(claimed) = &self.workers[listing.worker].claimed {
            let commanded = self.commanded(listing.worker);
            return WorkerRecord { state, epoch: listing.epoch, commanded, ..claimed.clone() };
        }
        WorkerRecord {
            schema: SCHEMA,
            node: self.config.node.clone(),
            worker: config.name.clone(),
            incarnation: listing.incarnation.clone(),
            epoch: listing.epoch,
            state,
            deadline: None,
            writer: Writer::Daemon,
            lease: lastgasp_protocol::LeaseKind::Node,
            engine: config.engine.clone(),
            models: config.models.clone(),
            endpoint: config.endpoint.clone(),
            registered_at: None,
            labels: config.labels.clone(),
            commanded: self.commanded(listing.worker),
            processes: self.recorded_processes(listing.worker),
        }
    }

    /// The critical processes below the root, for the daemon that takes over from this one.
    fn recorded_processes(&self, worker: WorkerId) -> Vec<RecordedProcess> {
        let tree = self.processes.tree(worker).into_iter();
        tree.filter(|tracked| tracked.critical && !tracked.exit_seen && tracked.id != tracked.root)
            .take(lastgasp_protocol::MAX_PROCESSES)
            .map(|tracked| RecordedProcess {
                pid: tracked.id.tgid,
                start_ticks: tracked.id.start_ticks,
                title: tracked.title.to_string(),
            })
            .collect()
    }

    /// A registrar did something, or could not.
    pub(super) fn outcome(&mut self, worker: WorkerId, outcome: WriteOutcome) {
        if !self.workers.knows(worker) {
            return;
        }
        let now = proc::monotonic_now();
        let name = self.name(worker).clone();
        self.publish_soon();
        let record = format!("record {name}");
        if !matches!(outcome, WriteOutcome::Failed { .. }) {
            self.troubles.good(&record);
        }
        let slot = &mut self.workers[worker];
        match outcome {
            WriteOutcome::Listed { incarnation, epoch, revision, state } => {
                (slot.revision, slot.epoch, slot.listed) = (revision, epoch, true);
                if let Some(sidecar) = &mut self.sidecar {
                    sidecar.withdrawn = false;
                }
                slot.incarnation = incarnation.to_string();
                self.core.resumed(worker, &incarnation, epoch);
                tracing::info!(worker = %name, %incarnation, epoch, revision, state = state.as_str(), "listed");
                self.tell_state(&name, format!("listed as {} at revision {revision}", state.as_str()));
                self.notify_listed(worker, incarnation, epoch, state.into());
            }
            WriteOutcome::Withdrawn { incarnation, revision } => {
                slot.listed = false;
                slot.withdrawing = false;
                if let Some(sidecar) = &mut self.sidecar {
                    sidecar.withdrawn = true;
                }
                slot.revision = revision.unwrap_or(slot.revision);
                let outcome = if revision.is_some() { Withdrawal::Deleted } else { Withdrawal::WasAbsent };
                let ending = slot.ending.take();
                let kind = ending.as_ref().map_or(UNKNOWN_CAUSE, |ending| ending.cause.kind.as_str());
                self.metrics.withdrawals.with_label_values(&[kind, outcome.as_str()]).inc();
                if let Some(Ending { evidence_at, .. }) = &ending {
                    self.metrics.evidence_to_withdrawn.observe(now.since(*evidence_at).as_secs_f64());
                }
                tracing::info!(worker = %name, %incarnation, revision, cause = kind, "withdrawn");
                self.tell_state(&name, format!("withdrawn ({kind})"));
                let detail = revision.map(|revision| format!("revision {revision}")).unwrap_or_default();
                self.deaths.withdrawn(worker, &incarnation, detail, now);
                let mode = ending.as_ref().map_or(Mode::Lost, |ending| ending.mode);
                self.notify_withdrawn(worker, incarnation, mode, ending.map(|ending| ending.cause), now);
            }
            WriteOutcome::OutOfService { incarnation, epoch, commanded } => {
                self.still_out_of_service(worker, &incarnation, epoch, commanded);
            }
            WriteOutcome::WasDraining { incarnation, epoch, deadline, commanded } => {
                self.core.resumed(worker, &incarnation, epoch);
                self.go_on_draining(worker, deadline, commanded);
            }
            WriteOutcome::Failed { refused, fault, error } => {
                let cost = "the worker is not listed, or not withdrawn, until another try succeeds";
                self.troubles.bad(&record, fault, error, cost);
                self.metrics.warnings.with_label_values(&[Warning::RecordRetried.as_str()]).inc();
                if refused {
                    self.metrics.lose(Loss::RefusedRecord, 1);
                }
            }
        }
    }

    pub(super) fn answered(&mut self, answered: &Answered) {
        let Answered { answer, at } = answered;
        self.metrics.router_answers.with_label_values(&[answer.phase.as_str()]).inc();
        self.deaths.answered(answer, *at);
    }
}

//! What is sent to those who do not read NATS, and when: once discovery says it too.

use lastgasp_protocol::ClosedName as _;
use std::time::Duration;

use jiff::Timestamp;
use lastgasp_protocol::{Cause, CauseKind, Certificate, Incarnation, Mode, Name, SCHEMA};

use crate::config::WorkerConfig;
use crate::core::{Nanos, ProcessId, State, WorkerId};
use crate::effects::deaths::MomentKind;
use crate::notify::{BridgeReport, Lost, Notification, NotificationKind, Notifier, System};
use crate::sensors::proc;

use super::Supervisor;

/// The notifier, and what it has yet to send.
pub(super) struct Notifications {
    notifier: Notifier,
    /// Withdrawals that are acknowledged, each with the certificate of its cause: they are sent
    /// once all withdrawals of that cause are. A reader that moves work off one of them must not
    /// move it to the next.
    held: Vec<Held>,
    /// Lives of which a bridge is being notified, once for each; their certificates say what
    /// came of it.
    telling: Vec<(System, WorkerId, Incarnation)>,
    /// Lives that were lost in this turn of the loop.
    out_of_dynamo: Vec<(WorkerId, Lost)>,
    /// Those whose connections and processes are left alone until Dynamo's discovery is changed: what they
    /// hold up would go to the next one that is lost.
    spared: Vec<Spared>,
}

/// A withdrawal of which no notification was sent yet.
struct Held {
    /// The certificate of its cause.
    death: Option<String>,
    lost: Lost,
    /// Whether it still runs.
    mode: Mode,
    /// For all sinks; they have it already of a worker that was handed over and is over now.
    notification: Option<Notification>,
}

/// A life that was lost, and what follows.
struct Spared {
    worker: WorkerId,
    root: ProcessId,
    aftermath: Aftermath,
    /// When it follows at the latest.
    until: Nanos,
}

/// How long Dynamo's discovery may hold up what follows a loss, whatever else it is asked for.
const SPARED_FOR: Duration = Duration::from_secs(1);

/// What follows a loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Aftermath {
    /// Its connections end, where that is configured.
    pub(super) severs: bool,
}

impl Notifications {
    pub(super) const fn new(notifier: Notifier) -> Self {
        Self { notifier, held: Vec::new(), telling: Vec::new(), out_of_dynamo: Vec::new(), spared: Vec::new() }
    }

    /// A worker is known.
    pub(super) fn known(&self, config: &WorkerConfig) {
        self.notifier.known(&config.name, &config.infera_id, config.dynamo_instance);
    }

    /// A worker will not be heard of again.
    pub(super) fn forget(&mut self, worker: WorkerId, name: &Name) {
        self.notifier.forget(name);
        self.telling.retain(|(_, of, _)| *of != worker);
        self.spared.retain(|spared| spared.worker != worker);
    }

    /// A worker would serve, though it is not listed yet.
    pub(super) fn recovers(&self, worker: &Name) {
        self.notifier.recovers(worker);
    }

    /// Of this life a bridge is being notified.
    pub(super) fn is_telling(
        telling: &[(System, WorkerId, Incarnation)],
        worker: WorkerId,
        incarnation: &Incarnation,
    ) -> bool {
        telling.iter().any(|(_, of, life)| *of == worker && life == incarnation)
    }

    /// The lives of which a bridge is being notified.
    pub(super) fn telling(&self) -> &[(System, WorkerId, Incarnation)] {
        &self.telling
    }

    /// The daemon ends.
    pub(super) fn end(&self) {
        let lost = self.notifier.waiting() + self.held.len();
        if lost > 0 {
            tracing::warn!(lost, "notifications not delivered: the daemon ended first");
        }
    }
}

impl Supervisor {
    /// A record stands.
    pub(super) fn notify_listed(
        &mut self,
        worker: WorkerId,
        incarnation: Incarnation,
        epoch: u64,
        event: NotificationKind,
    ) {
        if self.notifications.notifier.is_idle() {
            return;
        }
        // The server may take its time: what was wanted then may not be what is wanted now.
        let listing = (event == NotificationKind::Serving).then_some(epoch);
        let is_present = self.core.is_present(worker, &incarnation, listing);
        let notification = self.notification(worker, event, incarnation, epoch);
        if is_present {
            self.notifications.notifier.tell(notification);
        } else {
            self.notifications.notifier.tell_overtaken(notification);
        }
    }

    /// A record is gone.
    pub(super) fn notify_withdrawn(
        &mut self,
        worker: WorkerId,
        incarnation: Incarnation,
        mode: Mode,
        cause: Option<Cause>,
        now: Nanos,
    ) {
        let death = self.workers[worker].death.take();
        if self.notifications.notifier.is_idle() {
            return;
        }
        let certificate = self.deaths.so_far(worker, now).filter(|certificate| certificate.incarnation == incarnation);
        let epoch = certificate.as_ref().map_or(self.workers[worker].epoch, |certificate| certificate.epoch);
        let lost = Lost { worker: self.name(worker).clone(), incarnation: incarnation.clone(), cause: cause.clone() };
        let notification = self.notification(worker, NotificationKind::Withdrawn, incarnation, epoch);
        let notification = Some(Notification { cause, certificate: certificate.map(Box::new), ..notification });
        self.notifications.held.push(Held { death, lost, mode, notification });
        self.tell_withdrawn();
    }

    /// A worker that was handed over is over now. Its record went before.
    pub(super) fn notify_over(&mut self, worker: WorkerId, incarnation: &Incarnation, cause: &Cause) {
        let death = self.workers[worker].death.take();
        // What an earlier daemon left may end when its successor serves: nobody may answer in that one's place.
        let is_over = matches!(self.core.state(worker), None | Some(State::Starting | State::Lost | State::Left));
        if is_over && self.notifications.notifier.reports() {
            let (name, incarnation) = (self.name(worker).clone(), incarnation.clone());
            let lost = Lost { worker: name, incarnation, cause: Some(cause.clone()) };
            self.notifications.held.push(Held { death, lost, mode: Mode::Lost, notification: None });
        }
    }

    /// Tells of all whose whole cause is withdrawn.
    pub(super) fn tell_withdrawn(&mut self) {
        let workers = &self.workers;
        let going =
            |death: &String| workers.iter().any(|(_, slot)| slot.withdrawing && slot.death.as_ref() == Some(death));
        let (held, due): (Vec<_>, Vec<_>) = std::mem::take(&mut self.notifications.held)
            .into_iter()
            .partition(|held| held.death.as_ref().is_some_and(going));
        self.notifications.held = held;
        self.tell_inferas(&due);
        for notification in due.into_iter().filter_map(|held| held.notification) {
            self.notifications.notifier.tell(notification);
        }
    }

    /// What was withdrawn for one cause, at one time.
    fn tell_inferas(&mut self, due: &[Held]) {
        if !self.notifications.notifier.reports() {
            return;
        }
        let of = |mode| due.iter().filter(move |held| held.mode == mode).map(|held| &held.lost);
        let lost: Vec<Lost> = of(Mode::Lost).cloned().collect();
        // Who was asked to leave ends its streams by itself, and has a window of its own for that.
        let leaves_by_itself = |lost: &&Lost| lost.cause.as_ref().is_some_and(|it| it.kind == CauseKind::Terminated);
        let leaving: Vec<Lost> = of(Mode::Handover).filter(|lost| !leaves_by_itself(lost)).cloned().collect();
        let notified = |all: &[Lost], tell: &dyn Fn(&[Lost]) -> usize| if all.is_empty() { 0 } else { tell(all) };
        let notifier = &self.notifications.notifier;
        let reports = [
            (notified(&leaving, &|all| notifier.hands_over(all)), leaving),
            (notified(&lost, &|all| notifier.lost(all)), lost),
        ];
        for (reports, all) in reports {
            for Lost { worker, incarnation, cause: _ } in all {
                if let Some(worker) = self.workers.named(&worker) {
                    self.notifications
                        .telling
                        .extend(std::iter::repeat_n((System::Infera, worker, incarnation), reports));
                }
            }
        }
    }

    /// The processes of a worker's life are known, or its companion is another one.
    pub(super) fn notify_lives(&self, worker: WorkerId) {
        if self.notifications.notifier.has_dynamo()
            && let Some(root) = self.processes.root(worker)
        {
            let companion = self.workers[worker].companion;
            self.notifications.notifier.lives(self.name(worker), std::iter::once(root).chain(companion).collect());
        }
    }

    /// A life is lost or has left: it leaves Dynamo's discovery with the others of this turn of the loop.
    pub(super) fn leaves_dynamo(&mut self, worker: WorkerId, cause: Option<&Cause>) {
        if !self.notifications.notifier.has_dynamo() {
            return;
        }
        let slot = &self.workers[worker];
        if let Ok(incarnation) = Incarnation::new(slot.incarnation.clone()) {
            let lost = Lost { worker: slot.config.name.clone(), incarnation, cause: cause.cloned() };
            self.notifications.out_of_dynamo.push((worker, lost));
        }
    }

    /// All that were lost in this turn of the loop leave Dynamo's discovery together.
    pub(super) fn leave_dynamo(&mut self) {
        let (workers, lost): (Vec<WorkerId>, Vec<Lost>) =
            std::mem::take(&mut self.notifications.out_of_dynamo).into_iter().unzip();
        if lost.is_empty() {
            return;
        }
        let reports = self.notifications.notifier.out_of_dynamo(&lost);
        for (worker, Lost { incarnation, .. }) in workers.into_iter().zip(lost) {
            self.notifications.telling.extend(std::iter::repeat_n((System::Dynamo, worker, incarnation), reports));
        }
    }

    /// Whether what follows a loss waits until Dynamo's discovery says it too. Where a process has died there
    /// is nothing to wait for, and a companion that outlives it would say so to its router.
    pub(super) fn is_spared(&mut self, worker: WorkerId, cause: Option<&Cause>, aftermath: Aftermath) -> bool {
        let is_leaving = |(system, of, _): &(System, WorkerId, Incarnation)| (*system, *of) == (System::Dynamo, worker);
        if cause.is_some_and(|cause| is_death(cause.kind)) || !self.notifications.telling.iter().any(is_leaving) {
            return false;
        }
        let Some(root) = self.processes.root(worker) else { return false };
        let until = proc::monotonic_now().plus(SPARED_FOR);
        self.notifications.spared.push(Spared { worker, root, aftermath, until });
        true
    }

    /// A worker's state has changed: what waited for Dynamo's discovery has no reason any more.
    pub(super) fn spare_no_more(&mut self, worker: WorkerId) {
        self.notifications.spared.retain(|spared| spared.worker != worker);
    }

    /// When something that is spared is spared no longer.
    pub(super) fn next_spared(&self) -> Option<Nanos> {
        self.notifications.spared.iter().map(|spared| spared.until).min()
    }

    /// What was spared for long enough.
    pub(super) fn follow_overdue(&mut self, now: Nanos) {
        self.follow_up(|spared| spared.until <= now);
    }

    /// What follows a loss.
    fn follow_up(&mut self, is_due: impl Fn(&Spared) -> bool) {
        let (due, rest): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.notifications.spared).into_iter().partition(is_due);
        self.notifications.spared = rest;
        for Spared { worker, root, aftermath, until: _ } in due {
            if self.processes.root(worker) == Some(root) && self.core.state(worker) == Some(State::Lost) {
                self.follow(worker, aftermath, proc::monotonic_now());
            }
        }
    }

    /// A bridge reports what it did.
    pub(super) fn bridge_reported(&mut self, report: BridgeReport) {
        let BridgeReport { system, worker: name, lost, detail } = report;
        let Some(worker) = self.workers.named(&name) else { return };
        let now = proc::monotonic_now();
        self.deaths.moment_of(worker, lost.as_ref(), MomentKind::Effect, system.as_str(), detail.clone(), now);
        self.note(&name, format!("{}: {detail}", system.as_str()));
        if let Some(incarnation) = lost {
            let telling = &mut self.notifications.telling;
            let one = (system, worker, incarnation);
            if let Some(place) = telling.iter().position(|open| *open == one) {
                telling.swap_remove(place);
            }
            if system == System::Dynamo && !self.notifications.telling.contains(&one) {
                self.follow_up(|spared| spared.worker == worker);
            }
        }
    }

    /// A certificate is complete.
    pub(super) fn notify_certificate(&mut self, certificate: &Certificate) {
        if self.notifications.notifier.is_idle() {
            return;
        }
        let Some(worker) = self.workers.named(&certificate.worker) else { return };
        let Certificate { incarnation, epoch, cause, .. } = certificate;
        let notification = self.notification(worker, NotificationKind::Certificate, incarnation.clone(), *epoch);
        let certificate = Some(Box::new(certificate.clone()));
        self.notifications.notifier.tell(Notification { cause: Some(cause.clone()), certificate, ..notification });
    }

    fn notification(
        &self,
        worker: WorkerId,
        event: NotificationKind,
        incarnation: Incarnation,
        epoch: u64,
    ) -> Notification {
        let config = &self.workers[worker].config;
        Notification {
            schema: SCHEMA,
            event,
            at: Timestamp::now(),
            node: self.config.node.clone(),
            worker: config.name.clone(),
            endpoint: config.endpoint.clone(),
            models: config.models.clone(),
            incarnation,
            epoch,
            cause: None,
            certificate: None,
        }
    }
}

/// Whether a critical process has died of it, or is dying.
const fn is_death(kind: CauseKind) -> bool {
    matches!(
        kind,
        CauseKind::ProcessKilled
            | CauseKind::ProcessCrashed
            | CauseKind::ProcessExited
            | CauseKind::OomKilled
            | CauseKind::ProcessGone
    )
}

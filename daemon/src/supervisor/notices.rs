//! What those are told who do not read NATS, and when: once discovery says it too.

use jiff::Timestamp;
use lastgasp_protocol::{Cause, CauseKind, Certificate, Incarnation, Name, SCHEMA};

use crate::config::WorkerConfig;
use crate::core::{Nanos, ProcessId, State, WorkerId};
use crate::effects::deaths::MomentKind;
use crate::notify::{Lost, Notice, NoticeKind, Notifier, System, Told};
use crate::sensors::proc;

use super::Supervisor;

/// The notifier, and what it is not told yet.
pub(super) struct Notices {
    notifier: Notifier,
    /// Withdrawals that are acknowledged, each with the certificate of its cause: they are told of
    /// once all withdrawals of that cause are. A reader that moves work off one of them must not
    /// move it to the next.
    held: Vec<(Option<String>, Notice)>,
    /// Lives of which an Infera or a Dynamo is being told, once for each; their certificates say what
    /// came of it.
    telling: Vec<(System, WorkerId, Incarnation)>,
    /// Lives that were lost in this turn of the loop, with the cause.
    out_of_dynamo: Vec<(WorkerId, Option<Cause>)>,
    /// Those among them whose connections and processes are left alone until Dynamo's discovery is
    /// changed: what they hold up would go to the next one that is lost.
    spared: Vec<(WorkerId, ProcessId, Aftermath)>,
}

/// What follows a loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Aftermath {
    /// Its connections end, where that is configured.
    pub(super) severs: bool,
}

impl Notices {
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
        self.telling.retain(|(_, told, _)| *told != worker);
        self.spared.retain(|(spared, ..)| *spared != worker);
    }

    /// A worker would serve, though it is not listed yet.
    pub(super) fn recovers(&self, worker: &Name) {
        self.notifier.recovers(worker);
    }

    /// Of this life an Infera or a Dynamo is being told.
    pub(super) fn is_telling(
        telling: &[(System, WorkerId, Incarnation)],
        worker: WorkerId,
        incarnation: &Incarnation,
    ) -> bool {
        telling.iter().any(|(_, told, life)| *told == worker && life == incarnation)
    }

    /// The lives of which an Infera or a Dynamo is being told.
    pub(super) fn telling(&self) -> &[(System, WorkerId, Incarnation)] {
        &self.telling
    }

    /// The daemon ends.
    pub(super) fn end(&self) {
        let lost = self.notifier.waiting() + self.held.len();
        if lost > 0 {
            tracing::warn!(lost, "notices were not delivered before the end");
        }
    }
}

impl Supervisor {
    /// A record stands.
    pub(super) fn notify_listed(&mut self, worker: WorkerId, incarnation: Incarnation, epoch: u64, event: NoticeKind) {
        if !self.notices.notifier.is_idle() {
            let notice = self.notice(worker, event, incarnation, epoch);
            self.notices.notifier.tell(notice);
        }
    }

    /// A record is gone.
    pub(super) fn notify_withdrawn(
        &mut self,
        worker: WorkerId,
        incarnation: Incarnation,
        cause: Option<Cause>,
        now: Nanos,
    ) {
        let death = self.workers[worker].death.take();
        if self.notices.notifier.is_idle() {
            return;
        }
        let certificate = self.deaths.so_far(worker, now).filter(|certificate| certificate.incarnation == incarnation);
        let epoch = certificate.as_ref().map_or(self.workers[worker].epoch, |certificate| certificate.epoch);
        let notice = self.notice(worker, NoticeKind::Withdrawn, incarnation, epoch);
        self.notices.held.push((death, Notice { cause, certificate: certificate.map(Box::new), ..notice }));
        let workers = &self.workers;
        let going =
            |death: &String| workers.iter().any(|(_, slot)| slot.withdrawing && slot.death.as_ref() == Some(death));
        let (held, due): (Vec<_>, Vec<_>) = std::mem::take(&mut self.notices.held)
            .into_iter()
            .partition(|(death, _)| death.as_ref().is_some_and(going));
        self.notices.held = held;
        self.tell_inferas(&due);
        for (_, notice) in due {
            self.notices.notifier.tell(notice);
        }
    }

    /// What was withdrawn for one cause, at one time.
    fn tell_inferas(&mut self, due: &[(Option<String>, Notice)]) {
        if due.is_empty() || !self.notices.notifier.reports() {
            return;
        }
        let lost: Vec<Lost> = due
            .iter()
            .map(|(_, Notice { worker, incarnation, cause, .. })| Lost {
                worker: worker.clone(),
                incarnation: incarnation.clone(),
                cause: cause.clone(),
            })
            .collect();
        let reports = self.notices.notifier.lost(&lost);
        for Lost { worker, incarnation, cause: _ } in lost {
            if let Some(worker) = self.workers.named(&worker) {
                self.notices.telling.extend(std::iter::repeat_n((System::Infera, worker, incarnation), reports));
            }
        }
    }

    /// The processes of a worker's life are known, or its companion is another one.
    pub(super) fn notify_lives(&self, worker: WorkerId) {
        if self.notices.notifier.has_dynamo()
            && let Some(root) = self.processes.root(worker)
        {
            let companion = self.workers[worker].companion;
            self.notices.notifier.lives(self.name(worker), std::iter::once(root).chain(companion).collect());
        }
    }

    /// A worker is lost: it leaves Dynamo's discovery at the end of this turn of the loop. Says whether
    /// what follows waits for that. Where a process has died there is nothing to wait for, and a
    /// companion that outlives it would say so to its router.
    pub(super) fn leaves_dynamo(
        &mut self,
        worker: WorkerId,
        cause: Option<&Cause>,
        aftermath: Option<Aftermath>,
    ) -> bool {
        if !self.notices.notifier.has_dynamo() {
            return false;
        }
        self.notices.out_of_dynamo.push((worker, cause.cloned()));
        let has_died = cause.is_some_and(|cause| is_death(cause.kind));
        let (Some(root), Some(aftermath)) = (self.processes.root(worker).filter(|_| !has_died), aftermath) else {
            return false;
        };
        self.notices.spared.push((worker, root, aftermath));
        true
    }

    /// A worker's state has changed: what waited for Dynamo's discovery has no reason any more.
    pub(super) fn spare_no_more(&mut self, worker: WorkerId) {
        self.notices.spared.retain(|(spared, ..)| *spared != worker);
    }

    /// All that were lost in this turn of the loop leave Dynamo's discovery together.
    pub(super) fn leave_dynamo(&mut self) {
        let leaving = std::mem::take(&mut self.notices.out_of_dynamo);
        if leaving.is_empty() {
            return;
        }
        let incarnation = |worker: WorkerId| Incarnation::new(self.workers[worker].incarnation.clone()).ok();
        let lost: Vec<(WorkerId, Lost)> = leaving
            .into_iter()
            .filter_map(|(worker, cause)| {
                let incarnation = incarnation(worker)?;
                Some((worker, Lost { worker: self.name(worker).clone(), incarnation, cause }))
            })
            .collect();
        let all: Vec<Lost> = lost.iter().map(|(_, lost)| lost.clone()).collect();
        let reports = self.notices.notifier.out_of_dynamo(&all);
        for (worker, Lost { incarnation, .. }) in lost {
            self.notices.telling.extend(std::iter::repeat_n((System::Dynamo, worker, incarnation), reports));
            if reports == 0 {
                self.follow_up(worker);
            }
        }
    }

    /// What follows a loss, once Dynamo's discovery says it too.
    fn follow_up(&mut self, worker: WorkerId) {
        let (due, rest): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.notices.spared).into_iter().partition(|(spared, ..)| *spared == worker);
        self.notices.spared = rest;
        for (worker, root, aftermath) in due {
            if self.processes.root(worker) == Some(root) && self.core.state(worker) == Some(State::Lost) {
                self.follow(worker, aftermath, proc::monotonic_now());
            }
        }
    }

    /// An Infera or a Dynamo was told.
    pub(super) fn told(&mut self, told: Told) {
        let Told { system, worker: name, lost, detail } = told;
        let Some(worker) = self.workers.named(&name) else { return };
        self.deaths.moment(worker, MomentKind::Effect, system.as_str(), detail.clone(), proc::monotonic_now());
        self.tell_notice(&name, format!("{}: {detail}", system.as_str()));
        if let Some(incarnation) = lost {
            let telling = &mut self.notices.telling;
            let one = (system, worker, incarnation);
            if let Some(place) = telling.iter().position(|told| *told == one) {
                telling.swap_remove(place);
            }
            if system == System::Dynamo && !self.notices.telling.contains(&one) {
                self.follow_up(worker);
            }
        }
    }

    /// A certificate is complete.
    pub(super) fn notify_certificate(&mut self, certificate: &Certificate) {
        if self.notices.notifier.is_idle() {
            return;
        }
        let Some(worker) = self.workers.named(&certificate.worker) else { return };
        let Certificate { incarnation, epoch, cause, .. } = certificate;
        let notice = self.notice(worker, NoticeKind::Certificate, incarnation.clone(), *epoch);
        let certificate = Some(Box::new(certificate.clone()));
        self.notices.notifier.tell(Notice { cause: Some(cause.clone()), certificate, ..notice });
    }

    fn notice(&self, worker: WorkerId, event: NoticeKind, incarnation: Incarnation, epoch: u64) -> Notice {
        let config = &self.workers[worker].config;
        Notice {
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

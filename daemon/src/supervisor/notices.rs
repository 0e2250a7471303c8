//! What those are told who do not read NATS, and when: once discovery says it too.

use jiff::Timestamp;
use lastgasp_protocol::{Cause, Certificate, Incarnation, SCHEMA};

use crate::core::{Nanos, WorkerId};
use crate::notify::{Notice, NoticeKind, Notifier};

use super::Supervisor;

/// The notifier, and what it is not told yet.
pub(super) struct Notices {
    notifier: Notifier,
    /// Withdrawals that are acknowledged, each with the certificate of its cause: they are told of
    /// once all withdrawals of that cause are. A reader that moves work off one of them must not
    /// move it to the next.
    held: Vec<(Option<String>, Notice)>,
}

impl Notices {
    pub(super) const fn new(notifier: Notifier) -> Self {
        Self { notifier, held: Vec::new() }
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
        for (_, notice) in due {
            self.notices.notifier.tell(notice);
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

//! What those are told who do not read NATS, and when: once discovery says it too.

use jiff::Timestamp;
use lastgasp_protocol::{Cause, Certificate, Incarnation, SCHEMA};

use crate::core::{Nanos, WorkerId};
use crate::notify::{Notice, NoticeKind, Notifier};

use super::Supervisor;

/// The notifier, and what it is not told yet.
pub(super) struct Notices {
    notifier: Notifier,
    /// Of withdrawals that are acknowledged.
    held: Held<Notice>,
}

/// What is told of withdrawals, each with the certificate of its cause: once all withdrawals of that
/// cause are acknowledged. A reader that moves work off one of them must not move it to the next.
struct Held<T>(Vec<(Option<String>, T)>);

impl<T> Held<T> {
    /// Adds one, and takes out all that may be told now: those of whose cause no withdrawal is `going`.
    fn add(&mut self, death: Option<String>, one: T, going: impl Fn(&str) -> bool) -> Vec<T> {
        self.0.push((death, one));
        let (held, due): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.0).into_iter().partition(|(death, _)| death.as_deref().is_some_and(&going));
        self.0 = held;
        due.into_iter().map(|(_, one)| one).collect()
    }
}

impl Notices {
    pub(super) const fn new(notifier: Notifier) -> Self {
        Self { notifier, held: Held(Vec::new()) }
    }

    /// The daemon ends.
    pub(super) fn end(&self) {
        let lost = self.notifier.waiting() + self.held.0.len();
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
        let notice = Notice { cause, certificate: certificate.map(Box::new), ..notice };
        let workers = &self.workers;
        let going =
            |death: &str| workers.iter().any(|(_, slot)| slot.withdrawing && slot.death.as_deref() == Some(death));
        for notice in self.notices.held.add(death, notice, going) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_one_cause_all_are_withdrawn_before_any_is_told_of() {
        let mut held = Held(Vec::new());
        let death = |id: &str| Some(id.to_owned());
        assert!(held.add(death("a"), "a-0", |going| going == "a").is_empty(), "a-1 is still listed");
        // What is about another death, or about none, waits for neither.
        assert_eq!(held.add(death("b"), "b-0", |going| going == "a"), ["b-0"]);
        assert_eq!(held.add(None, "drained", |going| going == "a"), ["drained"]);
        assert_eq!(held.add(death("a"), "a-1", |_| false), ["a-0", "a-1"]);
        assert!(held.0.is_empty());
    }
}

//! A circuit breaker that cannot wedge: it has no probe to lose, only a time after which one more request may pass.

use std::time::{Duration, Instant};

/// Failures in a row that open it. One is chance, two a restart; more is a pattern.
const FAILURES: u32 = 3;
/// How long it stays shut after the first opening; doubled at each, up to [`LONGEST`].
const SHORTEST: Duration = Duration::from_millis(500);
const LONGEST: Duration = Duration::from_secs(15);

/// The state of one worker's breaker.
#[derive(Debug, Default)]
pub(crate) struct Breaker {
    failures: u32,
    shut_until: Option<Instant>,
}

impl Breaker {
    /// Whether a request may be sent now.
    pub(crate) fn allows(&self, now: Instant) -> bool {
        self.shut_until.is_none_or(|until| now >= until)
    }

    /// A request is being sent. Where the breaker had been shut, the next one waits for its
    /// outcome, or for as long as before.
    pub(crate) fn sent(&mut self, now: Instant) {
        if self.shut_until.is_some() {
            self.shut_until = Some(now + self.pause());
        }
    }

    /// The worker answered.
    pub(crate) fn succeeded(&mut self) {
        *self = Self::default();
    }

    /// The worker did not answer, or with a status of its own fault.
    pub(crate) fn failed(&mut self, now: Instant) {
        self.failures = self.failures.saturating_add(1);
        if self.failures >= FAILURES {
            self.shut_until = Some(now + self.pause());
        }
    }

    fn pause(&self) -> Duration {
        (SHORTEST * 2u32.pow(self.failures.saturating_sub(FAILURES).min(8))).min(LONGEST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_shuts_after_a_pattern_and_lets_one_request_pass_after_a_pause() {
        let (mut breaker, start) = (Breaker::default(), Instant::now());
        breaker.failed(start);
        breaker.failed(start);
        assert!(breaker.allows(start));
        breaker.failed(start);
        assert!(!breaker.allows(start));
        let later = start + SHORTEST;
        assert!(breaker.allows(later));
        breaker.sent(later);
        assert!(!breaker.allows(later));
        // The outcome of that request never comes, and still the next one passes.
        assert!(breaker.allows(later + SHORTEST));
    }

    #[test]
    fn one_success_forgets_everything() {
        let (mut breaker, now) = (Breaker::default(), Instant::now());
        (0..40).for_each(|_| breaker.failed(now));
        assert!(!breaker.allows(now + LONGEST / 2) && breaker.allows(now + LONGEST));
        breaker.succeeded();
        assert!(breaker.allows(now));
    }
}

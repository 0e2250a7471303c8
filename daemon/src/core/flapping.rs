//! How long a worker that keeps failing stays unlisted: longer every time, up to a bound.

use std::time::Duration;

use super::Nanos;

/// The hold-down doubles with every loss in a row, up to this many times.
const MAX_DOUBLINGS: u32 = 5;
/// A worker that was listed for so long before its loss did not flap.
const STEADY: Duration = Duration::from_secs(600);

/// A worker's losses, through all its lives.
#[derive(Debug, Default)]
pub(super) struct Flaps {
    /// Losses in a row, each but the first less than [`STEADY`] after the listing that it ended.
    losses: u32,
    lost_at: Nanos,
    listed_at: Option<Nanos>,
    said: Option<Nanos>,
}

impl Flaps {
    pub(super) fn listed(&mut self, now: Nanos) {
        self.listed_at.get_or_insert(now);
    }

    pub(super) fn lost(&mut self, now: Nanos) {
        // A death while it loads takes no work from anybody.
        if let Some(since) = self.listed_at.take() {
            self.losses = if now.since(since) >= STEADY { 1 } else { self.losses.saturating_add(1) };
        }
        self.lost_at = now;
    }

    pub(super) fn left(&mut self) {
        self.listed_at = None;
    }

    pub(super) const fn losses(&self) -> u32 {
        self.losses
    }

    /// When a life that was lost may be listed again: what made it fail may still be there.
    pub(super) fn same_life_from(&self, hold_down: Duration) -> Nanos {
        self.lost_at.plus(doubled(hold_down, self.losses.saturating_sub(1)))
    }

    /// When the next process of the worker may be listed. It is a new start, so one loss delays
    /// nothing; a crash loop is held down all the same.
    pub(super) fn next_life_from(&self, hold_down: Duration) -> Nanos {
        match self.losses.checked_sub(2) {
            Some(doublings) => self.lost_at.plus(doubled(hold_down, doublings)),
            None => Nanos::default(),
        }
    }

    /// Whether no note of this hold-down has been written yet.
    pub(super) fn is_news(&mut self, until: Nanos) -> bool {
        self.said.replace(until) != Some(until)
    }
}

fn doubled(hold_down: Duration, times: u32) -> Duration {
    hold_down * 2_u32.pow(times.min(MAX_DOUBLINGS))
}

//! What keeps verdicts without process evidence from taking a whole node: a limit per minute, and
//! doubt when most of its workers seem to fail at once.

use std::collections::VecDeque;
use std::time::Duration;

use lastgasp_protocol::Cause;

use super::{HeldBack, Nanos};

/// Withdrawals without process evidence, and whether one more is allowed.
pub(super) trait Brake {
    /// Why a withdrawal on other than process evidence may not happen now, if so. Counts it if it may.
    fn admit_soft(&mut self, now: Nanos) -> Option<HeldBack>;
    /// Probes of most of the node's workers fail at once.
    fn about_us(&self) -> bool;
}

/// A verdict that the brake held back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Held {
    /// Why.
    pub reason: HeldBack,
    /// What the verdict would have been for.
    pub cause: Cause,
}

/// The brake that all workers of a node share.
pub(super) struct NodeBrake<'a> {
    pub(super) soft: &'a mut VecDeque<Nanos>,
    pub(super) limit: u32,
    pub(super) about_us: bool,
}

impl Brake for NodeBrake<'_> {
    fn admit_soft(&mut self, now: Nanos) -> Option<HeldBack> {
        while self.soft.front().is_some_and(|at| now.since(*at) >= Duration::from_secs(60)) {
            self.soft.pop_front();
        }
        if self.soft.len() >= self.limit as usize {
            return Some(HeldBack::BlastRadius);
        }
        self.soft.push_back(now);
        None
    }

    fn about_us(&self) -> bool {
        self.about_us
    }
}

/// The brake of a life that is over anyway.
pub(super) struct Unbraked;

impl Brake for Unbraked {
    fn admit_soft(&mut self, _now: Nanos) -> Option<HeldBack> {
        None
    }
    fn about_us(&self) -> bool {
        false
    }
}

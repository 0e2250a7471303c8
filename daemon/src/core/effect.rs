//! What the core wants done. Effects are carried out concurrently, and retried as state.

use lastgasp_protocol::ClosedName as _;
use std::time::Duration;

use lastgasp_protocol::{Action, Cause, Incarnation, Mode, WorkerState};
use serde::Serialize;

use super::{Nanos, Process, ProcessId, WorkerId};

/// Where a worker's life stands.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    Serialize,
    strum::IntoStaticStr,
    strum::VariantArray,
    strum::VariantNames,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum State {
    /// Its root process is there, it has not begun to serve. Loading takes minutes.
    Starting,
    /// Listed, takes new work.
    Serving,
    /// Listed, takes no new work for now.
    Unready,
    /// Leaving on purpose.
    Draining,
    /// Drained and gone.
    Left,
    /// Dead, hung or unreachable.
    Lost,
}

impl std::fmt::Display for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.as_str())
    }
}

/// One listing of one life: what records, signals and answers agree on.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
pub(crate) struct Listing {
    /// Which worker.
    pub worker: WorkerId,
    /// Which life.
    pub incarnation: Incarnation,
    /// Which listing of that life.
    pub epoch: u64,
}

/// A timer of one worker. Arming it again moves it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Timer {
    /// The drain window ends.
    DrainWindow,
    /// A fatal signal was delivered; is the process gone by now?
    Recheck,
    /// A lost worker that lives may be listed again.
    HoldDown,
    /// A verdict that was held back may be given now.
    Held,
}

/// Why a verdict that the evidence would allow is not given.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, strum::IntoStaticStr, strum::VariantArray, strum::VariantNames,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum HeldBack {
    /// More withdrawals without process evidence in the last minute than the policy allows.
    BlastRadius,
    /// Probes of several workers fail at once while their processes live: it is about us.
    AboutUs,
}

/// One thing to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Effect {
    /// The record must say this.
    List {
        /// Which listing.
        listing: Listing,
        /// What the record says.
        state: WorkerState,
        /// While draining, for how long from now streams are left alone.
        drain_for: Option<Duration>,
    },
    /// This life must not be listed.
    Withdraw(Listing),
    /// Routers must hear of it.
    Signal {
        /// Which listing.
        listing: Listing,
        /// What routers are to do.
        action: Action,
        /// With [`Action::Move`].
        mode: Option<Mode>,
        /// Why.
        cause: Cause,
    },
    /// The state changed.
    Changed {
        /// Which worker.
        worker: WorkerId,
        /// From.
        from: State,
        /// To.
        to: State,
        /// Why, for states that need a reason.
        cause: Option<Cause>,
    },
    /// More is known about the end of a life that is over.
    Refined {
        /// Which worker.
        worker: WorkerId,
        /// The better cause.
        cause: Cause,
    },
    /// Ask the health source now, within its bound.
    Probe(WorkerId),
    /// Is this process still there? Answer with `still_alive` or `process_gone`.
    Recheck {
        /// Which worker.
        worker: WorkerId,
        /// Its root.
        root: ProcessId,
        /// The process whose end was announced.
        process: Process,
    },
    /// Call [`super::Core::fire`] at this time.
    Arm {
        /// Which worker.
        worker: WorkerId,
        /// Which timer.
        timer: Timer,
        /// When.
        at: Nanos,
    },
    /// The worker would serve, and is not listed before the end of its hold-down.
    HeldDown {
        /// Which worker.
        worker: WorkerId,
        /// Its losses in a row.
        losses: u32,
        /// When it may be listed.
        until: Nanos,
    },
    /// A verdict was held back. To be said loudly.
    Held {
        /// Which worker.
        worker: WorkerId,
        /// Why.
        reason: HeldBack,
        /// What the verdict would have been for.
        cause: Cause,
    },
}

//! The core alone: no runtime, no sockets, no clock.

mod cases;
mod command;
mod edges;
mod kernel;
mod limits;
mod properties;

use std::time::Duration;

use lastgasp_protocol::{Action, Incarnation, Mode, WorkerState};

use super::*;

pub(super) const W: WorkerId = WorkerId(0);
pub(super) const HOLD_DOWN: Duration = Duration::from_secs(10);
pub(super) const WINDOW: Duration = Duration::from_secs(5);
pub(super) const HANG: Duration = Duration::from_secs(10);

pub(super) fn policy() -> WorkerPolicy {
    WorkerPolicy {
        drain_window: WINDOW,
        hang_window: HANG,
        on_not_serving: OnNotServing::Drain,
        registers_itself: false,
        has_liveness: true,
    }
}

pub(super) const fn root(life: u32) -> ProcessId {
    ProcessId { tgid: 100 + life, start_ticks: 1000 + life as u64 }
}

pub(super) fn incarnation(life: u32) -> Incarnation {
    let ProcessId { tgid, start_ticks } = root(life);
    Incarnation::of_process("5f0c1d2e", tgid, start_ticks)
}

pub(super) fn engine_core() -> Process {
    Process { tgid: 500, title: "VLLM::EngineCore".into(), root: false }
}

pub(super) fn root_process(life: u32) -> Process {
    Process { tgid: root(life).tgid, title: "vllm".into(), root: true }
}

pub(super) const SERVING: Kind = Kind::Serving { role: HealthRole::Liveness };
pub(super) const NOT_SERVING: Kind = Kind::NotServing { role: HealthRole::Liveness };

pub(super) fn killed(process: Process) -> Kind {
    Kind::ProcessExit { process, exit: Exit::Signal { signal: 9, core: false } }
}

/// What routers and the bucket get to see, in short.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Seen {
    Listed(WorkerState, u64),
    Withdrawn(u64),
    Drain(u64),
    Handover(u64),
    Lost(u64),
}

pub(super) fn seen(effects: &[Effect]) -> Vec<Seen> {
    effects
        .iter()
        .filter_map(|effect| match effect {
            Effect::List { listing, state, .. } => Some(Seen::Listed(*state, listing.epoch)),
            Effect::Withdraw(listing) => Some(Seen::Withdrawn(listing.epoch)),
            Effect::Signal { listing, action: Action::Drain, .. } => Some(Seen::Drain(listing.epoch)),
            Effect::Signal { listing, mode: Some(Mode::Handover), .. } => Some(Seen::Handover(listing.epoch)),
            Effect::Signal { listing, .. } => Some(Seen::Lost(listing.epoch)),
            _ => None,
        })
        .collect()
}

/// A core whose clock the test moves.
pub(super) struct Node {
    pub(super) core: Core,
    pub(super) now: Nanos,
    pub(super) life: u32,
}

impl Node {
    pub(super) fn of(policies: Vec<WorkerPolicy>) -> Self {
        let node =
            Policy { hold_down: HOLD_DOWN, recheck_after: Duration::from_secs(5), soft_withdrawals_per_minute: 2 };
        let mut core = Core::new(node);
        for (policy, id) in policies.into_iter().zip(0..) {
            core.add_worker(WorkerId(id), policy);
        }
        Self { core, now: Nanos(1_000_000_000), life: 0 }
    }

    /// One worker, found and serving.
    pub(super) fn serving() -> Self {
        let mut node = Self::of(vec![policy()]);
        node.found();
        assert_eq!(seen(&node.hears(SERVING)), [Seen::Listed(WorkerState::Serving, 1)]);
        node
    }

    pub(super) fn found(&mut self) -> Vec<Effect> {
        self.core.found(W, root(self.life), incarnation(self.life), self.now)
    }

    pub(super) fn hears(&mut self, kind: Kind) -> Vec<Effect> {
        self.hears_of(W, self.life, kind)
    }

    pub(super) fn hears_of(&mut self, worker: WorkerId, life: u32, kind: Kind) -> Vec<Effect> {
        let evidence = Evidence { worker, root: root(life), kind, at: self.now };
        self.core.evidence(&evidence, self.now)
    }

    pub(super) fn after(&mut self, time: Duration) -> &mut Self {
        self.now = self.now.plus(time);
        self
    }

    pub(super) fn fires(&mut self, timer: Timer) -> Vec<Effect> {
        self.core.fire(W, timer, self.now)
    }

    pub(super) fn state(&self) -> State {
        self.core.state(W).expect("found")
    }
}

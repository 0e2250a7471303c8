//! What goes wrong in one round, and when. The same seed makes the same plan.

use std::collections::HashSet;
use std::time::Duration;

/// One thing that goes wrong. Numbers name workers, nodes and routers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Fault {
    /// SIGKILL to an engine core.
    KillCore(usize),
    /// SIGKILL to an engine's root.
    KillRoot(usize),
    /// SIGKILL to all of an engine.
    KillTree(usize),
    /// SIGTERM to an engine's root.
    Dismiss(usize),
    /// SIGSTOP to an engine core.
    FreezeCore(usize),
    /// SIGSTOP to an engine's root.
    FreezeRoot(usize),
    /// SIGKILL to a daemon.
    KillDaemon(usize),
    /// SIGTERM to a daemon, as for an upgrade.
    EndDaemon(usize),
    /// Nothing passes between a node and NATS.
    CutNode(usize),
    /// Nothing passes between a router and NATS.
    CutRouter(usize),
    /// SIGKILL to a router.
    KillRouter(usize),
    /// SIGKILL to the server.
    KillNats,
    /// SIGSTOP to the server.
    FreezeNats,
}

impl Fault {
    /// What it is about: two faults of one thing in one round would undo each other.
    fn target(self) -> (&'static str, usize) {
        match self {
            Self::KillCore(worker)
            | Self::KillRoot(worker)
            | Self::KillTree(worker)
            | Self::Dismiss(worker)
            | Self::FreezeCore(worker)
            | Self::FreezeRoot(worker) => ("worker", worker),
            Self::KillDaemon(node) | Self::EndDaemon(node) => ("daemon", node),
            Self::CutNode(node) => ("wire of node", node),
            Self::CutRouter(router) => ("wire of router", router),
            Self::KillRouter(router) => ("router", router),
            Self::KillNats | Self::FreezeNats => ("nats", 0),
        }
    }
}

/// A fault, from when to when.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Planned {
    pub(crate) fault: Fault,
    pub(crate) from: Duration,
    pub(crate) until: Duration,
}

/// How many of each there are.
pub(crate) struct Cast {
    pub(crate) workers: usize,
    pub(crate) nodes: usize,
    pub(crate) routers: usize,
}

/// A round: one to six faults of different things, of which one worker is spared.
pub(crate) fn round(rng: &mut fastrand::Rng, cast: &Cast) -> Vec<Planned> {
    let spared = rng.usize(..cast.workers);
    let mut taken = HashSet::new();
    let mut plan = Vec::new();
    for _ in 0..rng.usize(1..=6) {
        let worker = rng.usize(..cast.workers);
        let (node, router) = (rng.usize(..cast.nodes), rng.usize(..cast.routers));
        let fault = match rng.u32(..18) {
            0..3 => Fault::KillCore(worker),
            3..5 => Fault::KillRoot(worker),
            5 => Fault::KillTree(worker),
            6 => Fault::Dismiss(worker),
            7 => Fault::FreezeCore(worker),
            8..10 => Fault::FreezeRoot(worker),
            10..12 => Fault::KillDaemon(node),
            12 => Fault::EndDaemon(node),
            13 => Fault::CutNode(node),
            14 => Fault::CutRouter(router),
            15 => Fault::KillRouter(router),
            16 => Fault::KillNats,
            _ => Fault::FreezeNats,
        };
        let from = Duration::from_millis(rng.u64(..1500));
        // Sometimes longer than the hang window, never longer than the node's lease and its grace.
        let until = from + Duration::from_millis(rng.u64(100..5500));
        if fault.target() != ("worker", spared) && taken.insert(fault.target()) {
            plan.push(Planned { fault, from, until });
        }
    }
    plan
}

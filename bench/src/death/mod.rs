//! From a death to safety: how long a dead worker is still offered, and a reader waits.
//!
//! Engines with a live stream through a router are killed one by one. Who watches what is in
//! [`Situation::groups`]: those of one group watch the same deaths. Rivals that do nothing at the moment of
//! a death (a poll, a lease) share lastgasp's; those that act at once have deaths of their own, in turns,
//! since two cores would otherwise show how they disturb each other.

mod busy;
mod records;
mod rivals;
mod stage;
mod tables;

use std::time::Duration;

use nix::sys::signal::Signal;

use crate::report::Section;
use crate::{BenchError, Options};

/// Time to live of the lease, as Dynamo's of etcd.
const LEASE: Duration = Duration::from_secs(10);
/// Deaths in a situation in which each takes seconds, to one in the others.
const HEAVY: usize = 10;

/// Who finds out that a worker is dead, and removes its record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Watcher {
    /// A daemon as it comes.
    Ebpf,
    /// Another version's daemon, as it comes.
    Former,
    /// A daemon with `priority = "realtime"`.
    Realtime,
    /// A daemon without eBPF.
    Pidfd,
    /// What a sidecar does: grpc.health.v1 Watch, and the record is deleted when it ends or says NOT_SERVING.
    Watch,
    /// `GET /health` every second, and the record is deleted at the first that fails.
    Poll,
    /// The worker renews a key every third of its TTL.
    Lease,
}

impl Watcher {
    const fn name(self) -> &'static str {
        match self {
            Self::Ebpf => "lastgasp, eBPF",
            Self::Former => "lastgasp, eBPF, the other",
            Self::Realtime => "lastgasp, eBPF, realtime",
            Self::Pidfd => "lastgasp, pidfd only",
            Self::Watch => "gRPC health Watch",
            Self::Poll => "HTTP poll, 1 s",
            Self::Lease => "lease, 10 s",
        }
    }

    /// The node under which it keeps records.
    const fn node(self) -> &'static str {
        match self {
            Self::Ebpf => "ebpf",
            Self::Former => "former",
            Self::Realtime => "realtime",
            Self::Pidfd => "pidfd",
            Self::Watch => "watch",
            Self::Poll => "poll",
            Self::Lease => "lease",
        }
    }

    const fn is_lastgasp(self) -> bool {
        matches!(self, Self::Ebpf | Self::Former | Self::Realtime | Self::Pidfd)
    }
}

/// What is killed, and how.
#[derive(Debug, Clone, Copy)]
enum Kill {
    /// Every process of the worker, by SIGKILL, the root first.
    Tree,
    /// Only its EngineCore.
    Core(Signal),
}

/// A column of the issue: one way to die, on one kind of machine.
#[derive(Debug, Clone)]
struct Situation {
    name: &'static str,
    /// Part of a file's name.
    slug: &'static str,
    kill: Kill,
    /// All cores have something better to do.
    busy: bool,
    /// MiB that the engine core has touched.
    resident: usize,
    /// The first of each group has the stream.
    groups: Vec<&'static [Watcher]>,
    /// Time to live of the lease.
    lease: Duration,
    /// Of each group.
    deaths: usize,
    /// Workers of each group that are there at the same time; they are killed one by one.
    at_once: usize,
}

fn situations(options: &Options) -> Vec<Situation> {
    use Watcher::{Ebpf, Former, Lease, Pidfd, Poll, Realtime, Watch};
    let mut apart: Vec<&[Watcher]> = vec![&[Ebpf, Poll, Lease], &[Realtime], &[Pidfd], &[Watch]];
    // Here the fastest is done long before the next one begins.
    let mut together: Vec<&[Watcher]> = vec![&[Ebpf, Pidfd, Watch, Poll, Lease]];
    if options.beside.is_some() {
        apart.insert(1, &[Former]);
        together.push(&[Former]);
    }
    let (deaths, gib, lease) =
        if options.quick { (2, 32, Duration::from_secs(1)) } else { (options.deaths, 1024, LEASE) };
    let light = Situation {
        name: "whole worker, quiet",
        slug: "quiet",
        kill: Kill::Tree,
        busy: false,
        resident: 0,
        lease,
        groups: apart,
        deaths,
        at_once: deaths.min(8),
    };
    let heavy = Situation {
        kill: Kill::Core(Signal::SIGKILL),
        groups: together,
        deaths: deaths.div_ceil(HEAVY),
        at_once: 2,
        ..light.clone()
    };
    let all = vec![
        light.clone(),
        Situation { name: "whole worker, all cores busy", slug: "busy", busy: true, ..light.clone() },
        Situation { name: "EngineCore only", slug: "core", kill: Kill::Core(Signal::SIGKILL), ..light },
        Situation { name: "EngineCore with 6 GiB resident", slug: "large", resident: 6 * gib, ..heavy.clone() },
        Situation {
            name: "EngineCore, SIGSEGV, 1 GiB core dump",
            slug: "dump",
            kill: Kill::Core(Signal::SIGSEGV),
            resident: gib,
            ..heavy
        },
    ];
    all.into_iter().filter(|situation| options.wants(situation.slug)).collect()
}

pub(crate) async fn run(options: &Options) -> Result<Vec<Section>, BenchError> {
    let mut found = Vec::new();
    for situation in situations(options) {
        let deaths = stage::deaths(&situation, options.beside.as_deref()).await?;
        found.push((situation, deaths));
    }
    Ok(tables::sections(&found))
}
/// One death as one watcher saw it: microseconds from just before `kill()`.
#[derive(Debug, Clone)]
struct Death {
    watcher: Watcher,
    hops: Hops,
}

/// What followed. What the watcher has no part in is missing.
#[derive(Debug, Clone, Copy, Default)]
struct Hops {
    /// The first sign of it.
    evidence: Option<f64>,
    /// The signal to the routers left.
    signalled: Option<f64>,
    /// The deletion of the record was acknowledged; of a lease: its end was seen.
    gone: Option<f64>,
    /// Another client of NATS saw that the record is gone.
    seen: Option<f64>,
    /// The reader saw the move.
    acted: Option<f64>,
    /// The reader has the next token.
    next_token: Option<f64>,
}

//! The evidence ladder: how strong each kind of evidence is, and what follows from it.
//! All policy that depends on the kind alone is in this one table.

use lastgasp_protocol::{Cause, CauseKind, Sender};

use super::{Addressee, Exit, GpuPolicy, HealthRole, Kind, Process};

/// Signals whose default action dumps core (signal(7)).
const DUMPS_CORE: [i32; 8] = [
    libc::SIGABRT,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGILL,
    libc::SIGQUIT,
    libc::SIGSEGV,
    libc::SIGSYS,
    libc::SIGTRAP,
];

/// What a piece of evidence says about the worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Meaning {
    /// The worker is dead, now: a critical process ended or is ending.
    Dead {
        /// Which process.
        process: Process,
        /// Of what.
        cause: Cause,
        /// Near certain rather than certain: look again if no exit follows.
        recheck: bool,
        /// An end that fits a worker which leaves on purpose.
        orderly: bool,
    },
    /// Another program runs in the engine's place.
    Replaced(Cause),
    /// Nobody can reach it any more. Does not count while draining.
    Unreachable(Cause),
    /// It is leaving on purpose.
    Leaving(Cause),
    /// The liveness service took back its word. What follows is the operator's choice.
    NotLive,
    /// It takes no new work for now.
    NotReady,
    /// A health service is content.
    Healthy(HealthRole),
    /// It listens. Counts where there is no health service.
    Listening,
    /// A probe was refused by a host where nobody listens; twice is a verdict.
    Refused,
    /// A probe went unanswered; over the hang window that is a verdict.
    Unanswered,
    /// A probe was answered.
    Answered,
    /// Too little to act on: ask.
    Suspicion,
    /// For the record.
    Nothing,
    /// Who sent a signal. It explains a death that was seen, or will be.
    Sent {
        /// To whom.
        to: Addressee,
        /// Signal number.
        signal: i32,
        /// By whom.
        sender: Sender,
        /// It asks the worker to leave.
        asks: bool,
        /// It stops the worker: ask how it is.
        stops: bool,
    },
    /// A critical process is there again.
    Revived(Process),
    /// A death that was announced did not come.
    FalseAlarm(Process),
}

/// Reads the table.
#[must_use]
pub(super) fn meaning(kind: &Kind) -> Meaning {
    let dead = |process: &Process, exit: Exit, recheck: bool| Meaning::Dead {
        process: process.clone(),
        cause: cause_of_exit(process, exit),
        recheck,
        orderly: exit.is_orderly() && !recheck,
    };
    match kind {
        // certain
        Kind::ProcessExit { process, exit } | Kind::ProcessGone { process, exit } => dead(process, *exit, false),
        // near certain
        Kind::SignalDelivered { process, signal } => {
            let core = DUMPS_CORE.contains(signal);
            dead(process, Exit::Signal { signal: *signal, core }, true)
        }
        Kind::OomVictim { process } => Meaning::Dead {
            process: process.clone(),
            cause: Cause {
                kind: CauseKind::OomKilled,
                ..cause_of_exit(process, Exit::Signal { signal: libc::SIGKILL, core: false })
            },
            recheck: true,
            orderly: false,
        },
        // strong
        Kind::ListenerClosed { exiting: true } => Meaning::Unreachable(Cause::of(CauseKind::ListenerClosed)),
        Kind::ListenerClosed { exiting: false } => Meaning::Leaving(Cause::of(CauseKind::Terminated)),
        Kind::Terminating { signal } => {
            Meaning::Leaving(Cause { signal: Some(*signal), ..Cause::of(CauseKind::Terminated) })
        }
        Kind::Replaced { process, by: _ } => Meaning::Replaced(Cause {
            process: Some(process.title.as_ref().to_owned()),
            ..Cause::of(CauseKind::Replaced)
        }),
        Kind::GpuFault { process, policy: GpuPolicy::Lost, fault: _ } => Meaning::Unreachable(Cause {
            process: process.as_ref().map(|process| process.title.as_ref().to_owned()),
            ..Cause::of(CauseKind::GpuFault)
        }),
        // hint
        Kind::SignalSent { to, signal, sender, ending } => Meaning::Sent {
            to: to.clone(),
            signal: *signal,
            sender: sender.clone(),
            asks: !ending && asks_to_leave(to, *signal),
            stops: *signal == libc::SIGSTOP,
        },
        Kind::NotServing { role: HealthRole::Liveness } => Meaning::NotLive,
        Kind::NotServing { role: HealthRole::Readiness } => Meaning::NotReady,
        Kind::ProbeRefused { listening: false } => Meaning::Refused,
        // soft
        Kind::ProbeUnanswered | Kind::ProbeRefused { listening: true } => Meaning::Unanswered,
        Kind::WatchBroken | Kind::TcpReset { .. } | Kind::GpuFault { policy: GpuPolicy::Probe, .. } => {
            Meaning::Suspicion
        }
        Kind::GpuFault { policy: GpuPolicy::Note, .. } => Meaning::Nothing,
        // good news
        Kind::Serving { role } => Meaning::Healthy(*role),
        Kind::Listening => Meaning::Listening,
        Kind::ProbeAnswered => Meaning::Answered,
        Kind::CriticalSeen { process } => Meaning::Revived(process.clone()),
        Kind::StillAlive { process } => Meaning::FalseAlarm(process.clone()),
    }
}

/// Who is asked to leave leaves with the whole engine: its root, and what supervises that. SIGINT
/// to a supervisor says nothing: a shell gets it at every Ctrl-C, and the terminal sends it to the
/// engine too if that is meant.
const fn asks_to_leave(to: &Addressee, signal: i32) -> bool {
    match to {
        Addressee::Process(process) => process.root && matches!(signal, libc::SIGTERM | libc::SIGINT),
        Addressee::Supervisor { .. } => signal == libc::SIGTERM,
    }
}

fn cause_of_exit(process: &Process, exit: Exit) -> Cause {
    let (kind, signal, exit_status) = match exit {
        Exit::Status(status) => (CauseKind::ProcessExited, None, Some(status)),
        Exit::Signal { signal, core: true } => (CauseKind::ProcessCrashed, Some(signal), None),
        Exit::Signal { signal, core: false } => (CauseKind::ProcessKilled, Some(signal), None),
        Exit::Unknown => (CauseKind::ProcessGone, None, None),
    };
    Cause { kind, signal, exit_status, process: Some(process.title.as_ref().to_owned()), ..Cause::of(kind) }
}

/// The better of two causes of one death. The first evidence is often vague: a group exit shows
/// every thread signal 9, whatever the first signal was, and an OOM kill looks like any SIGKILL.
pub(super) fn refine(former: &Cause, later: &Cause) -> Option<Cause> {
    if former.process.is_some() && former.process != later.process {
        return None;
    }
    // Whoever asked for it knew why; that its process ends later on is another matter.
    if former.kind == CauseKind::Commanded {
        return None;
    }
    let rank = |cause: &Cause| match cause.kind {
        CauseKind::OomKilled | CauseKind::Replaced | CauseKind::GpuFault => 3,
        CauseKind::ProcessKilled | CauseKind::ProcessCrashed | CauseKind::ProcessExited => 2,
        CauseKind::ProcessGone => 1,
        _ => 0,
    };
    let better = match rank(later).cmp(&rank(former)) {
        std::cmp::Ordering::Greater => true,
        std::cmp::Ordering::Equal => former.signal != later.signal || former.kind != later.kind,
        std::cmp::Ordering::Less => false,
    };
    better.then(|| Cause { sender: later.sender.clone().or_else(|| former.sender.clone()), ..later.clone() })
}

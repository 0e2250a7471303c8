//! What sensors report. They never decide; how strong a kind is stands in [`super::ladder`].

use std::fmt;
use std::net::SocketAddr;

use lastgasp_protocol::Sender;
use serde::Serialize;

/// Nanoseconds on `CLOCK_MONOTONIC`, the clock of `bpf_ktime_get_ns` (bpf-helpers(7)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize)]
pub struct Nanos(pub u64);

impl Nanos {
    /// Time passed since `earlier`; zero if that lies in the future.
    #[must_use]
    pub const fn since(self, earlier: Self) -> std::time::Duration {
        std::time::Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// This moment and `later` more.
    #[must_use]
    pub fn plus(self, later: std::time::Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(later.as_nanos()).unwrap_or(u64::MAX)))
    }
}

/// A worker of this node: a number that is given once and not again. Also its slot in the kernel's maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct WorkerId(pub u32);

/// A process, never a bare pid: pids are used again within seconds on a busy node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct ProcessId {
    /// Thread group id, which user space calls the pid, in the initial PID namespace.
    pub tgid: u32,
    /// Start time in clock ticks (1/100 s) since boot: field 22 of `/proc/PID/stat` (proc(5)),
    /// and `task_struct.start_boottime` / 10^7 in the kernel.
    pub start_ticks: u64,
}

impl fmt::Display for ProcessId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.tgid)
    }
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Exit {
    /// By itself, with this status (0 to 255).
    Status(i32),
    /// By this signal.
    Signal {
        /// Signal number.
        signal: i32,
        /// A core was dumped.
        core: bool,
    },
    /// It is gone, and no source has said how.
    Unknown,
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status(status) => write!(f, "status {status}"),
            Self::Signal { signal, core: false } => write!(f, "signal {signal}"),
            Self::Signal { signal, core: true } => write!(f, "signal {signal}, core dumped"),
            Self::Unknown => f.write_str("how is not known"),
        }
    }
}

impl Exit {
    /// From a wait status as the kernel keeps it in `task_struct.exit_code`: the low seven bits are
    /// the signal, 0x80 says that a core was dumped, the next byte is the status (wait(2)).
    #[must_use]
    pub const fn from_wait_status(status: i32) -> Self {
        match status & 0x7f {
            0 => Self::Status((status >> 8) & 0xff),
            signal => Self::Signal { signal, core: status & 0x80 != 0 },
        }
    }

    /// The process went because it was asked to, or had nothing left to do.
    #[must_use]
    pub const fn is_orderly(self) -> bool {
        matches!(self, Self::Status(0) | Self::Signal { signal: libc::SIGTERM | libc::SIGINT, .. })
    }
}

/// A critical process of a worker: the engine's root, or a descendant that the profile names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// Thread group id.
    pub tgid: u32,
    /// Title or role, as `VLLM::EngineCore`.
    pub title: std::sync::Arc<str>,
    /// It is the engine's root.
    pub root: bool,
}

/// What a health service speaks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HealthRole {
    /// NOT_SERVING means that the engine failed or shuts down.
    Liveness,
    /// NOT_SERVING means that it takes no new work for now (asleep, paused).
    Readiness,
}

/// Whom a signal was sent to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Addressee {
    /// A critical process.
    Process(Process),
    /// The process that supervises the engine: the root's parent.
    Supervisor {
        /// Thread group id.
        tgid: u32,
    },
}

/// Which way a TCP reset went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, strum::IntoStaticStr)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Direction {
    /// From the serving port.
    Sent,
    /// To it.
    Received,
}

/// What is to be done about a GPU fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, strum::IntoStaticStr, strum::VariantNames)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum GpuPolicy {
    /// The process does not come out of it: lost.
    Lost,
    /// It may: ask its health at once.
    Probe,
    /// For the record.
    Note,
}

/// One observation. Where a process is meant, it is a *critical* one of the worker.
#[derive(Debug, Clone, PartialEq, Eq, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum Kind {
    /// The kernel reported the exit of the whole thread group (`sched_process_exit`).
    ProcessExit {
        /// Which.
        process: Process,
        /// How it ended.
        exit: Exit,
    },
    /// The pidfd became readable, or the process was found missing.
    ProcessGone {
        /// Which.
        process: Process,
        /// How it ended, if that could still be learnt.
        exit: Exit,
    },
    /// A signal that ends the process is being delivered to it (`signal_deliver`).
    SignalDelivered {
        /// Which.
        process: Process,
        /// Signal number. A group exit shows every thread signal 9, whatever the first one was.
        signal: i32,
    },
    /// The OOM killer chose the process (`mark_victim`).
    OomVictim {
        /// Which.
        process: Process,
    },
    /// A fatal signal was delivered a while ago, and the process is still there, not dumping core.
    StillAlive {
        /// Which.
        process: Process,
    },
    /// A signal that may end, stop or dismiss a process was sent to it (`signal_generate`). Delivery
    /// is reported apart, and sometimes before this.
    SignalSent {
        /// To whom.
        to: Addressee,
        /// Signal number.
        signal: i32,
        /// By whom.
        sender: Sender,
        /// The kernel has begun to end the process with it.
        ending: bool,
    },
    /// A critical process runs another program now.
    Replaced {
        /// Which, under its former title.
        process: Process,
        /// The new program's file.
        by: String,
    },
    /// Connections of the serving port were reset.
    TcpReset {
        /// Which way.
        direction: Direction,
        /// The kernel's reason, where it tells one.
        reason: Option<String>,
        /// The other end of the last one.
        peer: SocketAddr,
        /// How many since the last such evidence.
        count: u64,
    },
    /// The kernel log reports a GPU fault of a process of the worker's tree.
    GpuFault {
        /// The process, if the line names it.
        process: Option<Process>,
        /// As `xid 79` or `amdgpu reset`.
        fault: String,
        /// What follows.
        policy: GpuPolicy,
    },
    /// A critical process of this role is there (again).
    CriticalSeen {
        /// Which.
        process: Process,
    },
    /// The serving port's listening socket was closed, and no other listener is left there.
    ListenerClosed {
        /// The closing task was exiting (`PF_EXITING`).
        exiting: bool,
    },
    /// SIGTERM or SIGINT reached a process that handles it: the engine's root, or what supervises it.
    Terminating {
        /// Signal number.
        signal: i32,
    },
    /// The engine listens on its serving port. Counts for engines without a health service.
    Listening,
    /// A health service says SERVING, or HTTP health says 2xx.
    Serving {
        /// What it speaks for.
        role: HealthRole,
    },
    /// A health service says NOT_SERVING, forgot a service that had been SERVING, or HTTP says 503.
    NotServing {
        /// What it speaks for.
        role: HealthRole,
    },
    /// The health Watch broke, or ended after changes.
    WatchBroken,
    /// A probe was not answered in its time.
    ProbeUnanswered,
    /// A probe was answered, whatever the answer.
    ProbeAnswered,
    /// A probe was refused.
    ProbeRefused {
        /// Somebody listens at the address nevertheless (`/proc/net/tcp`).
        listening: bool,
    },
}

/// One observation about one life of one worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Evidence {
    /// Which worker.
    pub worker: WorkerId,
    /// The root process of the life it is about. Evidence about another life changes nothing.
    pub root: ProcessId,
    /// What was seen.
    pub kind: Kind,
    /// When it happened, by the kernel's clock where the kernel reported it.
    pub at: Nanos,
}

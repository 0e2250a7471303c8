//! Why a worker is withdrawn: closed enums, used verbatim in signals, certificates, logs and metrics.

use crate::ClosedName as _;
use serde::{Deserialize, Serialize};

/// What kind of end it was.
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
    Deserialize,
    strum::IntoStaticStr,
    strum::VariantArray,
    strum::VariantNames,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum CauseKind {
    /// A critical process was killed by a signal that dumps no core (SIGKILL, SIGTERM, …).
    ProcessKilled,
    /// A critical process was ended by a signal that dumps core (SIGSEGV, SIGABRT, …).
    ProcessCrashed,
    /// A critical process ended by itself, with whatever exit status; 0 is a loss too.
    ProcessExited,
    /// The kernel's OOM killer chose a critical process.
    OomKilled,
    /// A critical process was found dead; how it ended is not known (it died unobserved).
    ProcessGone,
    /// The engine's process runs another program now: what served is gone.
    Replaced,
    /// The kernel reported a GPU fault of a critical process that it does not survive.
    GpuFault,
    /// The serving port's last listener was closed by an exiting task.
    ListenerClosed,
    /// Connections to the health address are refused and nothing listens there.
    ConnectionRefused,
    /// The liveness service said NOT_SERVING while the processes lived.
    NotServing,
    /// The readiness service said NOT_SERVING.
    NotReady,
    /// Probes went unanswered over the hang window.
    Hung,
    /// SIGTERM or SIGINT reached the engine, or its listener was closed on purpose.
    Terminated,
    /// A person or a program asked for it.
    Commanded,
}

impl std::fmt::Display for CauseKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.as_str())
    }
}

/// A process's own words on their way to a log: what would steer a terminal, or end a line, is
/// replaced.
struct Printable<'a>(&'a str);

impl std::fmt::Display for Printable<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        use std::fmt::Write as _;
        self.0.chars().try_for_each(|c| f.write_char(if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }))
    }
}

/// Who sent a signal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sender {
    /// The sender's process id in the initial PID namespace; 0 for the kernel.
    pub pid: u32,
    /// Its comm, at most 15 bytes; `kernel` for the kernel, `itself` for the very process that the
    /// signal ended.
    pub comm: String,
    /// Its cgroup's v2 id, which is the inode number of the cgroup's directory, where there is v2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<u64>,
}

impl Sender {
    /// The `comm` that stands for the process itself.
    pub const ITSELF: &str = "itself";

    /// The kernel: a fault, the OOM killer, the end of a pid namespace.
    #[must_use]
    pub fn kernel() -> Self {
        Self { pid: 0, comm: "kernel".to_owned(), cgroup: None }
    }
}

impl std::fmt::Display for Sender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self { pid: 0, .. } => f.write_str("the kernel"),
            Self { comm, .. } if comm == Self::ITSELF => f.write_str(Self::ITSELF),
            Self { pid, comm, cgroup: _ } => write!(f, "{} (pid {pid})", Printable(comm)),
        }
    }
}

/// Why a worker is withdrawn, as far as it is known when the signal is sent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cause {
    /// What kind of end.
    pub kind: CauseKind,
    /// Signal number, if a signal ended the process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
    /// Exit status 0 to 255, if the process ended by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_status: Option<i32>,
    /// Title or role of the process, such as `VLLM::EngineCore`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<String>,
    /// Who sent the signal, where the kernel reported it; with `commanded`, who asked for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sender: Option<Sender>,
    /// With `commanded`: what was given as the reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

impl Cause {
    /// A cause of this kind with nothing more known.
    #[must_use]
    pub const fn of(kind: CauseKind) -> Self {
        Self { kind, signal: None, exit_status: None, process: None, sender: None, reason: None }
    }
}

impl std::fmt::Display for Cause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { kind, signal, exit_status, process, sender, reason } = self;
        write!(f, "{kind}")?;
        if let Some(process) = process {
            write!(f, " {}", Printable(process))?;
        }
        if let Some(signal) = signal {
            write!(f, " by signal {signal}")?;
        }
        if let Some(status) = exit_status {
            write!(f, " with status {status}")?;
        }
        if let Some(sender) = sender {
            write!(f, " from {sender}")?;
        }
        if let Some(reason) = reason {
            write!(f, ": {reason}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_cannot_write_to_the_terminal_of_whoever_reads_why() {
        let sender = Sender { pid: 7, comm: "\u{1b}[2J\nroot".to_owned(), cgroup: None };
        let process = Some("VLLM::\r\u{9b}31m".to_owned());
        let cause = Cause { process, sender: Some(sender), ..Cause::of(CauseKind::ProcessKilled) };
        assert!(!cause.to_string().contains(char::is_control), "{cause:?}");
    }
}

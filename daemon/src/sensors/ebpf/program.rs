//! The programs, and why one may be off.

use lastgasp_protocol::ClosedName as _;
use std::fmt;

use lastgasp_ebpf::names::program;
use serde::Serialize;

use super::btf::LookupError;

/// A kernel program and the tracepoint it sits on.
#[derive(
    Clone,
    Copy,
    Debug,
    Eq,
    Hash,
    Ord,
    PartialEq,
    PartialOrd,
    Serialize,
    strum::IntoStaticStr,
    strum::VariantArray,
    strum::VariantNames,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum KernelProgram {
    /// The whole thread group of a watched process exits.
    Exit,
    /// A fatal signal reaches a watched process.
    SignalDeliver,
    /// A watched process makes a child.
    Fork,
    /// A watched process runs another program.
    Exec,
    /// A watched process changes its title.
    Rename,
    /// The OOM killer chose a watched process.
    MarkVictim,
    /// A watched listening socket closes.
    ListenerClosed,
    /// A signal is sent to a watched process: by whom.
    SignalGenerate,
    /// The kernel sends a TCP reset from a watched port.
    TcpResetSent,
    /// A connection of a watched port is reset by its peer.
    TcpResetReceived,
}

impl KernelProgram {
    /// The raw tracepoint.
    #[must_use]
    pub const fn tracepoint(self) -> &'static str {
        match self {
            Self::Exit => "sched_process_exit",
            Self::SignalDeliver => "signal_deliver",
            Self::Fork => "sched_process_fork",
            Self::Exec => "sched_process_exec",
            Self::Rename => "task_rename",
            Self::MarkVictim => "mark_victim",
            Self::ListenerClosed => "inet_sock_set_state",
            Self::SignalGenerate => "signal_generate",
            Self::TcpResetSent => "tcp_send_reset",
            Self::TcpResetReceived => "tcp_receive_reset",
        }
    }

    /// The program's name in the object and in the kernel.
    #[must_use]
    pub const fn function(self) -> &'static str {
        match self {
            Self::Exit => program::EXIT,
            Self::SignalDeliver => program::SIGNAL,
            Self::Fork => program::FORK,
            Self::Exec => program::EXEC,
            Self::Rename => program::RENAME,
            Self::MarkVictim => program::OOM,
            Self::ListenerClosed => program::LISTENER,
            Self::SignalGenerate => program::SENDER,
            Self::TcpResetSent => program::RESET_SENT,
            Self::TcpResetReceived => program::RESET_RECEIVED,
        }
    }

    /// What is worse without it.
    #[must_use]
    pub const fn cost(self) -> &'static str {
        match self {
            Self::Exit => "exits are seen by pidfd, once the memory is torn down",
            Self::SignalDeliver => {
                "a fatal signal is seen at the exit it leads to: after the core dump, if there is one"
            }
            Self::Fork => "new processes of an engine are found by a scan, within seconds",
            Self::Exec => {
                "a program that runs in an engine's place, or under another title, goes unseen; a worker that declares \
                 itself is found by the next look at all processes"
            }
            Self::Rename => "a critical process that titles itself late is found by a scan, within seconds",
            Self::MarkVictim => "an OOM kill looks like any other SIGKILL",
            Self::ListenerClosed => "a listener that closes is seen by the next health check",
            Self::SignalGenerate => "who sent a signal is not known, and one to a supervisor goes unseen",
            Self::TcpResetSent | Self::TcpResetReceived => "resets do not ask for a health check before its time",
        }
    }
}

impl fmt::Display for KernelProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Whether a program works, and if not, why.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum ProgramState {
    /// It is attached.
    On,
    /// It is not; the others do their work without it.
    Off(OffReason),
}

impl ProgramState {
    /// Whether the program is attached.
    #[must_use]
    pub const fn is_on(&self) -> bool {
        matches!(self, Self::On)
    }
}

/// Why a program is off.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, strum::IntoStaticStr, strum::VariantNames)]
#[serde(tag = "reason", rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum OffReason {
    /// Somebody asked for it.
    Disabled,
    /// This kernel has no such tracepoint.
    NoTracepoint,
    /// The tracepoint has arguments that no known kernel gives it.
    UnknownPrototype {
        /// How many arguments it has.
        arguments: usize,
    },
    /// A field that the program reads does not exist in this kernel.
    NoField {
        /// What is missing, as the lookup says it.
        detail: String,
    },
    /// A field has another size than the program reads.
    FieldSize {
        /// The field, as C would write it.
        field: String,
        /// Its bytes in this kernel.
        found: u32,
        /// The bytes that the program reads.
        expected: u32,
    },
    /// The kernel refused the program.
    LoadRefused {
        /// The error number of `BPF_PROG_LOAD`.
        errno: i32,
        /// The last lines of what the verifier said.
        verifier: String,
    },
    /// The kernel refused to attach the program.
    AttachRefused {
        /// The error number of `BPF_RAW_TRACEPOINT_OPEN`.
        errno: i32,
    },
    /// The object file has no such program.
    NotInObject,
}

impl fmt::Display for OffReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let os = std::io::Error::from_raw_os_error;
        match self {
            Self::Disabled => f.write_str("switched off"),
            Self::NoTracepoint => f.write_str("the running kernel has no such tracepoint"),
            Self::UnknownPrototype { arguments } => {
                write!(f, "the tracepoint has {arguments} arguments, which no known kernel has")
            }
            Self::NoField { detail } => f.write_str(detail),
            Self::FieldSize { field, found, expected } => {
                write!(f, "{field} has {found} bytes in this kernel, expected {expected}")
            }
            Self::LoadRefused { errno, verifier } if verifier.is_empty() => {
                write!(f, "the kernel refused the program: {}", os(*errno))
            }
            Self::LoadRefused { errno, verifier } => {
                write!(f, "the kernel refused the program: {}; it says: {verifier}", os(*errno))
            }
            Self::AttachRefused { errno } => {
                write!(f, "the kernel refused to attach the program: {}", os(*errno))
            }
            Self::NotInObject => f.write_str("the object file has no such program"),
        }
    }
}

impl From<LookupError> for OffReason {
    fn from(error: LookupError) -> Self {
        match error {
            LookupError::NoTracepoint { .. } => Self::NoTracepoint,
            LookupError::NoStruct { .. }
            | LookupError::NoField { .. }
            | LookupError::BitField { .. }
            | LookupError::Nonsense { .. } => Self::NoField { detail: error.to_string() },
        }
    }
}

//! `struct task_struct` and `struct signal_struct` (include/linux/sched.h,
//! include/linux/sched/signal.h).

use aya_ebpf::helpers::{bpf_get_current_pid_tgid, bpf_get_current_task};
use lastgasp_ebpf::COMM_BYTES;

use super::kernel::{Address, Offset, unresolved};

#[unsafe(no_mangle)]
static TASK_TGID: Offset = unresolved();
#[unsafe(no_mangle)]
static TASK_PID: Offset = unresolved();
#[unsafe(no_mangle)]
static TASK_FLAGS: Offset = unresolved();
#[unsafe(no_mangle)]
static TASK_COMM: Offset = unresolved();
#[unsafe(no_mangle)]
static TASK_GROUP_LEADER: Offset = unresolved();
#[unsafe(no_mangle)]
static TASK_START_BOOTTIME: Offset = unresolved();
#[unsafe(no_mangle)]
static TASK_EXIT_CODE: Offset = unresolved();
#[unsafe(no_mangle)]
static TASK_SIGNAL: Offset = unresolved();
#[unsafe(no_mangle)]
static SIGNAL_LIVE: Offset = unresolved();
#[unsafe(no_mangle)]
static SIGNAL_FLAGS: Offset = unresolved();
#[unsafe(no_mangle)]
static SIGNAL_GROUP_EXIT_CODE: Offset = unresolved();

/// `PF_EXITING`, include/linux/sched.h: stable since 2.6.
const PF_EXITING: u32 = 0x4;

/// The tgid of the task that runs this program, without touching its memory.
#[inline(always)]
pub(super) fn current_tgid() -> u32 {
    (bpf_get_current_pid_tgid() >> 32) as u32
}

/// The thread id of the task that runs this program.
#[inline(always)]
pub(super) fn current_tid() -> u32 {
    bpf_get_current_pid_tgid() as u32
}

/// A thread.
#[derive(Clone, Copy)]
pub(super) struct Task(pub(super) Address);

impl Task {
    /// The thread that runs this program.
    #[inline(always)]
    pub(super) fn current() -> Self {
        // SAFETY: the helper has no preconditions. `bpf_get_current_task_btf` would need 5.11.
        Self(Address(unsafe { bpf_get_current_task() }))
    }

    #[inline(always)]
    pub(super) fn tgid(self) -> Option<u32> {
        self.0.read(&TASK_TGID)
    }

    #[inline(always)]
    pub(super) fn tid(self) -> Option<u32> {
        self.0.read(&TASK_PID)
    }

    #[inline(always)]
    pub(super) fn is_exiting(self) -> bool {
        self.0.read::<u32>(&TASK_FLAGS).unwrap_or(0) & PF_EXITING != 0
    }

    /// The thread whose identity and name are the process's.
    #[inline(always)]
    pub(super) fn group_leader(self) -> Option<Leader> {
        self.0.follow(&TASK_GROUP_LEADER).map(Leader)
    }

    #[inline(always)]
    pub(super) fn signal(self) -> Option<SignalStruct> {
        self.0.follow(&TASK_SIGNAL).map(SignalStruct)
    }
}

/// A group leader: what identifies a process.
#[derive(Clone, Copy)]
pub(super) struct Leader(pub(super) Address);

impl Leader {
    /// When the process was made, nanoseconds of `CLOCK_BOOTTIME`. Inherited by
    /// a thread that becomes leader in an exec (`de_thread`, fs/exec.c).
    #[inline(always)]
    pub(super) fn start_boottime(self) -> Option<u64> {
        self.0.read(&TASK_START_BOOTTIME)
    }

    #[inline(always)]
    pub(super) fn comm(self) -> [u8; COMM_BYTES] {
        self.0.read(&TASK_COMM).unwrap_or([0; COMM_BYTES])
    }

    #[inline(always)]
    pub(super) fn exit_code(self) -> u32 {
        self.0.read(&TASK_EXIT_CODE).unwrap_or(0)
    }
}

/// What the threads of a process share about signals and exit.
#[derive(Clone, Copy)]
pub(super) struct SignalStruct(Address);

impl SignalStruct {
    /// Threads that have not reached `do_exit`.
    #[inline(always)]
    pub(super) fn live(self) -> Option<i32> {
        self.0.read(&SIGNAL_LIVE)
    }

    #[inline(always)]
    pub(super) fn flags(self) -> SignalFlags {
        SignalFlags(self.0.read(&SIGNAL_FLAGS).unwrap_or(0))
    }

    #[inline(always)]
    pub(super) fn group_exit_code(self) -> u32 {
        self.0.read(&SIGNAL_GROUP_EXIT_CODE).unwrap_or(0)
    }
}

/// `signal_struct.flags`
#[derive(Clone, Copy)]
pub(super) struct SignalFlags(u32);

impl SignalFlags {
    const GROUP_EXIT: u32 = 0x4;
    /// Kernels before 5.17 have this instead of `GROUP_EXIT` while a core is
    /// written; later ones do not use the bit.
    const GROUP_COREDUMP: u32 = 0x8;
    const UNKILLABLE: u32 = 0x40;

    /// The wait status is in `group_exit_code`, not in a thread's `exit_code`.
    #[inline(always)]
    pub(super) fn is_group_exit(self) -> bool {
        self.0 & Self::GROUP_EXIT != 0
    }

    /// The kernel is ending all threads.
    #[inline(always)]
    pub(super) fn is_ending(self) -> bool {
        self.0 & (Self::GROUP_EXIT | Self::GROUP_COREDUMP) != 0
    }

    /// An init: default actions of signals from inside its namespace do not end it.
    #[inline(always)]
    pub(super) fn is_unkillable(self) -> bool {
        self.0 & Self::UNKILLABLE != 0
    }
}

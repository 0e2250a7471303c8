//! Who sends a watched process a signal that may end it.
//!
//! ```text
//! signal_generate(int sig, struct kernel_siginfo *info, struct task_struct *task, int group, int result)
//! ```
//!
//! It runs in the sender, after `complete_signal` (`__send_signal_locked`,
//! kernel/signal.c). `info` may be a sentinel: 0 for a signal from the process that
//! runs, 1 for one from the kernel; they are never followed.

use aya_ebpf::{helpers::bpf_get_current_cgroup_id, macros::raw_tracepoint, programs::RawTracePointContext};
use lastgasp_ebpf::{EventFlags, EventKind};

use super::{
    emit::{blank, emit},
    kernel::{Address, Offset, unresolved},
    task::{Task, current_tgid},
    watched::Process,
};

#[unsafe(no_mangle)]
static SIGINFO_CODE: Offset = unresolved();

/// `TRACE_SIGNAL_DELIVERED`, include/trace/events/signal.h: neither ignored, nor
/// pending already, nor lost.
const QUEUED: u32 = 0;
/// `SEND_SIG_NOINFO`, include/linux/sched/signal.h
const NO_INFO: u64 = 0;
/// `SEND_SIG_PRIV`
const FROM_KERNEL: u64 = 1;

/// HUP, INT, QUIT, ILL, TRAP, ABRT, BUS, FPE, KILL, USR1, SEGV, USR2, PIPE, TERM, STKFLT, STOP,
/// XCPU, XFSZ, PWR and SYS. Not the timers' (ALRM, VTALRM, PROF, IO) nor real-time ones, which
/// profilers and runtimes send thousands of times a second.
const TOLD: u64 = 1 << 1
    | 1 << 2
    | 1 << 3
    | 1 << 4
    | 1 << 5
    | 1 << 6
    | 1 << 7
    | 1 << 8
    | 1 << 9
    | 1 << 10
    | 1 << 11
    | 1 << 12
    | 1 << 13
    | 1 << 15
    | 1 << 16
    | 1 << 19
    | 1 << 24
    | 1 << 25
    | 1 << 30
    | 1 << 31;

#[raw_tracepoint(tracepoint = "signal_generate")]
fn lastgasp_sender(ctx: RawTracePointContext) -> i32 {
    on_signal(&ctx);
    0
}

#[inline(always)]
fn on_signal(ctx: &RawTracePointContext) -> Option<()> {
    let signal = ctx.arg::<u32>(0);
    if signal > 31 || TOLD >> signal & 1 == 0 || ctx.arg::<u32>(4) != QUEUED {
        return None;
    }
    let target = Task(Address(ctx.arg(2)));
    let process = Process::signalled(target, target.tgid()?)?;
    let ending = target.signal()?.flags().is_ending();

    let mut event = blank(EventKind::SignalGenerate);
    event.slot = process.slot;
    event.tgid = process.tgid;
    event.start_boottime = process.start_boottime;
    event.signal = signal;
    event.flags = EventFlags::default().with_if(ending, EventFlags::GROUP_EXIT);
    if is_from_a_process(ctx.arg(1)) {
        event.sender_tgid = current_tgid();
        event.comm = Task::current().group_leader()?.comm();
        // SAFETY: the helper has no preconditions.
        event.cgroup = unsafe { bpf_get_current_cgroup_id() };
    } else {
        event.flags = event.flags.with(EventFlags::FROM_KERNEL);
    }
    emit(event);
    Some(())
}

/// Whether the process that runs is the sender. Faults, the OOM killer and timers send from
/// whatever happens to run (`SI_FROMUSER`, include/uapi/asm-generic/siginfo.h, and the codes
/// below it).
#[inline(always)]
fn is_from_a_process(info: u64) -> bool {
    const SI_USER: i32 = 0;
    const SI_QUEUE: i32 = -1;
    const SI_TKILL: i32 = -6;
    match info {
        NO_INFO => true,
        FROM_KERNEL => false,
        address => matches!(Address(address).read(&SIGINFO_CODE), Some(SI_USER | SI_QUEUE | SI_TKILL)),
    }
}

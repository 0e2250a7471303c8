//! A watched process runs another program. It is the same process, under a new
//! name: its role may have changed.
//!
//! ```text
//! sched_process_exec(struct task_struct *p, pid_t old_pid, struct linux_binprm *bprm)
//! ```
//!
//! Any other process may have got an environment that declares it a worker. Those are told too, as
//! many as user space has asked for: what a storm of them costs is one load each.

use aya_ebpf::{
    macros::{map, raw_tracepoint},
    maps::Array,
    programs::RawTracePointContext,
};
use lastgasp_ebpf::{EventKind, NO_SLOT};

use super::{
    emit::{emit, event},
    kernel::Address,
    task::{Task, current_tgid},
    watched::Process,
};

/// How many more strangers that exec are to be told. User space fills it up; 0 where nobody may
/// declare anything.
#[map]
static STRANGERS: Array<u32> = Array::with_max_entries(1, 0);

#[raw_tracepoint(tracepoint = "sched_process_exec")]
fn lastgasp_exec(ctx: RawTracePointContext) -> i32 {
    on_exec(&ctx);
    0
}

#[inline(always)]
fn on_exec(ctx: &RawTracePointContext) -> Option<()> {
    // The thread that ran exec is the leader by now.
    let (task, tgid) = (Task(Address(ctx.arg(0))), current_tgid());
    let process = match Process::of(task, tgid) {
        Some(process) => process,
        None => stranger(task, tgid)?,
    };
    emit(event(EventKind::Exec, process));
    Some(())
}

/// A process that nobody watches, while some of them are still to be told.
#[inline(always)]
fn stranger(task: Task, tgid: u32) -> Option<Process> {
    let left = STRANGERS.get_ptr_mut(0)?;
    // SAFETY: the pointer is to a live value of the map, aligned, one plain word. CPUs that count at
    // the same moment may tell a few more than was asked for; nothing depends on the exact number.
    let left = unsafe { &mut *left };
    *left = left.checked_sub(1)?;
    let leader = task.group_leader()?;
    Some(Process { slot: NO_SLOT, tgid, start_boottime: leader.start_boottime()?, leader })
}

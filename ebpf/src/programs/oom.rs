//! The OOM killer has chosen a process (`__oom_kill_process`, mm/oom_kill.c).
//!
//! ```text
//! mark_victim(struct task_struct *task, uid_t uid)   since 2024, also in stable kernels
//! mark_victim(int pid)                               before
//! ```
//!
//! It runs in whoever asked for memory. The victim may be any thread that still
//! has an address space (`find_lock_task_mm`).

use aya_ebpf::{Global, macros::raw_tracepoint, programs::RawTracePointContext};
use lastgasp_ebpf::{EventFlags, EventKind, NO_SLOT};

use super::{
    emit::{blank, emit, event},
    kernel::{Address, Variant},
    task::Task,
    watched::Process,
};

#[unsafe(no_mangle)]
static OOM_HAS_TASK: Variant = Global::new(0);

#[raw_tracepoint(tracepoint = "mark_victim")]
fn lastgasp_oom(ctx: RawTracePointContext) -> i32 {
    if OOM_HAS_TASK.load() != 0 {
        on_task(Task(Address(ctx.arg(0))));
    } else {
        on_thread_id(ctx.arg(0));
    }
    0
}

#[inline(always)]
fn on_task(task: Task) -> Option<()> {
    let process = Process::of(task, task.tgid()?)?;
    let mut event = event(EventKind::MarkVictim, process);
    event.tid = task.tid()?;
    emit(event);
    Some(())
}

/// A thread id alone leads to no task here, so user space looks up whose it is,
/// and whether that is watched. Victims are few.
#[inline(always)]
fn on_thread_id(tid: u32) {
    let mut event = blank(EventKind::MarkVictim);
    event.tid = tid;
    event.slot = NO_SLOT;
    event.flags = EventFlags::TGID_UNKNOWN;
    emit(event);
}

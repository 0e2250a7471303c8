//! A watched process makes a child process, which is watched from birth: the
//! tracepoint fires before the child runs for the first time.
//!
//! ```text
//! sched_process_fork(struct task_struct *parent, struct task_struct *child)
//! ```

use aya_ebpf::{macros::raw_tracepoint, programs::RawTracePointContext};
use lastgasp_ebpf::{EventFlags, EventKind};

use super::{
    emit::{emit, event},
    kernel::Address,
    task::{Leader, Task, current_tgid},
    watched::{Process, watch},
};

#[raw_tracepoint(tracepoint = "sched_process_fork")]
fn lastgasp_fork(ctx: RawTracePointContext) -> i32 {
    on_fork(&ctx);
    0
}

#[inline(always)]
fn on_fork(ctx: &RawTracePointContext) -> Option<()> {
    let parent = Process::of(Task(Address(ctx.arg(0))), current_tgid())?;
    let child_task = Task(Address(ctx.arg(1)));
    let tgid = child_task.tgid()?;
    if tgid == parent.tgid {
        // A thread.
        return None;
    }
    // The first thread of a process is its own leader.
    let leader = Leader(child_task.0);
    let child = Process { slot: parent.slot, tgid, start_boottime: leader.start_boottime()?, leader };
    let watched = watch(child.tgid, child.slot, child.start_boottime);

    let mut event = event(EventKind::Fork, child);
    event.tid = tgid;
    event.parent_tgid = parent.tgid;
    event.flags = EventFlags::default().with_if(!watched, EventFlags::NOT_WATCHED);
    emit(event);
    Some(())
}

//! The last thread of a process enters `do_exit`.
//!
//! ```text
//! up to 6.15: sched_process_exit(struct task_struct *p)
//! from 6.16:  sched_process_exit(struct task_struct *p, bool group_dead)
//! ```

use aya_ebpf::{Global, macros::raw_tracepoint, programs::RawTracePointContext};
use lastgasp_ebpf::{EventFlags, EventKind};

use super::{
    emit::{emit, event},
    kernel::{Address, Variant},
    task::{Task, current_tgid},
    watched::Process,
};

#[unsafe(no_mangle)]
static EXIT_HAS_GROUP_DEAD: Variant = Global::new(0);

#[raw_tracepoint(tracepoint = "sched_process_exit")]
fn lastgasp_exit(ctx: RawTracePointContext) -> i32 {
    on_exit(&ctx);
    0
}

#[inline(always)]
fn on_exit(ctx: &RawTracePointContext) -> Option<()> {
    let group_dead_known = EXIT_HAS_GROUP_DEAD.load() != 0;
    if group_dead_known && ctx.arg::<u8>(1) == 0 {
        return None;
    }
    let task = Task(Address(ctx.arg(0)));
    let process = Process::of(task, current_tgid())?;
    let signal = task.signal()?;
    // Without the argument several threads may read zero: each has decremented
    // before any of them gets here. Whoever removes the entry reports.
    if !group_dead_known && signal.live()? != 0 {
        return None;
    }
    if !process.unwatch() {
        return None;
    }

    // As wait_task_zombie does (kernel/exit.c).
    let exit_code = if signal.flags().is_group_exit() { signal.group_exit_code() } else { process.leader.exit_code() };
    let mut event = event(EventKind::Exit, process);
    event.exit_code = exit_code;
    event.signal = exit_code & 0x7f;
    event.flags = EventFlags::EXITING.with_if(group_dead_known, EventFlags::GROUP_DEAD_KNOWN);
    emit(event);
    Some(())
}

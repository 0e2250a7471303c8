//! A watched process runs another program. It is the same process, under a new
//! name: its role may have changed.
//!
//! ```text
//! sched_process_exec(struct task_struct *p, pid_t old_pid, struct linux_binprm *bprm)
//! ```

use aya_ebpf::{macros::raw_tracepoint, programs::RawTracePointContext};
use lastgasp_ebpf::EventKind;

use super::{
    emit::{emit, event},
    kernel::Address,
    task::{Task, current_tgid},
    watched::Process,
};

#[raw_tracepoint(tracepoint = "sched_process_exec")]
fn lastgasp_exec(ctx: RawTracePointContext) -> i32 {
    on_exec(&ctx);
    0
}

#[inline(always)]
fn on_exec(ctx: &RawTracePointContext) -> Option<()> {
    // The thread that ran exec is the leader by now.
    let process = Process::of(Task(Address(ctx.arg(0))), current_tgid())?;
    emit(event(EventKind::Exec, process));
    Some(())
}

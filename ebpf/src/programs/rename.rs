//! The leader of a watched process gets another `comm`: an engine sets its title
//! (`setproctitle`, `prctl(PR_SET_NAME)`), and with it tells its role.
//!
//! ```text
//! task_rename(struct task_struct *task, const char *comm)
//! ```
//!
//! It fires before the name is copied (`__set_task_comm`, fs/exec.c), so the new
//! one is the argument. The renamed task need not be the one that runs: any thread
//! of a process can write `/proc/self/comm`. But it is of the same process
//! (`comm_write`, fs/proc/base.c), or a kernel thread that its maker names, so the
//! process is known without reading a byte of the task.

use aya_ebpf::{helpers::bpf_probe_read_kernel_str_bytes, macros::raw_tracepoint, programs::RawTracePointContext};
use lastgasp_ebpf::{COMM_BYTES, EventKind};

use super::{
    emit::{emit, event},
    kernel::Address,
    task::{Task, current_tgid},
    watched::Process,
};

#[raw_tracepoint(tracepoint = "task_rename")]
fn lastgasp_rename(ctx: RawTracePointContext) -> i32 {
    on_rename(&ctx);
    0
}

#[inline(always)]
fn on_rename(ctx: &RawTracePointContext) -> Option<()> {
    let task = Task(Address(ctx.arg(0)));
    let process = Process::of(task, current_tgid())?;
    if process.leader.0 != task.0 {
        return None;
    }
    let mut comm = [0; COMM_BYTES];
    // SAFETY: the helper checks the address and fails instead of faulting.
    unsafe { bpf_probe_read_kernel_str_bytes(ctx.arg::<u64>(1) as *const u8, &mut comm) }.ok()?;

    let mut event = event(EventKind::Rename, process);
    event.tid = process.tgid;
    event.comm = comm;
    emit(event);
    Some(())
}

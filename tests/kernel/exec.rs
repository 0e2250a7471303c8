//! A process that runs another program is still the same process.

use lastgasp_ebpf::EventKind;
use nix::sys::signal::Signal;

use crate::harness::{Kernel, Victim};

/// The kernel clears the other threads away with SIGKILL, the first one included.
#[test]
fn exec_by_another_thread_is_no_death() {
    let mut kernel = Kernel::load();
    let mut victim = Victim::start(&["exec-from-thread"]);
    kernel.watch(&victim);
    victim.go();
    assert_eq!(victim.read(), "ready", "the new program runs under the old id");

    let exec = kernel.wait_for_kind(EventKind::Exec, victim.tgid);
    assert_eq!(exec.start_ticks(), victim.start_ticks);
    assert_eq!(kernel.of(EventKind::Exit, victim.tgid), []);
    assert_eq!(kernel.of(EventKind::SignalDeliver, victim.tgid), []);

    victim.kill(Signal::SIGKILL);
    victim.wait();
    let exits = kernel.of(EventKind::Exit, victim.tgid);
    assert_eq!(exits.len(), 1, "{exits:#?}");
    assert_eq!(exits[0].start_boottime, exec.start_boottime);
}

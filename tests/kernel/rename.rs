//! A process tells its role by its title.

use lastgasp_ebpf::EventKind;

use crate::harness::{Kernel, SLOT, Victim};

#[test]
fn a_title_is_seen_when_it_is_set() {
    let mut kernel = Kernel::load();
    let mut victim = Victim::start(&["rename", "VLLM::EngineCore"]);
    kernel.watch(&victim);

    victim.go();
    assert_eq!(victim.read(), "other");
    assert_eq!(kernel.of(EventKind::Rename, victim.tgid), [], "a thread's name is not the process's");

    victim.go();
    assert_eq!(victim.read(), "leader");
    let renamed = kernel.wait_for_kind(EventKind::Rename, victim.tgid);
    // 15 bytes and a zero are all that a comm holds.
    assert_eq!(renamed.comm(), b"VLLM::EngineCor");
    assert_eq!((renamed.slot, renamed.start_ticks()), (SLOT, victim.start_ticks));

    // The thread that is renamed need not be the one that runs.
    victim.go();
    assert_eq!(victim.read(), "by a thread");
    kernel.wait_for("rename by a thread", |event| {
        event.kind() == Some(EventKind::Rename) && event.tgid == victim.tgid && event.comm() == b"by a thread"
    });

    victim.go();
    victim.wait();
    assert_eq!(kernel.wait_for_kind(EventKind::Exit, victim.tgid).comm(), b"by a thread");
}

//! Children of a watched process are watched from birth.

use lastgasp_ebpf::EventKind;

use crate::harness::{Kernel, SLOT, Victim};

#[test]
fn a_child_is_watched_before_it_runs() {
    let mut kernel = Kernel::load();
    let mut parent = Victim::start(&["fork"]);
    kernel.watch(&parent);
    for _ in 0..5 {
        parent.go();
        let child = parent.read_number("child ");
        let exit = kernel.wait_for_kind(EventKind::Exit, child);

        let [fork] = kernel.of(EventKind::Fork, child)[..] else { panic!("one fork per child") };
        assert_eq!(fork.parent_tgid, parent.tgid);
        assert_eq!((fork.slot, exit.slot), (SLOT, SLOT));
        assert_eq!(fork.start_boottime, exit.start_boottime, "one identity from birth to death");
        assert!(fork.start_ticks() >= parent.start_ticks);
        assert_eq!(kernel.of(EventKind::Exec, child).len(), 1);
        let kinds: Vec<_> =
            kernel.seen().iter().filter(|event| event.tgid == child).map(|event| event.kind()).collect();
        assert_eq!(kinds.first(), Some(&Some(EventKind::Fork)));
        assert_eq!(kinds.last(), Some(&Some(EventKind::Exit)));
    }
    assert_eq!(kernel.programs.watched_processes().map(|(tgid, _)| tgid).collect::<Vec<_>>(), [parent.tgid]);
}

#[test]
fn a_thread_is_no_child() {
    let mut kernel = Kernel::load();
    let mut victim = Victim::start(&["rename", "a-thread"]);
    kernel.watch(&victim);
    victim.go();
    assert_eq!(victim.read(), "other", "a thread was made and is gone");
    assert_eq!(kernel.seen(), []);
}

//! A process that runs another program is still the same process.

use std::process::Command;

use lastgasp_ebpf::{EventKind, NO_SLOT};
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

/// Any process may have declared itself a worker by its new environment.
#[test]
fn an_exec_of_nobodys_process_is_told_while_it_is_asked_for() {
    let mut kernel = Kernel::load();
    let exec = |kernel: &mut Kernel| {
        let mut victim = Victim::start(&["exec-from-thread"]);
        victim.go();
        assert_eq!(victim.read(), "ready", "it runs the new program");
        let seen = kernel.of(EventKind::Exec, victim.tgid);
        (victim, seen)
    };
    assert_eq!(exec(&mut kernel).1, [], "nobody has asked");

    // Everybody else who calls exec on this machine counts, too.
    kernel.programs.tell_strangers(u16::MAX).expect("root may");
    let (victim, seen) = exec(&mut kernel);
    let seen = seen.last().expect("it was asked for");
    assert_eq!((seen.slot, seen.start_ticks(), seen.comm()), (NO_SLOT, victim.start_ticks, b"victim".as_slice()));

    assert_ne!(kernel.programs.tell_strangers(0).expect("root may"), 0, "some were left");
    assert_eq!(exec(&mut kernel).1, [], "no more of them");
}

#[test]
fn a_storm_of_execs_makes_as_many_events_as_were_asked_for() {
    const ASKED: u16 = 5;
    let mut kernel = Kernel::load();
    kernel.programs.tell_strangers(ASKED).expect("root may");
    for _ in 0..50 {
        assert!(Command::new("true").status().expect("every system has it").success());
    }
    let seen = kernel.seen().iter().filter(|event| event.slot == NO_SLOT && event.kind() == Some(EventKind::Exec));
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let seen = seen.count();
    assert!((usize::from(ASKED)..=usize::from(ASKED) * cpus).contains(&seen), "{seen}");
    assert_eq!(kernel.programs.tell_strangers(0).expect("root may"), 0, "none is left");
}

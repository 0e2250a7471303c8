//! One process, one exit.

use std::process::Command;

use lastgasp::sensors::ebpf::LoadOptions;
use lastgasp_ebpf::{EventFlags, EventKind};
use nix::sys::signal::Signal;

use crate::harness::{Kernel, SLOT, Victim, until};

fn threads_exit_together(kernel: &mut Kernel) {
    let cpus = std::thread::available_parallelism().map_or(2, usize::from);
    for _ in 0..50 {
        let mut victim = Victim::start(&["threads-exit", &(10 * cpus).to_string()]);
        kernel.watch(&victim);
        victim.go();
        victim.wait();
        let exits = kernel.of(EventKind::Exit, victim.tgid);
        assert_eq!(exits.len(), 1, "{exits:#?}");
        assert_eq!(exits[0].slot, SLOT);
        assert_eq!(exits[0].start_ticks(), victim.start_ticks);
        assert_eq!(kernel.programs.watched(victim.tgid), None, "an exit ends the watch");
    }
}

#[test]
fn threads_that_exit_together_are_one_exit() {
    threads_exit_together(&mut Kernel::load());
}

/// Several threads find `signal->live` zero at the same time.
#[test]
fn threads_that_exit_together_are_one_exit_on_older_kernels() {
    let options = LoadOptions { ignore_group_dead: true, ..LoadOptions::default() };
    threads_exit_together(&mut Kernel::load_with(&options));
}

#[test]
fn a_leader_that_leaves_first_is_no_exit() {
    let mut kernel = Kernel::load();
    let mut victim = Victim::start(&["leader-exits-first"]);
    kernel.watch(&victim);
    until("the leader has left", || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", victim.tgid)).expect("not waited for");
        stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('Z')).then_some(())
    });
    assert_eq!(kernel.of(EventKind::Exit, victim.tgid), []);

    victim.go();
    victim.wait();
    let exits = kernel.of(EventKind::Exit, victim.tgid);
    assert_eq!(exits.len(), 1, "{exits:#?}");
    assert_ne!(exits[0].tid, victim.tgid, "the last thread is not the leader");
    assert_eq!(exits[0].start_ticks(), victim.start_ticks, "yet the identity is the leader's");
    assert_eq!(exits[0].comm(), b"victim");
}

#[test]
fn an_exit_carries_the_wait_status() {
    let mut kernel = Kernel::load();

    let mut exits = Victim::start(&["exit", "42"]);
    kernel.watch(&exits);
    exits.go();
    let status = exits.wait_raw();
    let event = kernel.wait_for_kind(EventKind::Exit, exits.tgid);
    assert_eq!(event.exit_code, status);
    assert_eq!((event.exit_code, event.signal), (42 << 8, 0));
    assert!(event.flags.contains(EventFlags::EXITING));

    let mut killed = Victim::start(&["threads", "3"]);
    kernel.watch(&killed);
    killed.kill(Signal::SIGUSR1);
    let status = killed.wait_raw();
    let event = kernel.wait_for_kind(EventKind::Exit, killed.tgid);
    assert_eq!(event.exit_code, status);
    assert_eq!(event.signal, Signal::SIGUSR1 as u32);
}

#[test]
fn processes_that_nobody_watches_are_silent() {
    let mut kernel = Kernel::load();
    let mut watched = Victim::start(&["exit", "0"]);
    kernel.watch(&watched);
    for _ in 0..50 {
        let status = Command::new("/bin/true").status().expect("every system has it");
        assert!(status.success());
        Victim::start(&["exit", "0"]).kill(Signal::SIGTERM);
    }
    watched.go();
    watched.wait();
    // Everything before the end of the one that is watched is in the ring.
    kernel.wait_for_kind(EventKind::Exit, watched.tgid);
    let others: Vec<_> = kernel.seen().iter().filter(|event| event.tgid != watched.tgid).collect();
    assert!(others.is_empty(), "{others:#?}");
}

/// A pid is used again after the exit of its predecessor was missed.
#[test]
fn a_watch_on_a_predecessor_does_not_match() {
    let mut kernel = Kernel::load();
    let mut victim = Victim::start(&["threads", "2"]);
    let predecessor = victim.start_ticks - 1;
    kernel.programs.watch(victim.tgid, SLOT, predecessor).expect("there is room");
    victim.kill(Signal::SIGKILL);
    victim.wait();
    assert_eq!(kernel.seen(), []);

    // And only that incarnation can be unwatched.
    kernel.programs.unwatch(victim.tgid, victim.start_ticks).expect("permitted");
    assert!(kernel.programs.watched(victim.tgid).is_some());
    kernel.programs.unwatch(victim.tgid, predecessor).expect("permitted");
    assert_eq!(kernel.programs.watched(victim.tgid), None);
    kernel.programs.unwatch(victim.tgid, predecessor).expect("unknown ones are no error");
}

//! A fatal signal is seen when it arrives, before the kernel tears the process down.

use std::{path::Path, process::Command};

use lastgasp_ebpf::{Event, EventFlags, EventKind};
use nix::{
    sys::{
        signal::Signal,
        wait::{Id, WaitPidFlag, waitid},
    },
    time::{ClockId, clock_gettime},
};

use crate::harness::{Kernel, Victim};

/// The only fatal signal seen, and the exit that followed.
fn died(kernel: &mut Kernel, victim: &Victim) -> (Event, Event) {
    let delivered = kernel.of(EventKind::SignalDeliver, victim.tgid);
    let exits = kernel.of(EventKind::Exit, victim.tgid);
    match (&delivered[..], &exits[..]) {
        ([delivered], [exit]) => (*delivered, *exit),
        _ => panic!("one of each, not {delivered:#?} and {exits:#?}"),
    }
}

#[test]
fn a_kill_is_delivered_and_then_the_process_exits() {
    let mut kernel = Kernel::load();
    let mut victim = Victim::start(&["exit", "0"]);
    kernel.watch(&victim);
    victim.kill(Signal::SIGKILL);
    victim.wait();
    let (delivered, exit) = died(&mut kernel, &victim);
    assert_eq!(delivered.signal, Signal::SIGKILL as u32);
    assert!(delivered.flags.contains(EventFlags::GROUP_EXIT));
    assert!(!delivered.flags.contains(EventFlags::UNKILLABLE));
    assert_eq!(delivered.start_boottime, exit.start_boottime);
    assert!(delivered.at <= exit.at);
}

#[test]
fn a_kill_of_many_threads_is_told_once() {
    let mut kernel = Kernel::load();
    for _ in 0..5 {
        let mut victim = Victim::start(&["threads", "300"]);
        kernel.watch(&victim);
        victim.kill(Signal::SIGKILL);
        victim.wait();
        died(&mut kernel, &victim);
    }
}

/// It is delivered as SIGKILL; which signal it was is in the wait status.
#[test]
fn a_terminate_without_a_handler_is_fatal() {
    let mut kernel = Kernel::load();
    let mut victim = Victim::start(&["threads", "7"]);
    kernel.watch(&victim);
    victim.kill(Signal::SIGTERM);
    victim.wait();
    let (delivered, exit) = died(&mut kernel, &victim);
    assert_eq!(delivered.signal, Signal::SIGKILL as u32);
    assert_eq!(delivered.exit_code, Signal::SIGTERM as u32);
    assert_eq!(exit.exit_code, Signal::SIGTERM as u32);
}

#[test]
fn an_exit_of_many_threads_is_not_taken_for_a_signal() {
    let mut kernel = Kernel::load();
    let mut victim = Victim::start(&["threads", "7", "5"]);
    kernel.watch(&victim);
    victim.go();
    victim.wait();
    // The other threads get SIGKILL from exit_group, if they come to see it at all.
    for event in kernel.of(EventKind::SignalDeliver, victim.tgid) {
        assert_eq!((event.signal, event.flags, event.exit_code), (0, EventFlags::GROUP_EXIT, 5 << 8));
    }
    assert_eq!(kernel.wait_for_kind(EventKind::Exit, victim.tgid).exit_code, 5 << 8);
}

#[test]
fn signals_that_do_not_kill_are_silent() {
    let mut kernel = Kernel::load();
    let mut victim = Victim::start(&["ignore-term"]);
    kernel.watch(&victim);
    for signal in [Signal::SIGTERM, Signal::SIGSTOP, Signal::SIGCONT, Signal::SIGWINCH, Signal::SIGCHLD, Signal::SIGURG]
    {
        victim.kill(signal);
    }
    victim.go();
    victim.wait();
    assert_eq!(kernel.of(EventKind::SignalDeliver, victim.tgid), []);
    kernel.wait_for_kind(EventKind::Exit, victim.tgid);
}

/// An engine that handles SIGTERM is asked to leave. It decides itself when it goes.
#[test]
fn a_handled_terminate_is_a_request() {
    let mut kernel = Kernel::load();
    let mut victim = Victim::start(&["handle-term"]);
    kernel.watch(&victim);
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        victim.kill(signal);
        let asked = kernel.wait_for("request", |event| {
            event.kind() == Some(EventKind::SignalDeliver) && event.signal == signal as u32
        });
        assert_eq!(asked.flags, EventFlags::default(), "the default action does not follow");
        assert_eq!((asked.tgid, asked.start_ticks()), (victim.tgid, victim.start_ticks));
    }
    // Another signal with a handler says nothing.
    victim.kill(Signal::SIGUSR1);
    victim.go();
    victim.wait();
    assert_eq!(kernel.of(EventKind::SignalDeliver, victim.tgid).len(), 2);
    assert_eq!(kernel.wait_for_kind(EventKind::Exit, victim.tgid).exit_code, 0);
}

/// An init may get a signal whose default action is to die, and not die.
#[test]
fn an_init_that_cannot_be_killed_is_marked() {
    let mut kernel = Kernel::load();
    let mut victim = Victim::start(&["init"]);
    kernel.watch(&victim);
    victim.go();
    assert_eq!(victim.read(), "survived");
    let delivered = kernel.wait_for("a signal", |event| event.kind() == Some(EventKind::SignalDeliver));
    assert_eq!(delivered.signal, Signal::SIGTERM as u32);
    assert!(delivered.flags.contains(EventFlags::UNKILLABLE));
    assert!(!delivered.flags.contains(EventFlags::GROUP_EXIT));
    assert_eq!(kernel.of(EventKind::Exit, delivered.tgid), [], "it lives");
}

/// While the kernel writes a core, the process looks alive to everybody else.
#[test]
fn a_core_dump_does_not_hide_the_death() {
    const MIB: u64 = 256;
    let pattern = std::fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap_or_default();
    if pattern.trim().is_empty() || pattern.starts_with(['|', '/', '@']) {
        lastgasp_tests::skip!("cores do not go into the working directory: core_pattern is {pattern:?}");
    }
    let directory = tempfile::tempdir().expect("a place for the core");
    let mut kernel = Kernel::load();
    let mut command = Command::new(Victim::program());
    let mut victim = Victim::start_by(command.current_dir(&directory), &["segv", &MIB.to_string()]);
    kernel.watch(&victim);
    // The parent is notified where pidfds are woken, in exit_notify.
    let pid = victim.pid();
    let waiting = std::thread::spawn(move || {
        waitid(Id::Pid(pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT).expect("it is a child");
        monotonic_nanos()
    });
    victim.go();
    let delivered = kernel.wait_for_kind(EventKind::SignalDeliver, victim.tgid);
    assert_eq!(delivered.signal, Signal::SIGSEGV as u32);
    assert_eq!(delivered.flags, EventFlags::HANDLER_DEFAULT, "nothing has ended yet");
    let parent_told = waiting.join().expect("waiting does not panic");
    let status = victim.wait_raw();
    assert_eq!(status, Signal::SIGSEGV as u32 | 0x80, "a core was written");

    let exit = kernel.wait_for_kind(EventKind::Exit, victim.tgid);
    assert_eq!(exit.exit_code, status);
    assert!(delivered.at < exit.at && exit.at < parent_told);
    // What lies between the two is the core, all of it.
    assert!(core_bytes(directory.path()) >= MIB << 20);
    eprintln!(
        "a core of {MIB} MiB: exit {:.1} ms and parent notified {:.1} ms after the signal was seen",
        (exit.at - delivered.at) as f64 / 1e6,
        (parent_told - delivered.at) as f64 / 1e6
    );
}

fn core_bytes(directory: &Path) -> u64 {
    let files = std::fs::read_dir(directory).expect("it was just made");
    files.map(|file| file.and_then(|file| file.metadata()).map_or(0, |file| file.len())).max().unwrap_or(0)
}

fn monotonic_nanos() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("every system has this clock");
    now.tv_sec() as u64 * 1_000_000_000 + now.tv_nsec() as u64
}

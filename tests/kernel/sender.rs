//! Who sent a signal.

use std::process::Command;

use lastgasp_ebpf::{Event, EventFlags, EventKind};
use nix::sys::signal::Signal;

use crate::harness::{Kernel, SLOT, Victim, start_ticks};

fn sent(kernel: &mut Kernel, tgid: u32, signal: Signal) -> Event {
    kernel.wait_for("sender", |event| {
        event.kind() == Some(EventKind::SignalGenerate) && event.tgid == tgid && event.signal == signal as u32
    })
}

#[test]
fn the_murderer_is_named() {
    let mut kernel = Kernel::load();
    let mut victim = Victim::start(&["threads", "3"]);
    kernel.watch(&victim);
    let mut murderer = Command::new("sh");
    let murderer = murderer.args(["-c", "kill -9 $0", &victim.tgid.to_string()]).spawn().expect("a shell");
    let sent = sent(&mut kernel, victim.tgid, Signal::SIGKILL);
    assert_eq!((sent.sender_tgid, sent.comm()), (murderer.id(), b"sh".as_slice()));
    assert_eq!((sent.slot, sent.start_ticks()), (SLOT, victim.start_ticks));
    assert_eq!(sent.flags, EventFlags::GROUP_EXIT, "nothing can stop this one");
    assert!(sent.cgroup > 0, "every process has one");
    victim.wait();
    let mut murderer = murderer;
    assert!(murderer.wait().is_ok_and(|status| status.success()));
}

#[test]
fn an_abort_comes_from_the_process_itself() {
    let mut kernel = Kernel::load();
    let mut victim = Victim::start(&["abort"]);
    kernel.watch(&victim);
    victim.go();
    victim.wait();
    let sent = sent(&mut kernel, victim.tgid, Signal::SIGABRT);
    assert_eq!((sent.sender_tgid, sent.comm()), (victim.tgid, b"victim".as_slice()));
    let exit = kernel.wait_for_kind(EventKind::Exit, victim.tgid);
    assert_eq!(exit.signal, Signal::SIGABRT as u32);
}

#[test]
fn a_fault_comes_from_the_kernel() {
    let mut kernel = Kernel::load();
    let mut victim = Victim::start(&["fault"]);
    kernel.watch(&victim);
    victim.go();
    victim.wait();
    let sent = sent(&mut kernel, victim.tgid, Signal::SIGSEGV);
    assert!(sent.flags.contains(EventFlags::FROM_KERNEL));
    assert_eq!((sent.sender_tgid, sent.comm()), (0, b"".as_slice()));
}

/// `group_send_sig_info` with the sentinel that stands for the sender's siginfo: a parent's death signal.
#[test]
fn a_signal_without_siginfo_comes_from_who_runs() {
    let mut kernel = Kernel::load();
    let mut parent = Victim::start(&["death-signal"]);
    let child: u32 = parent.said.parse().expect("a pid");
    let ticks = start_ticks(child).expect("it waits");
    kernel.programs.watch(child, SLOT, ticks).expect("there is room");
    parent.kill(Signal::SIGKILL);
    parent.wait();
    let sent = sent(&mut kernel, child, Signal::SIGTERM);
    assert!(!sent.flags.contains(EventFlags::FROM_KERNEL));
    assert_eq!(sent.sender_tgid, parent.tgid);
    kernel.wait_for_kind(EventKind::Exit, child);
}

#[test]
fn what_is_ignored_or_only_stops_a_while_is_told_apart() {
    let mut kernel = Kernel::load();
    let mut victim = Victim::start(&["ignore-term"]);
    kernel.watch(&victim);
    victim.kill(Signal::SIGTERM);
    victim.kill(Signal::SIGCHLD);
    victim.kill(Signal::SIGWINCH);
    victim.kill(Signal::SIGSTOP);
    let stop = sent(&mut kernel, victim.tgid, Signal::SIGSTOP);
    assert_eq!(stop.sender_tgid, std::process::id());
    victim.kill(Signal::SIGCONT);
    victim.go();
    victim.wait();
    let signals: Vec<_> = kernel.of(EventKind::SignalGenerate, victim.tgid).iter().map(|event| event.signal).collect();
    assert_eq!(signals, [Signal::SIGSTOP as u32], "the ignored ones never reached it");
}

/// A supervisor may wait for signals with `sigwait`, so that none is ever delivered.
#[test]
fn signals_alone_are_told_of_a_supervisor() {
    let mut kernel = Kernel::load();
    let mut supervisor = Victim::start(&["sigwait-term"]);
    kernel.programs.watch_signals(supervisor.tgid, SLOT, supervisor.start_ticks).expect("there is room");
    supervisor.kill(Signal::SIGTERM);
    let sent = sent(&mut kernel, supervisor.tgid, Signal::SIGTERM);
    assert_eq!((sent.slot, sent.flags), (SLOT, EventFlags::default()));
    let child = supervisor.read_number("child ");
    supervisor.wait();
    assert_eq!(kernel.seen().len(), 1, "neither its child nor its exit");
    assert_eq!(kernel.programs.watched(child), None);
}

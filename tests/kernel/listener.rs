//! A serving port closes.

use lastgasp_ebpf::{Event, EventFlags, EventKind};
use nix::sys::signal::Signal;

use crate::harness::{Kernel, SLOT, Victim, netns};

const PORT_SLOT: u32 = 12;

fn is_close_of(port: u32) -> impl Fn(&Event) -> bool {
    move |event| event.kind() == Some(EventKind::ListenerClosed) && event.port == port
}

/// The port is the kernel's choice, which it has forgotten in one of its two
/// places when the socket closes.
#[test]
fn a_living_process_closes_its_port() {
    let mut kernel = Kernel::load();
    let mut victim = Victim::start(&["listen"]);
    let port: u16 = victim.said.parse().expect("a port");
    let netns = netns(victim.tgid);
    kernel.programs.watch_port(netns, port, PORT_SLOT).expect("there is room");
    victim.go();
    assert_eq!(victim.read(), "closed");
    let closed = kernel.wait_for("closed port", is_close_of(port.into()));
    assert_eq!((closed.slot, closed.netns, closed.tgid), (PORT_SLOT, netns, victim.tgid));
    assert_eq!(closed.start_ticks(), victim.start_ticks);
    assert_eq!(closed.flags, EventFlags::PORT_WATCHED);
}

#[test]
fn a_dying_process_closes_its_port() {
    let mut kernel = Kernel::load();
    let mut victim = Victim::start(&["listen"]);
    let port: u16 = victim.said.parse().expect("a port");
    kernel.programs.watch_port(netns(victim.tgid), port, PORT_SLOT).expect("there is room");
    victim.kill(Signal::SIGKILL);
    victim.wait();
    let closed = kernel.wait_for("closed port", is_close_of(port.into()));
    assert_eq!((closed.slot, closed.tgid), (PORT_SLOT, victim.tgid));
    assert!(closed.flags.contains(EventFlags::EXITING));
}

#[test]
fn a_watched_process_closes_a_port_that_nobody_registered() {
    let mut kernel = Kernel::load();
    let mut victim = Victim::start(&["listen"]);
    let port: u32 = victim.said.parse().expect("a port");
    kernel.watch(&victim);
    victim.go();
    assert_eq!(victim.read(), "closed");
    let closed = kernel.wait_for("closed port", is_close_of(port));
    assert_eq!(closed.slot, SLOT);
    assert_eq!(closed.flags, EventFlags::OWNER_WATCHED);
}

#[test]
fn a_port_is_watched_in_its_network_namespace_only() {
    let mut kernel = Kernel::load();
    let mut here = Victim::start(&["listen"]);
    let port: u16 = here.said.parse().expect("a port");
    let mut elsewhere = Victim::start(&["listen-elsewhere", &port.to_string()]);
    kernel.programs.watch_port(netns(elsewhere.tgid), port, PORT_SLOT).expect("there is room");

    here.go();
    assert_eq!(here.read(), "closed");
    assert_eq!(kernel.seen(), []);

    elsewhere.go();
    assert_eq!(elsewhere.read(), "closed");
    let closed = kernel.wait_for("closed port", is_close_of(port.into()));
    assert_eq!((closed.tgid, closed.netns), (elsewhere.tgid, netns(elsewhere.tgid)));
}

#[test]
fn a_port_that_is_no_longer_watched_is_silent() {
    let mut kernel = Kernel::load();
    let mut victim = Victim::start(&["listen"]);
    let port: u16 = victim.said.parse().expect("a port");
    let netns = netns(victim.tgid);
    kernel.programs.watch_port(netns, port, PORT_SLOT).expect("there is room");
    kernel.programs.unwatch_port(netns, port).expect("permitted");
    kernel.programs.unwatch_port(netns, port).expect("unknown ones are no error");
    victim.go();
    assert_eq!(victim.read(), "closed");
    assert_eq!(kernel.seen(), []);
}

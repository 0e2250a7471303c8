//! TCP resets of watched ports, one story per row of the table of what the kernel does.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};

use lastgasp::sensors::ebpf::KernelProgram;
use lastgasp_ebpf::{Event, EventFlags, EventKind, RESET_WINDOW};
use nix::sys::signal::Signal;
use nix::sys::socket::{setsockopt, sockopt};

use crate::harness::{Kernel, Victim, netns, until};

const PORT_SLOT: u32 = 21;

const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

fn watch(kernel: &mut Kernel, port: u16) {
    kernel.programs.watch_port(netns(std::process::id()), port, PORT_SLOT).expect("there is room");
}

fn wait(kernel: &mut Kernel, kind: EventKind) -> Event {
    kernel.wait_for(kind.as_str(), |event| event.kind() == Some(kind))
}

fn peer(event: &Event) -> SocketAddr {
    SocketAddr::new(Ipv6Addr::from(event.peer).to_canonical(), event.peer_port as u16)
}

/// The kernel's reason, for kernels that give one.
fn assert_reason(kernel: &Kernel, event: &Event, expected: &[&str]) {
    if event.flags.contains(EventFlags::REASON_KNOWN) {
        let reason = kernel.programs.reset_reason(event.reason).unwrap_or("a number without a name");
        assert!(expected.contains(&reason), "{reason}");
    }
}

/// A connection that is closed like this sends a reset instead of a FIN.
fn close_rudely(stream: TcpStream) {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    setsockopt(&stream, sockopt::Linger, &linger).expect("a socket option");
    drop(stream);
}

/// A listener of this test's own, on a port that is watched.
fn listener(kernel: &mut Kernel, address: IpAddr) -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind((address, 0)).expect("a port");
    let address = listener.local_addr().expect("it is bound");
    watch(kernel, address.port());
    (listener, address)
}

fn a_rude_client(address: IpAddr, connect_to: IpAddr) {
    let mut kernel = Kernel::load();
    let (listener, bound) = listener(&mut kernel, address);
    let client = TcpStream::connect((connect_to, bound.port())).expect("it listens");
    let local = client.local_addr().expect("it is connected");
    let (_accepted, _) = listener.accept().expect("it is there");
    close_rudely(client);
    let reset = wait(&mut kernel, EventKind::TcpResetReceived);
    assert_eq!((reset.slot, reset.port, reset.count), (PORT_SLOT, bound.port().into(), 1));
    assert_eq!(reset.netns, netns(std::process::id()));
    assert_eq!(peer(&reset), local);
}

#[test]
fn a_rude_client_over_ipv4() {
    a_rude_client(LOCALHOST, LOCALHOST);
}

#[test]
fn a_rude_client_over_ipv6() {
    a_rude_client(Ipv6Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into());
}

#[test]
fn a_rude_client_over_ipv4_at_an_ipv6_socket() {
    a_rude_client(Ipv6Addr::UNSPECIFIED.into(), LOCALHOST);
}

/// `tcp_send_reset` with `sk == NULL`: before Linux 6.10 there is no such event.
fn nobody_listens(address: IpAddr) {
    let mut kernel = Kernel::load();
    let (listener, bound) = listener(&mut kernel, address);
    drop(listener);
    let refused = TcpStream::connect(bound).expect_err("nobody listens");
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
    let reported =
        |kernel: &mut Kernel| kernel.seen().iter().find(|event| event.kind() == Some(EventKind::TcpResetSent)).copied();
    let Some(reset) = reported(&mut kernel) else {
        assert!(!kernel.programs.gives_reset_reasons(), "this kernel tells of a reset without a socket");
        return;
    };
    assert_eq!((reset.slot, reset.port), (PORT_SLOT, bound.port().into()));
    assert_eq!(peer(&reset).ip(), address);
    assert_ne!(reset.peer_port, 0);
    assert_reason(&kernel, &reset, &["no_socket"]);
}

#[test]
fn nobody_listens_over_ipv4() {
    nobody_listens(LOCALHOST);
}

#[test]
fn nobody_listens_over_ipv6() {
    nobody_listens(Ipv6Addr::LOCALHOST.into());
}

#[test]
fn a_server_that_dies_with_unread_data_resets() {
    let mut kernel = Kernel::load();
    let mut victim = Victim::start(&["accept"]);
    let port: u16 = victim.said.parse().expect("a port");
    watch(&mut kernel, port);
    let mut client = TcpStream::connect((LOCALHOST, port)).expect("it listens");
    victim.read_number("accepted ");
    client.write_all(b"never read").expect("it is connected");
    victim.kill(Signal::SIGKILL);
    victim.wait();
    let reset = wait(&mut kernel, EventKind::TcpResetSent);
    assert_eq!((reset.slot, reset.port), (PORT_SLOT, port.into()));
    assert_eq!(peer(&reset), client.local_addr().expect("it was connected"));
    assert_reason(&kernel, &reset, &["tcp_abort_on_close", "not_specified"]);
    assert!(client.read(&mut [0; 1]).is_err(), "the client was reported");
}

#[test]
fn a_server_that_dies_with_connections_that_it_has_not_accepted_resets() {
    let mut kernel = Kernel::load();
    let mut victim = Victim::start(&["listen"]);
    let port: u16 = victim.said.parse().expect("a port");
    watch(&mut kernel, port);
    let _clients: Vec<_> = (0..3).map(|_| TcpStream::connect((LOCALHOST, port)).expect("it listens")).collect();
    victim.kill(Signal::SIGKILL);
    victim.wait();
    let reset = wait(&mut kernel, EventKind::TcpResetSent);
    assert_eq!((reset.slot, reset.port), (PORT_SLOT, port.into()));
    assert_reason(&kernel, &reset, &["tcp_state", "tcp_abort_on_close", "not_specified"]);
}

/// The mini-socket of a connection that is over.
#[test]
fn data_for_a_connection_that_is_over_is_answered_by_a_reset() {
    let mut kernel = Kernel::load();
    let mut victim = Victim::start(&["accept"]);
    let port: u16 = victim.said.parse().expect("a port");
    watch(&mut kernel, port);
    let mut client = TcpStream::connect((LOCALHOST, port)).expect("it listens");
    victim.read_number("accepted ");
    victim.kill(Signal::SIGKILL);
    victim.wait();
    assert_eq!(client.read(&mut [0; 1]).expect("a FIN, as nothing was unread"), 0);
    assert_eq!(kernel.seen().iter().filter(|event| is_reset(event)).count(), 0, "a FIN is no reset");
    client.write_all(b"hello?").expect("the socket is half open");
    let reported = until_told(&mut kernel);
    let Some(reset) = reported else {
        assert!(!kernel.programs.gives_reset_reasons(), "this kernel tells of mini-sockets");
        return;
    };
    assert_eq!((reset.slot, reset.port), (PORT_SLOT, port.into()));
    assert_eq!(peer(&reset), client.local_addr().expect("it was connected"));
}

fn is_reset(event: &Event) -> bool {
    matches!(event.kind(), Some(EventKind::TcpResetSent | EventKind::TcpResetReceived))
}

/// The reset that answers what a client has just sent; the client's own error says that it came.
fn until_told(kernel: &mut Kernel) -> Option<Event> {
    kernel.seen().iter().find(|event| event.kind() == Some(EventKind::TcpResetSent)).copied()
}

#[test]
fn resets_of_other_ports_and_of_the_clients_side_are_silent() {
    let mut kernel = Kernel::load();
    let other = TcpListener::bind((LOCALHOST, 0)).expect("a port");
    let client = TcpStream::connect(other.local_addr().expect("it is bound")).expect("it listens");
    drop(other.accept().expect("it is there"));
    close_rudely(client);
    drop(other);
    assert_eq!(kernel.seen(), []);
}

/// What a port scanner or a client without manners can do costs an event a second.
#[test]
fn thousands_of_resets_are_few_events_and_all_are_counted() {
    const CLIENTS: u64 = 3000;
    let mut kernel = Kernel::load();
    let (listener, bound) = listener(&mut kernel, LOCALHOST);
    let begin = std::time::Instant::now();
    let rude = |_| {
        let client = TcpStream::connect(bound).expect("it listens");
        let accepted = listener.accept().expect("it is there");
        close_rudely(client);
        accepted
    };
    (0..CLIENTS).map(rude).for_each(drop);
    // Those of a window are reported by the first one after it.
    let resets = until("they are reported", || {
        drop(rude(0));
        let resets: Vec<_> = kernel.seen().iter().filter(|event| is_reset(event)).copied().collect();
        let reported: u64 = resets.iter().map(|event| u64::from(event.count)).sum();
        (reported > CLIENTS * 9 / 10).then_some(resets)
    });
    let windows = begin.elapsed().as_nanos() as u64 / RESET_WINDOW + 1;
    let cpus = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    assert!(resets.len() as u64 <= windows * cpus, "{} events in {windows} windows", resets.len());
    assert!(kernel.programs.is_on(KernelProgram::TcpResetReceived));
}

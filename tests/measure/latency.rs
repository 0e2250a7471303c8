//! From the kill to the evidence, three ways.

use std::io::Read as _;
use std::net::TcpStream;
use std::process::Command;
use std::time::Instant;

use lastgasp::core::ProcessId;
use lastgasp::sensors::pidfd::PidFd;
use lastgasp::sensors::proc::monotonic_now;
use lastgasp_ebpf::EventKind;
use nix::sys::signal::Signal;

use crate::harness::{Kernel, Victim};
use crate::median;

/// Milliseconds from just before `kill()`.
#[derive(Clone, Copy)]
struct Seen {
    /// The kernel program ran.
    hook: f64,
    /// Its event was read.
    event: f64,
    /// The pidfd was readable.
    pidfd: f64,
    /// The peer of a connection read its end.
    socket: f64,
}

pub(crate) fn main(rounds: usize, resident: usize, core: usize) {
    println!(
        "{:<28} {:>12} {:>12} {:>12} {:>14}",
        "ms after kill()", "hook ran", "event read", "pidfd", "socket closed"
    );
    for (name, mib, signal) in [
        ("small process, SIGKILL".to_owned(), 1, Signal::SIGKILL),
        (format!("{resident} MiB resident, SIGKILL"), resident, Signal::SIGKILL),
        (format!("{core} MiB core, SIGSEGV"), core, Signal::SIGSEGV),
    ] {
        let kills: Vec<Seen> = (0..rounds).map(|_| kill(mib, signal)).collect();
        let of = |field: fn(&Seen) -> f64| median(kills.iter().map(field).collect());
        let (hook, event) = (of(|seen| seen.hook), of(|seen| seen.event));
        let (pidfd, socket) = (of(|seen| seen.pidfd), of(|seen| seen.socket));
        println!("{name:<28} {hook:>12.3} {event:>12.3} {pidfd:>12.3} {socket:>14.3}");
    }
    println!("medians of {rounds} kills");
}

fn kill(mib: usize, signal: Signal) -> Seen {
    let folder = tempfile::tempdir().expect("a place for the core");
    let mut kernel = Kernel::load();
    let mut command = Command::new(Victim::program());
    let mut victim = Victim::start_by(command.current_dir(&folder), &["serve", &mib.to_string()]);
    kernel.watch(&victim);
    let port: u16 = victim.said.parse().expect("a port");
    let mut connection = TcpStream::connect(("127.0.0.1", port)).expect("it listens");
    assert_eq!(victim.read(), "accepted");
    let id = ProcessId { tgid: victim.tgid, start_ticks: victim.start_ticks };

    let socket = std::thread::spawn(move || {
        let end = connection.read(&mut [0; 1]);
        assert!(matches!(end, Ok(0) | Err(_)));
        Instant::now()
    });
    let (opened, is_open) = std::sync::mpsc::channel();
    let pidfd = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let pidfd = PidFd::open(id).expect("it lives");
            opened.send(()).expect("somebody waits");
            pidfd.exited().await;
            Instant::now()
        })
    });
    is_open.recv().expect("the thread runs");

    let (begin, begin_monotonic) = (Instant::now(), monotonic_now());
    victim.kill(signal);
    let event = kernel.wait_for("evidence", |event| {
        event.tgid == id.tgid && matches!(event.kind(), Some(EventKind::SignalDeliver | EventKind::Exit))
    });
    let read = Instant::now();
    let ms = |at: Instant| at.duration_since(begin).as_secs_f64() * 1e3;
    let seen = Seen {
        hook: (event.at - begin_monotonic.0) as f64 / 1e6,
        event: ms(read),
        pidfd: ms(pidfd.join().expect("it does not panic")),
        socket: ms(socket.join().expect("it does not panic")),
    };
    victim.wait();
    seen
}

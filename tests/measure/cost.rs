//! Nanoseconds per run of each program.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use aya::programs::loaded_programs;
use aya::sys::{Stats, enable_stats};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{setsockopt, sockopt};

use crate::harness::{Kernel, Victim, until};

/// Runs and their time, by program.
type Runs = BTreeMap<String, (u64, Duration)>;

/// Of this process's own programs; another daemon may run here too.
fn runs(own: &BTreeSet<u32>) -> Runs {
    let programs = loaded_programs().filter_map(Result::ok).filter(|program| own.contains(&program.id()));
    programs
        .map(|program| {
            let name = program.name_as_str().unwrap_or_default().to_owned();
            (name, (program.run_count(), program.run_time()))
        })
        .collect()
}

/// The ids of the programs that this process holds open.
fn own() -> BTreeSet<u32> {
    let descriptors = std::fs::read_dir("/proc/self/fdinfo").expect("procfs is mounted");
    descriptors
        .filter_map(|descriptor| std::fs::read_to_string(descriptor.ok()?.path()).ok())
        .filter_map(|info| info.lines().find_map(|line| line.strip_prefix("prog_id:")?.trim().parse().ok()))
        .collect()
}

pub(crate) fn main(seconds: u64) {
    let _on_while_this_lives = enable_stats(Stats::RunTime).expect("root may, since Linux 5.8");
    let kernel = Kernel::load();
    let own = own();
    let each = Duration::from_secs(seconds);
    let loads: [(&str, &dyn Fn(Duration)); 5] = [
        ("fork and exit", &forks),
        ("fork, exec and exit", &execs),
        ("signals", &signals),
        ("TCP", &connections),
        ("TCP, nobody listens", &refusals),
    ];
    println!("{:<22} {:<16} {:>10} {:>12} {:>14}", "load", "program", "runs", "ns per run", "% of one CPU");
    for (load, run) in loads {
        let before = runs(&own);
        let begin = Instant::now();
        run(each);
        let took = begin.elapsed();
        for (program, (count, time)) in runs(&own) {
            let (former_count, former_time) = before.get(&program).copied().unwrap_or_default();
            let (count, time) = (count - former_count, time.saturating_sub(former_time));
            if count > 100 {
                let each = time.as_nanos() as f64 / count as f64;
                let share = time.as_secs_f64() / took.as_secs_f64() * 100.0;
                println!("{load:<22} {program:<16} {count:>10} {each:>12.0} {share:>14.3}");
            }
        }
    }
    println!("BPF_ENABLE_STATS itself is part of each run; a program that does nothing shows how much.");
    drop(kernel);
}

fn forks(time: Duration) {
    let mut storm = Victim::start(&["storm", "2"]);
    let begin = Instant::now();
    until("the time is over", || (begin.elapsed() > time).then_some(()));
    storm.go();
    storm.wait();
}

fn execs(time: Duration) {
    let begin = Instant::now();
    while begin.elapsed() < time {
        let status = Command::new("/bin/true").stdin(Stdio::null()).status().expect("every system has it");
        assert!(status.success());
    }
}

/// Handled ones, so that they are delivered.
fn signals(time: Duration) {
    let victim = Victim::start(&["handle-term"]);
    let begin = Instant::now();
    while begin.elapsed() < time {
        for signal in [Signal::SIGUSR1, Signal::SIGTERM] {
            kill(victim.pid(), signal).expect("it is there");
        }
    }
}

/// Connections that end politely and rudely, in turns.
fn connections(time: Duration) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("it is bound");
    let begin = Instant::now();
    while begin.elapsed() < time {
        let mut polite = TcpStream::connect(address).expect("it listens");
        polite.write_all(b"x").expect("it is connected");
        drop(listener.accept().expect("it is there"));
        let rude = TcpStream::connect(address).expect("it listens");
        let accepted = listener.accept().expect("it is there");
        let linger = libc::linger { l_onoff: 1, l_linger: 0 };
        setsockopt(&rude, sockopt::Linger, &linger).expect("a socket option");
        drop((rude, accepted));
    }
}

/// Resets that no socket sends.
fn refusals(time: Duration) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("it is bound");
    drop(listener);
    let begin = Instant::now();
    while begin.elapsed() < time {
        TcpStream::connect(address).expect_err("nobody listens");
    }
}

//! Nanoseconds per run of each kernel program, for events that concern nobody.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use aya::programs::loaded_programs;
use aya::sys::{Stats, enable_stats};
use lastgasp_tests::HarnessError;
use lastgasp_tests::daemon::{Daemon, DaemonConfig};
use lastgasp_tests::distribution::Unit;
use lastgasp_tests::nats::Nats;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::storms::exits;
use super::victim::Victim;
use crate::progress::Progress;
use crate::report::{Row, Section};
use crate::{BenchError, Options, file};

/// Fewer runs in a window say nothing.
const ENOUGH: u64 = 50;

/// Runs and their time, by program.
type Runs = BTreeMap<String, (u64, Duration)>;

/// Something that makes programs run, for so long.
type Load = (&'static str, fn(Duration) -> Result<(), BenchError>);

const LOADS: [Load; 5] = [
    ("fork and exit", |time| exits(time).map(drop)),
    ("fork, exec and exit", execs),
    ("signals", signals),
    ("TCP", connections),
    ("TCP, nobody listens", refusals),
];

pub(super) async fn section(options: &Options) -> Result<Section, BenchError> {
    let (windows, window) =
        if options.quick { (1, Duration::from_millis(100)) } else { (20, Duration::from_millis(200)) };
    let mut progress = Progress::begin("kernel programs", LOADS.len() * windows);
    let folder = tempfile::tempdir().map_err(file(&std::env::temp_dir()))?;
    let nats = Nats::start(folder.path()).await?;
    let mut config = DaemonConfig::new("node", &nats.url(), "required", folder.path());
    config.log = "info";
    let daemon = Daemon::start(&config, folder.path()).await?;
    let own = programs_of(daemon.process.identity.pid);
    let _on_while_this_lives =
        enable_stats(Stats::RunTime).map_err(|error| HarnessError::GaveUp(format!("BPF_ENABLE_STATS: {error}")))?;
    let mut rows = Vec::new();
    for (name, load) in LOADS {
        let mut found: BTreeMap<String, (Vec<f64>, Vec<f64>)> = BTreeMap::new();
        for _ in 0..windows {
            let (before, begin) = (runs(&own), Instant::now());
            tokio::task::block_in_place(|| load(window))?;
            let took = begin.elapsed();
            for (program, (count, time)) in runs(&own) {
                let (former_count, former_time) = before.get(&program).copied().unwrap_or_default();
                let (count, time) = (count - former_count, time.saturating_sub(former_time));
                if count > ENOUGH {
                    let (each, share) = found.entry(program).or_default();
                    each.push(time.as_nanos() as f64 / count as f64);
                    share.push(time.as_secs_f64() / took.as_secs_f64() * 100.0);
                }
            }
            progress.step();
        }
        for (program, (each, share)) in found {
            rows.extend(Row::of([name, &program, "a run"], Unit::Nanoseconds, each));
            rows.extend(Row::of([name, &program, "of one core"], Unit::Percent, share));
        }
    }
    Ok(Section {
        title: "Kernel programs".to_owned(),
        about: format!(
            "{windows} windows of {} s of each load, as fast as one thread can (fork and exit: two). The kernel measures \
             each run (`BPF_ENABLE_STATS`), and that it does is part of every number.",
            window.as_secs_f64()
        ),
        labels: ["load", "program", "takes"].map(str::to_owned).to_vec(),
        compared_with: None,
        rows,
        plots: Vec::new(),
    })
}

/// The ids of the programs that a process holds open.
fn programs_of(pid: u32) -> BTreeSet<u32> {
    let descriptors = std::fs::read_dir(format!("/proc/{pid}/fdinfo")).into_iter().flatten().flatten();
    let texts = descriptors.filter_map(|descriptor| std::fs::read_to_string(descriptor.path()).ok());
    texts.filter_map(|info| info.lines().find_map(|line| line.strip_prefix("prog_id:")?.trim().parse().ok())).collect()
}

fn runs(own: &BTreeSet<u32>) -> Runs {
    let programs = loaded_programs().filter_map(Result::ok).filter(|program| own.contains(&program.id()));
    let counts = programs.map(|program| {
        let name = program.name_as_str().unwrap_or_default().to_owned();
        (name, (program.run_count(), program.run_time()))
    });
    counts.collect()
}

fn execs(time: Duration) -> Result<(), BenchError> {
    let begin = Instant::now();
    while begin.elapsed() < time {
        Command::new("true").stdin(Stdio::null()).status().map_err(file("true".as_ref()))?;
    }
    Ok(())
}

/// Handled ones, so that they are delivered.
fn signals(time: Duration) -> Result<(), BenchError> {
    let victim = Victim::start(&["handle-term"])?;
    let pid = Pid::from_raw(victim.pid().cast_signed());
    let begin = Instant::now();
    while begin.elapsed() < time {
        for signal in [Signal::SIGUSR1, Signal::SIGTERM] {
            kill(pid, signal).map_err(|error| file("kill".as_ref())(error.into()))?;
        }
    }
    Ok(())
}

/// Connections that end politely and rudely, in turns.
fn connections(time: Duration) -> Result<(), BenchError> {
    let loopback = || file("127.0.0.1".as_ref());
    let listener = TcpListener::bind("127.0.0.1:0").map_err(loopback())?;
    let address = listener.local_addr().map_err(loopback())?;
    let begin = Instant::now();
    while begin.elapsed() < time {
        let mut polite = TcpStream::connect(address).map_err(loopback())?;
        polite.write_all(b"x").map_err(loopback())?;
        drop(listener.accept().map_err(loopback())?);
        let rude = TcpStream::connect(address).map_err(loopback())?;
        let accepted = listener.accept().map_err(loopback())?;
        socket2::SockRef::from(&rude).set_linger(Some(Duration::ZERO)).map_err(loopback())?;
        drop((rude, accepted));
    }
    Ok(())
}

/// Resets that no socket sends.
fn refusals(time: Duration) -> Result<(), BenchError> {
    let loopback = || file("127.0.0.1".as_ref());
    let listener = TcpListener::bind("127.0.0.1:0").map_err(loopback())?;
    let address = listener.local_addr().map_err(loopback())?;
    drop(listener);
    let begin = Instant::now();
    while begin.elapsed() < time {
        let _refused = TcpStream::connect(address);
    }
    Ok(())
}

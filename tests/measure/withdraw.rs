//! From the kill to the acknowledged delete of the record: while the machine is quiet, and while
//! every core has something better to do.

use std::process::{Child, Command};

use lastgasp::sensors::proc::monotonic_now;
use lastgasp_protocol::WorkerState;
use lastgasp_tests::HarnessError;
use lastgasp_tests::daemon::{Daemon, DaemonConfig};
use lastgasp_tests::discovery::Discovery;
use lastgasp_tests::engine::Engine;
use lastgasp_tests::nats::Nats;
use nix::sys::signal::Signal;
use tempfile::TempDir;

use crate::percentile;

/// Workers of each daemon: while one is killed, the others are found again.
const WORKERS: usize = 4;

pub(crate) fn main(kills: usize) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let seen = runtime.expect("a runtime").block_on(run(kills)).expect("the parts are built and start");
    println!("ms from kill() to the acknowledged delete");
    println!("{:<16} {:<8} {:>8} {:>8} {:>8}", "priority", "cores", "p50", "p99", "most");
    for (priority, busy, times) in seen {
        let cores = if busy { "busy" } else { "quiet" };
        let [half, most, all] = [50, 99, 100].map(|percent| percentile(&times, percent));
        println!("{priority:<16} {cores:<8} {half:>8.2} {most:>8.2} {all:>8.2}");
    }
    println!("{kills} kills each, in turns");
}

async fn run(kills: usize) -> Result<Vec<(&'static str, bool, Vec<f64>)>, HarnessError> {
    let mut stages = Vec::new();
    for priority in ["normal", "realtime"] {
        stages.push((priority, Stage::set(priority).await?));
    }
    let mut seen: Vec<_> =
        stages.iter().flat_map(|(name, _)| [(*name, false, Vec::new()), (*name, true, Vec::new())]).collect();
    for round in 0..kills {
        for (index, (_, stage)) in stages.iter_mut().enumerate() {
            // Now this one first, now that one: the machine may get slower or faster.
            for busy in [round % 2 == 0, round % 2 != 0] {
                seen[index * 2 + usize::from(busy)].2.push(stage.kill(busy).await?);
            }
        }
    }
    Ok(seen)
}

/// A daemon with its server and its workers.
struct Stage {
    engines: Vec<Engine>,
    next: usize,
    discovery: Discovery,
    _daemon: Daemon,
    _nats: Nats,
    folder: TempDir,
}

impl Stage {
    async fn set(priority: &'static str) -> Result<Self, HarnessError> {
        let folder = tempfile::tempdir().expect("a place for its files");
        let nats = Nats::start(folder.path()).await?;
        let discovery = Discovery::watch(&nats).await?;
        let mut engines = Vec::new();
        // Who crashes over and over would not be listed at once.
        let mut config = DaemonConfig::new("node", &nats.url(), "required", folder.path()).with_hold_down_ms(0);
        config.priority = priority;
        for worker in 0..WORKERS {
            let engine = Engine::start(&format!("worker-{worker}"), &[], folder.path()).await?;
            config = config.with(&engine);
            engines.push(engine);
        }
        let daemon = Daemon::start(&config, folder.path()).await?;
        Ok(Self { engines, next: 0, discovery, _daemon: daemon, _nats: nats, folder })
    }

    /// Kills the core of one engine and starts it anew; milliseconds to the acknowledgement.
    async fn kill(&mut self, busy: bool) -> Result<f64, HarnessError> {
        let engine = &self.engines[self.next];
        let worker = engine.process.name().to_owned();
        self.discovery.listed(&worker, WorkerState::Serving).await?;
        let spinning = busy.then(Spinning::start);
        let killed = monotonic_now().0;
        engine.signal_core(Signal::SIGKILL);
        let certificate = self.discovery.certificate(&worker, |found| found.at_monotonic_ns >= killed).await?;
        drop(spinning);
        let withdrawn =
            certificate.timeline.iter().find(|moment| moment.what == "withdrawn").map(|moment| moment.at_us);
        let withdrawn = withdrawn.ok_or_else(|| HarnessError::GaveUp(format!("{worker} was not withdrawn")))?;
        let ports = [engine.ready.http.port(), engine.ready.grpc.map_or(0, |address| address.port())];
        let [port, grpc] = ports.map(|port| port.to_string());
        // The old one first: it holds the ports.
        drop(self.engines.remove(self.next));
        let engine = Engine::start(&worker, &["--port", &port, "--grpc-port", &grpc], self.folder.path()).await?;
        self.engines.insert(self.next, engine);
        self.next = (self.next + 1) % WORKERS;
        Ok((certificate.at_monotonic_ns - killed) as f64 / 1e6 + withdrawn as f64 / 1e3)
    }
}

/// One process for each core that never sleeps.
struct Spinning(Vec<Child>);

impl Spinning {
    fn start() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let spin = |_| Command::new("sh").args(["-c", "while :; do :; done"]).spawn().expect("every system has it");
        let children = (0..cores).map(spin).collect();
        std::thread::sleep(std::time::Duration::from_millis(100));
        Self(children)
    }
}

impl Drop for Spinning {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

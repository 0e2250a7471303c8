//! What a daemon uses while nothing happens, by the number of its workers.

use std::fs;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use lastgasp_tests::daemon::{Daemon, DaemonConfig};
use lastgasp_tests::distribution::Unit;
use lastgasp_tests::nats::Nats;
use tokio_stream::wrappers::TcpListenerStream;
use tonic_health::ServingStatus;

use crate::progress::Progress;
use crate::report::{Row, Section};
use crate::{BenchError, Options, file};

/// After the last worker is listed, until it counts as nothing happens.
const SETTLED: Duration = Duration::from_secs(3);

pub(super) async fn section(options: &Options) -> Result<Section, BenchError> {
    let (sizes, windows, window): (&[usize], usize, Duration) = if options.quick {
        (&[0, 8], 2, Duration::from_millis(200))
    } else {
        (&[0, 8, 64, 512], 20, Duration::from_secs(1))
    };
    let mut progress = Progress::begin("idle", sizes.len() * windows);
    let mut rows = Vec::new();
    for &size in sizes {
        let folder = tempfile::tempdir().map_err(file(&std::env::temp_dir()))?;
        let nats = Nats::start(folder.path()).await?;
        let health = health_server().await?;
        let mut config = DaemonConfig::new("node", &nats.url(), "required", folder.path());
        config.log = "info";
        let mut workers = Vec::with_capacity(size);
        for number in 0..size {
            let worker = Worker::start()?;
            config = config.with_process(&format!("worker-{number}"), worker.0.id(), &format!("http://{health}"));
            workers.push(worker);
        }
        let daemon = Daemon::start(&config, folder.path()).await?;
        let serving = |status: &serde_json::Value| {
            let workers = status["workers"].as_array().into_iter().flatten();
            workers.filter(|worker| worker["state"] == "serving" && worker["revision"].as_u64() > Some(0)).count()
                == size
        };
        daemon.status_when("all workers to be listed", serving).await?;
        if !options.quick {
            tokio::time::sleep(SETTLED).await;
        }
        let pid = daemon.process.identity.pid;
        let (mut cpu, mut resident, mut proportional) = (Vec::new(), Vec::new(), Vec::new());
        let (mut then, mut used) = (Instant::now(), cpu_ns(pid));
        for _ in 0..windows {
            tokio::time::sleep(window).await;
            let (now, more) = (Instant::now(), cpu_ns(pid));
            cpu.push((more - used) / now.duration_since(then).as_nanos() as f64 * 100.0);
            (then, used) = (now, more);
            resident.push(memory(pid, "Rss:"));
            proportional.push(memory(pid, "Pss:"));
            progress.step();
        }
        let size = size.to_string();
        let of = |what, unit, values| Row::of([size.as_str(), what], unit, values);
        rows.extend(of("of one core", Unit::Percent, cpu));
        rows.extend(of("resident (RSS)", Unit::Bytes, resident));
        rows.extend(of("its share of it (PSS)", Unit::Bytes, proportional));
        rows.extend(of("kernel: maps and programs", Unit::Bytes, vec![kernel_memory(pid)]));
    }
    Ok(Section {
        title: "While nothing happens".to_owned(),
        about: format!(
            "{windows} windows of {} s. A worker is a process that sleeps, with a gRPC health service that is watched and \
             asked once a second, as is the default; all of them are one server outside of the daemon.",
            window.as_secs_f64()
        ),
        labels: ["workers", "used"].map(str::to_owned).to_vec(),
        compared_with: None,
        rows,
        plots: Vec::new(),
    })
}

/// A process that does nothing.
struct Worker(Child);

impl Worker {
    fn start() -> Result<Self, BenchError> {
        let child = Command::new("sleep").arg("infinity").stdin(Stdio::null()).spawn();
        Ok(Self(child.map_err(file("sleep".as_ref()))?))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// One for all workers: SERVING, for as long as the runtime lives.
async fn health_server() -> Result<SocketAddr, BenchError> {
    let loopback = || file("127.0.0.1".as_ref());
    let listener = StdListener::bind("127.0.0.1:0").map_err(loopback())?;
    listener.set_nonblocking(true).map_err(loopback())?;
    let address = listener.local_addr().map_err(loopback())?;
    let listener = tokio::net::TcpListener::from_std(listener).map_err(loopback())?;
    let (reporter, service) = tonic_health::server::health_reporter();
    reporter.set_service_status("", ServingStatus::Serving).await;
    let server = tonic::transport::Server::builder().add_service(service);
    tokio::spawn(async move {
        let _kept = reporter;
        server.serve_with_incoming(TcpListenerStream::new(listener)).await
    });
    Ok(address)
}

/// Time that all threads of a process have run (`/proc/PID/task/TID/schedstat`).
fn cpu_ns(pid: u32) -> f64 {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let times = threads.filter_map(|thread| {
        let text = fs::read_to_string(thread.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<f64>().ok()
    });
    times.sum()
}

/// A line of `/proc/PID/smaps_rollup`, in bytes.
fn memory(pid: u32, line: &str) -> f64 {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    let kib = text.lines().find_map(|text| text.strip_prefix(line)?.trim().trim_end_matches(" kB").parse::<f64>().ok());
    kib.unwrap_or_default() * 1024.0
}

/// What its maps and programs take, as `/proc/PID/fdinfo` has it (`memlock`, since Linux 5.0).
fn kernel_memory(pid: u32) -> f64 {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fdinfo")).into_iter().flatten().flatten();
    let mut counted = std::collections::BTreeMap::new();
    for descriptor in descriptors {
        let text = fs::read_to_string(descriptor.path()).unwrap_or_default();
        let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
        let id = field("map_id:").map(|id| ("map", id)).or_else(|| field("prog_id:").map(|id| ("program", id)));
        if let (Some(id), Some(bytes)) = (id, field("memlock:")) {
            counted.insert(id, bytes);
        }
    }
    counted.values().sum::<u64>() as f64
}

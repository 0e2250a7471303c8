//! The programs that are measured, and what they use of the machine.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use lastgasp_protocol::kv::{Bucket, Expect};
use lastgasp_protocol::{Incarnation, Name, WORKERS_BUCKET, worker_key};
use lastgasp_tests::HarnessError;
use lastgasp_tests::binaries;
use lastgasp_tests::nats::Nats;
use lastgasp_tests::process::{GIVE_UP, Process};
use serde::Deserialize;
use serde_json::json;
use tokio::process::Command;

use crate::{BenchError, file};

/// The other router, as pip knows it.
pub(super) const PEER: &str = "sglang-router==0.3.2";
/// The node that all engines are said to run on.
pub(super) const NODE: &str = "bench";
/// Records are not renewed here.
const TTL: Duration = Duration::from_secs(3600);

/// Starts a program and waits for the file that it writes when it is ready.
async fn start<T: for<'a> Deserialize<'a>>(
    name: &str,
    mut command: Command,
    folder: &Path,
) -> Result<(Process, T), HarnessError> {
    let ready = folder.join(format!("{name}.ready.json"));
    let _ = std::fs::remove_file(&ready);
    command.env_remove("LASTGASP_WORKER");
    let mut process = Process::spawn(name, command, folder)?;
    let said = process.ready_file(&ready).await?;
    Ok((process, said))
}

/// An engine that costs next to nothing, see `bench/src/engine.rs`.
#[derive(Debug)]
pub(super) struct Engine {
    pub(super) process: Process,
    pub(super) url: String,
}

impl Engine {
    pub(super) async fn start(letter: char, name: &str, folder: &Path) -> Result<Self, HarnessError> {
        #[derive(Deserialize)]
        struct Ready {
            url: String,
        }
        let mut command = Command::new(binaries::find("bench-engine")?);
        command.arg(letter.to_string()).arg(folder.join(format!("{name}.ready.json")));
        let (process, Ready { url }) = start(name, command, folder).await?;
        Ok(Self { process, url })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.url.trim_start_matches("http://").parse().expect("it was printed from one")
    }

    /// When it was asked for tokens since the last call, in nanoseconds of CLOCK_MONOTONIC.
    pub(super) async fn asked(&self) -> Result<Vec<u64>, HarnessError> {
        let response = reqwest::get(format!("{}/asked", self.url)).await.map_err(HarnessError::http)?;
        response.json().await.map_err(HarnessError::http)
    }
}

/// A router, ours or another.
#[derive(Debug)]
pub(super) struct Router {
    pub(super) process: Process,
    pub(super) address: SocketAddr,
}

impl Router {
    /// `lastgasp-router` as it comes, but for the limit of moves.
    pub(super) async fn ours(name: &str, nats: &Nats, moves: u32, folder: &Path) -> Result<Self, HarnessError> {
        #[derive(Deserialize)]
        struct Ready {
            listen: SocketAddr,
        }
        let mut command = Command::new(binaries::find("lastgasp-router")?);
        command.args(["--listen", "127.0.0.1:0", "--name", name, "--nats", &nats.url()]);
        command.args(["--migration-limit", &moves.to_string(), "--log", "warn"]);
        command.arg("--ready-file").arg(folder.join(format!("{name}.ready.json")));
        let (process, Ready { listen }) = start(name, command, folder).await?;
        Ok(Self { process, address: listen })
    }

    /// Waits until exactly these workers may have new work.
    pub(super) async fn offers(&self, workers: &[&str]) -> Result<(), HarnessError> {
        #[derive(Deserialize)]
        struct View {
            worker: String,
            takes_work: bool,
        }
        let deadline = Instant::now() + GIVE_UP;
        loop {
            let response =
                reqwest::get(format!("http://{}/workers", self.address)).await.map_err(HarnessError::http)?;
            let view: Vec<View> = response.json().await.map_err(HarnessError::http)?;
            let working: Vec<_> = view.iter().filter(|view| view.takes_work).map(|view| view.worker.as_str()).collect();
            let mut expected: Vec<_> = workers.iter().map(|worker| format!("{NODE}/{worker}")).collect();
            expected.sort();
            if working == expected {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(HarnessError::GaveUp(format!("{workers:?}; the router offers {working:?}")));
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// The other router before these engines.
    pub(super) async fn peer(python: &Path, engines: &[&Engine], folder: &Path) -> Result<Self, BenchError> {
        let [port, metrics] = [free_port()?, free_port()?];
        let mut command = Command::new(python);
        command.args(["-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", &port.to_string()]);
        command.args(["--prometheus-port", &metrics.to_string(), "--policy", "power_of_two", "--log-level", "warn"]);
        command.arg("--worker-urls").args(engines.iter().map(|engine| &engine.url));
        let mut process = Process::spawn("sglang-router", command, folder)?;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let deadline = Instant::now() + GIVE_UP;
        // It says so once it has looked at its workers.
        while !reqwest::get(format!("http://{address}/readiness"))
            .await
            .is_ok_and(|answer| answer.status().is_success())
        {
            if process.has_exited() || Instant::now() > deadline {
                let status = "before it was ready".to_owned();
                return Err(
                    HarnessError::Ended { name: "sglang-router".into(), status, log: process.log_tail() }.into()
                );
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(Self { process, address })
    }
}

fn free_port() -> Result<u16, BenchError> {
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr());
    free.map(|address| address.port()).map_err(file("127.0.0.1".as_ref()))
}

/// A Python that has the other router, in a virtual environment under `target/`.
pub(super) async fn python() -> Result<PathBuf, BenchError> {
    let folder = Path::new("target").join("tools").join(PEER.replace("==", "-"));
    let (python, installed) = (folder.join("bin/python"), folder.join("installed"));
    if !installed.exists() {
        eprintln!("  {PEER}: installing it with pip");
        let mut venv = Command::new("python3");
        venv.args(["-m", "venv"]).arg(&folder);
        let mut pip = Command::new(&python);
        pip.args(["-m", "pip", "install", "--quiet", PEER]);
        for command in [&mut venv, &mut pip] {
            let status = command.status().await.map_err(file(&folder))?;
            if !status.success() {
                return Err(HarnessError::GaveUp(format!("{command:?}: {status}")).into());
            }
        }
        std::fs::write(&installed, "").map_err(file(&installed))?;
    }
    std::path::absolute(&python).map_err(file(&python))
}

/// Discovery, written as a daemon would.
#[derive(Debug)]
pub(super) struct Register(Bucket);

impl Register {
    pub(super) async fn open(nats: &Nats) -> Result<Self, HarnessError> {
        let bucket = Bucket::open(&nats.jetstream().await?, WORKERS_BUCKET, 1).await;
        Ok(Self(bucket.map_err(|error| HarnessError::Nats(error.into()))?))
    }

    /// Lists an engine. Each name stands for one life.
    pub(super) async fn list(&self, worker: &str, engine: &Engine) -> Result<(), HarnessError> {
        let record = json!({ "schema": 1, "node": NODE, "worker": worker, "incarnation": incarnation(worker), "epoch": 1,
            "engine": "vllm", "models": ["m"], "endpoint": engine.url });
        let put = self.0.put(&key(worker), record.to_string().into(), Expect::Absent, TTL).await;
        put.map(drop).map_err(|error| HarnessError::Nats(error.into()))
    }

    pub(super) async fn withdraw(&self, worker: &str) -> Result<(), HarnessError> {
        let key = key(worker);
        let entry = self.0.read(&key).await.map_err(|error| HarnessError::Nats(error.into()))?;
        let Some(entry) = entry else { return Ok(()) };
        let gone = self.0.delete(&key, entry.payload, Expect::Revision(entry.revision), TTL).await;
        gone.map(drop).map_err(|error| HarnessError::Nats(error.into()))
    }
}

fn key(worker: &str) -> String {
    worker_key(&Name::new(NODE).expect("letters"), &Name::new(worker).expect("letters and digits"))
}

/// The life of that name.
pub(super) fn incarnation(worker: &str) -> Incarnation {
    Incarnation::new(format!("life-of-{worker}")).expect("short enough")
}

/// A process and its children.
fn tree(pid: u32) -> Vec<u32> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let below = children.split_whitespace().filter_map(|child| child.parse().ok()).flat_map(tree);
    std::iter::once(pid).chain(below).collect()
}

/// What a process and its children have run so far (`/proc/PID/task/TID/schedstat`, in nanoseconds).
pub(super) fn cpu_time(process: &Process) -> Duration {
    let of = |pid: u32| -> u64 {
        let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let stats = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("schedstat")).ok());
        stats.filter_map(|stat| stat.split(' ').next()?.parse::<u64>().ok()).sum()
    };
    Duration::from_nanos(tree(process.identity.pid).into_iter().map(of).sum())
}

/// Memory that is its own (`Pss` of `/proc/PID/smaps_rollup`), in bytes, its children's included.
pub(super) fn memory(process: &Process) -> u64 {
    let of = |pid: u32| {
        let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("Pss:"));
        line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()).unwrap_or_default() * 1024
    };
    tree(process.identity.pid).into_iter().map(of).sum()
}

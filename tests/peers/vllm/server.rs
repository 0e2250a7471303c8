//! One server of vLLM: a tree of processes.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::{Duration, Instant};

use lastgasp_tests::daemon::HealthConfig;
use lastgasp_tests::nats::free_port;
use lastgasp_tests::process::{Identity, Process};
use nix::sys::signal::Signal;
use tokio::process::Command;

use super::install::{Installed, installed};

/// Its imports alone are 30 s of work for a processor.
const START: Duration = Duration::from_secs(400);

/// What answers HTTP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Frontend {
    /// `vllm serve`, with `/health`.
    Python,
    /// `vllm-rs serve`, with gRPC health.
    Rust,
}

/// A process of the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// What was started: the API server, or `vllm-rs`.
    Root,
    /// It schedules.
    EngineCore,
    /// It computes.
    Worker,
}

/// A server that serves.
#[derive(Debug)]
pub(super) struct Server {
    process: Process,
    pub(super) frontend: Frontend,
    /// `LASTGASP_WORKER`, by which the daemon finds it.
    pub(super) declared: String,
    pub(super) http: SocketAddr,
    grpc: SocketAddr,
    tree: Vec<Identity>,
    engine_core: Identity,
    worker: Identity,
}

impl Server {
    /// Starts one on these addresses, with more arguments, and waits until it serves.
    pub(super) async fn start(name: &str, address: Addresses, arguments: &[&str], folder: &Path) -> Self {
        let Installed { python, vllm, rust, model } = installed().await;
        let Addresses { frontend, http, grpc } = address;
        let declared = folder.join(name).display().to_string();
        let mut command = match frontend {
            Frontend::Python => {
                let mut command = Command::new(vllm);
                command.arg("serve").arg(model);
                command
            }
            Frontend::Rust => {
                let mut command = Command::new(rust);
                command.arg("serve").arg(model).arg("--python").arg(python);
                command.args(["--grpc-port", &grpc.port().to_string()]);
                command
            }
        };
        command.args(["--host", "127.0.0.1", "--port", &http.port().to_string(), "--served-model-name", "tiny"]);
        command.args(["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "8"]);
        command.args(arguments).env("LASTGASP_WORKER", &declared);
        // Else each server pins itself to the first processors.
        command.env("VLLM_CPU_OMP_THREADS_BIND", "nobind").env("OMP_NUM_THREADS", "1");
        command.env("VLLM_CPU_KVCACHE_SPACE", "1").env("HF_HUB_OFFLINE", "1").env("VLLM_NO_USAGE_STATS", "1");
        let mut process = Process::spawn(name, command, folder).unwrap();
        let began = Instant::now();
        let url = format!("http://{http}/health");
        while !reqwest::get(&url).await.is_ok_and(|response| response.status().is_success()) {
            assert!(!process.has_exited(), "{name} ended:\n{}", process.log_tail());
            assert!(began.elapsed() < START, "{name} does not serve:\n{}", process.log_tail());
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        eprintln!("{name}: {frontend:?} frontend, serves after {:.0} s", began.elapsed().as_secs_f64());
        let pids = descendants(process.identity.pid);
        let titled = |title: &str| {
            let pid = pids.iter().copied().find(|pid| command_line(*pid).starts_with(title));
            pid.and_then(Identity::of).unwrap_or_else(|| panic!("{name} has no {title}: {}", process.log_tail()))
        };
        let (engine_core, worker) = (titled("VLLM::EngineCore"), titled("VLLM::Worker"));
        process.record(pids.iter().copied());
        let tree = pids.into_iter().filter_map(Identity::of).collect();
        Self { process, frontend, declared, http, grpc, tree, engine_core, worker }
    }

    pub(super) fn addresses(&self) -> Addresses {
        Addresses { frontend: self.frontend, http: self.http, grpc: self.grpc }
    }

    /// Signals one process of it.
    pub(super) fn signal(&self, role: Role, signal: Signal) {
        let process = match role {
            Role::Root => self.process.identity,
            Role::EngineCore => self.engine_core,
            Role::Worker => self.worker,
        };
        assert!(process.signal(signal), "{role:?} was gone already");
    }

    /// Kills all of it, the root first.
    pub(super) fn kill_tree(&self) {
        self.process.identity.signal(Signal::SIGKILL);
        for process in &self.tree {
            process.signal(Signal::SIGKILL);
        }
    }
}

/// Where a server is, also after it was started again.
#[derive(Clone, Copy, Debug)]
pub(super) struct Addresses {
    pub(super) frontend: Frontend,
    pub(super) http: SocketAddr,
    grpc: SocketAddr,
}

impl Addresses {
    /// Two that are free.
    pub(super) fn free(frontend: Frontend) -> Self {
        let [http, grpc] = [(); 2].map(|()| SocketAddr::from((Ipv4Addr::LOCALHOST, free_port().unwrap())));
        Self { frontend, http, grpc }
    }

    /// How it says how it is.
    pub(super) fn health(&self) -> HealthConfig {
        match self.frontend {
            Frontend::Python => HealthConfig::http(format!("http://{}/health", self.http)),
            Frontend::Rust => HealthConfig::grpc(format!("http://{}", self.grpc)),
        }
    }
}

fn descendants(root: u32) -> Vec<u32> {
    let mut found = vec![root];
    let mut at = 0;
    while let Some(&pid) = found.get(at) {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let children = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
        found.extend(
            children.flat_map(|list| list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<u32>>()),
        );
        at += 1;
    }
    found.split_off(1)
}

fn command_line(pid: u32) -> String {
    let bytes = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

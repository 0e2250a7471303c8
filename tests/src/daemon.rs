//! A `lastgasp` daemon under a test.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::process::Command;

use crate::HarnessError;
use crate::binaries;
use crate::engine::Engine;
use crate::process::{GIVE_UP, Process};

/// The configuration file, as far as tests need it.
#[derive(Clone, Debug, Serialize)]
pub struct DaemonConfig {
    /// Node name.
    pub node: String,
    /// `enforce` or `observe`.
    pub mode: &'static str,
    nats: NatsConfig,
    ebpf: EbpfConfig,
    status: StatusConfig,
    /// The workers.
    pub worker: Vec<WorkerConfig>,
}

#[derive(Clone, Debug, Serialize)]
struct NatsConfig {
    url: String,
}

#[derive(Clone, Debug, Serialize)]
struct EbpfConfig {
    enabled: &'static str,
}

#[derive(Clone, Debug, Serialize)]
struct StatusConfig {
    socket: PathBuf,
    listen: &'static str,
}

/// One worker of the configuration.
#[derive(Clone, Debug, Serialize)]
pub struct WorkerConfig {
    /// Its name.
    pub name: String,
    /// Engine profile.
    pub engine: &'static str,
    find: Find,
    /// `daemon` or `worker`.
    pub writer: &'static str,
    /// URL for routers.
    pub endpoint: String,
    /// Models it serves.
    pub models: Vec<String>,
    /// How long a drain may take, ms.
    pub drain_window_ms: u64,
    health: HealthConfig,
}

#[derive(Clone, Debug, Serialize)]
struct Find {
    /// By `LASTGASP_WORKER`, so that a worker that restarts is found again.
    env: String,
}

#[derive(Clone, Debug, Serialize)]
struct HealthConfig {
    grpc: String,
    check_interval_ms: u64,
}

impl DaemonConfig {
    /// A node without workers. `ebpf` is `auto`, `off` or `required`.
    pub fn new(node: &str, nats_url: &str, ebpf: &'static str, folder: &Path) -> Self {
        Self {
            node: node.to_owned(),
            mode: "enforce",
            nats: NatsConfig { url: nats_url.to_owned() },
            ebpf: EbpfConfig { enabled: ebpf },
            status: StatusConfig { socket: folder.join(format!("{node}.sock")), listen: "127.0.0.1:0" },
            worker: Vec::new(),
        }
    }

    /// Adds `engine` as a worker of this name.
    #[must_use]
    pub fn with(mut self, engine: &Engine) -> Self {
        let name = engine.process.name().to_owned();
        self.worker.push(WorkerConfig {
            find: Find { env: engine.declared.clone() },
            name,
            engine: "vllm",
            writer: "daemon",
            endpoint: engine.endpoint(),
            models: vec![engine.ready.model.clone()],
            drain_window_ms: 60_000,
            health: HealthConfig { grpc: engine.grpc(), check_interval_ms: 500 },
        });
        self
    }
}

/// What the daemon says when its sensors are attached.
#[derive(Clone, Debug, Deserialize)]
pub struct DaemonReady {
    /// Address of `/metrics`, `/livez` and `/readyz`.
    pub metrics: std::net::SocketAddr,
    /// Unix socket of its gRPC service.
    pub socket: PathBuf,
    /// `ebpf` or `pidfd`.
    pub sensor: String,
}

/// A running daemon.
#[derive(Debug)]
pub struct Daemon {
    /// The process.
    pub process: Process,
    /// What it said.
    pub ready: DaemonReady,
}

impl Daemon {
    /// Writes the configuration, starts the daemon and waits until its sensors are attached.
    ///
    /// # Errors
    ///
    /// It is not built, or ends before it is ready.
    pub async fn start(config: &DaemonConfig, folder: &Path) -> Result<Self, HarnessError> {
        let io = |what: &Path| {
            let what = what.display().to_string();
            move |source| HarnessError::Io { what, source }
        };
        let path = folder.join(format!("{}.toml", config.node));
        let text = toml::to_string(config).map_err(|error| HarnessError::GaveUp(error.to_string()))?;
        std::fs::write(&path, text).map_err(io(&path))?;
        let ready_file = folder.join(format!("{}.ready.json", config.node));
        let _ = std::fs::remove_file(&ready_file);
        let mut command = Command::new(binaries::find("lastgasp")?);
        command.arg("run").arg("--config").arg(&path).arg("--ready-file").arg(&ready_file);
        command.args(["--log", "info,lastgasp=debug"]);
        let mut process = Process::spawn(&format!("lastgasp-{}", config.node), command, folder)?;
        let ready = process.ready_file(&ready_file).await?;
        Ok(Self { process, ready })
    }

    /// What `lastgasp status --json` says.
    ///
    /// # Errors
    ///
    /// The daemon does not answer.
    pub async fn status(&self) -> Result<Value, HarnessError> {
        let mut command = Command::new(binaries::find("lastgasp")?);
        command.args(["status", "--json", "--socket"]).arg(&self.ready.socket);
        let output = command.output().await;
        let output = output.map_err(|source| HarnessError::Io { what: "lastgasp status".into(), source })?;
        serde_json::from_slice(&output.stdout).map_err(|error| {
            let said = String::from_utf8_lossy(&output.stderr);
            HarnessError::GaveUp(format!("`lastgasp status --json`: {error}; it said: {said}"))
        })
    }

    /// The value of one line of `/metrics`, named with its labels; 0 if there is none.
    ///
    /// # Errors
    ///
    /// The daemon does not answer.
    pub async fn counted(&self, line: &str) -> Result<f64, HarnessError> {
        let metrics = self.metrics().await?;
        let value = metrics.lines().find_map(|text| text.strip_prefix(line)?.trim().parse().ok());
        Ok(value.unwrap_or(0.0))
    }

    /// Waits until one line of `/metrics` has reached a value.
    ///
    /// # Errors
    ///
    /// It does not, for a long time, or the daemon does not answer.
    pub async fn counts(&self, line: &str, at_least: f64) -> Result<(), HarnessError> {
        let deadline = std::time::Instant::now() + GIVE_UP;
        while self.counted(line).await? < at_least {
            if std::time::Instant::now() > deadline {
                return Err(HarnessError::GaveUp(format!("{line} did not reach {at_least}")));
            }
            tokio::task::yield_now().await;
        }
        Ok(())
    }

    /// What `/metrics` says.
    ///
    /// # Errors
    ///
    /// The daemon does not answer.
    pub async fn metrics(&self) -> Result<String, HarnessError> {
        let response = reqwest::get(format!("http://{}/metrics", self.ready.metrics)).await;
        response.map_err(HarnessError::http)?.text().await.map_err(HarnessError::http)
    }
}

//! A `lastgasp` daemon under a test.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;

use crate::HarnessError;
use crate::binaries;
use crate::engine::Engine;
use crate::process::{GIVE_UP, Process};
use crate::user::User;

/// The configuration file, as far as tests need it.
#[derive(Clone, Debug, Serialize)]
pub struct DaemonConfig {
    /// Node name.
    pub node: String,
    /// `enforce` or `observe`.
    pub mode: &'static str,
    /// `normal` or `realtime`.
    pub priority: &'static str,
    nats: NatsConfig,
    ebpf: EbpfConfig,
    status: StatusConfig,
    policy: PolicyConfig,
    declare: Option<DeclareConfig>,
    /// Sinks of notices.
    pub notify: Vec<toml::Table>,
    /// The workers.
    pub worker: Vec<WorkerConfig>,
    /// What it logs.
    #[serde(skip)]
    pub log: &'static str,
    /// Further arguments of `lastgasp run`.
    #[serde(skip)]
    arguments: Vec<String>,
}

/// What keeps the daemon from doing too much.
#[derive(Clone, Debug, Default, Serialize)]
struct PolicyConfig {
    #[serde(skip_serializing_if = "Option::is_none")]
    hold_down_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    soft_withdrawals_per_minute: Option<u32>,
}

/// Who may declare itself a worker.
#[derive(Clone, Debug, Serialize)]
struct DeclareConfig {
    enabled: bool,
    uids: Vec<u32>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    cgroups: Vec<String>,
    #[serde(skip_serializing_if = "toml::Table::is_empty")]
    kubelet: toml::Table,
    on_lost: &'static str,
    reap_grace_ms: u64,
    scan_interval_ms: u64,
}

#[derive(Clone, Debug, Serialize)]
struct NatsConfig {
    url: String,
    #[serde(flatten)]
    login: toml::Table,
}

#[derive(Clone, Debug, Serialize)]
struct EbpfConfig {
    enabled: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    btf: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ring_bytes: Option<u32>,
}

#[derive(Clone, Debug, Serialize)]
struct StatusConfig {
    socket: PathBuf,
    listen: String,
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
    /// What is done about its processes when it is lost.
    pub on_lost: toml::Value,
    /// How long those processes have to end by themselves, ms.
    pub reap_grace_ms: u64,
    /// What becomes of its connections then.
    #[serde(skip_serializing_if = "toml::Table::is_empty")]
    pub sever: toml::Table,
    /// How it is asked how it is.
    pub health: HealthConfig,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
enum Find {
    /// By `LASTGASP_WORKER`, so that a worker that restarts is found again.
    Env(String),
    /// By its pid, which needs no privilege.
    Pid(u32),
    /// By a file that names its pid.
    PidFile(PathBuf),
}

/// How a worker is asked how it is.
#[derive(Clone, Debug, Serialize)]
pub struct HealthConfig {
    #[serde(skip_serializing_if = "String::is_empty")]
    grpc: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    http: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    check_timeout_ms: Option<u64>,
    check_interval_ms: u64,
    /// How long it does not answer before it is hung, ms, where not as is usual.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hang_window_ms: Option<u64>,
}

impl Default for HealthConfig {
    fn default() -> Self {
        Self {
            grpc: String::new(),
            http: String::new(),
            check_timeout_ms: None,
            check_interval_ms: 500,
            hang_window_ms: None,
        }
    }
}

impl HealthConfig {
    /// By gRPC, at `http://HOST:PORT`.
    pub fn grpc(url: String) -> Self {
        Self { grpc: url, ..Self::default() }
    }

    /// By HTTP, at `http://HOST:PORT/PATH`.
    pub fn http(url: String) -> Self {
        Self { http: url, ..Self::default() }
    }
}

impl DaemonConfig {
    /// A node without workers. `ebpf` is `auto`, `off` or `required`.
    pub fn new(node: &str, nats_url: &str, ebpf: &'static str, folder: &Path) -> Self {
        Self {
            node: node.to_owned(),
            mode: "enforce",
            priority: "normal",
            nats: NatsConfig { url: nats_url.to_owned(), login: toml::Table::new() },
            ebpf: EbpfConfig { enabled: ebpf, btf: None, ring_bytes: None },
            status: StatusConfig {
                socket: folder.join(format!("{}.sock", stem(node))),
                listen: "127.0.0.1:0".to_owned(),
            },
            policy: PolicyConfig::default(),
            declare: None,
            notify: Vec::new(),
            worker: Vec::new(),
            log: "info,lastgasp=debug",
            arguments: Vec::new(),
        }
    }

    /// Where its NATS is.
    pub fn nats_url(&self) -> &str {
        &self.nats.url
    }

    /// Takes the description of the kernel's types from this file.
    #[must_use]
    pub fn with_btf(mut self, btf: &Path) -> Self {
        self.ebpf.btf = Some(btf.to_owned());
        self
    }

    /// How long a worker that keeps failing stays unlisted at the first time.
    #[must_use]
    pub const fn with_hold_down_ms(mut self, millis: u64) -> Self {
        self.policy.hold_down_ms = Some(millis);
        self
    }

    /// As the sidecar of a pod, that waits so long for its engine.
    #[must_use]
    pub fn beside(mut self, pod: &str, startup_deadline_s: u32) -> Self {
        let deadline = startup_deadline_s.to_string();
        self.arguments = ["--sidecar", "--pod", pod, "--startup-deadline", &deadline].map(str::to_owned).into();
        self
    }

    /// With one more setting of `[nats]`, as `user`.
    #[must_use]
    pub fn with_nats(mut self, setting: &str, value: impl Into<toml::Value>) -> Self {
        self.nats.login.insert(setting.to_owned(), value.into());
        self
    }

    /// With a ring buffer of so many bytes.
    #[must_use]
    pub const fn with_ring_bytes(mut self, bytes: u32) -> Self {
        self.ebpf.ring_bytes = Some(bytes);
        self
    }

    /// With its HTTP address here.
    #[must_use]
    pub fn listening(mut self, address: std::net::SocketAddr) -> Self {
        self.status.listen = address.to_string();
        self
    }

    /// As [`Self::with`], but found by its pid, as a daemon has to that may not read the
    /// environment of other users' processes.
    #[must_use]
    pub fn with_pid_of(self, engine: &Engine) -> Self {
        let mut config = self.with(engine);
        if let Some(worker) = config.worker.last_mut() {
            worker.find = Find::Pid(engine.process.identity.pid);
        }
        config
    }

    /// As [`Self::with`], but found by what is written in this file.
    #[must_use]
    pub fn with_pid_file_of(self, engine: &Engine, file: &Path) -> Self {
        let mut config = self.with(engine);
        if let Some(worker) = config.worker.last_mut() {
            worker.find = Find::PidFile(file.to_owned());
        }
        config
    }

    /// Writes the file and says where it is.
    ///
    /// # Errors
    ///
    /// The folder cannot be written.
    pub fn write(&self, folder: &Path) -> Result<PathBuf, HarnessError> {
        let path = folder.join(format!("{}.toml", stem(&self.node)));
        let text = toml::to_string(self).map_err(|error| HarnessError::GaveUp(error.to_string()))?;
        std::fs::write(&path, text).map_err(|source| HarnessError::Io { what: path.display().to_string(), source })?;
        Ok(path)
    }

    /// Lets processes of this user declare themselves workers; what outlives one is killed at once.
    #[must_use]
    pub fn declared_by(mut self, uid: u32) -> Self {
        self.declare = Some(DeclareConfig {
            enabled: true,
            uids: vec![uid],
            cgroups: Vec::new(),
            kubelet: toml::Table::new(),
            on_lost: "reap",
            reap_grace_ms: 0,
            scan_interval_ms: 1000,
        });
        self
    }

    /// Those processes have to be below this cgroup too.
    #[must_use]
    pub fn within_cgroup(mut self, path: &str) -> Self {
        if let Some(declare) = &mut self.declare {
            declare.cgroups = vec![path.to_owned()];
        }
        self
    }

    /// Their pods' addresses are asked of the kubelet at this URL.
    #[must_use]
    pub fn asking_kubelet(mut self, url: &str) -> Self {
        if let Some(declare) = &mut self.declare {
            declare.kubelet.insert("url".to_owned(), url.into());
        }
        self
    }

    /// After the first look at all processes for declarations, the next one comes in an hour.
    #[must_use]
    pub const fn without_scans(mut self) -> Self {
        if let Some(declare) = &mut self.declare {
            declare.scan_interval_ms = 3_600_000;
        }
        self
    }

    /// Adds a worker without a health service: it serves while it listens on this port.
    #[must_use]
    pub fn with_listener(mut self, name: &str, declared: &str, port: u16) -> Self {
        self.worker.push(WorkerConfig {
            name: name.to_owned(),
            engine: "generic",
            find: Find::Env(declared.to_owned()),
            writer: "daemon",
            endpoint: format!("http://127.0.0.1:{port}"),
            models: vec!["tiny".to_owned()],
            drain_window_ms: 60_000,
            on_lost: "none".into(),
            reap_grace_ms: 0,
            sever: toml::Table::new(),
            health: HealthConfig::default(),
        });
        self
    }

    /// Adds a process as a worker, whose health somebody else tells there; asked as often as is the default.
    #[must_use]
    pub fn with_process(mut self, name: &str, pid: u32, grpc: &str) -> Self {
        self.worker.push(WorkerConfig {
            name: name.to_owned(),
            engine: "generic",
            find: Find::Pid(pid),
            writer: "daemon",
            endpoint: grpc.to_owned(),
            models: vec!["tiny".to_owned()],
            drain_window_ms: 60_000,
            on_lost: "none".into(),
            reap_grace_ms: 0,
            sever: toml::Table::new(),
            health: HealthConfig { check_interval_ms: 1000, ..HealthConfig::grpc(grpc.to_owned()) },
        });
        self
    }

    /// Adds a worker by its pid that says by HTTP, at `/live` of this port, how it is, and is hung once it
    /// has not answered for so long.
    #[must_use]
    pub fn with_http(mut self, name: &str, pid: u32, port: u16, hang_window_ms: u64) -> Self {
        self = self.with_listener(name, name, port);
        if let Some(worker) = self.worker.last_mut() {
            worker.find = Find::Pid(pid);
            worker.health = HealthConfig {
                http: format!("http://127.0.0.1:{port}/live"),
                check_interval_ms: hang_window_ms / 5,
                check_timeout_ms: Some(hang_window_ms / 5),
                hang_window_ms: Some(hang_window_ms),
                ..HealthConfig::default()
            };
        }
        self
    }

    /// Adds `engine` as a worker of this name.
    #[must_use]
    pub fn with(self, engine: &Engine) -> Self {
        let health = HealthConfig::grpc(engine.grpc());
        let config = self.with_vllm(engine.process.name(), &engine.declared, engine.endpoint(), health);
        config.serving(&engine.ready.model)
    }

    /// Adds a vLLM that carries `declared` in `LASTGASP_WORKER`, and serves the model `tiny`.
    #[must_use]
    pub fn with_vllm(mut self, name: &str, declared: &str, endpoint: String, health: HealthConfig) -> Self {
        self.worker.push(WorkerConfig {
            find: Find::Env(declared.to_owned()),
            name: name.to_owned(),
            engine: "vllm",
            writer: "daemon",
            endpoint,
            models: vec!["tiny".to_owned()],
            drain_window_ms: 60_000,
            on_lost: "none".into(),
            reap_grace_ms: 0,
            sever: toml::Table::new(),
            health,
        });
        self
    }

    /// The last worker serves this model.
    fn serving(mut self, model: &str) -> Self {
        if let Some(worker) = self.worker.last_mut() {
            worker.models = vec![model.to_owned()];
        }
        self
    }
}

/// Variables of the tests, which the daemon would warn of. The object that it loads is its own.
fn is_the_tests_own(variable: &OsStr) -> bool {
    variable.as_encoded_bytes().starts_with(b"LASTGASP_") && variable != "LASTGASP_EBPF_OBJECT"
}

/// A node's name as part of a file's; a sidecar's is `<node>/<pod>`.
fn stem(node: &str) -> String {
    node.replace('/', "-")
}

/// What the daemon says when its sensors are attached.
#[derive(Clone, Debug, Deserialize)]
pub struct DaemonReady {
    /// Address of `/metrics`, `/livez` and `/readyz`.
    pub metrics: std::net::SocketAddr,
    /// Unix socket of its gRPC service.
    pub socket: PathBuf,
    /// `ebpf` or `pidfd`.
    pub death_source: String,
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
        Self::start_by(Command::new(binaries::find("lastgasp")?), config, folder).await
    }

    /// As [`Self::start`], as another user, who gets the folder.
    ///
    /// # Errors
    ///
    /// As for [`Self::start`]; or the test may not become that user.
    pub async fn start_as(user: &User, config: &DaemonConfig, folder: &Path) -> Result<Self, HarnessError> {
        user.give(folder)?;
        Self::start_by(user.command(&binaries::find("lastgasp")?), config, folder).await
    }

    /// As [`Self::start`], by a command that becomes `lastgasp` when arguments are added.
    ///
    /// # Errors
    ///
    /// As for [`Self::start`].
    pub async fn start_by(mut command: Command, config: &DaemonConfig, folder: &Path) -> Result<Self, HarnessError> {
        let path = config.write(folder)?;
        let ready_file = folder.join(format!("{}.ready.json", stem(&config.node)));
        let _ = std::fs::remove_file(&ready_file);
        command.arg("run").arg("--config").arg(&path).arg("--ready-file").arg(&ready_file);
        command.args(["--log", config.log]).args(&config.arguments);
        for (name, _) in std::env::vars_os().filter(|(name, _)| is_the_tests_own(name)) {
            command.env_remove(name);
        }
        let mut process = Process::spawn(&format!("lastgasp-{}", stem(&config.node)), command, folder)?;
        let ready = process.ready_file(&ready_file).await?;
        Ok(Self { process, ready })
    }

    /// What a command says to this daemon, as `["drain", "alpha"]`.
    ///
    /// # Errors
    ///
    /// It cannot be run.
    pub async fn tell(&self, arguments: &[&str]) -> Result<Said, HarnessError> {
        let mut command = Command::new(binaries::find("lastgasp")?);
        command.args(arguments).arg("--socket").arg(&self.ready.socket);
        Said::by(command).await
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

    /// What a command of the daemon's prints for people, as `status`.
    ///
    /// # Errors
    ///
    /// It cannot be run.
    pub async fn says(&self, command: &str) -> Result<String, HarnessError> {
        let mut asking = Command::new(binaries::find("lastgasp")?);
        let output = asking.args([command, "--socket"]).arg(&self.ready.socket).output().await;
        let output = output.map_err(|source| HarnessError::Io { what: command.to_owned(), source })?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Waits for an event that `wanted` holds for, among those that were and those that come.
    ///
    /// # Errors
    ///
    /// None comes within [`GIVE_UP`].
    pub async fn event(&self, what: &str, wanted: impl Fn(&Value) -> bool) -> Result<Value, HarnessError> {
        self.line(&["events", "--follow", "--json"], what, wanted).await
    }

    /// Waits for a status that `wanted` holds for.
    ///
    /// # Errors
    ///
    /// None comes within [`GIVE_UP`].
    pub async fn status_when(&self, what: &str, wanted: impl Fn(&Value) -> bool) -> Result<Value, HarnessError> {
        self.line(&["status", "--watch", "--json"], what, wanted).await
    }

    /// Waits until this fault of NATS is shown in status, with what to do about it, and in metrics.
    /// Returns what is said of it.
    ///
    /// # Errors
    ///
    /// It is not shown for a long time.
    pub async fn trouble(&self, fault: &str) -> Result<Value, HarnessError> {
        let of = |status: &Value| {
            let degraded = status["degraded"].as_array().into_iter().flatten();
            let start = format!("{fault}: ");
            degraded.clone().find(|one| one["reason"].as_str().is_some_and(|it| it.starts_with(&start))).cloned()
        };
        let status = self.status_when(fault, |status| of(status).is_some()).await?;
        self.counts(&format!("lastgasp_nats_faults{{fault=\"{fault}\"}}"), 1.0).await?;
        Ok(of(&status).expect("it was waited for"))
    }

    /// Waits until nothing is wrong with NATS.
    ///
    /// # Errors
    ///
    /// Something is, for a long time.
    pub async fn no_trouble(&self) -> Result<(), HarnessError> {
        let nats = |one: &Value| one["what"].as_str().is_some_and(|what| what.starts_with("nats "));
        let well = |status: &Value| {
            status["nats"] == "connected" && !status["degraded"].as_array().into_iter().flatten().any(nats)
        };
        self.status_when("no trouble with NATS", well).await.map(drop)
    }

    /// The first line that a command of the daemon's prints and `wanted` holds for.
    async fn line(&self, command: &[&str], what: &str, wanted: impl Fn(&Value) -> bool) -> Result<Value, HarnessError> {
        let io = |source| HarnessError::Io { what: command.join(" "), source };
        let mut child = Command::new(binaries::find("lastgasp")?)
            .args(command)
            .arg("--socket")
            .arg(&self.ready.socket)
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(io)?;
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let mut last = Value::Null;
        let found = async {
            while let Some(line) = lines.next_line().await.map_err(io)? {
                last = serde_json::from_str(&line).map_err(|error| HarnessError::GaveUp(error.to_string()))?;
                if wanted(&last) {
                    return Ok(last.clone());
                }
            }
            Err(HarnessError::GaveUp(format!("{what}: the daemon ended")))
        };
        match tokio::time::timeout(GIVE_UP, found).await {
            Ok(found) => found,
            Err(_) => Err(HarnessError::GaveUp(format!("{what}; the last was {last:#}"))),
        }
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

/// What a command line has said.
#[derive(Clone, Debug)]
pub struct Said {
    /// Its exit code.
    pub code: Option<i32>,
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
}

impl Said {
    /// Runs a command to its end.
    ///
    /// # Errors
    ///
    /// It cannot be run.
    pub async fn by(mut command: Command) -> Result<Self, HarnessError> {
        let output = command.stdin(Stdio::null()).output().await;
        let output = output.map_err(|source| HarnessError::Io { what: "lastgasp".into(), source })?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok(Self { code: output.status.code(), out: text(&output.stdout), err: text(&output.stderr) })
    }

    /// Standard output as JSON.
    ///
    /// # Errors
    ///
    /// It is none.
    pub fn json(&self) -> Result<Value, HarnessError> {
        serde_json::from_str(&self.out).map_err(|error| HarnessError::GaveUp(format!("{error}: {self:?}")))
    }
}

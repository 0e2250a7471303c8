//! Configuration: a TOML file, environment variables over it, flags over those.
//!
//! [`schema::SCHEMA`] is the one table of all settings. Everything that is wrong is reported at
//! once, each with its place, the setting, and what is allowed. Files that hold secrets are named
//! here and read where they are used.

mod build;
mod deletion;
mod error;
pub mod schema;
mod settings;
mod sinks;
#[cfg(test)]
mod tests;
pub mod value;

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use lastgasp_protocol::login::Login;
use lastgasp_protocol::{Name, Writer};

pub(crate) use self::build::host_name;
pub use self::deletion::{HANDOVER, Misfit};
pub use self::error::{ConfigError, Place, Problem};
use crate::core::HealthRole;
pub(crate) use crate::core::OnNotServing;
use crate::engines::Profile;
pub use crate::engines::Service;
use crate::notify::NotificationKind;

/// All that can be set.
#[derive(Debug, Clone)]
pub struct Config {
    /// Name of this node in discovery.
    pub node: Name,
    /// Whether anything is changed.
    pub mode: Mode,
    /// The main thread has real-time priority.
    pub realtime: bool,
    /// How NATS is reached.
    pub nats: NatsConfig,
    /// Whether the kernel is asked.
    pub ebpf: EbpfConfig,
    /// Where the daemon answers questions.
    pub status: StatusConfig,
    /// How long the node's lease lasts without renewal.
    pub lease_ttl: Duration,
    /// Replicas of the buckets, if this daemon makes them.
    pub replicas: usize,
    /// Bounds on what the core does.
    pub policy: PolicyConfig,
    /// Which processes may declare themselves workers.
    pub declare: DeclareConfig,
    /// Sinks that are notified of workers, beside NATS.
    pub notify: Vec<NotifyConfig>,
    /// Infera's routers and discovery are notified too.
    pub infera: Vec<InferaConfig>,
    /// Dynamo's discovery is changed too.
    pub dynamo: Vec<DynamoConfig>,
    /// The workers of this node, in the order of the file.
    pub workers: Vec<WorkerConfig>,
}

/// Whether anything is changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Mode {
    /// Withdraw, signal, certify.
    Enforce,
    /// Decide, certify and count, but change nothing.
    Observe,
}

/// Whether the kernel is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EbpfMode {
    /// Go on with pidfd where it refuses.
    Auto,
    /// Only pidfd.
    Off,
    /// End where it refuses.
    Required,
}

/// How the kernel is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EbpfConfig {
    /// Whether at all.
    pub enabled: EbpfMode,
    /// Where the kernel's types are described.
    pub btf: PathBuf,
    /// Bytes of the ring buffer.
    pub ring_bytes: u32,
}

/// How NATS is reached. At most one login is set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NatsConfig {
    /// One URL, or several separated by commas; without credentials.
    pub url: String,
    /// Who we are there, and whom we trust.
    pub login: Login,
}

/// Where the daemon answers questions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatusConfig {
    /// Unix socket of the gRPC service.
    pub socket: PathBuf,
    /// Address of `/metrics`, `/livez`, `/readyz`; port 0 takes any.
    pub listen: SocketAddr,
    /// A status page is served there too.
    pub page: bool,
}

/// Bounds on what the core does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PolicyConfig {
    /// How long a lost worker that recovers stays unlisted.
    pub hold_down: Duration,
    /// When to look whether a process with a fatal signal is gone.
    pub near_certain_recheck: Duration,
    /// Most withdrawals a minute on anything but process evidence.
    pub soft_withdrawals_per_minute: u32,
}

/// Which processes may declare themselves workers, and what then holds for them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeclareConfig {
    /// Declarations are looked for.
    pub enabled: bool,
    /// Effective user ids; empty for any.
    pub uids: Vec<u32>,
    /// Cgroups, each with all below it; empty for any.
    pub cgroups: Vec<String>,
    /// Time between two looks through all processes.
    pub scan_interval: Duration,
    /// As [`WorkerConfig::on_lost`].
    pub on_lost: OnLost,
    /// As [`WorkerConfig::reap_grace`].
    pub reap_grace: Duration,
    /// As [`SeverConfig::enabled`].
    pub sever: bool,
    /// Who says which addresses pods have.
    pub kubelet: Option<KubeletConfig>,
}

/// This node's kubelet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubeletConfig {
    /// Its API, as `https://127.0.0.1:10250`.
    pub url: String,
    /// A file with the token for it.
    pub token_file: Option<PathBuf>,
    /// The authorities that are trusted, instead of the system's.
    pub tls_ca: Option<PathBuf>,
}

/// One sink of notifications.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotifyConfig {
    /// Kind and place in the list, as `webhook-0`: for logs and metrics.
    pub name: String,
    /// Where notifications go.
    pub kind: NotifyKind,
    /// Which ones.
    pub on: Vec<NotificationKind>,
    /// How long one try may take.
    pub timeout: Duration,
    /// How often it is tried, at least once.
    pub attempts: u32,
    /// How many are under way at one time, at least one; those of one worker stay in order.
    pub concurrency: usize,
    /// How many wait for each of those places.
    pub queue: usize,
}

/// Where notifications go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotifyKind {
    /// A program and its arguments.
    Exec {
        /// Without a shell.
        command: Vec<String>,
    },
    /// A URL.
    Webhook(WebhookConfig),
}

/// How a webhook is reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WebhookConfig {
    /// `http://…` or `https://…`.
    pub url: String,
    /// Sent with every notification.
    pub headers: BTreeMap<String, String>,
    /// File with a bearer token.
    pub token_file: Option<PathBuf>,
    /// PEM file with the authorities to trust; the system's without it.
    pub tls_ca: Option<PathBuf>,
}

/// One Infera that is notified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InferaConfig {
    /// Kind and place in the list, as `infera-0`: for logs.
    pub name: String,
    /// Its NATS.
    pub nats: NatsConfig,
    /// Its etcd, if that is its discovery.
    pub etcd: Option<EtcdConfig>,
    /// Most requests of one worker that are remembered.
    pub max_requests: usize,
    /// How long a request is remembered.
    pub max_age: Duration,
    /// Requests to a worker that is lost are answered for it.
    pub stand_in: bool,
    /// How many notifications wait.
    pub queue: usize,
}

/// One Dynamo whose discovery is changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DynamoConfig {
    /// Kind and place in the list, as `dynamo-0`: for logs.
    pub name: String,
    /// Where its discovery is.
    pub backend: DynamoBackend,
    /// How many notifications wait.
    pub queue: usize,
}

/// Where Dynamo's discovery is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DynamoBackend {
    /// In etcd.
    Etcd {
        /// `http://host:port`.
        url: String,
    },
    /// In a folder that its processes share.
    Folder(PathBuf),
}

impl DynamoBackend {
    /// The port to which workers keep their leases.
    #[must_use]
    pub fn port(&self) -> Option<u16> {
        let Self::Etcd { url } = self else { return None };
        url.parse::<axum::http::Uri>().ok()?.port_u16()
    }
}

/// Where Infera's etcd is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EtcdConfig {
    /// `http://host:port`.
    pub url: String,
    /// What its keys begin with.
    pub prefix: String,
}

/// What is done about the processes of a worker that is lost.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OnLost {
    /// Nothing.
    None,
    /// What outlives the root is killed.
    Reap,
    /// A root that lives on is ended, so that what supervises it starts it again.
    TerminateRoot,
    /// The root and everything below it are killed, as those of a hung engine that hears no SIGTERM.
    KillTree,
    /// A program is run: its name and arguments.
    Command(Vec<String>),
}

/// What becomes of the TCP connections of a worker that is lost.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeverConfig {
    /// They are destroyed.
    pub enabled: bool,
    /// A process that is none of the engine's, and whose connections are destroyed too.
    pub companion: Option<Find>,
    /// Connections to these ports stay.
    pub spare_ports: Vec<u16>,
}

/// One worker.
#[derive(Debug, Clone)]
pub struct WorkerConfig {
    /// Name in discovery, unique on this node.
    pub name: Name,
    /// Name of the engine profile.
    pub engine: String,
    /// The profile, with the critical titles that the configuration adds.
    pub profile: Arc<Profile>,
    /// How the root process is found.
    pub find: Find,
    /// Who writes the record.
    pub writer: Writer,
    /// Base URL for routers: `http://host:port`, without a path or a slash at the end.
    pub endpoint: String,
    /// Port of `endpoint`, the one that the worker serves on.
    pub port: u16,
    /// Models, as clients name them.
    pub models: Vec<String>,
    /// Anything that routers may select by.
    pub labels: BTreeMap<String, String>,
    /// How long streams go on when the worker leaves.
    pub drain_window: Duration,
    /// How long its pod has from its deletion to SIGKILL; only to check that the times fit.
    pub termination_grace: Option<Duration>,
    /// How much of that its preStop hook takes.
    pub pre_stop: Duration,
    /// How long its engine lets streams go on after SIGTERM.
    pub shutdown_timeout: Option<Duration>,
    /// What NOT_SERVING of a liveness service means while the processes live.
    pub on_not_serving: OnNotServing,
    /// What is done about its processes when it is lost.
    pub on_lost: OnLost,
    /// How long those processes have to end by themselves.
    pub reap_grace: Duration,
    /// What becomes of its connections then.
    pub sever: SeverConfig,
    /// Its id in Infera.
    pub infera_id: String,
    /// Its instance in Dynamo, if it is not found by its process.
    pub dynamo_instance: Option<u64>,
    /// How its health is asked for.
    pub health: HealthConfig,
}

/// How a root process is found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Find {
    /// By pid.
    Pid(u32),
    /// By a file with the pid.
    PidFile(PathBuf),
    /// By the port it listens on.
    Port(u16),
    /// By a part of its command line, blanks between the arguments.
    Cmdline(String),
    /// By the value of `LASTGASP_WORKER` in its environment.
    Env(String),
}

impl fmt::Display for Find {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pid(pid) => write!(f, "pid {pid}"),
            Self::PidFile(path) => write!(f, "pid file {}", path.display()),
            Self::Port(port) => write!(f, "port {port}"),
            Self::Cmdline(part) => write!(f, "command line {part:?}"),
            Self::Env(worker) => write!(f, "LASTGASP_WORKER={worker}"),
        }
    }
}

/// How a worker's health is asked for. At most one of `grpc` and `http` is set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthConfig {
    /// `http://host:port` of the gRPC health service.
    pub grpc: Option<String>,
    /// Services to watch there; the profile's unless configured.
    pub services: Vec<Service>,
    /// URL that answers 2xx while the worker serves.
    pub http: Option<String>,
    /// Time between two checks.
    pub check_interval: Duration,
    /// Time that a check has.
    pub check_timeout: Duration,
    /// How long checks go unanswered before the worker counts as hung.
    pub hang_window: Duration,
    /// HTTP/2 keepalive, at least 10 s.
    pub keepalive: Duration,
}

impl HealthConfig {
    /// Something is asked that speaks for liveness; HTTP always does.
    #[must_use]
    pub fn has_liveness(&self) -> bool {
        let services = self.grpc.is_some() && self.services.iter().any(|service| service.role == HealthRole::Liveness);
        services || self.http.is_some()
    }
}

/// A setting taken from a flag: the flag, the setting's path, the value.
pub type Override = (&'static str, &'static str, String);

impl Config {
    /// Reads the file, if one is named, this process's environment, and `flags`. What is odd but
    /// not wrong comes back as warnings.
    ///
    /// # Errors
    /// The file cannot be read, or anything at all is wrong; all of it is listed.
    pub fn load(file: Option<&Path>, flags: &[Override]) -> Result<(Self, Vec<Problem>), ConfigError> {
        // A variable that is not UTF-8 is none of ours: names and values of settings are text.
        let variables =
            std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
        let text = file.map(build::read).transpose()?;
        Self::read(file.zip(text.as_deref()), variables, flags)
    }

    /// As [`Config::load`], from what is given.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn read(
        document: Option<(&Path, &str)>,
        variables: impl IntoIterator<Item = (String, String)>,
        flags: &[Override],
    ) -> Result<(Self, Vec<Problem>), ConfigError> {
        let mut settings = settings::Settings::default();
        if let Some((file, text)) = document {
            settings.read_file(file, text);
        }
        settings.read_env(variables);
        for (flag, path, text) in flags {
            settings.read_flag(flag, path, text);
        }
        match build::config(&mut settings, build::host_name) {
            Some(config) => Ok((config, settings.warnings)),
            None => {
                // As they stand in the file, then the environment's and the flags'.
                settings.problems.sort_by_key(|problem| problem.place.line().unwrap_or(usize::MAX));
                Err(ConfigError::Invalid(settings.problems))
            }
        }
    }
}

/// The variables by which a process declares itself a worker, and the settings they stand for.
pub const DECLARATION: [(&str, &str); 10] = [
    ("LASTGASP_WORKER", "worker[0].name"),
    ("LASTGASP_ENGINE", "worker[0].engine"),
    ("LASTGASP_ENDPOINT", "worker[0].endpoint"),
    ("LASTGASP_GRPC_HEALTH", "worker[0].health.grpc"),
    ("LASTGASP_HTTP_HEALTH", "worker[0].health.http"),
    ("LASTGASP_MODELS", "worker[0].models"),
    ("LASTGASP_DRAIN_WINDOW_MS", "worker[0].drain_window_ms"),
    ("LASTGASP_TERMINATION_GRACE_S", "worker[0].termination_grace_s"),
    ("LASTGASP_PRE_STOP_S", "worker[0].pre_stop_s"),
    ("LASTGASP_SHUTDOWN_TIMEOUT_S", "worker[0].shutdown_timeout_s"),
];

/// The worker that a process declares itself by these variables of [`DECLARATION`]. Everything
/// that they cannot say has its default.
///
/// # Errors
/// As for a worker of the file, each problem with its variable.
pub fn declared(variables: &[(String, String)]) -> Result<WorkerConfig, Vec<Problem>> {
    let mut settings = settings::Settings::default();
    for (variable, path) in DECLARATION {
        if let Some((_, text)) = variables.iter().find(|(name, _)| name == variable) {
            settings.read_declaration(variable, path, text);
        }
    }
    match build::worker(&mut settings, "worker[0]") {
        Some(worker) if settings.problems.is_empty() => Ok(worker),
        _ => Err(settings.problems),
    }
}

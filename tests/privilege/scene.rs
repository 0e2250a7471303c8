//! One engine and NATS; the daemon is the story's.

use lastgasp_protocol::WorkerState;
use lastgasp_tests::daemon::{Daemon, DaemonConfig};
use lastgasp_tests::discovery::Discovery;
use lastgasp_tests::engine::Engine;
use lastgasp_tests::nats::Nats;
use lastgasp_tests::user::User;
use nix::sys::signal::Signal;
use serde_json::Value;
use tempfile::TempDir;

pub(crate) const NODE: &str = "node-a";

/// The fields are dropped from first to last.
pub(crate) struct Scene {
    pub(crate) engine: Engine,
    pub(crate) discovery: Discovery,
    pub(crate) nats: Nats,
    /// Of the daemon, and nobody else's.
    pub(crate) daemons: TempDir,
    /// Of everything else.
    _folder: TempDir,
}

impl Scene {
    pub(crate) async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let nats = Nats::start(folder.path()).await.unwrap();
        let discovery = Discovery::watch(&nats).await.unwrap();
        // The frontend would not notice the death of its core for an hour.
        let arguments = ["--frontend", "rust", "--rust-notice-ms", "3600000"];
        let engine = Engine::start("alpha", &arguments, folder.path()).await.unwrap();
        Self { engine, discovery, nats, daemons: tempfile::tempdir().unwrap(), _folder: folder }
    }

    pub(crate) fn config(&self, ebpf: &'static str) -> DaemonConfig {
        DaemonConfig::new(NODE, &self.nats.url(), ebpf, self.daemons.path())
    }

    /// Starts a daemon that watches the engine, as root.
    pub(crate) async fn daemon(&self, config: DaemonConfig) -> Daemon {
        let daemon = Daemon::start(&config.with(&self.engine), self.daemons.path()).await.unwrap();
        self.listed().await;
        daemon
    }

    /// The same as another user, which finds the engine by its pid.
    pub(crate) async fn daemon_of(&self, user: &User, config: DaemonConfig) -> Daemon {
        let config = config.with_pid_of(&self.engine);
        let daemon = Daemon::start_as(user, &config, self.daemons.path()).await.unwrap();
        self.listed().await;
        daemon
    }

    pub(crate) async fn listed(&self) {
        self.discovery.listed("alpha", WorkerState::Serving).await.unwrap();
    }

    /// Kills the engine's core, and waits until the worker is withdrawn; once.
    pub(crate) async fn kill_and_see_it_withdrawn(&self) {
        self.engine.signal_core(Signal::SIGKILL);
        self.discovery.removed("alpha").await.unwrap();
        self.discovery.certificate("alpha", |_| true).await.unwrap();
        assert_eq!(self.discovery.removals("alpha"), 1);
    }
}

/// The value of a metric with these labels, as it stands in the text format.
pub(crate) fn metric(text: &str, series: &str) -> f64 {
    let value = text.lines().find_map(|line| line.strip_prefix(series)?.trim().parse().ok());
    value.unwrap_or_else(|| panic!("no {series} in:\n{text}"))
}

/// The names in a list of a status.
pub(crate) fn names(list: &Value) -> Vec<&str> {
    list.as_array().map(|names| names.iter().filter_map(Value::as_str).collect()).unwrap_or_default()
}

//! Two engines and a daemon, and a NATS that the story brings with it.

use std::time::{Duration, Instant};

use async_nats::jetstream::kv;
use lastgasp_protocol::kv::{Bucket, Content};
use lastgasp_protocol::{WORKERS_BUCKET, WorkerRecord};
use lastgasp_tests::daemon::{Daemon, DaemonConfig};
use lastgasp_tests::engine::Engine;
use lastgasp_tests::process::GIVE_UP;
use nix::sys::signal::Signal;
use tempfile::TempDir;

pub(crate) const NODE: &str = "node-a";

/// How many workers a router may send new work, in its metrics.
pub(crate) const SERVING: &str = "lastgasp_router_workers{state=\"serving\"}";

/// What the engines are started with. They themselves would say nothing of a death for an hour.
pub(crate) const ENGINE: [&str; 6] =
    ["--tokens-per-second", "100", "--frontend", "rust", "--rust-notice-ms", "3600000"];

/// The workers' bucket by the client's own calls, which say nothing about consumers.
pub(crate) fn contract() -> kv::Config {
    let marker = Some(Duration::from_secs(3600));
    kv::Config { bucket: WORKERS_BUCKET.into(), history: 1, limit_markers: marker, ..kv::Config::default() }
}

/// Dropped from first to last.
pub(crate) struct Stage {
    pub(crate) daemon: Daemon,
    pub(crate) engines: Vec<Engine>,
    pub(crate) folder: TempDir,
}

impl Stage {
    /// A daemon that watches `alpha` and `beta`, and is sent to NATS at `url`.
    pub(crate) async fn at(url: &str) -> Self {
        Self::configured(url, |config| config).await
    }

    pub(crate) async fn configured(url: &str, change: impl FnOnce(DaemonConfig) -> DaemonConfig) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut engines = Vec::new();
        for name in ["alpha", "beta"] {
            engines.push(Engine::start(name, &ENGINE, folder.path()).await.unwrap());
        }
        Self::watching(url, engines, folder, change).await
    }

    /// A daemon that watches these engines.
    pub(crate) async fn watching(
        url: &str,
        engines: Vec<Engine>,
        folder: TempDir,
        change: impl FnOnce(DaemonConfig) -> DaemonConfig,
    ) -> Self {
        // These stories are about NATS: pidfds are enough.
        let config = DaemonConfig::new(NODE, url, "off", folder.path());
        let config = engines.iter().fold(config, DaemonConfig::with);
        let daemon = Daemon::start(&change(config), folder.path()).await.unwrap();
        Self { daemon, engines, folder }
    }

    /// Kills the engine core of a worker, and waits until the daemon knows.
    pub(crate) async fn kill(&mut self, name: &str) {
        let engine = self.engines.iter_mut().find(|engine| engine.process.name() == name).expect("alpha or beta");
        engine.signal_core(Signal::SIGKILL);
        self.state(name, "lost").await;
    }

    /// Waits until a worker has no record, and the daemon knows.
    pub(crate) async fn withdrawn(&self, book: &Record, name: &str) {
        let of = |status: &serde_json::Value| {
            let workers = status["workers"].as_array().into_iter().flatten();
            workers.clone().any(|worker| worker["worker"] == name && worker["revision"] == 0)
        };
        self.daemon.status_when(&format!("{name} to be withdrawn"), of).await.unwrap();
        assert!(!book.stands_now(name).await);
    }

    /// Waits until a worker is in this state.
    pub(crate) async fn state(&self, name: &str, state: &str) {
        let of = |status: &serde_json::Value| {
            let workers = status["workers"].as_array().into_iter().flatten();
            workers.clone().any(|worker| worker["worker"] == name && worker["state"] == state)
        };
        self.daemon.status_when(&format!("{name} to be {state}"), of).await.unwrap();
    }
}

/// What stands in discovery, as the stream's leader has it.
pub(crate) struct Record {
    bucket: Bucket,
}

impl Record {
    /// Looks there over this connection. The bucket must be there.
    pub(crate) async fn book(context: &async_nats::jetstream::Context) -> Self {
        let deadline = Instant::now() + GIVE_UP;
        loop {
            if let Ok(Some(bucket)) = Bucket::existing(context, WORKERS_BUCKET).await {
                return Self { bucket };
            }
            assert!(Instant::now() < deadline, "there is no bucket");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits until the record of a worker stands; returns it with its revision.
    pub(crate) async fn stands(&self, worker: &str) -> (WorkerRecord, u64) {
        let deadline = Instant::now() + GIVE_UP;
        let key = format!("{NODE}.{worker}");
        loop {
            if let Ok(Some(entry)) = self.bucket.read(&key).await
                && let Content::Put(value) = &entry.value
            {
                return (WorkerRecord::parse(&key, value).expect("a record"), entry.revision);
            }
            assert!(Instant::now() < deadline, "{worker} is not listed");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Whether it stands now.
    pub(crate) async fn stands_now(&self, worker: &str) -> bool {
        let entry = self.bucket.read(&format!("{NODE}.{worker}")).await.expect("NATS answers");
        entry.is_some_and(|entry| matches!(entry.value, Content::Put(_)))
    }
}

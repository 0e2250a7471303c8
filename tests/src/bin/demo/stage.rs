//! Everything that has to run before an engine can be killed.

use std::collections::HashMap;

use lastgasp_protocol::WorkerState;
use lastgasp_tests::daemon::{Daemon, DaemonConfig};
use lastgasp_tests::discovery::Discovery;
use lastgasp_tests::engine::Engine;
use lastgasp_tests::nats::Nats;
use lastgasp_tests::router::Router;

use crate::{Arguments, Outcome, show};

/// The two workers.
const WORKERS: [&str; 2] = ["worker-a", "worker-b"];

/// NATS, engines, daemon and router; dropped, all of it is gone.
pub(crate) struct Stage {
    // In the order in which they end.
    pub(crate) router: Router,
    daemon: Daemon,
    engines: HashMap<String, Engine>,
    pub(crate) discovery: Discovery,
    _nats: Nats,
    folder: tempfile::TempDir,
    rate: String,
}

impl Stage {
    pub(crate) async fn set(arguments: &Arguments) -> Outcome<Self> {
        let folder = tempfile::tempdir()?;
        let path = folder.path();
        let rate = arguments.rate.to_string();
        show::step("nats-server");
        let nats = Nats::start(path).await?;
        let discovery = Discovery::watch(&nats).await?;
        let mut engines = HashMap::new();
        for worker in WORKERS {
            show::step(&format!("mock engine {worker}"));
            // The Rust frontend of vLLM says nothing for 3.6 s after its engine core died (measured).
            let engine = Engine::start(worker, &["--frontend", "rust", "--tokens-per-second", &rate], path).await?;
            engines.insert(worker.to_owned(), engine);
        }
        let ebpf = if arguments.no_ebpf { "off" } else { "auto" };
        let mut config = DaemonConfig::new("demo-node", &nats.url(), ebpf, path);
        // Whoever asks for many kills makes the workers flap.
        config = config.with_hold_down_ms(0);
        for worker in WORKERS {
            config = config.with(&engines[worker]);
        }
        show::step("lastgasp");
        let daemon = Daemon::start(&config, path).await?;
        show::sensor(&daemon.ready.death_source, arguments.no_ebpf);
        for worker in WORKERS {
            discovery.listed(worker, WorkerState::Serving).await?;
        }
        show::step("lastgasp-router");
        let router = Router::start("demo-router", &nats.url(), 3, path).await?;
        Ok(Self { router, daemon, engines, discovery, _nats: nats, folder, rate })
    }

    pub(crate) fn death_source(&self) -> &str {
        &self.daemon.ready.death_source
    }

    pub(crate) fn engine(&self, worker: &str) -> Outcome<&Engine> {
        self.engines.get(worker).ok_or_else(|| format!("no engine {worker:?}").into())
    }

    /// Starts an engine in the place, and on the ports, of one that was killed.
    pub(crate) async fn replace(&mut self, worker: &str) -> Outcome<()> {
        let old = self.engines.remove(worker).ok_or_else(|| format!("no engine {worker:?}"))?;
        let port = old.ready.http.port().to_string();
        let grpc = old.ready.grpc.map_or(0, |address| address.port()).to_string();
        drop(old);
        let arguments =
            ["--frontend", "rust", "--tokens-per-second", &self.rate, "--port", &port, "--grpc-port", &grpc];
        let engine = Engine::start(worker, &arguments, self.folder.path()).await?;
        self.engines.insert(worker.to_owned(), engine);
        self.discovery.listed(worker, WorkerState::Serving).await?;
        Ok(())
    }
}

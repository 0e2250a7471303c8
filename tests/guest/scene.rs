//! One engine, one daemon and NATS, on a machine of their own.

use std::time::Duration;

use futures_util::StreamExt as _;
use lastgasp_protocol::kv::{Bucket, Change, Content};
use lastgasp_protocol::{Certificate, NODES_BUCKET, NodeLease, WorkerState};
use lastgasp_tests::daemon::{Daemon, DaemonConfig};
use lastgasp_tests::discovery::Discovery;
use lastgasp_tests::engine::Engine;
use lastgasp_tests::nats::Nats;
use nix::sys::signal::Signal;
use tempfile::TempDir;

use crate::cgroup::Cgroup;

const NODE: &str = "node-a";

/// Set by the guest's init: nobody else may have its clock set or its memory used up.
const GUEST: &str = "LASTGASP_GUEST";

/// An emulated processor takes its time.
const GIVE_UP: Duration = Duration::from_secs(120);

/// The fields are dropped from first to last.
pub(crate) struct Scene {
    pub(crate) daemon: Daemon,
    pub(crate) config: DaemonConfig,
    pub(crate) engine: Engine,
    pub(crate) discovery: Discovery,
    pub(crate) nats: Nats,
    pub(crate) folder: TempDir,
}

impl Scene {
    /// An engine that is listed. Its frontend would not notice the death of its core for an hour.
    pub(crate) async fn new(ebpf: &'static str, arguments: &[&str]) -> Self {
        Self::inside(None, ebpf, arguments).await
    }

    /// As [`Scene::new`], with the engine in this cgroup.
    pub(crate) async fn inside(cgroup: Option<&Cgroup>, ebpf: &'static str, arguments: &[&str]) -> Self {
        assert!(std::env::var_os(GUEST).is_some(), "not on this machine: `cargo xtask test-kernels` runs it in QEMU");
        let folder = tempfile::tempdir().unwrap();
        let nats = Nats::start(folder.path()).await.unwrap();
        let discovery = Discovery::watch(&nats).await.unwrap();
        let arguments = [&["--frontend", "rust", "--rust-notice-ms", "3600000"], arguments].concat();
        if let Some(cgroup) = cgroup {
            cgroup.enter();
        }
        let engine = Engine::start("alpha", &arguments, folder.path()).await.unwrap();
        if let Some(cgroup) = cgroup {
            cgroup.leave();
        }
        let config = DaemonConfig::new(NODE, &nats.url(), ebpf, folder.path()).with(&engine);
        let daemon = Daemon::start(&config, folder.path()).await.unwrap();
        discovery.listed("alpha", WorkerState::Serving).await.unwrap();
        Self { daemon, config, engine, discovery, nats, folder }
    }

    /// What is written about the death of the worker, once it is withdrawn; it was withdrawn once.
    pub(crate) async fn withdrawn(&self, wanted: impl Fn(&Certificate) -> bool) -> Certificate {
        self.discovery.removed("alpha").await.unwrap();
        let certificate = self.discovery.certificate("alpha", wanted).await.unwrap();
        assert_eq!(self.discovery.removals("alpha"), 1);
        certificate
    }

    /// Kills the engine's core: that is seen, whatever happened before, and nothing was withdrawn
    /// until then.
    pub(crate) async fn a_death_is_seen(&self) -> Certificate {
        assert_eq!(self.discovery.removals("alpha"), 0);
        self.engine.signal_core(Signal::SIGKILL);
        self.withdrawn(|_| true).await
    }

    /// The node's lease, from now on.
    pub(crate) async fn lease(&self) -> Lease {
        let context = async_nats::jetstream::new(self.nats.client().await.unwrap());
        Lease { bucket: Bucket::open(&context, NODES_BUCKET, 1).await.unwrap() }
    }
}

/// The lease of the node as NATS has it.
pub(crate) struct Lease {
    bucket: Bucket,
}

impl Lease {
    /// Waits until the daemon has written it twice from now on: it is alive, and goes on.
    pub(crate) async fn renewed_twice(&self) {
        let renewed = async {
            let mut changes = self.bucket.watch(NODE).await.unwrap();
            let (mut listed, mut writes) = (false, 0);
            while writes < 2 {
                match changes.next().await.expect("the watch goes on").unwrap() {
                    Change::Listed => listed = true,
                    Change::Entry(entry) => {
                        let Content::Put(value) = &entry.value else { continue };
                        NodeLease::parse(value).expect("the daemon's lease");
                        writes += usize::from(listed);
                    }
                }
            }
        };
        tokio::time::timeout(GIVE_UP, renewed).await.expect("the lease is renewed");
    }
}

/// What a certificate says of one kind of moment; empty if there was none.
pub(crate) fn details<'a>(certificate: &'a Certificate, what: &str) -> Vec<&'a str> {
    let moments = certificate.timeline.iter().filter(|moment| moment.what == what);
    moments.map(|moment| moment.detail.as_str()).collect()
}

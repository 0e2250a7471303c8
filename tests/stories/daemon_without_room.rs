//! The daemon cannot write, or has no descriptors left. What it cannot do it says, and nobody is
//! taken for dead because he could not be looked at.

use lastgasp_protocol::kv::Bucket;
use lastgasp_protocol::{NODES_BUCKET, WorkerState};
use lastgasp_tests::binaries;
use lastgasp_tests::daemon::{Daemon, DaemonConfig, HealthConfig};
use lastgasp_tests::discovery::Discovery;
use lastgasp_tests::engine::Engine;
use lastgasp_tests::matrix;
use lastgasp_tests::nats::Nats;
use nix::sys::signal::Signal;
use tempfile::TempDir;
use tokio::process::Command;

use crate::scene::{Scene, only_those_of_are_moved};

/// A command that becomes `lastgasp` when arguments are added, after a shell has done something.
fn after(script: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", &format!(r#"{script}; exec "$@""#), "sh"]).arg(binaries::find("lastgasp").unwrap());
    command
}

/// Every line that it logs fails with ENOSPC (full(4)).
#[tokio::test]
async fn a_full_disk_under_its_log_changes_nothing() {
    let mut scene = Scene::started_by(after("exec >/dev/full 2>/dev/full")).await;
    let asked = scene.ask_several().await;

    scene.engine("alpha").signal_core(Signal::SIGKILL);

    only_those_of_are_moved("alpha", asked).await;
    scene.discovery.removed("alpha").await.unwrap();
    let certificate = scene.discovery.certificate("alpha", |c| c.routers_done == 1).await.unwrap();
    assert!(!scene.daemon.process.has_exited());
    assert_eq!((scene.discovery.removals("alpha"), scene.discovery.removals("beta")), (1, 0));
    matrix::row(
        "The disk of the daemon's log is full",
        "it does its work all the same, and the certificate is on the server",
        &format!("{} of {} streams moved, withdrawn once", certificate.streams.moved, certificate.streams.streams),
    );
}

/// The least that a daemon of two workers starts with: all of it is kept for other things than pidfds.
const LEAST: u32 = 168;

fn limited_to(files: u32) -> Command {
    after(&format!("ulimit -n {files}"))
}

#[tokio::test]
async fn with_too_few_descriptors_it_does_not_start_and_says_how_many_it_needs() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let config =
        ["alpha", "beta"].iter().fold(DaemonConfig::new("node-a", "nats://127.0.0.1:9", "off", path), |all, name| {
            all.with_vllm(name, name, "http://127.0.0.1:9".to_owned(), HealthConfig::default())
        });
    let mut command = limited_to(LEAST - 1);
    command.arg("run").arg("--config").arg(config.write(path).unwrap());

    let said = command.output().await.unwrap();

    let text = String::from_utf8_lossy(&said.stderr);
    assert_eq!(said.status.code(), Some(78), "{text}");
    for part in ["at most 167 files", "LimitNOFILE=", "168 or more"] {
        assert!(text.contains(part), "{text}");
    }
}

/// Two engines that a daemon without probes lists. Dropped from first to last.
struct Listed {
    daemon: Daemon,
    alpha: Engine,
    _beta: Engine,
    discovery: Discovery,
    nats: Nats,
    _folder: TempDir,
}

impl Listed {
    async fn by(command: Command) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let nats = Nats::start(path).await.unwrap();
        let discovery = Discovery::watch(&nats).await.unwrap();
        // Neither says by itself that its engine core is gone.
        let arguments = ["--frontend", "rust", "--rust-notice-ms", "3600000"];
        let alpha = Engine::start("alpha", &arguments, path).await.unwrap();
        let beta = Engine::start("beta", &arguments, path).await.unwrap();
        let config = DaemonConfig::new("node-a", &nats.url(), "off", path).with(&alpha).with(&beta);
        let daemon = Daemon::start_by(command, &config, path).await.unwrap();
        discovery.listed("alpha", WorkerState::Serving).await.unwrap();
        discovery.listed("beta", WorkerState::Serving).await.unwrap();
        Self { daemon, alpha, _beta: beta, discovery, nats, _folder: folder }
    }

    async fn finds_the_death_of_alpha_alone(self) {
        self.alpha.signal_core(Signal::SIGKILL);
        self.discovery.removed("alpha").await.unwrap();
        assert_eq!((self.discovery.removals("alpha"), self.discovery.removals("beta")), (1, 0));
    }
}

/// Without the kernel's events, and without a descriptor that becomes readable, they have to be looked at.
#[tokio::test]
async fn without_a_descriptor_for_any_process_the_dead_are_found_by_looking() {
    let listed = Listed::by(limited_to(LEAST)).await;
    listed.daemon.counts("lastgasp_losses_total{hop=\"pidfd\",kind=\"open\"}", 2.0).await.unwrap();

    listed.finds_the_death_of_alpha_alone().await;

    matrix::row(
        "The daemon has so few file descriptors (RLIMIT_NOFILE) that none is left for a pidfd, and no kernel programs",
        "critical processes are looked at every second; with still fewer it does not start",
        "the one that died was withdrawn, the other stayed",
    );
}

/// As when another program has taken all that the node has, or somebody lowered the limit.
#[tokio::test]
async fn with_no_descriptor_left_the_living_stay_and_the_dead_are_found() {
    let listed = Listed::by(Command::new(binaries::find("lastgasp").unwrap())).await;
    let pid = listed.daemon.process.identity.pid.to_string();
    let lowered = Command::new("prlimit").args(["--pid", &pid, "--nofile=1"]).status().await.unwrap();
    assert!(lowered.success());
    // It has looked around more than once by then.
    let nodes = Bucket::existing(&listed.nats.jetstream().await.unwrap(), NODES_BUCKET).await.unwrap().unwrap();
    let lease = async || nodes.read("node-a").await.unwrap().unwrap().revision;
    let before = lease().await;
    while lease().await < before + 2 {}
    assert_eq!((listed.discovery.removals("alpha"), listed.discovery.removals("beta")), (0, 0));

    listed.finds_the_death_of_alpha_alone().await;

    matrix::row(
        "The daemon can open nothing any more (RLIMIT_NOFILE lowered, or ENFILE)",
        "nobody is taken for dead because he could not be looked at; deaths are found by what is open",
        "two seconds without: no withdrawal; then a death found",
    );
}

//! The daemon cannot write, or has no descriptors left. What it cannot do it says, and nobody is
//! taken for dead because he could not be looked at.

use std::time::Duration;

use lastgasp_protocol::kv::Bucket;
use lastgasp_protocol::{NODES_BUCKET, WorkerState};
use lastgasp_tests::binaries;
use lastgasp_tests::daemon::{Daemon, DaemonConfig};
use lastgasp_tests::discovery::Discovery;
use lastgasp_tests::engine::Engine;
use lastgasp_tests::matrix;
use lastgasp_tests::nats::Nats;
use lastgasp_tests::process::Process;
use nix::sys::signal::Signal;
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

/// Revision of the node's lease. It grows while a daemon is at work.
async fn lease(nats: &Nats) -> u64 {
    let context = async_nats::jetstream::new(nats.client().await.unwrap());
    match Bucket::existing(&context, NODES_BUCKET).await.unwrap() {
        Some(bucket) => bucket.read("node-a").await.unwrap().map_or(0, |entry| entry.revision),
        None => 0,
    }
}

/// So few that some of what it wants to open cannot be.
#[tokio::test]
async fn without_descriptors_the_living_stay_and_the_dead_are_found() {
    /// How many too few there are at most. With less, it cannot even talk to NATS.
    const LACKING: usize = 8;
    /// It may open a few more than were counted.
    const SPARE: usize = 2;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let nats = Nats::start(path).await.unwrap();
    let discovery = Discovery::watch(&nats).await.unwrap();
    let arguments = ["--frontend", "rust", "--rust-notice-ms", "3600000"];
    let alpha = Engine::start("alpha", &arguments, path).await.unwrap();
    let beta = Engine::start("beta", &arguments, path).await.unwrap();
    // Without the kernel's events a critical process that has no pidfd has to be looked at.
    let config = DaemonConfig::new("node-a", &nats.url(), "off", path).with(&alpha).with(&beta);
    let enough = {
        let daemon = Daemon::start(&config, path).await.unwrap();
        discovery.listed("alpha", WorkerState::Serving).await.unwrap();
        discovery.listed("beta", WorkerState::Serving).await.unwrap();
        std::fs::read_dir(format!("/proc/{}/fd", daemon.process.identity.pid)).unwrap().count()
    };
    // Its ready file may be what it has no descriptor for: its lease shows whether it is at work.
    let short = |limit: usize| {
        let mut command = after(&format!("ulimit -n {limit}"));
        command.arg("run").arg("--config").arg(config.write(path).unwrap());
        Process::spawn("lastgasp-short", command, path).unwrap()
    };
    let (mut at_work, mut refused, mut fewest) = (0, 0, None);
    for limit in (enough - LACKING..=enough + SPARE).rev() {
        let before = lease(&nats).await;
        let mut daemon = short(limit);
        // Two renewals of its lease: it has looked around more than once by then.
        let works = async {
            while lease(&nats).await < before + 2 {
                tokio::task::yield_now().await
            }
        };
        tokio::select! {
            () = works => {
                at_work += 1;
                fewest = Some(limit);
            }
            exited = daemon.exited() => {
                exited.unwrap();
                refused += 1;
            }
            // It cannot reach NATS, so it cannot harm anybody either.
            () = tokio::time::sleep(Duration::from_secs(8)) => refused += 1,
        }
        assert_eq!((discovery.removals("alpha"), discovery.removals("beta")), (0, 0), "with {limit} descriptors");
    }

    let _daemon = short(fewest.expect("none of them was at work"));
    alpha.signal_core(Signal::SIGKILL);
    discovery.removed("alpha").await.unwrap();
    assert_eq!((discovery.removals("alpha"), discovery.removals("beta")), (1, 0));
    matrix::row(
        "The daemon has too few file descriptors (RLIMIT_NOFILE), by 0 to 8",
        "nobody is taken for dead because he could not be looked at; deaths are found",
        &format!(
            "{at_work} daemons at work and {refused} not, under {} limits: 0 withdrawals of living workers; a death found",
            LACKING + SPARE + 1
        ),
    );
}

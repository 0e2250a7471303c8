//! A daemon is replaced by one with fewer privileges, which cannot find the engines any more. They live, and
//! their records say which processes they are.

use lastgasp_protocol::WorkerState;
use lastgasp_tests::binaries;
use lastgasp_tests::daemon::{Daemon, DaemonConfig};
use lastgasp_tests::discovery::Discovery;
use lastgasp_tests::engine::Engine;
use lastgasp_tests::matrix;
use lastgasp_tests::nats::Nats;
use lastgasp_tests::process::GIVE_UP;
use tokio::process::Command;

#[tokio::test]
async fn the_living_stay_listed_and_the_dead_are_withdrawn() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let nats = Nats::start(path).await.unwrap();
    let discovery = Discovery::watch(&nats).await.unwrap();
    let mut alpha = Engine::start("alpha", &[], path).await.unwrap();
    let beta = Engine::start("beta", &[], path).await.unwrap();
    // Found by their environment, which only those may read who may trace them (ptrace(2)).
    let config = DaemonConfig::new("node-a", &nats.url(), "off", path).with(&alpha).with(&beta);
    let daemon = Daemon::start(&config, path).await.unwrap();
    for worker in ["alpha", "beta"] {
        discovery.listed(worker, WorkerState::Serving).await.unwrap();
    }
    drop(daemon);

    let mut command = Command::new("setpriv");
    command.args(["--bounding-set=-sys_ptrace,-dac_read_search", "--inh-caps=-sys_ptrace,-dac_read_search"]);
    command.arg(binaries::find("lastgasp").unwrap());
    let daemon = Daemon::start_by(command, &config, path).await.unwrap();
    let is_logged = |log: &str, worker: &str| {
        log.lines()
            .any(|line| line.contains("the record's process lives") && line.contains(&format!("worker={worker} ")))
    };
    tokio::time::timeout(GIVE_UP, async {
        while ["alpha", "beta"].iter().any(|worker| !is_logged(&daemon.process.log_tail(), worker)) {
            tokio::task::yield_now().await;
        }
    })
    .await
    .unwrap();
    alpha.kill_tree();
    alpha.process.exited().await.unwrap();

    discovery.removed("alpha").await.unwrap();
    assert_eq!((discovery.removals("alpha"), discovery.removals("beta")), (1, 0));
    matrix::row(
        "A daemon is replaced by one that may not read the engines' environments, and finds none of them",
        "their records stand as long as the processes live that they name",
        "said for both; withdrawn once the process was gone, the other stayed listed",
    );
}

//! The nats-server hangs (SIGSTOP): its kernel takes every byte, and nobody answers.

use lastgasp_protocol::WorkerState;
use lastgasp_tests::discovery::Discovery;
use lastgasp_tests::matrix;
use lastgasp_tests::nats::Nats;
use nix::sys::signal::Signal;

use super::stage::Stage;

#[tokio::test]
async fn what_was_decided_meanwhile_is_made_up_for_when_it_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let discovery = Discovery::watch(&nats).await.unwrap();
    let mut stage = Stage::at(&nats.url()).await;
    for worker in ["alpha", "beta"] {
        discovery.listed(worker, WorkerState::Serving).await.unwrap();
    }

    nats.signal(Signal::SIGSTOP);
    stage.kill("alpha").await;
    stage.daemon.trouble("unreachable").await.unwrap();
    nats.signal(Signal::SIGCONT);

    discovery.removed("alpha").await.unwrap();
    stage.daemon.no_trouble().await.unwrap();
    assert_eq!((discovery.removals("alpha"), discovery.removals("beta")), (1, 0));
    matrix::row(
        "nats-server hangs (SIGSTOP) and goes on, a worker killed meanwhile",
        "said to be unreachable, withdrawn once when it goes on, nobody else withdrawn",
        "unreachable, then withdrawn once, the other worker stayed listed",
    );
}

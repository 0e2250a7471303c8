//! A worker is taken out of the configuration while no daemon runs. Nobody else would ever renew or end
//! the record that the last one has left of it.

use lastgasp_protocol::WorkerState;
use lastgasp_tests::discovery::Discovery;
use lastgasp_tests::matrix;
use lastgasp_tests::nats::Nats;
use nix::sys::signal::Signal;

use super::stage::Stage;

#[tokio::test]
async fn its_record_is_deleted_and_the_others_stay() {
    let server = tempfile::tempdir().unwrap();
    let nats = Nats::start(server.path()).await.unwrap();
    let discovery = Discovery::watch(&nats).await.unwrap();
    let Stage { mut daemon, mut engines, folder } = Stage::at(&nats.url()).await;
    for worker in ["alpha", "beta"] {
        discovery.listed(worker, WorkerState::Serving).await.unwrap();
    }
    assert!(daemon.process.identity.signal(Signal::SIGKILL));
    daemon.process.exited().await.unwrap();
    matrix::count("daemons killed", 1);

    let alpha = engines.remove(0);
    let _stage = Stage::watching(&nats.url(), engines, folder, |config| config).await;
    discovery.removed("alpha").await.unwrap();
    discovery.listed("beta", WorkerState::Serving).await.unwrap();
    assert_eq!((discovery.removals("alpha"), discovery.removals("beta")), (1, 0));
    assert!(alpha.process.identity.is_alive());
    matrix::row(
        "a worker is taken out of the configuration after the daemon was killed",
        "the next daemon deletes the record that was left of it, and no other",
        "deleted once, the other worker stayed listed",
    );
}

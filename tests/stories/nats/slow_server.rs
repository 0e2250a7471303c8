//! Everything that NATS says is late by a fifth of a second, each way.

use std::time::Duration;

use lastgasp_protocol::WorkerState;
use lastgasp_tests::discovery::Discovery;
use lastgasp_tests::matrix;
use lastgasp_tests::nats::Nats;
use lastgasp_tests::proxy::{Proxy, Weather};

use super::stage::Stage;

#[tokio::test]
async fn workers_are_listed_and_withdrawn_later_and_once() {
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let discovery = Discovery::watch(&nats).await.unwrap();
    let proxy = Proxy::start(nats.address()).await.unwrap();
    proxy.set(Weather::Slow(Duration::from_millis(200)));
    let mut stage = Stage::at(&proxy.url()).await;
    for worker in ["alpha", "beta"] {
        discovery.listed(worker, WorkerState::Serving).await.unwrap();
    }
    stage.kill("alpha").await;
    discovery.removed("alpha").await.unwrap();
    stage.daemon.no_trouble().await.unwrap();
    assert_eq!((discovery.removals("alpha"), discovery.removals("beta")), (1, 0));
    assert_eq!(proxy.accepted(), 1, "a slow server is no reason to connect again");
    matrix::row(
        "NATS answers late (200 ms each way), a worker killed",
        "withdrawn once, later; the connection is kept",
        "withdrawn once over the first connection, the other worker stayed listed",
    );
}

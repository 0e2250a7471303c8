//! The network between the daemon and NATS falls silent: bytes neither pass nor is anything closed.

use std::time::Instant;

use lastgasp_protocol::WorkerState;
use lastgasp_tests::discovery::Discovery;
use lastgasp_tests::matrix;
use lastgasp_tests::nats::Nats;
use lastgasp_tests::proxy::{Proxy, Weather};

use super::stage::Stage;

#[tokio::test]
async fn it_is_noticed_by_pings_and_the_death_meanwhile_is_made_up_for() {
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let discovery = Discovery::watch(&nats).await.unwrap();
    let proxy = Proxy::start(nats.address()).await.unwrap();
    let mut stage = Stage::at(&proxy.url()).await;
    for worker in ["alpha", "beta"] {
        discovery.listed(worker, WorkerState::Serving).await.unwrap();
    }

    proxy.set(Weather::Still);
    let silent = Instant::now();
    // The ping interval that async-nats has by default would take three minutes.
    stage.daemon.status_when("the silence to be noticed", |status| status["nats"] == "disconnected").await.unwrap();
    let noticed = silent.elapsed();
    assert!(stage.daemon.trouble("unreachable").await.unwrap()["fix"].as_str().is_some_and(|fix| !fix.is_empty()));
    stage.kill("alpha").await;
    proxy.set(Weather::Fair);

    discovery.removed("alpha").await.unwrap();
    stage.daemon.no_trouble().await.unwrap();
    assert_eq!((discovery.removals("alpha"), discovery.removals("beta")), (1, 0));
    matrix::row(
        "the network to NATS falls silent (nothing passes, nothing is closed), a worker killed meanwhile",
        "noticed within 5 s, withdrawn once after the reconnect, nobody else withdrawn",
        &format!("noticed after {:.1} s, withdrawn once, the other worker stayed listed", noticed.as_secs_f64()),
    );
}

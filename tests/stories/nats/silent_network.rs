//! The network between the daemon and NATS falls silent: bytes neither pass nor is anything closed.

use std::time::Instant;

use lastgasp_protocol::WorkerState;
use lastgasp_tests::discovery::Discovery;
use lastgasp_tests::matrix;
use lastgasp_tests::model::Endpoint;
use lastgasp_tests::nats::Nats;
use lastgasp_tests::proxy::{Proxy, Weather};
use lastgasp_tests::router::Router;
use serde_json::json;

use super::stage::{SERVING, Stage};

const UNREACHABLE: &str = "lastgasp_router_nats_faults{fault=\"unreachable\"}";

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

#[tokio::test]
async fn a_router_notices_as_well_and_serves_with_the_workers_known_last() {
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let proxy = Proxy::start(nats.address()).await.unwrap();
    let mut stage = Stage::at(&nats.url()).await;
    let router = Router::start("router-1", &proxy.url(), 3, folder.path()).await.unwrap();
    router.shows(SERVING, 2.0).await.unwrap();

    proxy.set(Weather::Still);
    let silent = Instant::now();
    router.shows(UNREACHABLE, 1.0).await.unwrap();
    let noticed = silent.elapsed();
    router.shows(SERVING, 2.0).await.unwrap();
    let body = json!({"model": "tiny", "prompt": "hello", "max_tokens": 5, "ignore_eos": true});
    let answer = router.stream(Endpoint::Completions, &body).await.unwrap().finish().await.unwrap();
    assert_eq!((answer.status, answer.dones), (200, 1));
    stage.kill("alpha").await;
    proxy.set(Weather::Fair);

    // The signal was missed; the deletion says the same.
    router.shows(SERVING, 1.0).await.unwrap();
    router.shows(UNREACHABLE, 0.0).await.unwrap();
    matrix::row(
        "the network between a router and NATS falls silent, a worker killed meanwhile",
        "noticed within 5 s, requests are served, the death is learnt from the deletion after it",
        &format!("noticed after {:.1} s, a request served, the worker dropped after it", noticed.as_secs_f64()),
    );
}

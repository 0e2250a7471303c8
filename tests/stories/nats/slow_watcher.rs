//! A router hears nothing from NATS while a worker dies and comes back: the deletion is overwritten
//! by the next life's record before the router looks.

use lastgasp_protocol::WorkerState;
use lastgasp_tests::discovery::Discovery;
use lastgasp_tests::engine::Engine;
use lastgasp_tests::matrix;
use lastgasp_tests::model::Endpoint;
use lastgasp_tests::nats::Nats;
use lastgasp_tests::proxy::{Proxy, Weather};
use lastgasp_tests::router::Router;
use serde_json::json;

use super::stage::{ENGINE, SERVING, Stage};

#[tokio::test]
async fn the_next_life_says_that_the_one_before_is_gone() {
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let discovery = Discovery::watch(&nats).await.unwrap();
    let proxy = Proxy::start(nats.address()).await.unwrap();
    let own = tempfile::tempdir().unwrap();
    let mut engines = Vec::new();
    for name in ["alpha", "beta"] {
        engines.push(Engine::start(name, &ENGINE, own.path()).await.unwrap());
    }
    // Between router and alpha too, so that the end of its connections is not heard either.
    let road = Proxy::start(engines[0].ready.http).await.unwrap();
    let mut stage = Stage::watching(&nats.url(), engines, own, |mut config| {
        config.worker[0].endpoint = format!("http://{}", road.address());
        config
    })
    .await;
    let router = Router::start("router-1", &proxy.url(), 3, folder.path()).await.unwrap();
    router.shows(SERVING, 2.0).await.unwrap();
    let body = json!({"model": "tiny", "prompt": "hello", "max_tokens": 400, "ignore_eos": true, "temperature": 0,
        "return_token_ids": true});
    // Least in flight puts one on each.
    let mut on_alpha = None;
    let mut on_beta = None;
    for _ in 0..2 {
        let mut stream = router.stream(Endpoint::Completions, &body).await.unwrap();
        stream.tokens(5).await.unwrap();
        let alpha = stream.transcript.worker.as_deref() == Some("node-a/alpha");
        *(if alpha { &mut on_alpha } else { &mut on_beta }) = Some(stream);
    }
    let (on_alpha, on_beta) = (on_alpha.expect("one of two"), on_beta.expect("the other"));

    proxy.set(Weather::Still);
    road.strand();
    let old = &mut stage.engines[0];
    let (http, grpc) = (old.ready.http.port().to_string(), old.ready.grpc.unwrap().port().to_string());
    old.kill_tree();
    old.process.exited().await.unwrap();
    discovery.removed("alpha").await.unwrap();
    let addresses = ["--port", &http, "--grpc-port", &grpc];
    let next = Engine::start("alpha", &[&ENGINE[..], &addresses].concat(), stage.folder.path()).await.unwrap();
    discovery.listed("alpha", WorkerState::Serving).await.unwrap();
    proxy.set(Weather::Fair);

    let moved = on_alpha.finish().await.unwrap();
    assert!(moved.comments.iter().any(|comment| comment.starts_with("lastgasp moved")), "{moved:#?}");
    assert_eq!((moved.ids.len(), moved.dones), (400, 1));
    let stayed = on_beta.finish().await.unwrap();
    assert_eq!(stayed.ids, moved.ids, "the same answer to the same question");
    assert!(!stayed.comments.iter().any(|comment| comment.starts_with("lastgasp moved")));
    drop(next);
    matrix::row(
        "a router hears nothing while a worker dies and its next life is listed over the deletion",
        "the next life says that the one before is gone: its streams move, exactly",
        "the stream on the dead life moved and is exact, the other stayed",
    );
}

//! The connections of daemon and router are cut again and again.

use std::time::{Duration, Instant};

use lastgasp_protocol::{NODES_BUCKET, ROUTERS_BUCKET, WORKERS_BUCKET};
use lastgasp_tests::matrix;
use lastgasp_tests::nats::Nats;
use lastgasp_tests::process::GIVE_UP;
use lastgasp_tests::proxy::Proxy;
use lastgasp_tests::router::Router;

use super::stage::{Record, SERVING, Stage};

const CUTS: usize = 30;

#[tokio::test]
async fn no_consumer_is_left_behind_on_the_server() {
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let proxy = Proxy::start(nats.address()).await.unwrap();
    let mut stage = Stage::at(&proxy.url()).await;
    let router = Router::start("router-1", &proxy.url(), 3, folder.path()).await.unwrap();
    router.shows(SERVING, 2.0).await.unwrap();
    let context = nats.jetstream().await.unwrap();
    let book = Record::book(&context).await;
    book.stands("beta").await;

    for _ in 0..CUTS {
        let before = proxy.accepted();
        proxy.cut();
        let both = async {
            while proxy.accepted() < before + 2 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(GIVE_UP, both).await.expect("both come back");
    }
    stage.daemon.no_trouble().await.unwrap();
    // The daemon follows its own records and the routers; the router the workers and the nodes.
    let deadline = Instant::now() + GIVE_UP;
    for (bucket, followers) in [(WORKERS_BUCKET, 2), (NODES_BUCKET, 1), (ROUTERS_BUCKET, 1)] {
        loop {
            let stream = context.get_stream(format!("KV_{bucket}")).await.unwrap();
            let found = stream.cached_info().state.consumer_count;
            if found == followers {
                break;
            }
            assert!(Instant::now() < deadline, "{bucket} has {found} consumers, and {followers} follow it");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
    // And those that are there are heard.
    stage.kill("alpha").await;
    router.shows(SERVING, 1.0).await.unwrap();
    assert!(book.stands_now("beta").await);
    matrix::row(
        &format!("the connections of daemon and router cut {CUTS} times"),
        "as many consumers on the server as watches; nobody withdrawn",
        "4 consumers for 4 watches, nobody withdrawn, a death is heard after it",
    );
}

//! The acknowledgement of a withdrawal is lost with the connection: it was made, and nobody knows.

use lastgasp_protocol::WorkerState;
use lastgasp_tests::discovery::Discovery;
use lastgasp_tests::matrix;
use lastgasp_tests::nats::Nats;
use lastgasp_tests::proxy::{Proxy, Weather};

use super::stage::Stage;

#[tokio::test]
async fn it_is_read_after_the_reconnect_and_not_made_twice() {
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let discovery = Discovery::watch(&nats).await.unwrap();
    let proxy = Proxy::start(nats.address()).await.unwrap();
    let mut stage = Stage::at(&proxy.url()).await;
    for worker in ["alpha", "beta"] {
        discovery.listed(worker, WorkerState::Serving).await.unwrap();
    }

    proxy.swallow_answer_to("KV-Operation: DEL");
    stage.kill("alpha").await;
    proxy.swallowed().await;
    discovery.removed("alpha").await.unwrap();
    proxy.cut();
    proxy.set(Weather::Fair);

    stage.daemon.counts("lastgasp_withdrawals_total{cause=\"process_killed\",outcome=\"deleted\"}", 1.0).await.unwrap();
    stage.daemon.no_trouble().await.unwrap();
    assert_eq!((discovery.removals("alpha"), discovery.removals("beta")), (1, 0));
    matrix::row(
        "the acknowledgement of a withdrawal lost with the connection",
        "read after the reconnect, counted as done, not made twice",
        "one tombstone, counted once as deleted",
    );
}

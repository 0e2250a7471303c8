//! Somebody deletes lastgasp's streams while everything runs. The server tells nobody.

use lastgasp_protocol::kv::{Bucket, Content};
use lastgasp_protocol::{DEATHS_STREAM, NODES_BUCKET, ROUTERS_BUCKET, WORKERS_BUCKET};
use lastgasp_tests::discovery::Discovery;
use lastgasp_tests::matrix;
use lastgasp_tests::nats::Nats;
use lastgasp_tests::process::GIVE_UP;
use lastgasp_tests::router::Router;

use super::stage::{NODE, Record, Stage};

#[tokio::test]
async fn all_are_made_again_and_every_living_worker_is_listed() {
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let mut stage = Stage::at(&nats.url()).await;
    let router = Router::start("router-1", &nats.url(), 3, stage.folder.path()).await.unwrap();
    let context = nats.jetstream().await.unwrap();
    let book = Record::book(&context).await;
    let (before, _) = book.stands("alpha").await;
    book.stands("beta").await;

    for bucket in [WORKERS_BUCKET, NODES_BUCKET, ROUTERS_BUCKET] {
        context.delete_key_value(bucket).await.unwrap();
    }
    context.delete_stream(DEATHS_STREAM).await.unwrap();

    let book = Record::book(&context).await;
    let (after, _) = book.stands("alpha").await;
    assert_eq!((after.incarnation, after.epoch), (before.incarnation, before.epoch), "the same life, not a new one");
    book.stands("beta").await;
    // The node's lease and the router's.
    for (bucket, key) in [(NODES_BUCKET, NODE), (ROUTERS_BUCKET, "router-1")] {
        let held = async {
            loop {
                if let Ok(Some(bucket)) = Bucket::existing(&context, bucket).await
                    && let Ok(Some(entry)) = bucket.read(key).await
                    && matches!(entry.value, Content::Put(_))
                {
                    return;
                }
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(GIVE_UP, held).await.expect(key);
    }
    stage.daemon.no_trouble().await.unwrap();
    // A death goes over the new ones: the certificate is kept, the record withdrawn.
    let discovery = Discovery::watch(&nats).await.unwrap();
    stage.kill("alpha").await;
    discovery.removed("alpha").await.unwrap();
    discovery.certificate("alpha", |_| true).await.unwrap();
    assert_eq!(discovery.removals("beta"), 0);
    assert!(!stage.daemon.process.has_exited());
    drop(router);
    matrix::row(
        "all buckets and the stream of certificates deleted while everything runs",
        "made again; every living worker listed under the same life; leases held again; deaths signalled",
        "all four made again, both workers listed with the same incarnation and epoch, a death certified",
    );
}

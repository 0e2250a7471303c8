//! Somebody empties the workers' bucket while everything runs. No watch hears of it.

use lastgasp_tests::matrix;
use lastgasp_tests::nats::Nats;

use super::stage::{Record, Stage};

#[tokio::test]
async fn every_living_worker_is_listed_again_and_no_dead_one() {
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let mut stage = Stage::at(&nats.url()).await;
    let context = nats.jetstream().await.unwrap();
    let book = Record::book(&context).await;
    let (before, revision) = book.stands("alpha").await;
    book.stands("beta").await;
    stage.kill("beta").await;
    stage.withdrawn(&book, "beta").await;

    context.get_stream("KV_lastgasp_workers").await.unwrap().purge().await.unwrap();

    let (after, again) = book.stands("alpha").await;
    assert_eq!((after.incarnation, after.epoch), (before.incarnation, before.epoch));
    assert!(again > revision);
    // A worker that dies later is still withdrawn: its record's revision is the new one.
    stage.kill("alpha").await;
    stage.withdrawn(&book, "alpha").await;
    assert!(!book.stands_now("beta").await, "the dead one is not listed");
    matrix::row(
        "the workers' bucket purged while everything runs",
        "living workers listed again under the same life, dead ones not",
        "listed with the same incarnation and epoch, the dead worker was not, withdrawals go on",
    );
}

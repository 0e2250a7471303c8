//! The server loses its disk and comes back empty.

use lastgasp_tests::matrix;
use lastgasp_tests::nats::Nats;

use super::stage::{Record, Stage};

#[tokio::test]
async fn what_stood_there_is_made_again() {
    let folder = tempfile::tempdir().unwrap();
    let mut nats = Nats::start(folder.path()).await.unwrap();
    let mut stage = Stage::at(&nats.url()).await;
    let book = Record::book(&nats.jetstream().await.unwrap()).await;
    let (before, _) = book.stands("beta").await;
    book.stands("alpha").await;

    nats.stop();
    stage.kill("alpha").await;
    nats.wipe();
    nats.resume().await.unwrap();

    let book = Record::book(&nats.jetstream().await.unwrap()).await;
    let (after, _) = book.stands("beta").await;
    assert_eq!((after.incarnation, after.epoch), (before.incarnation, before.epoch));
    stage.daemon.no_trouble().await.unwrap();
    assert!(!book.stands_now("alpha").await, "the dead one is not listed");
    matrix::row(
        "nats-server comes back with an empty disk, a worker killed meanwhile",
        "buckets made again, living workers listed under the same life, the dead one not",
        "listed with the same incarnation and epoch, the dead worker was not",
    );
}

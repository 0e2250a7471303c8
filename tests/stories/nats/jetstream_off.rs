//! The server runs without JetStream: from the beginning, or after a restart.

use lastgasp_tests::matrix;
use lastgasp_tests::nats::{Nats, Options};

use super::stage::{Record, Stage};

#[tokio::test]
async fn it_is_said_with_the_fix_and_all_is_made_up_for_when_it_is_on() {
    let folder = tempfile::tempdir().unwrap();
    let options = Options { jetstream: false, ..Options::default() };
    let mut nats = Nats::start_with(folder.path(), options).await.unwrap();
    let mut stage = Stage::at(&nats.url()).await;
    let trouble = stage.daemon.trouble("no_jetstream").await.unwrap();
    assert!(trouble["fix"].as_str().is_some_and(|fix| fix.contains("--jetstream")), "{trouble}");

    let switch = async |nats: &mut Nats, jetstream| {
        nats.stop();
        nats.options.jetstream = jetstream;
        nats.resume().await.unwrap();
    };
    switch(&mut nats, true).await;
    stage.daemon.no_trouble().await.unwrap();
    let book = Record::book(&nats.jetstream().await.unwrap()).await;
    let (_, alpha) = book.stands("alpha").await;
    let (before, beta) = book.stands("beta").await;
    assert!(alpha != beta);

    switch(&mut nats, false).await;
    stage.daemon.trouble("no_jetstream").await.unwrap();
    stage.kill("alpha").await;
    switch(&mut nats, true).await;
    stage.daemon.no_trouble().await.unwrap();
    let book = Record::book(&nats.jetstream().await.unwrap()).await;
    stage.withdrawn(&book, "alpha").await;
    let (after, revision) = book.stands("beta").await;
    assert_eq!((after.incarnation, revision), (before.incarnation, beta), "nobody touched it");
    matrix::row(
        "JetStream is off at the start, later on, off again; a worker killed while it is off",
        "said with the fix; workers listed when it is on; withdrawn when it is on again, nobody else",
        "no_jetstream in status and metrics both times, listed, withdrawn, the other record untouched",
    );
}

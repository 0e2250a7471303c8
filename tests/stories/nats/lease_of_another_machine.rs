//! Another machine has this node's name, by mistake or as what is left of one.

use std::time::Duration;

use lastgasp_protocol::kv::{Bucket, Expect};
use lastgasp_protocol::{NODES_BUCKET, NodeLease};
use lastgasp_tests::matrix;
use lastgasp_tests::nats::Nats;

use super::stage::{NODE, Record, Stage};

/// As the contract has it.
const TTL: Duration = Duration::from_secs(6);
/// Of the one that lives: it must not lapse where this test does not get to renewing it.
const LONG_TTL: Duration = Duration::from_secs(600);

fn foreign() -> NodeLease {
    NodeLease {
        schema: 1,
        node: NODE.parse().unwrap(),
        machine_id: "another-machine".into(),
        boot_id: "another-boot".into(),
        pid: 1,
        start_ticks: 1,
    }
}

#[tokio::test]
async fn while_it_lives_the_second_daemon_is_refused_and_writes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let context = nats.jetstream().await.unwrap();
    let nodes = Bucket::open(&context, NODES_BUCKET, 1).await.unwrap();
    let value = foreign().to_json();
    let mut revision = nodes.put(NODE, value.clone().into(), Expect::Absent, LONG_TTL).await.unwrap();
    let mut stage = Stage::at(&nats.url()).await;
    let exit = loop {
        tokio::select! {
            exit = stage.daemon.process.exited() => break exit.unwrap(),
            () = tokio::time::sleep(Duration::from_secs(1)) => {
                revision = nodes.put(NODE, value.clone().into(), Expect::Revision(revision), LONG_TTL).await.unwrap();
            }
        }
    };
    assert_eq!(exit.code(), Some(69), "EX_UNAVAILABLE");
    let said = stage.daemon.process.log_tail();
    assert!(said.contains("another-machine") && said.contains("another `node` name"), "{said}");
    let book = Record::book(&context).await;
    assert!(!book.stands_now("alpha").await && !book.stands_now("beta").await);
    matrix::row(
        "a daemon of another machine holds this node's name and lives",
        "this daemon ends with status 69 and the fix, and has written nothing",
        "ended with status 69, with the advice to choose another name, no record written",
    );
}

#[tokio::test]
async fn when_it_lapses_the_name_is_taken() {
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let context = nats.jetstream().await.unwrap();
    let nodes = Bucket::open(&context, NODES_BUCKET, 1).await.unwrap();
    nodes.put(NODE, foreign().to_json().into(), Expect::Absent, TTL).await.unwrap();
    let stage = Stage::at(&nats.url()).await;
    let waits = |status: &serde_json::Value| status["lease"].as_str().is_some_and(|it| it.starts_with("waiting"));
    stage.daemon.status_when("it waits for the other's lease to lapse", waits).await.unwrap();
    let book = Record::book(&context).await;
    assert!(!book.stands_now("alpha").await, "nothing is written before the name is ours");
    stage.daemon.status_when("the lease is held", |status| status["lease"] == "held").await.unwrap();
    book.stands("alpha").await;
    matrix::row(
        "the lease of a dead machine of the same name",
        "waited for, then taken; nothing written before",
        "taken when the server let it lapse, then the workers were listed",
    );
}

//! JetStream has no room left when a worker dies: not even its tombstone can be written.

use async_nats::jetstream::{self, stream};
use lastgasp_protocol::{CauseKind, WorkerState};
use lastgasp_tests::discovery::Discovery;
use lastgasp_tests::engine::Engine;
use lastgasp_tests::matrix;
use lastgasp_tests::nats::{Nats, Options};
use tempfile::TempDir;

use super::stage::{ENGINE, Stage};

/// Two listed workers on a server that has no room left: what takes it is a stream named `others`.
async fn filled() -> (Stage, Discovery, jetstream::Context, (Nats, TempDir)) {
    let folder = tempfile::tempdir().unwrap();
    let options = Options { max_file_store: Some(128 * 1024), ..Options::default() };
    let nats = Nats::start_with(folder.path(), options).await.unwrap();
    let discovery = Discovery::watch(&nats).await.unwrap();
    let stage = Stage::at(&nats.url()).await;
    for worker in ["alpha", "beta"] {
        discovery.listed(worker, WorkerState::Serving).await.unwrap();
    }
    let context = nats.jetstream().await.unwrap();
    let config = stream::Config { name: "others".into(), subjects: vec!["others".into()], ..Default::default() };
    context.create_stream(config).await.unwrap();
    // In steps that get smaller, so that no room is left even for a small record.
    for size in [16 * 1024, 1024, 64, 1] {
        loop {
            let written = context.publish("others", vec![0; size].into()).await.unwrap().await;
            if written.is_err() {
                break;
            }
        }
    }
    (stage, discovery, context, (nats, folder))
}

#[tokio::test]
async fn the_withdrawal_waits_for_room_and_the_fix_is_told() {
    let (mut stage, discovery, context, _nats) = filled().await;

    stage.kill("alpha").await;
    let trouble = stage.daemon.trouble("store_full").await.unwrap();
    assert!(trouble["fix"].as_str().is_some_and(|fix| fix.contains("max_file_store")), "{trouble}");
    assert_eq!(discovery.removals("alpha"), 0);
    stage.daemon.event("the certificate", |event| event["event"] == "certificate").await.unwrap();
    context.delete_stream("others").await.unwrap();

    discovery.removed("alpha").await.unwrap();
    stage.daemon.no_trouble().await.unwrap();
    assert_eq!((discovery.removals("alpha"), discovery.removals("beta")), (1, 0));
    // That could not be kept either, and is not forgotten.
    let certificate = discovery.certificate("alpha", |_| true).await.unwrap();
    assert_eq!(certificate.cause.kind, CauseKind::ProcessKilled, "{certificate:#?}");
    matrix::row(
        "JetStream's store is full, a worker killed",
        "the fix is shown; withdrawal and certificate wait and are written when there is room; nobody else withdrawn",
        "store_full in status and metrics, withdrawn once and certified when room was made, the other worker stayed listed",
    );
}

#[tokio::test]
async fn a_life_that_came_and_went_meanwhile_leaves_no_record_of_the_one_before_it() {
    let (mut stage, discovery, context, _nats) = filled().await;

    stage.kill("alpha").await;
    stage.daemon.trouble("store_full").await.unwrap();
    let engine = &mut stage.engines[0];
    engine.kill_tree();
    engine.process.exited().await.unwrap();
    let (http, grpc) = (engine.ready.http.port().to_string(), engine.ready.grpc.unwrap().port().to_string());
    let arguments = [&ENGINE[..], &["--port", &http, "--grpc-port", &grpc]].concat();
    stage.engines[0] = Engine::start("alpha", &arguments, stage.folder.path()).await.unwrap();
    stage.state("alpha", "serving").await;
    stage.kill("alpha").await;
    context.delete_stream("others").await.unwrap();

    discovery.removed("alpha").await.unwrap();
    stage.daemon.no_trouble().await.unwrap();
    assert_eq!((discovery.removals("alpha"), discovery.removals("beta")), (1, 0));
    matrix::row(
        "JetStream's store is full, a worker killed, started and killed again",
        "the record of its first life is deleted when there is room, though the second was never listed",
        "withdrawn once when room was made, the other worker stayed listed",
    );
}

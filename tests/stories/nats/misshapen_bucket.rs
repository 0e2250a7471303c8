//! The workers' bucket was made by somebody else, in another shape than the contract says.

use std::time::Duration;

use async_nats::jetstream::{kv, stream};
use lastgasp_protocol::WORKERS_BUCKET;
use lastgasp_tests::matrix;
use lastgasp_tests::nats::Nats;

use super::stage::{Record, Stage, contract};

#[tokio::test]
async fn it_is_not_used_and_made_again_once_it_is_deleted() {
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let context = nats.jetstream().await.unwrap();
    // The client's own calls for buckets make markers along with TTLs.
    let right = stream::Config {
        name: format!("KV_{WORKERS_BUCKET}"),
        subjects: vec![format!("$KV.{WORKERS_BUCKET}.>")],
        max_messages_per_subject: 1,
        allow_message_ttl: true,
        subject_delete_marker_ttl: Some(Duration::from_secs(3600)),
        allow_rollup: true,
        allow_direct: true,
        ..stream::Config::default()
    };
    let shapes = [
        (
            "allow_msg_ttl",
            stream::Config { allow_message_ttl: false, subject_delete_marker_ttl: None, ..right.clone() },
        ),
        ("subject_delete_marker_ttl", stream::Config { subject_delete_marker_ttl: None, ..right.clone() }),
        ("max_age", stream::Config { max_age: Duration::from_secs(7200), ..right.clone() }),
        ("max_msgs", stream::Config { max_messages: 100, ..right.clone() }),
    ];
    let mut stage = None;
    for (name, shape) in shapes {
        context.create_stream(shape).await.unwrap();
        let stage = match &mut stage {
            Some(stage) => stage,
            none => none.insert(Stage::at(&nats.url()).await),
        };
        let trouble = stage.daemon.trouble("misshapen").await.unwrap();
        let (reason, fix) = (trouble["reason"].as_str().unwrap(), trouble["fix"].as_str().unwrap());
        assert!(reason.contains(WORKERS_BUCKET) && reason.contains(name) && fix.contains("nats kv del"), "{trouble}");
        context.delete_key_value(WORKERS_BUCKET).await.unwrap();
        stage.daemon.no_trouble().await.unwrap();
        let book = Record::book(&context).await;
        for worker in ["alpha", "beta"] {
            book.stands(worker).await;
        }
        context.delete_key_value(WORKERS_BUCKET).await.unwrap();
    }
    matrix::row(
        "the workers' bucket has no message TTLs, no markers, or a limit of age or number",
        "not used; said with the fix; made again and filled once it is deleted",
        "misshapen in status and metrics, all workers listed after `nats kv del`",
    );
}

#[tokio::test]
async fn one_that_keeps_more_than_is_read_is_used_and_remarked() {
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let context = nats.jetstream().await.unwrap();
    context.create_key_value(kv::Config { history: 5, ..contract() }).await.unwrap();
    let mut stage = Stage::at(&nats.url()).await;
    let book = Record::book(&context).await;
    for worker in ["alpha", "beta"] {
        book.stands(worker).await;
    }
    let trouble = stage.daemon.trouble("misshapen").await.unwrap();
    assert!(trouble["reason"].as_str().is_some_and(|reason| reason.contains("keeps 5 values")), "{trouble}");
    stage.kill("alpha").await;
    stage.withdrawn(&book, "alpha").await;
    assert!(book.stands_now("beta").await);
    matrix::row(
        "the workers' bucket keeps a history of 5",
        "used, and remarked in status; withdrawals work",
        "listed, remarked, withdrawn, the other worker stayed listed",
    );
}

//! The workers' bucket was made by somebody else, in another shape than the contract says.

use std::time::Duration;

use async_nats::jetstream::kv;
use lastgasp_protocol::WORKERS_BUCKET;
use lastgasp_tests::matrix;
use lastgasp_tests::nats::Nats;

use super::stage::{Record, Stage};

fn contract() -> kv::Config {
    let marker = Some(Duration::from_secs(3600));
    kv::Config { bucket: WORKERS_BUCKET.into(), history: 1, limit_markers: marker, ..kv::Config::default() }
}

#[tokio::test]
async fn it_is_not_used_and_made_again_once_it_is_deleted() {
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let context = nats.jetstream().await.unwrap();
    let shapes = [
        ("allow_msg_ttl", kv::Config { limit_markers: None, ..contract() }),
        ("max_age", kv::Config { max_age: Duration::from_secs(3600), ..contract() }),
    ];
    let mut stage = None;
    for (name, shape) in shapes {
        context.create_key_value(shape).await.unwrap();
        let stage = match &mut stage {
            Some(stage) => stage,
            none => none.insert(Stage::at(&nats.url()).await),
        };
        let told = stage.daemon.trouble("misshapen").await.unwrap();
        let (reason, fix) = (told["reason"].as_str().unwrap(), told["fix"].as_str().unwrap());
        assert!(reason.contains(WORKERS_BUCKET) && reason.contains(name) && fix.contains("nats kv del"), "{told}");
        context.delete_key_value(WORKERS_BUCKET).await.unwrap();
        stage.daemon.no_trouble().await.unwrap();
        let book = Record::book(&context).await;
        for worker in ["alpha", "beta"] {
            book.stands(worker).await;
        }
        context.delete_key_value(WORKERS_BUCKET).await.unwrap();
    }
    matrix::row(
        "the workers' bucket has no message TTLs, or an age limit",
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
    let told = stage.daemon.trouble("misshapen").await.unwrap();
    assert!(told["reason"].as_str().is_some_and(|reason| reason.contains("keeps 5 values")), "{told}");
    stage.kill("alpha").await;
    stage.withdrawn(&book, "alpha").await;
    assert!(book.stands_now("beta").await);
    matrix::row(
        "the workers' bucket keeps a history of 5",
        "used, and remarked in status; withdrawals work",
        "listed, remarked, withdrawn, the other worker stayed listed",
    );
}

//! A worker that registers itself does so again after it was withdrawn: its API server is alive and
//! does not know that its engine core is dead.

use std::time::Duration;

use lastgasp_protocol::kv::{Bucket, Content, Expect};
use lastgasp_protocol::{WORKERS_BUCKET, WorkerRecord};
use lastgasp_tests::matrix;
use lastgasp_tests::nats::Nats;
use serde_json::json;

use super::stage::{NODE, Record, Stage};

/// Longer than the story.
const TTL: Duration = Duration::from_secs(3600);

#[tokio::test]
async fn it_is_withdrawn_again_until_there_is_another_life() {
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let context = nats.jetstream().await.unwrap();
    let bucket = Bucket::open(&context, WORKERS_BUCKET, 1).await.unwrap();
    let by_itself = |mut config: lastgasp_tests::daemon::DaemonConfig| {
        config.worker.iter_mut().for_each(|worker| worker.writer = "worker");
        config
    };
    let mut stage = Stage::configured(&nats.url(), by_itself).await;
    let endpoint = stage.engines[0].endpoint();
    let key = format!("{NODE}.alpha");
    let record = |incarnation: &str| {
        let record = json!({"schema": 1, "node": NODE, "worker": "alpha", "incarnation": incarnation, "epoch": 1,
            "state": "serving", "writer": "worker", "engine": "vllm", "models": ["tiny"], "endpoint": endpoint});
        let record = serde_json::to_vec(&record).unwrap();
        WorkerRecord::parse(&key, &record).expect("a record");
        record
    };
    bucket.put(&key, record("first").into(), Expect::Absent, TTL).await.unwrap();
    stage.state("alpha", "serving").await;
    stage.kill("alpha").await;
    let tombstone = gone(&bucket, &key, 0).await;

    // The same life, and what its server calls another one.
    let mut last = tombstone;
    for incarnation in ["first", "second"] {
        let written = bucket.put(&key, record(incarnation).into(), Expect::Revision(last), TTL).await.unwrap();
        last = gone(&bucket, &key, written).await;
    }
    let book = Record::book(&context).await;
    assert!(!book.stands_now("alpha").await);
    matrix::row(
        "a worker that registers itself does so again after its withdrawal, twice",
        "withdrawn again each time",
        "withdrawn again each time",
    );
}

/// Waits for a tombstone after this revision, and returns its own.
async fn gone(bucket: &Bucket, key: &str, after: u64) -> u64 {
    let look = async {
        loop {
            if let Ok(Some(entry)) = bucket.read(key).await
                && entry.value == Content::Deleted
                && entry.revision > after
            {
                return entry.revision;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(lastgasp_tests::process::GIVE_UP, look).await.expect("it is withdrawn")
}

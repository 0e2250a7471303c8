//! More replicas are asked for than there are.

use lastgasp_tests::matrix;
use lastgasp_tests::nats::{Cluster, Nats};

use super::stage::{Record, Stage};

#[tokio::test]
async fn three_by_one_server_are_refused_with_the_fix() {
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let stage = Stage::configured(&nats.url(), |config| config.with_nats("replicas", 3)).await;
    let trouble = stage.daemon.trouble("replicas").await.unwrap();
    assert!(trouble["fix"].as_str().is_some_and(|fix| fix.contains("--replicas")), "{trouble}");
    matrix::row(
        "three replicas asked of a single server",
        "said with the fix; nothing is listed",
        "replicas in status and metrics, with the fix",
    );
}

#[tokio::test]
async fn a_bucket_with_one_is_used_and_remarked_until_it_has_three() {
    let folder = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(folder.path(), 3).await.unwrap();
    let stage = Stage::configured(&cluster.url(), |config| config).await;
    let context = cluster.jetstream().await.unwrap();
    let book = Record::book(&context).await;
    book.stands("alpha").await;
    drop(stage);

    let mut stage = Stage::configured(&cluster.url(), |config| config.with_nats("replicas", 3)).await;
    let trouble = stage.daemon.trouble("replicas").await.unwrap();
    assert!(trouble["reason"].as_str().is_some_and(|it| it.contains("1 replicas, and 3 were asked for")), "{trouble}");
    let book = Record::book(&context).await;
    book.stands("beta").await;
    // What the fix says.
    for stream in ["KV_lastgasp_workers", "KV_lastgasp_nodes", "KV_lastgasp_routers"] {
        let mut config = context.get_stream(stream).await.unwrap().cached_info().config.clone();
        config.num_replicas = 3;
        context.update_stream(config).await.unwrap();
    }
    stage.daemon.no_trouble().await.unwrap();
    stage.kill("alpha").await;
    stage.withdrawn(&book, "alpha").await;
    assert!(book.stands_now("beta").await);
    matrix::row(
        "buckets with one replica where three are asked for",
        "used, remarked with the fix until they have three",
        "remarked in status and metrics, well after `nats stream edit`, withdrawals work",
    );
}

//! A cluster of three loses the server that leads the workers' bucket, and a worker dies with it.

use lastgasp_protocol::{DEATHS_STREAM, WorkerState};
use lastgasp_tests::discovery::Discovery;
use lastgasp_tests::matrix;
use lastgasp_tests::nats::Cluster;
use lastgasp_tests::router::Router;

use super::stage::{SERVING, Stage};

#[tokio::test]
async fn the_withdrawal_goes_to_the_new_leader() {
    let folder = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start(folder.path(), 3).await.unwrap();
    let discovery = Discovery::over(cluster.jetstream().await.unwrap(), 3).await.unwrap();
    let mut stage = Stage::configured(&cluster.url(), |config| config.with_nats("replicas", 3)).await;
    for worker in ["alpha", "beta"] {
        discovery.listed(worker, WorkerState::Serving).await.unwrap();
    }
    let context = cluster.jetstream().await.unwrap();
    for stream in ["KV_lastgasp_workers", "KV_lastgasp_nodes", "KV_lastgasp_routers", DEATHS_STREAM] {
        let info = context.get_stream(stream).await.unwrap();
        assert_eq!(info.cached_info().config.num_replicas, 3, "{stream}");
    }
    stage.daemon.no_trouble().await.unwrap();
    let router = Router::start("router-1", &cluster.url(), 3, folder.path()).await.unwrap();
    router.shows(SERVING, 2.0).await.unwrap();

    let leader = cluster.leader("KV_lastgasp_workers").await.unwrap();
    cluster.servers[leader].stop();
    stage.kill("alpha").await;

    discovery.removed("alpha").await.unwrap();
    router.shows(SERVING, 1.0).await.unwrap();
    assert_eq!((discovery.removals("alpha"), discovery.removals("beta")), (1, 0));
    stage.daemon.no_trouble().await.unwrap();
    matrix::row(
        "cluster of three, the leader of the workers' bucket killed, a worker killed",
        "withdrawn once by the new leader, nobody else withdrawn",
        "withdrawn once, the other worker stayed listed, 3 replicas of each stream",
    );
}

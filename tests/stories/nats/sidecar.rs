//! A sidecar's daemon runs beside the one of the DaemonSet, on the same machine and in the same boot.

use lastgasp_protocol::kv::{Bucket, Content};
use lastgasp_protocol::{NODES_BUCKET, Name};
use lastgasp_tests::daemon::{Daemon, DaemonConfig};
use lastgasp_tests::matrix;
use lastgasp_tests::nats::Nats;
use nix::sys::signal::Signal;

use super::stage::{NODE, Record, Stage};

#[tokio::test]
async fn each_holds_a_lease_of_its_own_and_leaves_the_others_records_alone() {
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let mut stage = Stage::at(&nats.url()).await;
    let context = nats.jetstream().await.unwrap();
    let book = Record::book(&context).await;
    let (_, revision) = book.stands("alpha").await;

    let node = format!("{NODE}/pod-1");
    let own = stage.folder.path().join("pod");
    std::fs::create_dir(&own).unwrap();
    let config = DaemonConfig::new(&node, &nats.url(), "off", &own);
    let mut sidecar = Daemon::start(&config, &own).await.unwrap();
    sidecar.status_when("the sidecar's lease", |status| status["lease"] == "held").await.unwrap();

    let nodes = Bucket::existing(&context, NODES_BUCKET).await.unwrap().unwrap();
    for node in [NODE, node.as_str()] {
        let entry = nodes.read(&Name::new(node).unwrap().token()).await.unwrap().expect("a lease");
        assert!(matches!(entry.value, Content::Put(_)), "{node}");
    }
    // The sidecar is killed; the other daemon's workers are as they were, and watched.
    assert!(sidecar.process.identity.signal(Signal::SIGKILL));
    sidecar.process.exited().await.unwrap();
    assert_eq!(book.stands("alpha").await.1, revision);
    stage.kill("alpha").await;
    stage.withdrawn(&book, "alpha").await;
    assert!(book.stands_now("beta").await);
    matrix::row(
        "a sidecar's daemon beside the node's, killed",
        "two leases; neither touches the other's records",
        "both leases held, the node's records untouched, its daemon goes on",
    );
}

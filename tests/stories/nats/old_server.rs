//! The server is a real 2.10, which knows no message TTLs: leases of dead nodes would never lapse.

use lastgasp_tests::binaries;
use lastgasp_tests::matrix;
use lastgasp_tests::nats::{Nats, Options};
use lastgasp_tests::router::Router;

use super::stage::{Record, Stage};

#[tokio::test]
async fn it_is_not_used_and_the_needed_version_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let program = Some(binaries::old_nats_server().unwrap());
    let mut nats = Nats::start_with(folder.path(), Options { program, ..Options::default() }).await.unwrap();
    let stage = Stage::at(&nats.url()).await;
    let router = Router::start_unready("router-1", &nats.url(), folder.path()).unwrap();
    let trouble = stage.daemon.trouble("old_server").await.unwrap();
    let (reason, fix) = (trouble["reason"].as_str().unwrap(), trouble["fix"].as_str().unwrap());
    assert!(reason.contains("version 2.10.") && fix.contains("2.11"), "{trouble}");
    let context = nats.jetstream().await.unwrap();
    assert!(context.get_stream("KV_lastgasp_workers").await.is_err(), "nothing is made there");
    router.says("old_server").await.unwrap();

    nats.stop();
    nats.options.program = None;
    nats.resume().await.unwrap();
    stage.daemon.no_trouble().await.unwrap();
    let book = Record::book(&nats.jetstream().await.unwrap()).await;
    for worker in ["alpha", "beta"] {
        book.stands(worker).await;
    }
    matrix::row(
        "nats-server 2.10 (a real one), replaced by a new one",
        "not used, the needed version is said; workers listed once it is replaced",
        "old_server in status, metrics and the router's log, nothing made there, listed after the upgrade",
    );
}

//! What becomes of a worker's record in Infera's etcd.

use futures_util::StreamExt as _;
use lastgasp::notify::NotificationKind;
use lastgasp_protocol::CauseKind;
use lastgasp_tests::etcd::Etcd;
use lastgasp_tests::process::GIVE_UP;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::etcd::{record, register, registered};
use crate::sink::Sink;
use crate::standin::{Wire, error_frame};

const ALPHA: (&str, &str) = ("alpha", "10.0.0.1:8080");
const BETA: (&str, &str) = ("beta", "10.0.0.2:8080");

struct Scene {
    sink: Sink,
    etcd: Etcd,
    _folder: TempDir,
}

impl Scene {
    async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let etcd = Etcd::start(folder.path()).await.unwrap();
        let sink = Sink::watching(&[ALPHA, BETA], 100, Some(etcd.url())).await;
        Self { sink, etcd, _folder: folder }
    }
}

fn draining(id: &str) -> Value {
    let mut record = record(id);
    record["status"] = json!("draining");
    record
}

/// A stream that is moved off one of them would be moved to the next (docs/infera.md).
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd; cargo xtask test fetches it"]
async fn all_that_died_of_one_cause_are_out_of_discovery_before_any_router_is_told() {
    let Scene { mut sink, etcd, _folder } = Scene::new().await;
    let leases = [register(&etcd, ALPHA.1).await, register(&etcd, BETA.1).await];
    let mut inbox = sink.client.subscribe("_INBOX.one").await.unwrap();
    sink.client.flush().await.unwrap();
    sink.ask(ALPHA.1, "_INBOX.one").await;
    sink.remembers("alpha", 1).await;
    let looks = async {
        inbox.next().await.unwrap();
        (registered(&etcd, ALPHA.1).await, registered(&etcd, BETA.1).await)
    };

    let lose = sink.lose(&["alpha", "beta"], CauseKind::ProcessKilled);
    let (done, listed) = tokio::join!(lose, looks);

    assert_eq!(listed, (None, None), "when the first frame came");
    assert!(done.iter().all(|done| done.contains("record deleted")), "{done:?}");
    for lease in leases {
        assert!(etcd.lives(lease).await.unwrap(), "it is the wrapper's");
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd; cargo xtask test fetches it"]
async fn a_worker_that_leaves_drains_in_discovery_and_is_taken_back_if_it_stays() {
    let Scene { mut sink, etcd, _folder } = Scene::new().await;
    let lease = register(&etcd, ALPHA.1).await;
    sink.listed("alpha", NotificationKind::Serving, 1);

    sink.listed("alpha", NotificationKind::Draining, 1);
    assert_eq!(sink.done().await, "record drained");
    assert_eq!(registered(&etcd, ALPHA.1).await, Some((draining(ALPHA.1), lease)));

    sink.listed("alpha", NotificationKind::Serving, 1);
    has_record(&etcd, (record(ALPHA.1), lease)).await;
}

async fn has_record(etcd: &Etcd, wanted: (Value, i64)) {
    let restored = async {
        while registered(etcd, ALPHA.1).await.as_ref() != Some(&wanted) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(GIVE_UP, restored).await.expect("the record");
}

/// A wrapper that lives never writes a deleted record again.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd; cargo xtask test fetches it"]
async fn a_worker_that_may_recover_keeps_its_record_and_is_listed_again_when_it_does() {
    let Scene { mut sink, etcd, _folder } = Scene::new().await;
    let lease = register(&etcd, ALPHA.1).await;

    let done = sink.lose(&["alpha"], CauseKind::Hung).await;
    assert!(done[0].contains("record drained"), "{done:?}");
    assert_eq!(registered(&etcd, ALPHA.1).await, Some((draining(ALPHA.1), lease)));

    sink.listed("alpha", NotificationKind::Serving, 2);
    has_record(&etcd, (record(ALPHA.1), lease)).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd; cargo xtask test fetches it"]
async fn a_worker_that_has_registered_again_is_not_answered_for() {
    let Scene { mut sink, etcd, _folder } = Scene::new().await;
    register(&etcd, ALPHA.1).await;
    let mut wire = Wire::hearing(&sink.nats.url(), &["_INBOX.>"]);
    sink.lose(&["alpha"], CauseKind::ProcessKilled).await;
    sink.ask(ALPHA.1, "_INBOX.one").await;
    assert_eq!(wire.message(), error_frame("_INBOX.one", 0, "lastgasp: worker lost (process_killed)"));

    register(&etcd, ALPHA.1).await;

    sink.ask(ALPHA.1, "_INBOX.two").await;
    sink.remembers("alpha", 1).await;
    assert!(registered(&etcd, ALPHA.1).await.is_some(), "the new life's record");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd; cargo xtask test fetches it"]
async fn routers_are_told_though_etcd_is_down_and_the_record_goes_when_it_is_up() {
    let Scene { mut sink, mut etcd, _folder } = Scene::new().await;
    register(&etcd, ALPHA.1).await;
    let mut wire = Wire::hearing(&sink.nats.url(), &["_INBOX.>"]);
    sink.ask(ALPHA.1, "_INBOX.one").await;
    sink.remembers("alpha", 1).await;
    etcd.stop();

    let done = sink.lose(&["alpha"], CauseKind::ProcessKilled).await;
    assert!(done[0].contains("record failed; 1 of 1"), "{done:?}");
    assert_eq!(wire.message(), error_frame("_INBOX.one", 0, "lastgasp: worker lost (process_killed)"));

    etcd.resume().await.unwrap();
    let gone = async {
        while registered(&etcd, ALPHA.1).await.is_some() {
            tokio::task::yield_now().await;
        }
        while sink.metrics.infera_records.with_label_values(&["deleted"]).get() == 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(GIVE_UP, gone).await.expect("it goes");
}

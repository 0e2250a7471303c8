//! What becomes of a worker's records in etcd.

use lastgasp::config::DynamoBackend;
use lastgasp::notify::NotificationKind;
use lastgasp_protocol::CauseKind;
use lastgasp_tests::etcd::{Etcd, Record};
use tempfile::TempDir;

use crate::notifications::name;
use crate::scene::{Instance, Sink, until};

struct Scene {
    sink: Sink,
    etcd: Etcd,
    alpha: Instance,
    beta: Instance,
    leases: [i64; 2],
    _folder: TempDir,
}

impl Scene {
    async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let etcd = Etcd::start(folder.path()).await.unwrap();
        let sink = Sink::of(DynamoBackend::Etcd { url: etcd.url() });
        // As large as they may be: JSON's numbers are no 64-bit integers everywhere.
        let (alpha, beta) = (Instance::start(u64::MAX - 1), Instance::start(0x02b3_a228_b505_9d13));
        let leases = [register(&etcd, &alpha).await, register(&etcd, &beta).await];
        sink.watch("alpha", &alpha).await;
        sink.watch("beta", &beta).await;
        Self { sink, etcd, alpha, beta, leases, _folder: folder }
    }
}

/// As a worker does; its lease.
async fn register(etcd: &Etcd, instance: &Instance) -> i64 {
    let lease = etcd.grant(30).await.unwrap();
    for (key, value) in instance.records() {
        etcd.put(&key, &value, lease).await.unwrap();
    }
    lease
}

/// Keys, values and leases of all records that matter.
async fn listed(etcd: &Etcd) -> Vec<(String, String, i64)> {
    let plain = |Record { key, value, lease, revision: _ }| (key, value, lease);
    etcd.list("v1/").await.unwrap().into_iter().map(plain).collect()
}

fn records(instances: &[(&Instance, i64)]) -> Vec<(String, String, i64)> {
    let of_one = |(instance, lease): &(&Instance, i64)| {
        let lease = *lease;
        instance.records().into_iter().map(move |(key, value)| (key, value, lease))
    };
    let mut records: Vec<_> = instances.iter().flat_map(of_one).collect();
    records.sort();
    records
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd; cargo xtask test fetches it"]
async fn all_that_died_of_one_cause_are_gone_with_their_cards_and_nobody_elses_are() {
    let Scene { mut sink, etcd, alpha, beta, leases, _folder } = Scene::new().await;
    // Not of this node, though its port is alpha's.
    let [(key, value), _] = alpha.records();
    let foreign = (key.replace("fffffffffffffffe", "7"), value.replace("127.0.0.1", "192.0.2.77"));
    let foreign = (foreign.0, foreign.1.replace(&alpha.id.to_string(), "7"), 0);
    etcd.put(&foreign.0, &foreign.1, 0).await.unwrap();

    let done = sink.lose(&["alpha", "beta"], CauseKind::ProcessKilled).await;

    assert_eq!(done, ["fffffffffffffffe: 2 records deleted", "2b3a228b5059d13: 2 records deleted"]);
    assert_eq!(listed(&etcd).await, [foreign]);
    for lease in leases {
        assert!(etcd.lives(lease).await.unwrap(), "it is the worker's");
    }
    drop(beta);
}

/// A worker that lives does not write a deleted record again.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd; cargo xtask test fetches it"]
async fn a_worker_that_hung_has_its_records_back_with_their_lease_when_it_serves_again() {
    let Scene { mut sink, etcd, alpha, beta, leases, _folder } = Scene::new().await;
    sink.lose(&["alpha"], CauseKind::Hung).await;
    assert_eq!(listed(&etcd).await, records(&[(&beta, leases[1])]));

    sink.listed("alpha", NotificationKind::Serving, 2);

    let whole = records(&[(&alpha, leases[0]), (&beta, leases[1])]);
    until("the records", async || listed(&etcd).await == whole).await;
    sink.counts("restored", 1).await;
    // It is found again, with the revisions that it has now.
    assert_eq!(sink.lose(&["alpha"], CauseKind::Hung).await, ["fffffffffffffffe: 2 records deleted"]);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd; cargo xtask test fetches it"]
async fn a_worker_that_drains_takes_no_new_work_and_is_listed_again_if_it_stays() {
    let Scene { mut sink, etcd, alpha, beta, leases, _folder } = Scene::new().await;
    sink.listed("alpha", NotificationKind::Draining, 1);
    assert_eq!(sink.done().await, "2 records deleted");
    assert_eq!(listed(&etcd).await, records(&[(&beta, leases[1])]));

    sink.listed("alpha", NotificationKind::Serving, 1);
    let whole = records(&[(&alpha, leases[0]), (&beta, leases[1])]);
    until("the records", async || listed(&etcd).await == whole).await;
}

/// What hangs for longer than its lease ends by itself when it goes on.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd; cargo xtask test fetches it"]
async fn nothing_is_put_back_without_its_lease() {
    let Scene { mut sink, etcd, alpha: _alpha, beta, leases, _folder } = Scene::new().await;
    sink.lose(&["alpha"], CauseKind::Hung).await;
    etcd.revoke(leases[0]).await.unwrap();

    sink.listed("alpha", NotificationKind::Serving, 2);

    sink.counts("lapsed", 1).await;
    assert_eq!(listed(&etcd).await, records(&[(&beta, leases[1])]));
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd; cargo xtask test fetches it"]
async fn nothing_is_put_back_for_a_worker_that_has_died_meanwhile() {
    let Scene { mut sink, etcd, mut alpha, beta, leases, _folder } = Scene::new().await;
    sink.lose(&["alpha"], CauseKind::Hung).await;
    alpha.end();
    sink.listed("alpha", NotificationKind::Serving, 2);
    sink.counts("absent", 1).await;

    // Nor for the next life, which has records of its own.
    let next = Instance::start(5);
    let lease = register(&etcd, &next).await;
    sink.notifier.lives(&name("alpha"), vec![next.process]);
    until("the next life", async || listed(&etcd).await == records(&[(&beta, leases[1]), (&next, lease)])).await;
    sink.knows("alpha", 1).await;
    assert_eq!(sink.lose(&["alpha"], CauseKind::ProcessKilled).await, ["5: 2 records deleted"]);
}

/// A worker with another model's card has written it again: it is still the same instance.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd; cargo xtask test fetches it"]
async fn a_record_that_was_written_again_goes_too() {
    let Scene { mut sink, etcd, alpha, beta, leases, _folder } = Scene::new().await;
    let [_, (key, value)] = alpha.records();
    for _ in 0..20 {
        etcd.put(&key, &value, leases[0]).await.unwrap();
    }
    assert_eq!(sink.lose(&["alpha"], CauseKind::Hung).await, ["fffffffffffffffe: 2 records deleted"]);
    // And so does what it writes while it must not be listed.
    etcd.put(&key, &value, leases[0]).await.unwrap();
    until("it is gone", async || listed(&etcd).await == records(&[(&beta, leases[1])])).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd; cargo xtask test fetches it"]
async fn a_loss_is_reported_though_etcd_is_down_and_the_records_go_when_it_is_up() {
    let Scene { mut sink, mut etcd, alpha: _alpha, beta, leases, _folder } = Scene::new().await;
    etcd.stop();

    assert_eq!(sink.lose(&["alpha"], CauseKind::ProcessKilled).await, ["fffffffffffffffe: 2 records failed"]);

    etcd.resume().await.unwrap();
    until("they go", async || listed(&etcd).await == records(&[(&beta, leases[1])])).await;
    // What etcd says from now on is heard again.
    let next = Instance::start(5);
    register(&etcd, &next).await;
    sink.notifier.lives(&name("alpha"), vec![next.process]);
    sink.knows("alpha", 1).await;
}

/// The record of an instance that takes its requests over NATS, and so names no port, as etcd lists it.
async fn portless(etcd: &Etcd) -> (String, String, i64) {
    let lease = etcd.grant(30).await.unwrap();
    let key = "v1/instances/dynamo/backend/generate/a";
    let value = r#"{"type":"Endpoint","instance_id":10,"transport":{"nats_tcp":"dynamo_backend.generate-a"}}"#;
    etcd.put(key, value, lease).await.unwrap();
    (key.to_owned(), value.to_owned(), lease)
}

/// The operator names the instance.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd; cargo xtask test fetches it"]
async fn an_instance_that_names_no_port_goes_by_its_configured_id() {
    let folder = tempfile::tempdir().unwrap();
    let etcd = Etcd::start(folder.path()).await.unwrap();
    let mut sink = Sink::of(DynamoBackend::Etcd { url: etcd.url() });
    let record = portless(&etcd).await;
    sink.notifier.known(&name("alpha"), "", Some(10));
    sink.knows("alpha", 1).await;

    // The record may be read only after that.
    sink.lose(&["alpha"], CauseKind::Hung).await;
    until("it is gone", async || listed(&etcd).await.is_empty()).await;
    sink.listed("alpha", NotificationKind::Serving, 2);
    until("it is back", async || listed(&etcd).await == [record.clone()]).await;
}

/// Its value was not kept when it was seen, as that of all records of other nodes.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd; cargo xtask test fetches it"]
async fn a_record_that_was_seen_before_its_worker_was_known_comes_back_whole() {
    let folder = tempfile::tempdir().unwrap();
    let etcd = Etcd::start(folder.path()).await.unwrap();
    let mut sink = Sink::of(DynamoBackend::Etcd { url: etcd.url() });
    let record = portless(&etcd).await;
    // What was written later is seen later.
    let beta = Instance::start(0xb);
    let beta_lease = register(&etcd, &beta).await;
    sink.watch("beta", &beta).await;

    sink.notifier.known(&name("alpha"), "", Some(10));
    sink.knows("alpha", 1).await;
    assert_eq!(sink.lose(&["alpha"], CauseKind::Hung).await, ["a: 1 records deleted"]);
    sink.listed("alpha", NotificationKind::Serving, 2);

    let mut whole = records(&[(&beta, beta_lease)]);
    whole.push(record);
    whole.sort();
    until("it is back", async || listed(&etcd).await == whole).await;
}

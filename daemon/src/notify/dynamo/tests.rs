//! What one sink does when things come in another order than hoped for, with records in a folder.

use std::fs;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::Command as Program;
use std::sync::{Arc, Mutex};

use lastgasp_protocol::{Cause, CauseKind, Incarnation, Name};

use super::DynamoCommand;
use super::folder::{self, Files};
use super::records::Record;
use super::stores::{Seen, Store};
use super::watcher::Watcher;
use crate::config::{DynamoBackend, DynamoConfig};
use crate::core::ProcessId;
use crate::metrics::Metrics;
use crate::notify::Lost;
use crate::sensors::proc;

struct Scene {
    watcher: Watcher,
    metrics: Metrics,
    root: PathBuf,
    reports: Arc<Mutex<Vec<String>>>,
    _folder: tempfile::TempDir,
}

const INSTANCES: &str = "v1/instances";

fn file(bucket: &str, instance: u64) -> String {
    format!("{bucket}/dynamo%2Fbackend%2Fgenerate%2F{instance:x}")
}

fn alpha() -> Name {
    Name::new("alpha").unwrap()
}

fn me() -> ProcessId {
    proc::identify(std::process::id()).unwrap()
}

impl Scene {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().to_owned();
        for bucket in super::records::BUCKETS {
            fs::create_dir_all(root.join(bucket)).unwrap();
        }
        let backend = DynamoBackend::Folder(root.clone());
        let (store, metrics) = (Store::new(&backend), Metrics::new());
        let reports = Arc::<Mutex<Vec<String>>>::default();
        let sink = Arc::clone(&reports);
        let report = Arc::new(move |report: crate::notify::BridgeReport| sink.lock().unwrap().push(report.detail));
        let config = DynamoConfig { name: "dynamo-0".into(), backend, queue: 1 };
        Self { watcher: Watcher::new(config, store, metrics.clone(), report), metrics, root, reports, _folder: folder }
    }

    /// Instance 10, by configuration, is a worker with this root, and has a record that was seen.
    async fn of(root: ProcessId) -> Self {
        let mut scene = Self::new();
        scene.watcher.command(DynamoCommand::Watch(alpha(), Some(10))).await;
        scene.watcher.command(DynamoCommand::Lives(alpha(), vec![root])).await;
        scene.register(INSTANCES, 10, 0);
        scene.look();
        scene
    }

    fn register(&self, bucket: &str, instance: u64, port: u16) {
        let tcp = format!("127.0.0.1:{port}/{instance:x}/dynamo/backend/generate");
        let value = serde_json::json!({"instance_id": instance, "transport": {"tcp": tcp}});
        let (made, place) = (self.root.join(".tmp_x"), self.root.join(file(bucket, instance)));
        fs::write(&made, value.to_string()).unwrap();
        fs::rename(made, place).unwrap();
    }

    fn all(&self) -> Vec<Record> {
        folder::look(&self.root, &Files::new()).unwrap().into_values().filter_map(|(_, record)| record).collect()
    }

    fn look(&mut self) {
        let all = self.all();
        self.watcher.see(Seen::All(all));
    }

    /// The processes of instances are looked for.
    async fn find(&mut self) {
        let looked = self.watcher.look().expect("there is something to look for").await.unwrap();
        self.watcher.looked(looked).await;
    }

    fn listed(&self) -> Vec<String> {
        self.all().into_iter().map(|record| record.key).collect()
    }

    async fn lose(&mut self, kind: CauseKind) -> String {
        let lost =
            Lost { worker: alpha(), incarnation: Incarnation::new("a-1-2").unwrap(), cause: Some(Cause::of(kind)) };
        self.watcher.command(DynamoCommand::Lost(vec![lost])).await;
        self.reports.lock().unwrap().pop().unwrap()
    }

    async fn serves(&mut self) {
        self.watcher.command(DynamoCommand::Serves(alpha())).await;
    }

    /// Nothing can be changed until it is mended.
    fn breaks(&self) {
        fs::rename(self.root.join(INSTANCES), self.root.join("aside")).unwrap();
        fs::write(self.root.join(INSTANCES), "no folder").unwrap();
    }

    fn mend(&self) {
        fs::remove_file(self.root.join(INSTANCES)).unwrap();
        fs::rename(self.root.join("aside"), self.root.join(INSTANCES)).unwrap();
    }
}

#[tokio::test]
async fn a_death_that_was_a_false_alarm_is_taken_back() {
    let mut scene = Scene::of(me()).await;
    for kind in [CauseKind::ProcessKilled, CauseKind::OomKilled, CauseKind::Replaced, CauseKind::GpuFault] {
        assert_eq!(scene.lose(kind).await, "a: 1 records deleted");
        assert_eq!(scene.listed(), [""; 0]);
        scene.serves().await;
        assert_eq!(scene.listed(), [file(INSTANCES, 10)], "{kind:?}");
    }
}

#[tokio::test]
async fn a_configured_instance_is_not_put_back_once_its_root_is_dead() {
    let mut child = Program::new("sleep").arg("1000").spawn().unwrap();
    let mut scene = Scene::of(proc::identify(child.id()).unwrap()).await;
    scene.lose(CauseKind::Hung).await;
    child.kill().unwrap();
    child.wait().unwrap();
    scene.serves().await;
    assert_eq!(scene.listed(), [""; 0]);
    assert_eq!(scene.metrics.dynamo_records.with_label_values(&["absent"]).get(), 1);
}

#[tokio::test]
async fn a_deletion_that_was_heard_but_not_answered_is_taken_back_too() {
    let mut scene = Scene::of(me()).await;
    scene.breaks();
    assert_eq!(scene.lose(CauseKind::Hung).await, "a: 1 records failed");
    fs::remove_file(scene.root.join("aside").join(&file(INSTANCES, 10)[INSTANCES.len() + 1..])).unwrap();
    scene.mend();
    scene.serves().await;
    assert_eq!(scene.listed(), [file(INSTANCES, 10)]);
}

#[tokio::test]
async fn a_return_that_failed_is_not_forgotten_at_the_next_loss() {
    let mut scene = Scene::of(me()).await;
    scene.lose(CauseKind::Hung).await;
    scene.breaks();
    scene.serves().await;
    scene.lose(CauseKind::Hung).await;
    scene.mend();
    scene.watcher.tick().await;
    assert_eq!(scene.listed(), [""; 0], "it is out");
    scene.serves().await;
    assert_eq!(scene.listed(), [file(INSTANCES, 10)]);
}

#[tokio::test]
async fn what_is_owed_of_one_loss_is_owed_after_the_next_too() {
    let mut scene = Scene::of(me()).await;
    scene.breaks();
    scene.lose(CauseKind::Hung).await;
    let [_, cards] = super::records::BUCKETS;
    scene.register(cards, 10, 0);
    let card = scene.root.join(file(cards, 10));
    let value = fs::read(&card).unwrap();
    scene.watcher.see(Seen::Put(Record::read(&file(cards, 10), &value, 0, 0).unwrap()));
    scene.mend();
    scene.look();
    scene.lose(CauseKind::ProcessKilled).await;
    assert_eq!(scene.listed(), [""; 0]);
    scene.serves().await;
    assert_eq!(scene.listed(), [file(INSTANCES, 10), file(cards, 10)]);
}

/// It was taken before the record was put back, and comes after.
#[tokio::test]
async fn a_snapshot_that_comes_late_hides_no_record_for_long() {
    let mut scene = Scene::of(me()).await;
    scene.lose(CauseKind::Hung).await;
    let late = scene.all();
    scene.serves().await;
    scene.watcher.see(Seen::All(late));
    assert_eq!(scene.lose(CauseKind::Hung).await, "a: 0 records absent");
    scene.look();
    scene.watcher.tick().await;
    assert_eq!(scene.listed(), [""; 0]);
}

#[tokio::test]
async fn what_was_put_back_is_not_hidden_by_news_from_before() {
    let mut scene = Scene::of(me()).await;
    let record = Record { revision: 7, ..scene.all().remove(0) };
    scene.watcher.see(Seen::Put(record.clone()));
    scene.watcher.see(Seen::Gone(record.key.clone(), 6));
    scene.watcher.see(Seen::Put(Record { file: None, revision: 5, ..record }));
    assert_eq!(scene.lose(CauseKind::Hung).await, "a: 1 records deleted");
}

#[tokio::test]
async fn what_is_owed_of_a_life_goes_after_its_end_and_is_not_the_next_ones() {
    let mut child = Program::new("sleep").arg("1000").spawn().unwrap();
    let mut scene = Scene::of(proc::identify(child.id()).unwrap()).await;
    scene.breaks();
    scene.lose(CauseKind::Hung).await;
    scene.watcher.command(DynamoCommand::Lives(alpha(), vec![me()])).await;
    scene.mend();
    scene.watcher.tick().await;
    assert_eq!(scene.listed(), [""; 0]);
    scene.serves().await;
    assert_eq!(scene.listed(), [""; 0]);
    child.kill().unwrap();
    child.wait().unwrap();
}

#[tokio::test]
async fn the_record_of_a_successor_of_the_same_id_stays() {
    let mut scene = Scene::of(me()).await;
    scene.breaks();
    scene.lose(CauseKind::Hung).await;
    scene.mend();
    let next = ProcessId { start_ticks: me().start_ticks + 1, ..me() };
    scene.watcher.command(DynamoCommand::Lives(alpha(), vec![next])).await;
    scene.register(INSTANCES, 10, 0);
    scene.watcher.tick().await;
    assert_eq!(scene.listed(), [file(INSTANCES, 10)]);
}

#[tokio::test]
async fn what_is_owed_of_a_worker_goes_though_it_is_forgotten() {
    let mut scene = Scene::of(me()).await;
    scene.breaks();
    scene.lose(CauseKind::ProcessKilled).await;
    scene.watcher.command(DynamoCommand::Forget(alpha())).await;
    scene.mend();
    scene.watcher.tick().await;
    assert_eq!(scene.listed(), [""; 0]);
}

#[tokio::test]
async fn an_instance_that_is_found_after_the_loss_of_its_worker_goes_and_comes_back_whole() {
    let mut scene = Scene::new();
    scene.watcher.command(DynamoCommand::Watch(alpha(), None)).await;
    scene.watcher.command(DynamoCommand::Lives(alpha(), vec![me()])).await;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    scene.register(INSTANCES, 10, listener.local_addr().unwrap().port());
    let free = { TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port() };
    scene.register(INSTANCES, 11, free);
    let before = scene.all();
    scene.look();
    assert_eq!(scene.lose(CauseKind::Hung).await, "no instance of it is known");
    scene.find().await;
    scene.look();
    assert!(scene.watcher.look().is_none(), "what is nobody's is looked for once");
    scene.watcher.tick().await;
    assert_eq!(scene.listed(), [file(INSTANCES, 11)]);
    scene.serves().await;
    let said = |records: Vec<Record>| records.into_iter().map(|record| record.value).collect::<Vec<_>>();
    assert_eq!(said(scene.all()), said(before));
}

#[tokio::test]
async fn a_sidecar_that_outlives_its_engine_is_back_with_the_next_one() {
    let mut engine = Program::new("sleep").arg("1000").spawn().unwrap();
    let mut scene = Scene::new();
    let root = proc::identify(engine.id()).unwrap();
    scene.watcher.command(DynamoCommand::Watch(alpha(), None)).await;
    scene.watcher.command(DynamoCommand::Lives(alpha(), vec![root, me()])).await;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    scene.register(INSTANCES, 10, listener.local_addr().unwrap().port());
    scene.look();
    scene.find().await;
    engine.kill().unwrap();
    engine.wait().unwrap();
    assert_eq!(scene.lose(CauseKind::ProcessKilled).await, "a: 1 records deleted");
    let mut next = Program::new("sleep").arg("1000").spawn().unwrap();
    scene.watcher.command(DynamoCommand::Lives(alpha(), vec![proc::identify(next.id()).unwrap(), me()])).await;
    scene.serves().await;
    assert_eq!(scene.listed(), [file(INSTANCES, 10)]);
    next.kill().unwrap();
    next.wait().unwrap();
}

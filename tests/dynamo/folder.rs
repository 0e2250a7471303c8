//! What becomes of a worker's records in a folder.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use lastgasp::config::DynamoBackend;
use lastgasp::notify::NotificationKind;
use lastgasp_protocol::CauseKind;

use crate::scene::{Instance, Sink, until};

/// As a worker does: every byte of a key that is no letter or digit is percent-encoded.
fn register(root: &Path, instance: &Instance) {
    for (key, value) in instance.records() {
        let (bucket, name) = key.split_at(key.match_indices('/').nth(1).unwrap().0);
        fs::create_dir_all(root.join(bucket)).unwrap();
        fs::write(root.join(bucket).join(name[1..].replace('/', "%2F")), value).unwrap();
    }
}

fn listed(root: &Path) -> BTreeMap<String, String> {
    let files = ["v1/instances", "v1/mdc"].map(|bucket| fs::read_dir(root.join(bucket)).unwrap());
    let files = files.into_iter().flatten().map(|file| file.unwrap().path());
    files.map(|path| (path.display().to_string(), fs::read_to_string(path).unwrap())).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_hung_has_its_files_back_when_it_serves_again() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let mut sink = Sink::of(DynamoBackend::Folder(root.to_owned()));
    let (alpha, beta) = (Instance::start(u64::MAX - 1), Instance::start(5));
    register(root, &beta);
    let without = listed(root);
    register(root, &alpha);
    let whole = listed(root);
    sink.watch("alpha", &alpha).await;
    sink.watch("beta", &beta).await;
    let file = root.join("v1/instances/dynamo%2Fbackend%2Fgenerate%2Ffffffffffffffffe");
    // Another user's, as that of a worker in a container is.
    std::os::unix::fs::chown(&file, Some(65534), Some(65534)).unwrap();

    assert_eq!(sink.lose(&["alpha"], CauseKind::Hung).await, ["fffffffffffffffe: 2 records deleted"]);
    assert_eq!(listed(root), without);

    sink.listed("alpha", NotificationKind::Serving, 2);
    until("the files", async || listed(root) == whole).await;
    let metadata = fs::metadata(&file).unwrap();
    assert_eq!((metadata.uid(), metadata.gid()), (65534, 65534), "it touches them to keep them");
    assert_eq!(sink.lose(&["alpha"], CauseKind::ProcessKilled).await, ["fffffffffffffffe: 2 records deleted"]);
    assert_eq!(listed(root), without);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_is_there_is_never_written_over() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let mut sink = Sink::of(DynamoBackend::Folder(root.to_owned()));
    let alpha = Instance::start(7);
    register(root, &alpha);
    sink.watch("alpha", &alpha).await;
    sink.lose(&["alpha"], CauseKind::Hung).await;
    let file = root.join("v1/mdc/dynamo%2Fbackend%2Fgenerate%2F7");
    fs::write(&file, "somebody else's").unwrap();

    sink.listed("alpha", NotificationKind::Serving, 2);

    sink.counts("changed", 1).await;
    assert_eq!(fs::read_to_string(&file).unwrap(), "somebody else's");
    assert_eq!(listed(root).len(), 2, "the other one is back, and nothing temporary is left");
}

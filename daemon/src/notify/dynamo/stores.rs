//! Where Dynamo keeps its records: etcd, or a folder that its processes share.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{DirEntryExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::records::{BUCKETS, Record};
use crate::config::DynamoBackend;
use crate::log::with_cause;
use crate::notify::etcd::{EtcdError, Gateway, KeyValue, coded};

/// What all keys begin with.
const PREFIX: &str = "v1/";
/// Time between two looks into the folder, and between two tries to reach etcd.
const INTERVAL: Duration = Duration::from_secs(1);
/// Largest file that is read. A model's card has some kilobytes.
const MAX_FILE: u64 = 4 << 20;
/// What Dynamo passes over in its folders.
const TEMPORARY: &str = ".tmp_";
/// Most records in one transaction: etcd takes 128 changes by default (`--max-txn-ops`). A worker has that
/// many only with as many adapters.
const MAX_CHANGES: usize = 100;
/// What etcd says of a lease that is over (`ErrLeaseNotFound` in its `api/v3rpc/rpctypes`).
const NO_LEASE: &str = "requested lease not found";

/// Why nothing became of it.
#[derive(Debug, thiserror::Error)]
pub(super) enum StoreError {
    /// Of etcd.
    #[error(transparent)]
    Etcd(#[from] EtcdError),
    /// Of a folder.
    #[error("{path}: {source}")]
    File {
        /// Of what.
        path: String,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
}

/// What was seen.
#[derive(Debug)]
pub(super) enum Seen {
    /// These are all records.
    All(Vec<Record>),
    /// This one is new, or has changed.
    Put(Record),
    /// This one is gone.
    Gone(String),
}

/// What became of the records of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Done {
    /// They are gone.
    Deleted,
    /// They stand again.
    Restored,
    /// There were none.
    Absent,
    /// Somebody changed them in between.
    Changed,
    /// The lease that they hung on is over: their worker ends by itself.
    Lapsed,
}

impl Done {
    /// The closed name used in metrics and certificates.
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Deleted => "deleted",
            Self::Restored => "restored",
            Self::Absent => "absent",
            Self::Changed => "changed",
            Self::Lapsed => "lapsed",
        }
    }
}

/// The place.
#[derive(Debug, Clone)]
pub(super) enum Store {
    Etcd(Gateway),
    Folder(PathBuf),
}

impl Store {
    pub(super) fn new(backend: &DynamoBackend) -> Self {
        match backend {
            DynamoBackend::Etcd { url } => Self::Etcd(Gateway::new(url)),
            DynamoBackend::Folder(root) => Self::Folder(root.clone()),
        }
    }

    /// Tells of every record, until nobody listens.
    pub(super) async fn follow(self, sink: String, seen: mpsc::Sender<Seen>) {
        let mut tick = tokio::time::interval(INTERVAL);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut said = None;
        let mut known = BTreeMap::new();
        while !seen.is_closed() {
            tick.tick().await;
            let followed = match &self {
                Self::Etcd(gateway) => follow_etcd(gateway, &seen).await.map_err(StoreError::from),
                Self::Folder(root) => look_into(root, &mut known, &seen).await,
            };
            let failed = followed.err().map(|error| with_cause(&error));
            if let Some(error) = failed.as_ref().filter(|_| failed != said) {
                tracing::warn!(sink, error, "Dynamo's discovery cannot be read; it is tried again");
            }
            said = failed;
        }
    }

    /// Every record, now.
    async fn list(&self) -> Result<Vec<Record>, StoreError> {
        match self {
            Self::Etcd(gateway) => Ok(gateway.list(PREFIX).await?.kvs.iter().filter_map(record).collect()),
            Self::Folder(root) => {
                let root = root.clone();
                blocking(move || Ok(files(&root)?.keys().filter_map(|key| read(&root, key)).collect())).await
            }
        }
    }

    /// Deletes these records of one worker, if each of them is still what it was; those that were deleted,
    /// as they stood then.
    pub(super) async fn withdraw(&self, records: &[Record]) -> Result<(Done, Vec<Record>), StoreError> {
        let Self::Etcd(gateway) = self else { return self.unlink(records).await };
        if records.is_empty() {
            return Ok((Done::Absent, Vec::new()));
        }
        if delete(gateway, records).await? {
            return Ok((Done::Deleted, records.to_vec()));
        }
        // A record may have been written again, as with another model, or have gone by itself.
        let now = self.list().await?;
        let still: Vec<Record> =
            now.into_iter().filter(|record| records.iter().any(|known| record.is_still(known))).collect();
        if still.is_empty() {
            return Ok((Done::Absent, still));
        }
        Ok(if delete(gateway, &still).await? { (Done::Deleted, still) } else { (Done::Changed, Vec::new()) })
    }

    /// Puts these records of one worker back, if none of them is there.
    pub(super) async fn restore(&self, records: &[Record]) -> Result<Done, StoreError> {
        let Self::Etcd(gateway) = self else { return self.write(records).await };
        match create(gateway, records).await {
            Ok(true) => Ok(Done::Restored),
            Ok(false) => Ok(Done::Changed),
            Err(EtcdError::Refused(_, why)) if why.contains(NO_LEASE) => Ok(Done::Lapsed),
            Err(error) => Err(error.into()),
        }
    }

    async fn unlink(&self, records: &[Record]) -> Result<(Done, Vec<Record>), StoreError> {
        let (Self::Folder(root), records) = (self, records.to_vec()) else { unreachable!("etcd has its own way") };
        let root = root.clone();
        blocking(move || {
            let mut deleted = Vec::new();
            for known in &records {
                let Some(record) = read(&root, &known.key).filter(|record| record.is_still(known)) else { continue };
                match fs::remove_file(root.join(&record.key)) {
                    Ok(()) => deleted.push(record),
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    Err(source) => return Err(failed(&root, &known.key)(source)),
                }
            }
            Ok((if deleted.is_empty() { Done::Absent } else { Done::Deleted }, deleted))
        })
        .await
    }

    async fn write(&self, records: &[Record]) -> Result<Done, StoreError> {
        let (Self::Folder(root), records) = (self, records.to_vec()) else { unreachable!("etcd has its own way") };
        let root = root.clone();
        blocking(move || {
            let mut done = Done::Restored;
            for record in &records {
                match put(&root, record) {
                    Ok(()) => {}
                    Err(error) if error.kind() == io::ErrorKind::AlreadyExists => done = Done::Changed,
                    Err(source) => return Err(failed(&root, &record.key)(source)),
                }
            }
            Ok(done)
        })
        .await
    }
}

// === etcd ===

fn record(found: &KeyValue) -> Option<Record> {
    let key = std::str::from_utf8(&found.key).ok()?;
    Record::read(key, &found.value, found.mod_revision, found.lease)
}

async fn follow_etcd(gateway: &Gateway, seen: &mpsc::Sender<Seen>) -> Result<(), EtcdError> {
    let range = gateway.list(PREFIX).await?;
    // Nobody listens: the caller looks.
    let _ = seen.send(Seen::All(range.kvs.iter().filter_map(record).collect())).await;
    let mut watch = gateway.watch(PREFIX, range.header.revision + 1).await?;
    loop {
        let events = tokio::select! {
            events = watch.next() => events?,
            () = seen.closed() => return Ok(()),
        };
        for event in events {
            let told = match record(&event.kv) {
                Some(record) if !event.is_deletion() => Seen::Put(record),
                _ => Seen::Gone(String::from_utf8_lossy(&event.kv.key).into_owned()),
            };
            let _ = seen.send(told).await;
        }
    }
}

/// Whether each was still at its revision.
async fn delete(gateway: &Gateway, records: &[Record]) -> Result<bool, EtcdError> {
    let compare = |record: &Record| {
        let revision = record.revision.to_string();
        json!({"target": "MOD", "result": "EQUAL", "key": coded(&record.key), "mod_revision": revision})
    };
    let change = |record: &Record| json!({"request_delete_range": {"key": coded(&record.key)}});
    for records in records.chunks(MAX_CHANGES) {
        let compares: Vec<Value> = records.iter().map(compare).collect();
        let changes: Vec<Value> = records.iter().map(change).collect();
        if !gateway.change(&compares, &changes).await? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether none was there, of those that go together.
async fn create(gateway: &Gateway, records: &[Record]) -> Result<bool, EtcdError> {
    let mut none_was_there = true;
    for records in records.chunks(MAX_CHANGES) {
        let (mut compares, mut changes) = (Vec::new(), Vec::new());
        for record in records {
            let (key, value, lease) = (coded(&record.key), coded(&record.value), record.lease.to_string());
            compares.push(json!({"target": "VERSION", "result": "EQUAL", "key": key, "version": "0"}));
            changes.push(json!({"request_put": {"key": key, "value": value, "lease": lease}}));
        }
        none_was_there &= gateway.change(&compares, &changes).await?;
    }
    Ok(none_was_there)
}

// === a folder ===

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, StoreError> + Send + 'static,
) -> Result<T, StoreError> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
}

fn failed(root: &Path, key: &str) -> impl FnOnce(io::Error) -> StoreError {
    let path = root.join(key).display().to_string();
    move |source| StoreError::File { path, source }
}

/// The path of each file below the root, as `v1/instances/dynamo%2Fbackend%2Fgenerate%2F1f63`, and its
/// inode number.
type Files = BTreeMap<String, u64>;

/// Tells of everything if there is another file, or one less: Dynamo writes none twice.
async fn look_into(root: &Path, last: &mut Files, seen: &mpsc::Sender<Seen>) -> Result<(), StoreError> {
    let (root, known) = (root.to_owned(), last.clone());
    let look = move || {
        let now = files(&root)?;
        let records = (now != known).then(|| now.keys().filter_map(|key| read(&root, key)).collect::<Vec<Record>>());
        Ok((now, records))
    };
    let (now, records) = blocking(look).await?;
    *last = now;
    if let Some(records) = records {
        let _ = seen.send(Seen::All(records)).await;
    }
    Ok(())
}

/// Folders that are not there are empty: the first worker makes them.
fn files(root: &Path) -> Result<Files, StoreError> {
    let mut found = Files::new();
    for bucket in BUCKETS {
        let entries = match fs::read_dir(root.join(bucket)) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(source) => return Err(failed(root, bucket)(source)),
        };
        let names = entries.filter_map(|entry| {
            let entry = entry.ok()?;
            Some((entry.file_name().into_string().ok()?, entry.ino()))
        });
        let whole = names.filter(|(name, _)| !name.starts_with(TEMPORARY));
        found.extend(whole.map(|(name, inode)| (format!("{bucket}/{name}"), inode)));
    }
    Ok(found)
}

fn read(root: &Path, key: &str) -> Option<Record> {
    let path = root.join(key);
    let metadata = fs::metadata(&path).ok().filter(|metadata| metadata.is_file() && metadata.len() <= MAX_FILE)?;
    let mut record = Record::read(key, &fs::read(&path).ok()?, 0, 0)?;
    record.owner = Some((metadata.uid(), metadata.gid(), metadata.mode() & 0o777));
    Some(record)
}

/// Appears with all of its content at once, as Dynamo's own files do, and never over another one. Its
/// worker has to be able to write to it: it touches it to keep it.
fn put(root: &Path, record: &Record) -> io::Result<()> {
    let path = root.join(&record.key);
    let folder = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    let temporary = folder.join(format!("{TEMPORARY}lastgasp_{:x}_{}", record.instance, std::process::id()));
    let (uid, gid, mode) = record.owner.unwrap_or((0, 0, 0o644));
    let written = (|| {
        let mut file = fs::File::options().write(true).create(true).truncate(true).mode(mode).open(&temporary)?;
        file.write_all(&record.value)?;
        let made = file.metadata()?;
        if record.owner.is_some() && (made.uid(), made.gid()) != (uid, gid) {
            std::os::unix::fs::fchown(&file, Some(uid), Some(gid))?;
        }
        renameat2(AT_FDCWD, &temporary, AT_FDCWD, &path, RenameFlags::RENAME_NOREPLACE)?;
        Ok(())
    })();
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written
}

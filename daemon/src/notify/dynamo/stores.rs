//! Where Dynamo keeps its records: etcd, or a folder that its processes share.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::folder::{self, Files};
use super::records::{BUCKETS, Record};
use crate::config::DynamoBackend;
use crate::log::with_cause;
use crate::notify::etcd::{EtcdError, Event, Gateway, KeyValue, coded};

/// Time between two looks into the folder, and between two tries to reach etcd.
const INTERVAL: Duration = Duration::from_secs(1);
/// How often etcd is asked something beside the watch, which is silent too when nothing changes.
const PULSE: Duration = Duration::from_secs(10);
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
    /// There is no such folder.
    #[error(
        "{0}: no such folder: no worker has made it yet, DYN_FILE_KV names another one, or the daemon's own unit or \
         container hides it (docs/dynamo.md)"
    )]
    Absent(String),
}

/// What was seen.
#[derive(Debug)]
pub(super) enum Seen {
    /// These are all records.
    All(Vec<Record>),
    /// This one is new, or has changed.
    Put(Record),
    /// This one is gone, since this revision.
    Gone(String, i64),
}

/// What became of the records of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
pub(crate) enum StoreChange {
    /// They are gone.
    Deleted,
    /// They stand again.
    Restored,
    /// There were none.
    Absent,
    /// Somebody changed some of them in between.
    Changed,
    /// The lease that they hung on is over: their worker ends by itself.
    Lapsed,
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
        let mut known = Files::new();
        while !seen.is_closed() {
            tick.tick().await;
            let followed = match &self {
                Self::Etcd(gateway) => follow_etcd(gateway, &seen).await.map_err(StoreError::from),
                Self::Folder(root) => look_into(root.clone(), &mut known, &seen).await,
            };
            let failed = followed.err().map(|error| with_cause(&error));
            if let Some(error) = failed.as_ref().filter(|_| failed != said) {
                tracing::warn!(sink, error, "cannot read Dynamo's discovery: another try follows");
            }
            said = failed;
        }
    }

    /// Those of these records that are there, now.
    pub(super) async fn read(&self, keys: Vec<String>) -> Result<Vec<Record>, StoreError> {
        match self {
            Self::Etcd(gateway) => {
                let mut records = Vec::new();
                for key in keys {
                    records.extend(gateway.read(&key).await?.as_ref().and_then(record));
                }
                Ok(records)
            }
            Self::Folder(root) => {
                let root = root.clone();
                blocking(move || folder::read(&root, &keys)).await
            }
        }
    }

    /// Deletes these records of one worker, if each of them is still what it was; those that were deleted,
    /// as they stood then. After an error any of them may be.
    pub(super) async fn withdraw(&self, records: &[Record]) -> Result<(StoreChange, Vec<Record>), StoreError> {
        let mut deleted = Vec::new();
        match self {
            Self::Etcd(gateway) => {
                for records in records.chunks(MAX_CHANGES) {
                    // What was nobody's when it was seen has no value, and could not be put back.
                    let whole = records.iter().all(|record| !record.value.is_empty());
                    if whole && delete(gateway, records).await? {
                        deleted.extend_from_slice(records);
                        continue;
                    }
                    // A record may have been written again, as with another model, or have gone by itself.
                    let now = self.read(records.iter().map(|record| record.key.clone()).collect()).await?;
                    let is_still = |record: &Record| records.iter().any(|known| record.is_still(known));
                    let still: Vec<Record> = now.into_iter().filter(is_still).collect();
                    if !still.is_empty() && !delete(gateway, &still).await? {
                        return Ok((StoreChange::Changed, deleted));
                    }
                    deleted.extend(still);
                }
            }
            Self::Folder(root) => {
                let (root, records) = (root.clone(), records.to_vec());
                deleted = blocking(move || folder::unlink(&root, &records)).await?;
            }
        }
        Ok((if deleted.is_empty() { StoreChange::Absent } else { StoreChange::Deleted }, deleted))
    }

    /// Puts those of these records of one worker back that are not there; those that stand again, as they
    /// stand now. After an error any of them may.
    pub(super) async fn restore(&self, records: &[Record]) -> Result<(StoreChange, Vec<Record>), StoreError> {
        let mut restored = Vec::new();
        match self {
            Self::Etcd(gateway) => {
                for record in records {
                    match create(gateway, record).await {
                        Ok(Some(revision)) => restored.push(Record { revision, ..record.clone() }),
                        Ok(None) => {}
                        Err(EtcdError::Refused(_, why)) if why.contains(NO_LEASE) => {
                            return Ok((StoreChange::Lapsed, restored));
                        }
                        Err(error) => return Err(error.into()),
                    }
                }
            }
            Self::Folder(root) => {
                let (root, records) = (root.clone(), records.to_vec());
                restored = blocking(move || folder::write(&root, &records)).await?;
            }
        }
        Ok((if restored.len() == records.len() { StoreChange::Restored } else { StoreChange::Changed }, restored))
    }
}

// === etcd ===

fn record(found: &KeyValue) -> Option<Record> {
    let key = std::str::from_utf8(&found.key).ok()?;
    Record::read(key, &found.value, found.mod_revision, found.lease)
}

async fn follow_etcd(gateway: &Gateway, seen: &mpsc::Sender<Seen>) -> Result<(), EtcdError> {
    let [instances, cards] = BUCKETS.map(|bucket| format!("{bucket}/"));
    let (first, second) = (gateway.list(&instances).await?, gateway.list(&cards).await?);
    // Nobody listens: the caller looks.
    let _ = seen.send(Seen::All(first.kvs.iter().chain(&second.kvs).filter_map(record).collect())).await;
    let mut instances = gateway.watch(&instances, first.header.revision + 1).await?;
    let mut cards = gateway.watch(&cards, second.header.revision + 1).await?;
    drop((first, second));
    let pulse = async {
        loop {
            tokio::time::sleep(PULSE).await;
            if let Err(error) = gateway.read(BUCKETS[0]).await {
                return error;
            }
        }
    };
    let mut pulse = std::pin::pin!(pulse);
    loop {
        let events: Vec<Event> = tokio::select! {
            events = instances.next() => events?,
            events = cards.next() => events?,
            error = &mut pulse => return Err(error),
            () = seen.closed() => return Ok(()),
        };
        for event in events {
            let change = match record(&event.kv) {
                Some(record) if !event.is_deletion() => Seen::Put(record),
                _ => Seen::Gone(String::from_utf8_lossy(&event.kv.key).into_owned(), event.kv.mod_revision),
            };
            let _ = seen.send(change).await;
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
    let compares: Vec<Value> = records.iter().map(compare).collect();
    let changes: Vec<Value> = records.iter().map(change).collect();
    Ok(gateway.change(&compares, &changes).await?.is_some())
}

/// At which revision, if none was there.
async fn create(gateway: &Gateway, record: &Record) -> Result<Option<i64>, EtcdError> {
    let (key, value, lease) = (coded(&record.key), coded(&record.value), record.lease.to_string());
    let compare = json!({"target": "VERSION", "result": "EQUAL", "key": key, "version": "0"});
    let change = json!({"request_put": {"key": key, "value": value, "lease": lease}});
    gateway.change(&[compare], &[change]).await
}

// === a folder ===

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, StoreError> + Send + 'static,
) -> Result<T, StoreError> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
}

/// Tells of everything if something is new, has changed, or is gone.
async fn look_into(root: PathBuf, last: &mut Files, seen: &mpsc::Sender<Seen>) -> Result<(), StoreError> {
    let known = std::mem::take(last);
    let look = move || {
        let looked = folder::look(&root, &known);
        Ok((known, looked))
    };
    let (known, looked) = blocking(look).await?;
    let (now, failed) = match looked {
        Ok(now) => (now, None),
        Err(error @ StoreError::Absent(_)) => (Files::new(), Some(error)),
        Err(error) => {
            *last = known;
            return Err(error);
        }
    };
    let records = |files: &Files| files.values().filter_map(|(_, record)| record.clone()).collect::<Vec<Record>>();
    let all = records(&now);
    if all != records(&known) {
        let _ = seen.send(Seen::All(all)).await;
    }
    *last = now;
    failed.map_or(Ok(()), Err)
}

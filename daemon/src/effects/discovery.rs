//! One registrar per worker keeps its record in `lastgasp_workers` as the core wants it.
//!
//! What is wanted is a state, the latest one; what happened in between does not matter. Every
//! write names the revision it expects, so a late withdrawal cannot hit a successor's record.

use std::time::Duration;

use bytes::Bytes;
use jiff::Timestamp;
use lastgasp_protocol::kv::{Bucket, Entry, Expect, Value, WriteError};
use lastgasp_protocol::{Incarnation, WorkerRecord, WorkerState};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::core::WorkerId;
use crate::fault;

/// How long a record or tombstone outlives its node, if the node never returns.
pub const RECORD_TTL: Duration = Duration::from_secs(24 * 3600);
/// How often a record's TTL is renewed.
const RENEWAL: Duration = Duration::from_secs(6 * 3600);
/// Pauses between tries while the server does not answer.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// Pause after the server refused a write; the same write would be refused again at once.
const REFUSED_PAUSE: Duration = Duration::from_secs(5);

/// What is wanted of a worker's key.
#[derive(Debug, Clone, PartialEq)]
pub enum Desired {
    /// Nothing: no life of it was ever listed by this daemon.
    Untouched,
    /// This record.
    Listed {
        /// The record; `registered_at` and a deadline are filled in when it is written.
        record: Box<WorkerRecord>,
        /// While draining: how long from now streams are left alone.
        drain_for: Option<Duration>,
    },
    /// No record of this incarnation.
    Absent {
        /// Which life.
        incarnation: Incarnation,
    },
}

/// What a registrar did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The record stands, acknowledged by the server.
    Listed {
        /// Which life.
        incarnation: Incarnation,
        /// Under which epoch; higher than wanted if an earlier daemon had listed the same life.
        epoch: u64,
        /// At which revision.
        revision: u64,
        /// What it says.
        state: WorkerState,
    },
    /// No record of this life stands, acknowledged by the server.
    Withdrawn {
        /// Which life.
        incarnation: Incarnation,
        /// Revision of the tombstone, if it was this daemon that wrote it.
        revision: Option<u64>,
    },
    /// The server did not answer or refused; it is tried again.
    Failed {
        /// It refused: until somebody acts, it will again.
        refused: bool,
        /// What it says.
        error: String,
    },
}

/// A worker's registrar, as the supervisor holds it.
#[derive(Debug)]
pub struct Registrar {
    desired: watch::Sender<Desired>,
}

impl Registrar {
    /// Starts the registrar of one worker. It waits for the bucket for as long as it takes.
    #[must_use]
    pub fn spawn(
        worker: WorkerId,
        key: String,
        bucket: watch::Receiver<Option<Bucket>>,
        outcomes: mpsc::UnboundedSender<(WorkerId, Outcome)>,
    ) -> Self {
        let (desired, wanted) = watch::channel(Desired::Untouched);
        let task =
            Task { worker, key, bucket, wanted, outcomes, known: None, written: None, last_write: Instant::now() };
        tokio::spawn(task.run());
        Self { desired }
    }

    /// Says what is wanted from now on.
    pub fn want(&self, desired: Desired) {
        self.desired.send_replace(desired);
    }
}

struct Task {
    worker: WorkerId,
    key: String,
    bucket: watch::Receiver<Option<Bucket>>,
    wanted: watch::Receiver<Desired>,
    outcomes: mpsc::UnboundedSender<(WorkerId, Outcome)>,
    /// The key as we wrote it last, if nobody has contradicted since.
    known: Option<Known>,
    /// Which life we wrote last. The first write of another life reads before.
    written: Option<Incarnation>,
    last_write: Instant,
}

/// What stands under the key: a record of ours, or our tombstone of it.
struct Known {
    revision: u64,
    record: Bytes,
    /// It is a tombstone.
    ended: bool,
}

/// What became of one try.
enum Tried {
    /// It is as wanted.
    Done,
    /// Another try may succeed, now.
    Again,
    /// Another try may succeed, later.
    Later(Duration, String),
}

impl Task {
    async fn run(mut self) {
        loop {
            let wanted = self.wanted.borrow_and_update().clone();
            let due = if wanted == Desired::Untouched { Ok(()) } else { self.achieve(&wanted).await };
            let renewal = matches!(wanted, Desired::Listed { .. });
            tokio::select! {
                changed = self.wanted.changed() => if changed.is_err() { return },
                () = tokio::time::sleep_until(self.last_write + RENEWAL), if renewal => {}
            }
            if due.is_err() {
                return;
            }
        }
    }

    /// Tries until it is as wanted, or something else is wanted, or the daemon ends.
    async fn achieve(&mut self, wanted: &Desired) -> Result<(), ()> {
        let mut pause = BACKOFF.0;
        loop {
            let bucket = loop {
                if let Some(bucket) = self.bucket.borrow_and_update().clone() {
                    break bucket;
                }
                tokio::select! {
                    changed = self.bucket.changed() => changed.map_err(drop)?,
                    changed = self.wanted.changed() => { changed.map_err(drop)?; self.wanted.mark_changed(); return Ok(()) }
                }
            };
            // The bucket was waited for, and so was something else, perhaps at the same moment.
            if self.wanted.has_changed().map_err(drop)? {
                return Ok(());
            }
            match self.once(&bucket, wanted).await {
                Tried::Done => return Ok(()),
                Tried::Again => {}
                Tried::Later(at_least, error) => {
                    self.known = None;
                    let refused = at_least == REFUSED_PAUSE;
                    let _ = self.outcomes.send((self.worker, Outcome::Failed { refused, error }));
                    tokio::select! {
                        () = tokio::time::sleep(pause.max(at_least)) => {}
                        changed = self.wanted.changed() => { changed.map_err(drop)?; self.wanted.mark_changed(); return Ok(()) }
                    }
                    pause = (pause * 2).min(BACKOFF.1);
                }
            }
        }
    }

    async fn once(&mut self, bucket: &Bucket, wanted: &Desired) -> Tried {
        match wanted {
            Desired::Untouched => Tried::Done,
            Desired::Listed { record, drain_for } => self.list(bucket, record, *drain_for).await,
            Desired::Absent { incarnation } => self.withdraw(bucket, incarnation).await,
        }
    }

    async fn list(&mut self, bucket: &Bucket, wanted: &WorkerRecord, drain_for: Option<Duration>) -> Tried {
        let mut record = wanted.clone();
        let expect = match &self.known {
            Some(known) if self.written.as_ref() == Some(&record.incarnation) => Expect::Revision(known.revision),
            // The first write of a life reads first: an earlier daemon may have listed the same
            // life, and an epoch that routers have seen the end of must not come back.
            _ => match bucket.read(&self.key).await {
                Err(error) => return later(&error),
                Ok(None) => Expect::Absent,
                Ok(Some(entry)) => {
                    let revision = entry.revision;
                    if let Some(former) = former_listing(&entry).filter(|f| f.incarnation == record.incarnation) {
                        let ended = entry.value == Value::Deleted;
                        record.epoch = record.epoch.max(former.epoch + u64::from(ended));
                        record.registered_at = former.registered_at.filter(|_| !ended);
                    }
                    Expect::Revision(revision)
                }
            },
        };
        let now = Timestamp::now();
        record.registered_at.get_or_insert(now);
        record.deadline = drain_for.and_then(|window| now.checked_add(window).ok());
        let payload = Bytes::from(record.to_json());
        let written = bucket.put(&self.key, payload.clone(), expect, RECORD_TTL).await;
        if written.is_ok() {
            fault::point("record listed");
            self.written = Some(record.incarnation.clone());
        }
        self.settle(written, payload, false, |revision| Outcome::Listed {
            incarnation: record.incarnation,
            epoch: record.epoch,
            revision,
            state: record.state,
        })
    }

    async fn withdraw(&mut self, bucket: &Bucket, incarnation: &Incarnation) -> Tried {
        let withdrawn = |revision| Outcome::Withdrawn { incarnation: incarnation.clone(), revision };
        let (revision, ended) = match &self.known {
            Some(known) if known.ended => {
                let _ = self.outcomes.send((self.worker, withdrawn(None)));
                return Tried::Done;
            }
            Some(known) => (known.revision, known.record.clone()),
            None => match bucket.read(&self.key).await {
                Err(error) => return later(&error),
                Ok(entry) => {
                    let listed = entry.filter(|entry| {
                        let ours = former_listing(entry).is_some_and(|former| former.incarnation == *incarnation);
                        matches!(entry.value, Value::Put(_)) && ours
                    });
                    let Some(entry) = listed else {
                        let _ = self.outcomes.send((self.worker, withdrawn(None)));
                        return Tried::Done;
                    };
                    (entry.revision, entry.payload)
                }
            },
        };
        let written = bucket.delete(&self.key, ended.clone(), Expect::Revision(revision), RECORD_TTL).await;
        if written.is_ok() {
            fault::point("record withdrawn");
        }
        self.settle(written, ended, true, |revision| withdrawn(Some(revision)))
    }

    fn settle(
        &mut self,
        written: Result<u64, WriteError>,
        record: Bytes,
        ended: bool,
        outcome: impl FnOnce(u64) -> Outcome,
    ) -> Tried {
        match written {
            Ok(revision) => {
                self.known = Some(Known { revision, record, ended });
                self.last_write = Instant::now();
                let _ = self.outcomes.send((self.worker, outcome(revision)));
                Tried::Done
            }
            Err(WriteError::Mismatch) => {
                // Read and decide again. A second mismatch in a row is a fight: slow down.
                match self.known.take() {
                    Some(_) => Tried::Again,
                    None => Tried::Later(BACKOFF.0, "the record is being changed by somebody else".to_owned()),
                }
            }
            Err(WriteError::Unknown(error)) => later(&error),
            Err(WriteError::Refused(error)) => Tried::Later(REFUSED_PAUSE, error.to_string()),
        }
    }
}

fn later(error: &async_nats::Error) -> Tried {
    Tried::Later(Duration::ZERO, error.to_string())
}

/// The listing that a record, or a tombstone of a lastgasp daemon, speaks of.
fn former_listing(entry: &Entry) -> Option<WorkerRecord> {
    WorkerRecord::parse(&entry.key, &entry.payload).ok()
}

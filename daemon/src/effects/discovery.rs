//! One registrar per worker keeps its record in `lastgasp_workers` as the core wants it.
//!
//! What is wanted is a state, the latest one; what happened in between does not matter. Every
//! write names the revision it expects, so a late withdrawal cannot hit a successor's record.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use jiff::Timestamp;
use lastgasp_protocol::kv::{Bucket, Content, Entry, Expect, Fault, ReadError, WriteError, jittered};
use lastgasp_protocol::{Incarnation, WorkerRecord, WorkerState, Writer};
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::Instant;

use super::nats::ConnectionState;
use crate::core::WorkerId;
use crate::fault;

/// How long a record or tombstone outlives its node, if the node never returns.
pub const RECORD_TTL: Duration = Duration::from_secs(24 * 3600);
/// How often a record's TTL is renewed.
const RENEWAL: Duration = Duration::from_secs(6 * 3600);
/// How often a daemon looks whether its records are still there. A stream that is purged says nothing to
/// those who watch it. Each look is a question to the stream's leader, and a thousand daemons ask.
pub const LOOK: Duration = Duration::from_secs(10);
/// Pauses between tries while the server does not answer.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// Shortest time between two writes over what is no record.
const REPAIR_PAUSE: Duration = Duration::from_secs(1);
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
        /// Somebody has taken this life into service again: what its tombstone says counts no more.
        taken_back: bool,
    },
    /// No record of this incarnation.
    Absent {
        /// Which life.
        incarnation: Incarnation,
        /// Somebody has taken it out of service, and why. The tombstone keeps it.
        commanded: Option<String>,
    },
}

impl Desired {
    /// Which life is spoken of.
    fn incarnation(&self) -> Option<&Incarnation> {
        match self {
            Self::Untouched => None,
            Self::Listed { record, .. } => Some(&record.incarnation),
            Self::Absent { incarnation, .. } => Some(incarnation),
        }
    }
}

/// What a registrar did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WriteOutcome {
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
    /// Its tombstone says that somebody has taken this life out of service. It was not listed.
    OutOfService {
        /// Which life.
        incarnation: Incarnation,
        /// Under which epoch it was listed last.
        epoch: u64,
        /// Why.
        commanded: String,
    },
    /// An earlier daemon had listed this life as draining. It was not listed as anything better.
    WasDraining {
        /// Which life.
        incarnation: Incarnation,
        /// Under which epoch.
        epoch: u64,
        /// Until when.
        deadline: Option<Timestamp>,
        /// Why, if somebody has asked for it.
        commanded: Option<String>,
    },
    /// The server did not answer or refused; it is tried again.
    Failed {
        /// It refused: until somebody acts, it will again.
        refused: bool,
        /// What is wrong.
        fault: Fault,
        /// What it says.
        error: String,
    },
}

/// What registrars share: where the records are, and what is known of that.
#[derive(Debug, Clone)]
pub struct Ledger {
    /// The workers' bucket, once it is open and the node's name is ours.
    pub bucket: watch::Receiver<Option<Bucket>>,
    /// The connection to NATS.
    pub connection: watch::Receiver<ConnectionState>,
    /// The keys of this node, each time they were looked at.
    pub present: watch::Receiver<Arc<Present>>,
}

/// The keys of a node that the bucket had at some time. One that was deleted or wiped has none, and
/// says so to nobody.
#[derive(Debug)]
pub struct Present {
    /// It was asked for at this time or later.
    pub asked: Instant,
    /// Records and tombstones.
    pub keys: HashSet<String>,
}

/// A worker's registrar, as the supervisor holds it.
#[derive(Debug)]
pub struct Registrar {
    desired: watch::Sender<Desired>,
    again: Arc<Notify>,
}

impl Registrar {
    /// Starts the registrar of one worker. It waits for the bucket for as long as it takes.
    #[must_use]
    pub fn spawn(
        worker: WorkerId,
        key: String,
        ledger: Ledger,
        outcomes: mpsc::UnboundedSender<(WorkerId, WriteOutcome)>,
    ) -> Self {
        let (desired, wanted) = watch::channel(Desired::Untouched);
        let again = Arc::new(Notify::new());
        let task = Task {
            worker,
            key,
            ledger,
            wanted,
            again: Arc::clone(&again),
            outcomes,
            known: None,
            written: None,
            ending: None,
            keeping: None,
            last_write: Instant::now(),
            renew_at: Instant::now(),
        };
        tokio::spawn(task.run());
        Self { desired, again }
    }

    /// Something else stands under the key: what is wanted is written once more.
    pub fn write_again(&self) {
        self.again.notify_one();
    }

    /// Says what is wanted from now on.
    pub fn want(&self, desired: Desired) {
        self.desired.send_replace(desired);
    }
}

struct Task {
    worker: WorkerId,
    key: String,
    ledger: Ledger,
    wanted: watch::Receiver<Desired>,
    again: Arc<Notify>,
    outcomes: mpsc::UnboundedSender<(WorkerId, WriteOutcome)>,
    /// The key as we wrote it last, if nobody has contradicted since.
    known: Option<Known>,
    /// Which life we wrote last. The first write of another life reads before.
    written: Option<Incarnation>,
    /// Whose tombstone was sent to the server, if it is not known what became of that.
    ending: Option<Incarnation>,
    /// Whose tombstone says that somebody took it out of service. It has to stand for as long as that life may.
    keeping: Option<Incarnation>,
    last_write: Instant,
    /// When the TTL of what was written last is renewed.
    renew_at: Instant,
}

/// What stands under the key: a record of ours, or our tombstone of it.
struct Known {
    revision: u64,
    record: Bytes,
    tombstone: bool,
}

/// What became of one try.
enum Tried {
    /// It is as wanted.
    Done,
    /// Another try may succeed, now.
    Again,
    /// Another try may succeed, later.
    Later(WriteFailure),
}

/// Why a try did not succeed.
struct WriteFailure {
    fault: Fault,
    error: String,
    /// The server refused: the same write would be refused again at once.
    refused: bool,
    /// The bucket may be gone.
    no_bucket: bool,
}

impl From<ReadError> for WriteFailure {
    fn from(error: ReadError) -> Self {
        let no_bucket = matches!(error, ReadError::NoBucket);
        Self { fault: error.fault(), error: error.to_string(), refused: false, no_bucket }
    }
}

impl Task {
    async fn run(mut self) {
        loop {
            let wanted = self.wanted.borrow_and_update().clone();
            let due = if wanted == Desired::Untouched { Ok(()) } else { self.achieve(&wanted).await };
            if due.is_err() {
                return;
            }
            // What was left by an earlier daemon and not written by us stands or not: it is not ours to list again.
            let of = |life: &Option<Incarnation>| life.is_some() && life.as_ref() == wanted.incarnation();
            let listed = matches!(wanted, Desired::Listed { .. }) && of(&self.written);
            let kept = of(&self.keeping);
            loop {
                let again = async {
                    self.again.notified().await;
                    // Whoever writes there may do so a thousand times a second.
                    tokio::time::sleep_until(self.last_write + REPAIR_PAUSE).await;
                };
                tokio::select! {
                    changed = self.wanted.changed() => if changed.is_err() { return } else { break },
                    () = again => break,
                    () = tokio::time::sleep_until(self.renew_at), if listed || kept => break,
                    changed = self.ledger.present.changed(), if listed => match changed {
                        Err(_) => return,
                        Ok(()) => if self.is_missing() { break },
                    },
                }
            }
        }
    }

    /// The key was looked for after it was written, and is not there.
    fn is_missing(&mut self) -> bool {
        let present = self.ledger.present.borrow_and_update();
        let missing = present.asked > self.last_write && !present.keys.contains(&self.key);
        if missing {
            tracing::warn!(key = self.key, "record vanished from the bucket: the daemon lists the worker again");
            self.known = None;
        }
        missing
    }

    /// Tries until it is as wanted, or something else is wanted, or the daemon ends.
    async fn achieve(&mut self, wanted: &Desired) -> Result<(), ()> {
        let mut pause = BACKOFF.0;
        loop {
            let ready = async {
                let bucket = self.ledger.bucket.wait_for(Option::is_some).await.map_err(drop)?.clone();
                // Without a connection a write would only wait in the client's queue.
                self.ledger
                    .connection
                    .wait_for(|connection| *connection == ConnectionState::Connected)
                    .await
                    .map_err(drop)?;
                bucket.ok_or(())
            };
            let bucket = tokio::select! {
                biased;
                bucket = ready => bucket?,
                changed = self.wanted.changed() => { changed.map_err(drop)?; self.wanted.mark_changed(); return Ok(()) }
            };
            // Something else may be wanted since the same moment.
            if self.wanted.has_changed().map_err(drop)? {
                return Ok(());
            }
            let mut connection = self.ledger.connection.clone();
            let tried = tokio::select! {
                biased;
                tried = self.once(&bucket, wanted) => tried,
                lost = connection.changed() => {
                    lost.map_err(drop)?;
                    // Whether it took effect is read after the reconnect.
                    self.known = None;
                    Tried::Again
                }
            };
            match tried {
                Tried::Done => return Ok(()),
                Tried::Again => {}
                Tried::Later(WriteFailure { fault, error, refused, no_bucket }) => {
                    self.known = None;
                    let _ = self.outcomes.send((self.worker, WriteOutcome::Failed { refused, fault, error }));
                    if no_bucket && let Err(error) = bucket.again().await {
                        tracing::debug!(%error, "no bucket, and the daemon cannot make one");
                    }
                    let wait = if refused { REFUSED_PAUSE.max(pause) } else { pause };
                    tokio::select! {
                        () = tokio::time::sleep(wait) => {}
                        // A new connection may be to a server that takes it.
                        lost = connection.changed() => lost.map_err(drop)?,
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
            Desired::Listed { record, drain_for, taken_back } => {
                self.list(bucket, record, *drain_for, *taken_back).await
            }
            Desired::Absent { incarnation, commanded } => self.withdraw(bucket, incarnation, commanded.as_ref()).await,
        }
    }

    async fn list(
        &mut self,
        bucket: &Bucket,
        wanted: &WorkerRecord,
        drain_for: Option<Duration>,
        taken_back: bool,
    ) -> Tried {
        let mut record = wanted.clone();
        let expect = match &self.known {
            Some(known) if self.written.as_ref() == Some(&record.incarnation) => Expect::Revision(known.revision),
            // The first write of a life reads first: an earlier daemon may have listed the same
            // life, and an epoch that routers have seen the end of must not come back.
            _ => match bucket.read(&self.key).await {
                Err(error) => return Tried::Later(error.into()),
                Ok(None) => Expect::Absent,
                Ok(Some(entry)) => {
                    let revision = entry.revision;
                    if let Some(former) = former_listing(&entry).filter(|f| f.incarnation == record.incarnation) {
                        let ended = entry.value == Content::Deleted;
                        let left = left_by_a_predecessor(&former, ended, record.state).filter(|_| !taken_back);
                        if let Some(outcome) = left {
                            let kept = matches!(outcome, WriteOutcome::OutOfService { .. });
                            // Known already, if its tombstone is only renewed.
                            if self.keeping.as_ref() != Some(&record.incarnation) {
                                let _ = self.outcomes.send((self.worker, outcome));
                            }
                            return if kept { self.keep(bucket, entry, record.incarnation).await } else { Tried::Done };
                        }
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
            self.keeping = None;
        }
        self.settle(written, payload, false, |revision| WriteOutcome::Listed {
            incarnation: record.incarnation,
            epoch: record.epoch,
            revision,
            state: record.state,
        })
    }

    async fn withdraw(&mut self, bucket: &Bucket, incarnation: &Incarnation, commanded: Option<&String>) -> Tried {
        let withdrawn = |revision| WriteOutcome::Withdrawn { incarnation: incarnation.clone(), revision };
        let (revision, ended) = match &self.known {
            Some(known) if !known.tombstone => (known.revision, known.record.clone()),
            _ => match bucket.read(&self.key).await {
                Err(error) => return Tried::Later(error.into()),
                Ok(entry) => {
                    // A put that is no record is nobody's; a tombstone says what routers should know.
                    // Another life that a daemon of this node listed is over as well: it was not deleted in time.
                    let ours = |entry: &Entry| match former_listing(entry) {
                        Some(former) if former.incarnation == *incarnation => true,
                        Some(former) => former.writer == Writer::Daemon && matches!(entry.value, Content::Put(_)),
                        None => matches!(entry.value, Content::Put(_)),
                    };
                    match entry.filter(ours) {
                        Some(entry) if matches!(entry.value, Content::Put(_)) => (entry.revision, entry.payload),
                        Some(entry)
                            if self.keeping.as_ref() == Some(incarnation) && self.renew_at <= Instant::now() =>
                        {
                            return self.keep(bucket, entry, incarnation.clone()).await;
                        }
                        rest => {
                            // The tombstone whose acknowledgement was lost, or nothing of ours.
                            let sent = self.ending.take().is_some_and(|ending| ending == *incarnation);
                            let revision = rest.filter(|_| sent).map(|entry| entry.revision);
                            let _ = self.outcomes.send((self.worker, withdrawn(revision)));
                            return Tried::Done;
                        }
                    }
                }
            },
        };
        let ended = match WorkerRecord::parse(&self.key, &ended) {
            Ok(record) if record.commanded.as_ref() != commanded => {
                Bytes::from(WorkerRecord { commanded: commanded.cloned(), ..record }.to_json())
            }
            _ => ended,
        };
        self.ending = Some(incarnation.clone());
        let written = bucket.delete(&self.key, ended.clone(), Expect::Revision(revision), RECORD_TTL).await;
        if written.is_ok() {
            fault::point("record withdrawn");
            self.keeping = commanded.map(|_| incarnation.clone());
        }
        self.settle(written, ended, true, |revision| withdrawn(Some(revision)))
    }

    fn settle(
        &mut self,
        written: Result<u64, WriteError>,
        record: Bytes,
        tombstone: bool,
        outcome: impl FnOnce(u64) -> WriteOutcome,
    ) -> Tried {
        match written {
            Ok(revision) => {
                self.wrote(revision, record, tombstone);
                let _ = self.outcomes.send((self.worker, outcome(revision)));
                Tried::Done
            }
            Err(error) => self.not_written(error),
        }
    }

    /// Renews the TTL of the tombstone of a life that somebody took out of service.
    async fn keep(&mut self, bucket: &Bucket, entry: Entry, incarnation: Incarnation) -> Tried {
        let Entry { revision, payload, .. } = entry;
        match bucket.delete(&self.key, payload.clone(), Expect::Revision(revision), RECORD_TTL).await {
            Ok(revision) => {
                self.keeping = Some(incarnation);
                self.wrote(revision, payload, true);
                Tried::Done
            }
            Err(error) => self.not_written(error),
        }
    }

    fn wrote(&mut self, revision: u64, record: Bytes, tombstone: bool) {
        self.known = Some(Known { revision, record, tombstone });
        self.last_write = Instant::now();
        self.renew_at = self.last_write + jittered(RENEWAL);
    }

    fn not_written(&mut self, error: WriteError) -> Tried {
        match error {
            // Read and decide again. A second mismatch in a row is a fight: slow down.
            WriteError::Mismatch if self.known.take().is_some() => Tried::Again,
            error => Tried::Later(WriteFailure {
                fault: error.fault().unwrap_or(Fault::Refused),
                error: error.to_string(),
                refused: matches!(error, WriteError::Refused(_)),
                no_bucket: matches!(error, WriteError::NoBucket),
            }),
        }
    }
}

/// The listing that a record, or a tombstone of a lastgasp daemon, speaks of.
fn former_listing(entry: &Entry) -> Option<WorkerRecord> {
    WorkerRecord::parse(&entry.key, &entry.payload).ok()
}

/// What an earlier daemon knew about this very life, and this one is about to overrule without
/// having heard of it: its reading of the bucket may come later than the first good health.
fn left_by_a_predecessor(former: &WorkerRecord, ended: bool, wanted: WorkerState) -> Option<WriteOutcome> {
    let WorkerRecord { incarnation, epoch, state, deadline, commanded, .. } = former.clone();
    match (ended, commanded) {
        (true, Some(commanded)) => Some(WriteOutcome::OutOfService { incarnation, epoch, commanded }),
        (false, commanded) if state == WorkerState::Draining && wanted != WorkerState::Draining => {
            Some(WriteOutcome::WasDraining { incarnation, epoch, deadline, commanded })
        }
        _ => None,
    }
}

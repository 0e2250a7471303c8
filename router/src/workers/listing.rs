//! One listing of a worker: an (incarnation, epoch), its fate, and the streams on it.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use lastgasp_protocol::{Counts, Incarnation, Mode, Name, WorkerRecord};
use tokio::sync::watch;

use super::breaker::Breaker;
use crate::continuation::{Engine, Target};

/// A move by the connection's end counts for the signal that explains it, if that comes within this time.
const EXPLAINED_WITHIN: Duration = Duration::from_secs(10);

/// Node and worker name.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// Node name.
    pub node: Name,
    /// Worker name.
    pub worker: Name,
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.node, self.worker)
    }
}

/// Why streams leave a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum Why {
    /// A migration signal.
    Signal,
    /// Its record was deleted.
    Deleted,
    /// Another life, or a later listing of it, stands in its place.
    Superseded,
    /// It was draining, and its deadline went by without a word.
    Deadline,
}

/// What streams on this worker are to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Fate {
    /// Go on.
    #[default]
    Stay,
    /// Leave it.
    Move(Mode, Why),
}

/// What became of a stream that was on a condemned worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestOutcome {
    /// It goes on elsewhere.
    Moved,
    /// Its nature forbids it.
    Unmovable,
    /// No worker took it.
    Failed,
    /// It ended by itself, or its client left.
    Ended,
}

/// The account of a listing's streams.
#[derive(Debug, Default)]
struct Tally {
    live: u64,
    condemned: bool,
    counts: Counts,
    settled: u64,
    /// What was settled shortly before the condemnation.
    recent: Vec<(Instant, RequestOutcome)>,
}

impl Tally {
    fn add(&mut self, outcome: RequestOutcome) {
        self.settled += 1;
        match outcome {
            RequestOutcome::Moved => self.counts.moved += 1,
            RequestOutcome::Unmovable => self.counts.unmovable += 1,
            RequestOutcome::Failed => self.counts.failed += 1,
            RequestOutcome::Ended => {}
        }
    }
}

/// What a worker's `/v1/models` says.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Models {
    /// Context length by model, in tokens.
    pub context: HashMap<String, u64>,
    /// They belong to `vllm`; the Rust frontend says `vllm-frontend-rs` (both 0.32.0, measured).
    pub python_frontend: bool,
}

/// A worker as it was listed once.
#[derive(Debug)]
pub struct Listing {
    /// Whose.
    pub key: Key,
    /// Which life.
    pub incarnation: Incarnation,
    /// Which listing of it.
    pub epoch: u64,
    /// Base URL without a slash at its end.
    pub endpoint: String,
    /// What it accepts.
    pub engine: Engine,
    /// What it says of its models, once it was asked.
    pub models: OnceLock<Models>,
    in_flight: AtomicU64,
    fate: watch::Sender<Fate>,
    tally: watch::Sender<Tally>,
    breaker: Mutex<Breaker>,
}

impl Listing {
    pub(super) fn new(record: &WorkerRecord) -> Arc<Self> {
        Arc::new(Self {
            key: Key { node: record.node.clone(), worker: record.worker.clone() },
            incarnation: record.incarnation.clone(),
            epoch: record.epoch,
            endpoint: record.endpoint.trim_end_matches('/').to_owned(),
            engine: Engine::named(&record.engine),
            models: OnceLock::new(),
            in_flight: AtomicU64::new(0),
            fate: watch::Sender::default(),
            tally: watch::Sender::default(),
            breaker: Mutex::default(),
        })
    }

    /// What the continuation engine needs to know of it.
    #[must_use]
    pub fn target(&self, model: &str) -> Target {
        let models = self.models.get();
        Target {
            engine: self.engine,
            max_model_len: models.and_then(|models| models.context.get(model)).copied(),
            // Not known yet, it is tried: the first chunk tells before a word is passed on.
            takes_chat_ids: self.engine == Engine::Vllm && models.is_none_or(|models| models.python_frontend),
        }
    }

    /// Requests under way.
    #[must_use]
    pub fn in_flight(&self) -> u64 {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// The fate of its streams; a change wakes whoever waits for one.
    #[must_use]
    pub fn fate(&self) -> watch::Receiver<Fate> {
        self.fate.subscribe()
    }

    pub(crate) fn breaker(&self) -> std::sync::MutexGuard<'_, Breaker> {
        self.breaker.lock().expect("no breaker panics")
    }

    /// A signal has its streams leave.
    pub(super) fn is_condemned(&self) -> bool {
        *self.fate.borrow() != Fate::Stay
    }

    /// Tells every stream to leave, once; later only from handover to lost.
    pub(super) fn condemn(&self, mode: Mode, why: Why) -> bool {
        let now = Instant::now();
        self.tally.send_if_modified(|tally| {
            if tally.condemned {
                return false;
            }
            tally.condemned = true;
            tally.counts.streams = tally.live;
            for (at, outcome) in std::mem::take(&mut tally.recent) {
                if now.duration_since(at) <= EXPLAINED_WITHIN {
                    tally.counts.streams += 1;
                    tally.add(outcome);
                }
            }
            true
        });
        self.fate.send_if_modified(|fate| match *fate {
            Fate::Stay => {
                *fate = Fate::Move(mode, why);
                true
            }
            Fate::Move(before, _) if before < mode => {
                *fate = Fate::Move(mode, why);
                true
            }
            Fate::Move(..) => false,
        })
    }

    /// Waits until every stream that was here when it was condemned is dealt with.
    pub async fn settled(&self) -> Counts {
        let mut tally = self.tally.subscribe();
        let settled = tally.wait_for(|tally| tally.condemned && tally.settled >= tally.counts.streams).await;
        settled.map(|tally| tally.counts).unwrap_or_default()
    }

    /// Streams that are here now.
    #[must_use]
    pub fn streams(&self) -> u64 {
        self.tally.borrow().live
    }
}

/// A request under way at a worker. Dropping it ends that.
#[derive(Debug)]
pub struct Ticket {
    listing: Arc<Listing>,
    /// It is counted among the listing's live streams.
    live: bool,
    settled: bool,
}

impl Ticket {
    pub(super) fn new(listing: Arc<Listing>, stream: bool) -> Self {
        listing.in_flight.fetch_add(1, Ordering::Relaxed);
        if stream {
            listing.tally.send_modify(|tally| {
                tally.live += 1;
                if tally.condemned {
                    tally.counts.streams += 1;
                }
            });
        }
        Self { listing, live: stream, settled: !stream }
    }

    /// Where it is.
    #[must_use]
    pub fn listing(&self) -> &Arc<Listing> {
        &self.listing
    }

    /// Says what became of the stream. Only the first word counts.
    pub fn settle(&mut self, outcome: RequestOutcome) {
        if std::mem::replace(&mut self.settled, true) {
            return;
        }
        let Self { listing, live, settled: _ } = self;
        listing.tally.send_modify(|tally| {
            if tally.condemned {
                tally.add(outcome);
            } else {
                // Settled before the condemnation that may explain it: no longer one of the living.
                let now = Instant::now();
                tally.recent.retain(|(at, _)| now.duration_since(*at) <= EXPLAINED_WITHIN);
                tally.recent.push((now, outcome));
                tally.live -= 1;
                *live = false;
            }
        });
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let Self { listing, live, settled } = self;
        listing.in_flight.fetch_sub(1, Ordering::Relaxed);
        if *live {
            listing.tally.send_modify(|tally| {
                tally.live -= 1;
                if tally.condemned && !*settled {
                    tally.add(RequestOutcome::Ended);
                }
            });
        }
    }
}

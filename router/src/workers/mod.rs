//! The workers this router knows, which of them may be chosen, and whose streams must leave.
//!
//! All of it is decided here, without I/O: the watch and the signals only report.

mod breaker;
mod lease;
mod listing;

use std::collections::{HashSet, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use indexmap::IndexMap;
use jiff::Timestamp;
use lastgasp_protocol::{
    Action, Incarnation, LeaseKind, MigrateSignal, Mode, Name, WorkerRecord, WorkerRef, WorkerState, worker_key,
};
use tokio::sync::{mpsc, watch};

pub use listing::{Fate, Key, Listing, Models, RequestOutcome, Ticket, Why};

use lease::Leases;

/// How long a daemon's lease lasts, as the contract says.
pub const NODE_TTL: Duration = Duration::from_secs(6);
/// Most (incarnation, epoch)s that are remembered as gone before their record was seen.
const GRAVES: usize = 4096;

/// How long a worker is kept whose record is gone without a word. The bucket may have been wiped, and then its
/// daemon lists it again within seconds.
const FORGOTTEN: Duration = Duration::from_secs(24 * 3600);

/// How often a worker is drawn at random before all are looked at. Each request would else cost the more,
/// the more workers there are; with one worker in two fit to be drawn, one request in 4,000 does.
const DRAWS: usize = 16;

/// Whether a listing is still one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ListingState {
    Listed,
    /// The key is gone without a word: no new work, streams stay.
    Unknown,
    /// Its record was deleted. Written again, it is listed again.
    Withdrawn,
    /// A signal said so, or a successor: for good.
    Gone,
}

#[derive(Debug)]
struct Slot {
    listing: Arc<Listing>,
    revision: u64,
    state: WorkerState,
    models: Vec<String>,
    lease: LeaseKind,
    /// Until when it may drain, if it does.
    deadline: Option<Timestamp>,
    listing_state: ListingState,
    /// Since when it is [`ListingState::Unknown`], if it is.
    unknown_since: Option<Instant>,
}

impl Slot {
    fn is_now_unknown(&mut self, now: Instant) {
        self.listing_state = ListingState::Unknown;
        self.unknown_since.get_or_insert(now);
    }

    /// Nobody will say anything about it any more: its node went without a word, long ago.
    fn is_forgotten(&self, now: Instant) -> bool {
        let long = |since| now.saturating_duration_since(since) >= FORGOTTEN;
        self.listing_state == ListingState::Unknown
            && self.listing.in_flight() == 0
            && self.unknown_since.is_some_and(long)
    }
}

/// A listing that was said to be gone before it was seen.
#[derive(Debug)]
struct Grave {
    key: String,
    incarnation: Incarnation,
    epoch: u64,
    action: Action,
    mode: Mode,
}

#[derive(Debug)]
struct Inner {
    /// In an order, so that one can be drawn.
    slots: IndexMap<String, Slot>,
    graves: VecDeque<Grave>,
    leases: Leases,
}

/// What a signal did to one worker that it names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum SignalResult {
    /// Acted on.
    Applied,
    /// Known already.
    Repeated,
    /// A worker of a node that has others: remembered, since its record may only be late.
    Unseen,
    /// A node of which no worker was seen yet: remembered.
    UnknownNode,
    /// Another life than the one that is listed: remembered, and the listed one is left alone.
    OtherIncarnation,
    /// About a listing that a later one has replaced.
    Stale,
}

/// One worker as this router knows it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct View {
    /// Node and name.
    pub worker: String,
    /// Which life.
    pub incarnation: Incarnation,
    /// Which listing of that life.
    pub epoch: u64,
    /// It is listed as serving: new work may go there.
    pub takes_work: bool,
    /// Requests under way.
    pub in_flight: u64,
}

/// All workers. Cheap to share behind an `Arc`.
#[derive(Debug)]
pub struct Workers {
    inner: Mutex<Inner>,
    /// Counts changes of what may be chosen.
    changed: watch::Sender<u64>,
    arrivals: mpsc::UnboundedSender<Arc<Listing>>,
    random: RandomState,
}

impl Workers {
    /// No workers yet, and where each new listing will be announced.
    #[must_use]
    pub fn new() -> (Arc<Self>, mpsc::UnboundedReceiver<Arc<Listing>>) {
        let (arrivals, announced) = mpsc::unbounded_channel();
        let inner = Inner { slots: IndexMap::new(), graves: VecDeque::new(), leases: Leases::new(NODE_TTL) };
        let workers =
            Self { inner: Mutex::new(inner), changed: watch::Sender::new(0), arrivals, random: RandomState::new() };
        (Arc::new(workers), announced)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("nothing panics while it holds the workers")
    }

    fn notify(&self) {
        self.changed.send_modify(|count| *count += 1);
    }

    /// Wakes when another worker may be chosen.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// All records are listed anew. Revisions before this are not compared with: a bucket that was
    /// made again counts from one.
    pub fn relisting(&self) {
        self.lock().slots.values_mut().for_each(|slot| slot.revision = 0);
    }

    /// A record was written at `revision`.
    pub fn put(&self, record: &WorkerRecord, revision: u64) {
        let mut inner = self.lock();
        let key = worker_key(&record.node, &record.worker);
        if let Some(slot) = inner.slots.get_mut(&key) {
            if revision < slot.revision {
                return;
            }
            if slot.listing.incarnation == record.incarnation {
                if record.epoch < slot.listing.epoch {
                    return;
                }
                // Its streams were sent away since its drain was overdue. It serves after all: it is listed anew.
                let back = slot.listing.is_condemned() && record.state != WorkerState::Draining;
                let kept = match slot.listing_state {
                    ListingState::Listed | ListingState::Unknown => !back,
                    ListingState::Withdrawn => false,
                    ListingState::Gone => true,
                };
                if record.epoch == slot.listing.epoch && kept {
                    slot.revision = revision;
                    slot.state = record.state;
                    slot.models.clone_from(&record.models);
                    slot.lease = record.lease;
                    slot.deadline = record.deadline;
                    slot.unknown_since = None;
                    if slot.listing_state == ListingState::Unknown {
                        slot.listing_state = ListingState::Listed;
                    }
                    drop(inner);
                    return self.notify();
                }
            }
            slot.listing_state = ListingState::Gone;
            // The same process listed again still runs; another one stands on its grave.
            let lives = slot.listing.incarnation == record.incarnation;
            slot.listing.condemn(if lives { Mode::Handover } else { Mode::Lost }, Why::Superseded);
        }
        let listing = Listing::new(record);
        let mut slot = Slot {
            listing: Arc::clone(&listing),
            revision,
            state: record.state,
            models: record.models.clone(),
            lease: record.lease,
            deadline: record.deadline,
            listing_state: ListingState::Listed,
            unknown_since: None,
        };
        let grave = inner
            .graves
            .iter()
            .find(|grave| grave.key == key && grave.incarnation == record.incarnation && grave.epoch >= record.epoch);
        match grave {
            Some(grave) if grave.action == Action::Move => {
                slot.listing_state = ListingState::Gone;
                listing.condemn(grave.mode, Why::Signal);
            }
            Some(_) => slot.state = WorkerState::Draining,
            None => _ = self.arrivals.send(listing),
        }
        inner.slots.insert(key, slot);
        drop(inner);
        self.notify();
    }

    /// A record was deleted. Whether its worker still runs is not said, so what cannot be moved stays.
    pub fn deleted(&self, key: &str, revision: u64) {
        let mut inner = self.lock();
        let Some(slot) = inner.slots.get_mut(key).filter(|slot| revision > slot.revision) else { return };
        slot.revision = revision;
        if slot.listing_state != ListingState::Gone {
            slot.listing_state = ListingState::Withdrawn;
        }
        slot.listing.condemn(Mode::Handover, Why::Deleted);
        drop(inner);
        self.notify();
    }

    /// The deadline of a draining listing is over. Its daemon says so itself, with a signal; this is for
    /// the case that it cannot. Nothing happens if it is no longer draining.
    pub fn overdue(&self, key: &str, record: &WorkerRecord) {
        if let Some(slot) = self.lock().slots.get(key)
            && slot.listing_state == ListingState::Listed
            && slot.state == WorkerState::Draining
            && slot.listing.incarnation == record.incarnation
            && slot.listing.epoch == record.epoch
            && slot.deadline == record.deadline
        {
            slot.listing.condemn(Mode::Handover, Why::Deadline);
        }
    }

    /// A record cannot be read.
    pub fn unknown(&self, key: &str) {
        if let Some(slot) = self.lock().slots.get_mut(key)
            && slot.listing_state == ListingState::Listed
        {
            slot.is_now_unknown(Instant::now());
        }
    }

    /// The TTL of a record ran out, or that of the tombstone of one. Returns whether it was a record, of a
    /// worker that gets no new work from now on.
    pub fn expired(&self, key: &str) -> bool {
        self.expired_at(key, Instant::now())
    }

    fn expired_at(&self, key: &str, now: Instant) -> bool {
        let mut inner = self.lock();
        inner.slots.retain(|_, slot| !slot.is_forgotten(now));
        let Some(slot) = inner.slots.get_mut(key) else { return false };
        match slot.listing_state {
            ListingState::Listed | ListingState::Unknown => {
                slot.is_now_unknown(now);
                true
            }
            // Where each pod is a worker, there are thousands in a month: nobody asks for these any more.
            ListingState::Withdrawn | ListingState::Gone => {
                if slot.listing.in_flight() == 0 {
                    inner.slots.swap_remove(key);
                }
                false
            }
        }
    }

    /// Everything was listed: a key that is not among `present` is unknown.
    pub fn listed(&self, present: &HashSet<String>) {
        let now = Instant::now();
        self.lock().slots.retain(|key, slot| {
            if present.contains(key) {
                return true;
            }
            if slot.listing_state == ListingState::Listed {
                slot.is_now_unknown(now);
            }
            // Else nothing is left to be said about it.
            slot.listing_state == ListingState::Unknown && !slot.is_forgotten(now) || slot.listing.in_flight() > 0
        });
        self.notify();
    }

    /// A migration signal: condemns what it names, all of it before any stream looks for a
    /// new place. Returns the listings to wait for, and what was made of each name.
    pub fn signal(&self, signal: &MigrateSignal) -> (Vec<Arc<Listing>>, Vec<SignalResult>) {
        let mut inner = self.lock();
        let mode = signal.mode.unwrap_or(Mode::Handover);
        let mut found = Vec::new();
        let mut heard = Vec::new();
        for reference in &signal.workers {
            let WorkerRef { worker, incarnation, epoch, revision } = reference;
            let key = worker_key(&signal.node, worker);
            match inner.slots.get_mut(&key).filter(|slot| slot.listing.incarnation == *incarnation) {
                Some(slot) if *epoch < slot.listing.epoch => heard.push(SignalResult::Stale),
                // It is said again to those who have not answered, and its record has meanwhile said otherwise.
                Some(slot)
                    if signal.action == Action::Drain
                        && (1..slot.revision).contains(revision)
                        && slot.state != WorkerState::Draining =>
                {
                    heard.push(SignalResult::Stale);
                }
                Some(slot) => {
                    if signal.action == Action::Drain && slot.listing_state == ListingState::Listed {
                        heard.push(if slot.state == WorkerState::Draining {
                            SignalResult::Repeated
                        } else {
                            SignalResult::Applied
                        });
                        slot.state = WorkerState::Draining;
                    } else if signal.action == Action::Move {
                        slot.listing_state = ListingState::Gone;
                        found.push(Arc::clone(&slot.listing));
                    } else {
                        heard.push(SignalResult::Repeated);
                    }
                    if *epoch == slot.listing.epoch {
                        continue;
                    }
                    inner.bury(key, reference, signal.action, mode);
                }
                None => {
                    let known = |slot: &Slot| slot.listing.key.node == signal.node;
                    heard.push(match inner.slots.get(&key) {
                        Some(_) => SignalResult::OtherIncarnation,
                        None if inner.slots.values().any(known) => SignalResult::Unseen,
                        None => SignalResult::UnknownNode,
                    });
                    inner.bury(key, reference, signal.action, mode);
                }
            }
        }
        // Nothing of this cause may be chosen by the first stream that wakes: hence a second pass.
        for listing in &found {
            heard.push(if listing.condemn(mode, Why::Signal) { SignalResult::Applied } else { SignalResult::Repeated });
        }
        (found, heard)
    }

    /// Chooses a worker for `model` and reserves a place there: the one with fewer requests in
    /// flight of two taken at random, among those that may have new work and are not `tried`.
    pub fn choose(&self, model: &str, tried: &[Arc<Listing>], stream: bool) -> Option<Ticket> {
        let now = Instant::now();
        let inner = self.lock();
        let serves = |slot: &Slot| {
            slot.listing_state == ListingState::Listed
                && slot.state == WorkerState::Serving
                && (slot.models.is_empty() || slot.models.iter().any(|name| name == model))
                && !tried.iter().any(|listing| Arc::ptr_eq(listing, &slot.listing))
        };
        let leased =
            |slot: &Slot| slot.lease == LeaseKind::None || !inner.leases.is_lapsed(&slot.listing.key.node, now);
        let open = |slot: &Slot| slot.listing.breaker().allows(now);
        let random = |below: usize, draw: usize| {
            usize::try_from(self.random.hash_one((now, draw)) >> 1).unwrap_or_default() % below.max(1)
        };
        let take = |pair: [&Slot; 2]| {
            let chosen = pair.into_iter().min_by_key(|slot| slot.listing.in_flight())?;
            chosen.listing.breaker().sent(now);
            Some(Ticket::new(Arc::clone(&chosen.listing), stream))
        };

        // Two draws nearly always do, however many workers there are.
        if inner.slots.len() > DRAWS {
            let mut first: Option<&Slot> = None;
            for draw in 0..DRAWS {
                let Some((_, slot)) = inner.slots.get_index(random(inner.slots.len(), draw)) else { continue };
                if !(serves(slot) && leased(slot) && open(slot)) {
                    continue;
                }
                match first {
                    Some(first) if !std::ptr::eq(first, slot) => return take([first, slot]),
                    _ => first = Some(slot),
                }
            }
        }
        let serving: Vec<&Slot> = inner.slots.values().filter(|slot| serves(slot)).collect();
        // The best kind that exists: a lapsed lease or a shut breaker is no reason to refuse everybody.
        let tiers: [Vec<&Slot>; 3] = [
            serving.iter().copied().filter(|slot| leased(slot) && open(slot)).collect(),
            serving.iter().copied().filter(|slot| open(slot)).collect(),
            serving,
        ];
        let tier = tiers.iter().find(|tier| !tier.is_empty())?;
        let first = random(tier.len(), DRAWS);
        let mut second = if tier.len() > 1 { random(tier.len() - 1, DRAWS + 1) } else { 0 };
        if second >= first && tier.len() > 1 {
            second += 1;
        }
        take([tier[first], tier[second]])
    }

    /// Whether any listing, chosen or not, has this model.
    pub fn knows(&self, model: &str) -> bool {
        let serves = |slot: &Slot| slot.models.is_empty() || slot.models.iter().any(|name| name == model);
        self.lock().slots.values().any(serves)
    }

    /// Models that are served now, sorted, with the context length where a worker gave it.
    pub fn models(&self) -> Vec<(String, Option<u64>)> {
        let inner = self.lock();
        let mut models: Vec<(String, Option<u64>)> = Vec::new();
        for slot in inner.slots.values().filter(|slot| slot.listing_state == ListingState::Listed) {
            for model in &slot.models {
                let length = slot.listing.target(model).max_model_len;
                match models.iter_mut().find(|(name, _)| name == model) {
                    // Only what every worker of this model can hold is promised.
                    Some((_, known)) => *known = known.zip(length).map(|(a, b)| a.min(b)).or(*known).or(length),
                    None => models.push((model.clone(), length)),
                }
            }
        }
        models.sort();
        models
    }

    /// Listings that may have new work.
    pub fn serving(&self) -> usize {
        let inner = self.lock();
        let serving = |slot: &&Slot| slot.listing_state == ListingState::Listed && slot.state == WorkerState::Serving;
        inner.slots.values().filter(serving).count()
    }

    /// Listings that may have new work, of one model or of all, sorted by name.
    pub fn all_serving(&self, model: Option<&str>) -> Vec<Arc<Listing>> {
        let inner = self.lock();
        let has = |slot: &Slot| {
            model.is_none_or(|model| slot.models.is_empty() || slot.models.iter().any(|name| name == model))
        };
        let serving = |slot: &&Slot| {
            slot.listing_state == ListingState::Listed && slot.state == WorkerState::Serving && has(slot)
        };
        let mut all: Vec<_> = inner.slots.values().filter(serving).map(|slot| Arc::clone(&slot.listing)).collect();
        all.sort_by_key(|listing| listing.key.to_string());
        all
    }

    /// What is known of every worker, sorted by name.
    pub fn view(&self) -> Vec<View> {
        let inner = self.lock();
        let mut view: Vec<View> = inner
            .slots
            .values()
            .map(|slot| View {
                worker: slot.listing.key.to_string(),
                incarnation: slot.listing.incarnation.clone(),
                epoch: slot.listing.epoch,
                takes_work: slot.listing_state == ListingState::Listed && slot.state == WorkerState::Serving,
                in_flight: slot.listing.in_flight(),
            })
            .collect();
        view.sort_by(|a, b| a.worker.cmp(&b.worker));
        view
    }

    /// What is listed under a name, or was last.
    pub fn listing(&self, key: &Key) -> Option<Arc<Listing>> {
        self.lock().slots.get(&worker_key(&key.node, &key.worker)).map(|slot| Arc::clone(&slot.listing))
    }

    /// Every listing in use, for metrics.
    pub fn all(&self) -> Vec<Arc<Listing>> {
        self.lock().slots.values().map(|slot| Arc::clone(&slot.listing)).collect()
    }

    /// Whether this listing depends on a lease that has lapsed.
    pub fn is_lapsed(&self, listing: &Arc<Listing>) -> bool {
        let inner = self.lock();
        let Some(slot) = inner.slots.get(&worker_key(&listing.key.node, &listing.key.worker)) else { return false };
        Arc::ptr_eq(&slot.listing, listing)
            && slot.lease == LeaseKind::Node
            && inner.leases.is_lapsed(&listing.key.node, Instant::now())
    }

    /// The router has (re)connected to NATS, at this time.
    pub fn connected(&self, at: Instant) {
        self.lock().leases.connected(at);
    }

    /// A node's lease was renewed.
    pub fn lease_renewed(&self, node: Name) {
        self.lock().leases.renewed(node);
    }

    /// A node's lease lapsed or was given back.
    pub fn lease_lapsed(&self, node: Name) {
        self.lock().leases.lapsed(node, Instant::now());
    }

    /// All leases were listed.
    pub fn leases_listed(&self, present: &HashSet<Name>) {
        self.lock().leases.listed(present, Instant::now());
    }
}

impl Inner {
    fn bury(&mut self, key: String, reference: &WorkerRef, action: Action, mode: Mode) {
        let WorkerRef { worker: _, incarnation, epoch, revision: _ } = reference;
        let same = |grave: &&mut Grave| grave.key == key && grave.incarnation == *incarnation && grave.epoch == *epoch;
        if let Some(grave) = self.graves.iter_mut().find(same) {
            grave.action = grave.action.max(action);
            grave.mode = grave.mode.max(mode);
            return;
        }
        if self.graves.len() == GRAVES {
            self.graves.pop_front();
        }
        self.graves.push_back(Grave { key, incarnation: incarnation.clone(), epoch: *epoch, action, mode });
    }
}

#[cfg(test)]
pub(crate) mod tests;

//! What is known now, and what has happened.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{broadcast, watch};

use super::{Event, NodeStatus};

/// Events that are remembered. A death makes about four, so this is days of an ordinary node and
/// all of a bad night.
pub(crate) const HISTORY: usize = 1024;

/// Death certificates that are remembered.
pub(crate) const DEATHS: usize = 256;

/// How long the supervisor may be silent before `/livez` calls it stuck. It beats at least once a
/// second; a node that swaps may be much later.
const STUCK: Duration = Duration::from_secs(30);

/// Where the supervisor puts what readers may know. Cloning is cheap.
#[derive(Debug, Clone)]
pub(crate) struct StatusHub {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    status: watch::Sender<Arc<NodeStatus>>,
    /// The lock joins history and live events: a new reader misses none and sees none twice.
    history: Mutex<VecDeque<Arc<Event>>>,
    live: broadcast::Sender<Arc<Event>>,
    /// Certificates as JSON by their ids, which are ULIDs and so in the order of time.
    deaths: Mutex<BTreeMap<String, Arc<str>>>,
    deaths_version: watch::Sender<u64>,
    last_beat: Mutex<Option<Instant>>,
}

impl StatusHub {
    /// A hub that tells `status` until the first [`StatusHub::publish`].
    #[must_use]
    pub(crate) fn new(status: NodeStatus) -> Self {
        let inner = Inner {
            status: watch::Sender::new(Arc::new(status)),
            history: Mutex::default(),
            live: broadcast::Sender::new(HISTORY),
            deaths: Mutex::default(),
            deaths_version: watch::Sender::new(0),
            last_beat: Mutex::default(),
        };
        Self { inner: Arc::new(inner) }
    }

    /// Replaces what is known. Never blocks; who watches is woken if anything is different.
    pub(crate) fn publish(&self, status: NodeStatus) {
        self.inner.status.send_if_modified(|current| {
            let different = **current != status;
            if different {
                *current = Arc::new(status);
            }
            different
        });
    }

    /// What is known now.
    #[must_use]
    pub(crate) fn status(&self) -> Arc<NodeStatus> {
        Arc::clone(&self.inner.status.borrow())
    }

    /// What is known now, and a wake-up after every change.
    #[must_use]
    pub(crate) fn watch(&self) -> watch::Receiver<Arc<NodeStatus>> {
        self.inner.status.subscribe()
    }

    /// Adds an event. Never blocks; the oldest beyond [`HISTORY`] is forgotten.
    pub(crate) fn event(&self, event: Event) {
        let event = Arc::new(event);
        let mut history = self.inner.history.lock().unwrap_or_else(PoisonError::into_inner);
        if history.len() == HISTORY {
            history.pop_front();
        }
        history.push_back(Arc::clone(&event));
        // An error says that nobody follows.
        let _ = self.inner.live.send(event);
    }

    /// The remembered events, oldest first, and all that come after them.
    #[must_use]
    pub(crate) fn events(&self) -> (Vec<Arc<Event>>, broadcast::Receiver<Arc<Event>>) {
        let history = self.inner.history.lock().unwrap_or_else(PoisonError::into_inner);
        (history.iter().cloned().collect(), self.inner.live.subscribe())
    }

    /// Adds a death certificate, or one that an earlier daemon has written. Never blocks; the oldest
    /// beyond [`DEATHS`] is forgotten.
    pub(crate) fn death(&self, id: &str, certificate_json: &str) {
        let mut deaths = self.inner.deaths.lock().unwrap_or_else(PoisonError::into_inner);
        deaths.insert(id.to_owned(), certificate_json.into());
        if deaths.len() > DEATHS {
            deaths.pop_first();
        }
        self.inner.deaths_version.send_modify(|version| *version += 1);
    }

    /// A wake-up after every [`StatusHub::death`].
    #[must_use]
    pub(crate) fn watch_deaths(&self) -> watch::Receiver<u64> {
        self.inner.deaths_version.subscribe()
    }

    /// The remembered certificates as JSON, oldest first.
    #[must_use]
    pub(crate) fn deaths(&self) -> Vec<Arc<str>> {
        let deaths = self.inner.deaths.lock().unwrap_or_else(PoisonError::into_inner);
        deaths.values().cloned().collect()
    }

    /// The supervisor's loop turns. Once this was called it must be called every second or so:
    /// `/livez` fails after 30 s without.
    pub(crate) fn beat(&self) {
        *self.inner.last_beat.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// How long the supervisor's loop has stood still, if that is too long.
    #[must_use]
    pub(crate) fn stuck_for(&self) -> Option<Duration> {
        let last = *self.inner.last_beat.lock().unwrap_or_else(PoisonError::into_inner);
        last.map(|last| last.elapsed()).filter(|silent| *silent > STUCK)
    }

    #[cfg(test)]
    pub(super) fn pretend_last_beat(&self, at: Instant) {
        *self.inner.last_beat.lock().unwrap() = Some(at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(summary: usize) -> Event {
        Event { kind: "note".into(), summary: summary.to_string(), ..Event::default() }
    }

    #[test]
    fn a_reader_gets_the_history_and_then_what_follows() {
        let hub = StatusHub::new(NodeStatus::default());
        hub.event(event(1));
        let (history, mut live) = hub.events();
        hub.event(event(2));
        assert_eq!(history.iter().map(|event| event.summary.as_str()).collect::<Vec<_>>(), ["1"]);
        assert_eq!(live.try_recv().unwrap().summary, "2");
        assert!(live.try_recv().is_err());
    }

    #[test]
    fn the_history_is_bounded_and_keeps_the_newest() {
        let hub = StatusHub::new(NodeStatus::default());
        for number in 0..HISTORY + 3 {
            hub.event(event(number));
        }
        let (history, _) = hub.events();
        assert_eq!((history.len(), history[0].summary.as_str()), (HISTORY, "3"));
    }

    #[test]
    fn a_death_is_remembered_once_and_in_its_place() {
        let hub = StatusHub::new(NodeStatus::default());
        for (id, json) in [("01B", "{2}"), ("01A", "{1}"), ("01B", "{2, more}")] {
            hub.death(id, json);
        }
        assert_eq!(hub.deaths().iter().map(|json| &**json).collect::<Vec<_>>(), ["{1}", "{2, more}"]);
        for number in 0..DEATHS {
            hub.death(&format!("02{number:04}"), "{}");
        }
        assert_eq!(hub.deaths().len(), DEATHS);
    }

    #[test]
    fn saying_the_same_again_wakes_nobody() {
        let hub = StatusHub::new(NodeStatus { node: "a".into(), ..NodeStatus::default() });
        let watcher = hub.watch();
        hub.publish(NodeStatus { node: "a".into(), ..NodeStatus::default() });
        assert!(!watcher.has_changed().unwrap());
        hub.publish(NodeStatus { node: "b".into(), ..NodeStatus::default() });
        assert!(watcher.has_changed().unwrap());
        assert_eq!(hub.status().node, "b");
    }
}

//! The requests that may be open at one worker, by their reply inboxes and nothing else.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

/// Inboxes in the order in which they came. Their answers are not seen, so most of them are closed.
#[derive(Debug, Default)]
pub(super) struct Inboxes {
    places: HashMap<Arc<str>, u64>,
    in_order: BTreeMap<u64, Remembered>,
    next: u64,
}

#[derive(Debug)]
struct Remembered {
    since: Instant,
    inbox: Arc<str>,
    /// Its router would move it.
    movable: bool,
}

impl Inboxes {
    /// Remembers an inbox. `false`: there are `most` already, and the oldest one was forgotten for it.
    pub(super) fn insert(&mut self, inbox: Arc<str>, movable: bool, most: usize, now: Instant) -> bool {
        self.remove(&inbox);
        let room = self.places.len() < most;
        if !room && let Some((_, oldest)) = self.in_order.pop_first() {
            self.places.remove(&oldest.inbox);
        }
        self.places.insert(inbox.clone(), self.next);
        self.in_order.insert(self.next, Remembered { since: now, inbox, movable });
        self.next += 1;
        room
    }

    /// Its router takes no more of it.
    pub(super) fn remove(&mut self, inbox: &Arc<str>) {
        if let Some(place) = self.places.remove(inbox) {
            self.in_order.remove(&place);
        }
    }

    /// Forgets what is older.
    pub(super) fn prune(&mut self, oldest: Duration, now: Instant) {
        while let Some(entry) = self.in_order.first_entry()
            && now.duration_since(entry.get().since) > oldest
        {
            let forgotten = entry.remove();
            self.places.remove(&forgotten.inbox);
        }
    }

    /// Takes all of them, the youngest first: it is the likeliest to be open.
    pub(super) fn take(&mut self) -> Vec<Arc<str>> {
        self.places.clear();
        std::mem::take(&mut self.in_order).into_values().rev().map(|remembered| remembered.inbox).collect()
    }

    /// Takes those that their routers would move, in the same order. The others stay.
    pub(super) fn take_movable(&mut self) -> Vec<Arc<str>> {
        let movable: Vec<_> = self.in_order.values().rev().filter(|it| it.movable).map(|it| it.inbox.clone()).collect();
        for inbox in &movable {
            self.remove(inbox);
        }
        movable
    }

    pub(super) fn len(&self) -> usize {
        self.places.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inbox(name: &str) -> Arc<str> {
        format!("_INBOX.{name}").into()
    }

    #[test]
    fn the_youngest_comes_first_and_those_taken_back_not_at_all() {
        let (mut inboxes, now) = (Inboxes::default(), Instant::now());
        for name in ["a", "b", "c"] {
            assert!(inboxes.insert(inbox(name), false, 8, now));
        }
        inboxes.remove(&inbox("b"));
        assert_eq!(inboxes.take(), [inbox("c"), inbox("a")]);
        assert_eq!((inboxes.len(), inboxes.take()), (0, vec![]));
    }

    #[test]
    fn the_oldest_makes_room_and_that_is_said() {
        let (mut inboxes, now) = (Inboxes::default(), Instant::now());
        assert!(inboxes.insert(inbox("a"), false, 2, now) && inboxes.insert(inbox("b"), false, 2, now));
        assert!(inboxes.insert(inbox("a"), false, 2, now), "it was there");
        assert!(!inboxes.insert(inbox("c"), false, 2, now));
        assert_eq!(inboxes.take(), [inbox("c"), inbox("a")]);
    }

    #[test]
    fn what_cannot_be_moved_stays() {
        let (mut inboxes, now) = (Inboxes::default(), Instant::now());
        for (name, movable) in [("a", true), ("b", false), ("c", true)] {
            inboxes.insert(inbox(name), movable, 8, now);
        }
        assert_eq!(inboxes.take_movable(), [inbox("c"), inbox("a")]);
        assert_eq!((inboxes.len(), inboxes.take()), (1, vec![inbox("b")]));
    }

    #[test]
    fn what_is_too_old_is_forgotten() {
        let (mut inboxes, now) = (Inboxes::default(), Instant::now());
        for (name, age) in [("a", 0), ("b", 5), ("c", 9)] {
            inboxes.insert(inbox(name), false, 8, now + Duration::from_secs(age));
        }
        inboxes.prune(Duration::from_secs(5), now + Duration::from_secs(10));
        assert_eq!(inboxes.take(), [inbox("c"), inbox("b")]);
    }
}

//! Looks at processes and ports that the kernel's events ask for, paced: a process that renames itself in a loop, or
//! opens and closes a listener in a loop, costs a few looks a second and no more.
//!
//! The first event of a process or port is followed by a look at once. While that is under way, others are kept as
//! one, the last. It follows after a pause that doubles as long as there are more, so that the last state is always
//! seen. Each worker has a share of the looks at one time, so that no tree can use up those of another's.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::Hash;
use std::time::Duration;

use crate::core::WorkerId;

/// Looks under way for one worker, at the most. Each takes a thread.
const OF_ONE_WORKER: usize = 2;
/// Looks under way, at the most.
const AT_ONCE: usize = 32;
/// Before the second look at the same process or port, and at the most before a later one.
const PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(640));

/// What is known of one process or port.
#[derive(Debug)]
struct Entry<T> {
    worker: WorkerId,
    stage: Stage,
    /// What asked for the next look, if something did.
    next: Option<T>,
    pause: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// There is no room for another look yet.
    Waits,
    /// A look is under way.
    UnderWay,
    /// The next look waits for its time.
    Pauses,
}

/// A look that is to begin now.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Begin<K, T> {
    pub(super) key: K,
    pub(super) worker: WorkerId,
    /// What asked for it last.
    pub(super) what: T,
}

/// Looks at what `K` names, at most one at a time at each.
#[derive(Debug)]
pub(super) struct Looks<K, T> {
    entries: HashMap<K, Entry<T>>,
    /// Keys of the entries that wait for room, by worker.
    waiting: BTreeMap<WorkerId, VecDeque<K>>,
    /// How many looks are under way for each worker that has some.
    under_way: HashMap<WorkerId, usize>,
}

impl<K, T> Default for Looks<K, T> {
    fn default() -> Self {
        Self { entries: HashMap::new(), waiting: BTreeMap::new(), under_way: HashMap::new() }
    }
}

impl<K: Copy + Eq + Hash, T> Looks<K, T> {
    /// Something asks for a look. `Some`: it begins now, and [`Self::ended`] follows.
    pub(super) fn ask(&mut self, key: K, worker: WorkerId, what: T) -> Option<Begin<K, T>> {
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.next = Some(what);
            return None;
        }
        let entry = |stage, next| Entry { worker, stage, next, pause: PAUSES.0 };
        if self.has_room(worker) {
            *self.under_way.entry(worker).or_default() += 1;
            self.entries.insert(key, entry(Stage::UnderWay, None));
            return Some(Begin { key, worker, what });
        }
        self.entries.insert(key, entry(Stage::Waits, Some(what)));
        self.waiting.entry(worker).or_default().push_back(key);
        None
    }

    /// A look has ended. `Some`: another one was asked for; after that long, [`Self::resume`] is due.
    pub(super) fn ended(&mut self, key: K) -> Option<Duration> {
        let entry = self.entries.get_mut(&key).filter(|entry| entry.stage == Stage::UnderWay)?;
        if let Some(count) = self.under_way.get_mut(&entry.worker) {
            *count -= 1;
            if *count == 0 {
                self.under_way.remove(&entry.worker);
            }
        }
        if entry.next.is_none() {
            self.entries.remove(&key);
            return None;
        }
        let pause = entry.pause;
        entry.pause = (pause * 2).min(PAUSES.1);
        entry.stage = Stage::Pauses;
        Some(pause)
    }

    /// The pause before the next look at this is over.
    pub(super) fn resume(&mut self, key: K) {
        if let Some(entry) = self.entries.get_mut(&key).filter(|entry| entry.stage == Stage::Pauses) {
            entry.stage = Stage::Waits;
            self.waiting.entry(entry.worker).or_default().push_back(key);
        }
    }

    /// A look that has waited for room and begins now.
    pub(super) fn next(&mut self) -> Option<Begin<K, T>> {
        let worker = self.waiting.keys().copied().find(|worker| self.has_room(*worker))?;
        let queue = self.waiting.get_mut(&worker)?;
        let key = queue.pop_front();
        if queue.is_empty() {
            self.waiting.remove(&worker);
        }
        let key = key?;
        let entry = self.entries.get_mut(&key)?;
        let what = entry.next.take()?;
        entry.stage = Stage::UnderWay;
        *self.under_way.entry(worker).or_default() += 1;
        Some(Begin { key, worker, what })
    }

    fn has_room(&self, worker: WorkerId) -> bool {
        let of_worker = self.under_way.get(&worker).copied().unwrap_or(0);
        of_worker < OF_ONE_WORKER && self.under_way.values().sum::<usize>() < AT_ONCE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: WorkerId = WorkerId(0);
    const B: WorkerId = WorkerId(1);

    fn begins(key: u32, worker: WorkerId, what: u32) -> Option<Begin<u32, u32>> {
        Some(Begin { key, worker, what })
    }

    #[test]
    fn a_flood_is_one_look_at_a_time_and_the_last_state_is_seen() {
        let mut looks = Looks::default();
        assert_eq!(looks.ask(7, A, 0), begins(7, A, 0));
        for flood in 1..1000 {
            assert_eq!(looks.ask(7, A, flood), None);
        }
        assert_eq!(looks.ended(7), Some(PAUSES.0));
        assert_eq!(looks.next(), None, "it pauses");
        assert_eq!(looks.ask(7, A, 1000), None);
        looks.resume(7);
        assert_eq!(looks.next(), begins(7, A, 1000));
        assert_eq!(looks.ended(7), None);
        assert_eq!(looks.ask(7, A, 1001), begins(7, A, 1001), "after a quiet time at once again");
    }

    #[test]
    fn pauses_double_up_to_a_bound() {
        let mut looks = Looks::default();
        assert!(looks.ask(7, A, 0).is_some());
        let mut pauses = Vec::new();
        for flood in 0..12 {
            assert_eq!(looks.ask(7, A, flood), None);
            pauses.push(looks.ended(7).unwrap());
            looks.resume(7);
            assert!(looks.next().is_some());
        }
        assert_eq!((pauses[0], pauses[1]), (PAUSES.0, PAUSES.0 * 2));
        assert_eq!(pauses[11], PAUSES.1);
    }

    #[test]
    fn one_workers_tree_leaves_room_for_anothers() {
        let mut looks = Looks::default();
        let begun = (0..100).filter(|key| looks.ask(*key, A, 0).is_some()).count();
        assert_eq!(begun, OF_ONE_WORKER);
        assert_eq!(looks.ask(1000, B, 0), begins(1000, B, 0));
        assert_eq!(looks.next(), None);
        assert_eq!(looks.ended(0), None);
        assert_eq!(looks.next(), begins(2, A, 0), "the one that has waited longest");
        let workers = (2..200).filter(|worker| looks.ask(2000 + worker, WorkerId(*worker), 0).is_some()).count();
        assert_eq!(workers, AT_ONCE - OF_ONE_WORKER - 1);
    }
}

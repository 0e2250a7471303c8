//! The workers that the supervisor knows. A [`WorkerId`] is given once and never again, so that
//! what comes in late about a worker that was forgotten is about nobody.

use std::collections::BTreeMap;
use std::ops::{Index, IndexMut};

use lastgasp_protocol::Name;

use crate::core::WorkerId;

use super::WorkerSlot;

/// Every worker, in the order in which they became known: those of the configuration first.
pub(super) struct Slots {
    slots: BTreeMap<WorkerId, WorkerSlot>,
    next: WorkerId,
}

impl Slots {
    pub(super) const fn new() -> Self {
        Self { slots: BTreeMap::new(), next: WorkerId(0) }
    }

    /// The id that the next worker will have.
    pub(super) const fn next(&self) -> WorkerId {
        self.next
    }

    /// Adds a worker under [`Slots::next`].
    pub(super) fn add(&mut self, slot: WorkerSlot) -> WorkerId {
        let id = self.next;
        self.next = WorkerId(id.0 + 1);
        self.slots.insert(id, slot);
        id
    }

    pub(super) fn forget(&mut self, worker: WorkerId) -> Option<WorkerSlot> {
        self.slots.remove(&worker)
    }

    pub(super) fn knows(&self, worker: WorkerId) -> bool {
        self.slots.contains_key(&worker)
    }

    pub(super) fn named(&self, name: &Name) -> Option<WorkerId> {
        self.iter().find(|(_, slot)| slot.config.name == *name).map(|(worker, _)| worker)
    }

    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (WorkerId, &WorkerSlot)> {
        self.slots.iter().map(|(worker, slot)| (*worker, slot))
    }
}

/// Whoever holds an id that did not come in from outside holds that of a worker that is known.
impl Index<WorkerId> for Slots {
    type Output = WorkerSlot;

    fn index(&self, worker: WorkerId) -> &WorkerSlot {
        &self.slots[&worker]
    }
}

impl IndexMut<WorkerId> for Slots {
    fn index_mut(&mut self, worker: WorkerId) -> &mut WorkerSlot {
        self.slots.get_mut(&worker).expect("a worker that is known")
    }
}

//! Which processes are watched, and by whom.

use aya_ebpf::{bindings::BPF_ANY, macros::map, maps::HashMap};
use lastgasp_ebpf::{WATCHED_MAX, Watched, start_ticks};

use super::task::{Leader, Task};

#[map]
static WATCHED: HashMap<u32, Watched> = HashMap::with_max_entries(WATCHED_MAX, 0);

/// A watched process, seen in one of its threads.
#[derive(Clone, Copy)]
pub(super) struct Process {
    pub(super) slot: u32,
    pub(super) tgid: u32,
    pub(super) start_boottime: u64,
    pub(super) leader: Leader,
}

impl Process {
    /// The process that `task` belongs to, if it is watched. Everything that is
    /// not watched ends at the first line, after one look into a hash.
    #[inline(always)]
    pub(super) fn of(task: Task, tgid: u32) -> Option<Self> {
        Self::matching(task, tgid, |watched| watched.signals_only == 0)
    }

    /// The same, also for a process of which only signals are told.
    #[inline(always)]
    pub(super) fn signalled(task: Task, tgid: u32) -> Option<Self> {
        Self::matching(task, tgid, |_| true)
    }

    #[inline(always)]
    fn matching(task: Task, tgid: u32, wanted: impl Fn(&Watched) -> bool) -> Option<Self> {
        let watched = entry(tgid)?;
        if !wanted(&watched) {
            return None;
        }
        let Watched { start_ticks: expected, slot, signals_only: _ } = watched;
        let leader = task.group_leader()?;
        let start_boottime = leader.start_boottime()?;
        // An entry for a predecessor with the same tgid is not ours.
        (start_ticks(start_boottime) == expected).then_some(Self { slot, tgid, start_boottime, leader })
    }

    /// Stops watching. True for exactly one caller, however many threads exit at
    /// the same time: deleting from a hash is atomic.
    #[inline(always)]
    pub(super) fn unwatch(self) -> bool {
        WATCHED.remove(self.tgid).is_ok()
    }
}

#[inline(always)]
fn entry(tgid: u32) -> Option<Watched> {
    // SAFETY: the value is copied at once. Should the entry be removed and its
    // memory reused in between, its start time gives it away.
    unsafe { WATCHED.get(tgid) }.copied()
}

/// Watches a process that has not run yet; false if there is no room. An entry
/// that is there is a predecessor's, whose exit was missed.
#[inline(always)]
pub(super) fn watch(tgid: u32, slot: u32, start_boottime: u64) -> bool {
    let value = Watched { start_ticks: start_ticks(start_boottime), slot, signals_only: 0 };
    WATCHED.insert(tgid, value, u64::from(BPF_ANY)).is_ok()
}

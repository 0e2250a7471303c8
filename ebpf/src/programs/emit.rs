//! The ring buffer, and the count of what did not fit into it.

use aya_ebpf::{
    helpers::bpf_ktime_get_ns,
    macros::map,
    maps::{PerCpuArray, RingBuf},
};
use lastgasp_ebpf::{COMM_BYTES, EVENTS_BYTES, Event, EventFlags, EventKind};

use super::{task::current_tid, watched::Process};

#[map]
static EVENTS: RingBuf = RingBuf::with_byte_size(EVENTS_BYTES, 0);

#[map]
static DROPPED: PerCpuArray<u64> = PerCpuArray::with_max_entries(EventKind::COUNT as u32, 0);

/// An event about a watched process, at this moment, in this thread.
#[inline(always)]
pub(super) fn event(kind: EventKind, process: Process) -> Event {
    Event {
        slot: process.slot,
        tgid: process.tgid,
        start_boottime: process.start_boottime,
        comm: process.leader.comm(),
        ..blank(kind)
    }
}

/// An event of which only kind, time and thread are known.
#[inline(always)]
pub(super) fn blank(kind: EventKind) -> Event {
    Event {
        // SAFETY: the helper has no preconditions.
        at: unsafe { bpf_ktime_get_ns() },
        start_boottime: 0,
        cgroup: 0,
        kind: kind as u32,
        flags: EventFlags::default(),
        slot: 0,
        tgid: 0,
        tid: current_tid(),
        parent_tgid: 0,
        sender_tgid: 0,
        exit_code: 0,
        signal: 0,
        netns: 0,
        port: 0,
        peer_port: 0,
        reason: 0,
        count: 0,
        comm: [0; COMM_BYTES],
        peer: [0; 16],
    }
}

/// Hands the event to user space, which is woken if it had caught up.
#[inline(always)]
pub(super) fn emit(event: Event) {
    match EVENTS.reserve::<Event>(0) {
        Some(mut entry) => {
            entry.write(event);
            entry.submit(0);
        }
        None => count_dropped(event.kind),
    }
}

#[inline(always)]
fn count_dropped(kind: u32) {
    if let Some(count) = DROPPED.get_ptr_mut(kind) {
        // SAFETY: the pointer is to this CPU's value, aligned, and lives as long
        // as the map. Each kind comes from one program, and the kernel lets no
        // program run twice at a time on a CPU (`__bpf_trace_run`), so nobody else is
        // counting here.
        unsafe { *count += 1 };
    }
}

//! Keys and values of the maps.

use core::mem::{offset_of, size_of};

/// Nanoseconds in one tick of `/proc/PID/stat`.
///
/// User space sees `USER_HZ` ticks, 100 per second on every architecture that
/// has these probes, whatever the kernel's own `HZ` (`nsec_to_clock_t`,
/// kernel/time/time.c).
pub const NANOS_PER_TICK: u64 = 10_000_000;

/// Processes that can be watched at the same time; a power of two, and small
/// enough to stay in the cache, as every exit and fork of the node looks here.
///
/// A node has tens of workers with tens of processes each. A fork beyond this
/// is reported with `NOT_WATCHED`.
pub const WATCHED_MAX: u32 = 4096;

/// Bytes of the ring buffer: about 2,000 events. Deaths are rare and everything
/// else is filtered in the kernel, so a full ring is a fault, and it is counted.
pub const EVENTS_BYTES: u32 = 256 * 1024;

/// `start_boottime` in nanoseconds as field 22 of `/proc/PID/stat`, so that the
/// kernel and procfs name the same process.
///
/// They disagree inside a time namespace with a boot-time offset: procfs adds
/// it, `task_struct` does not.
#[must_use]
pub const fn start_ticks(start_boottime: u64) -> u64 {
    start_boottime / NANOS_PER_TICK
}

/// Value of `WATCHED`, whose key is the tgid in the initial pid namespace.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct Watched {
    /// Which incarnation of that tgid, as field 22 of `/proc/PID/stat`. An entry
    /// whose process is gone never matches a successor with the same tgid.
    pub start_ticks: u64,
    /// The worker, as user space numbered it; comes back in every event.
    pub slot: u32,
    /// 1: only the signals that are sent to it are told, and its children are not
    /// watched. So are those watched that supervise an engine. Else 0.
    pub signals_only: u32,
}

/// Key of `PORTS`, whose value is the worker's slot.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[repr(C)]
pub struct ListenerKey {
    /// The network namespace: the inode number of `/proc/PID/ns/net`.
    pub netns: u32,
    /// The local TCP port.
    pub port: u32,
}

/// Words of `PORT_BITS`, which has a bit for each TCP port.
pub const PORT_WORDS: u32 = (1 << 16) / u64::BITS;

/// Where a port's bit is: its word in `PORT_BITS`, and the mask.
#[must_use]
pub const fn port_bit(port: u16) -> (u32, u64) {
    (port as u32 / u64::BITS, 1 << (port as u32 % u64::BITS))
}

/// Key of `RESETS`: TCP resets that are counted together.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[repr(C)]
pub struct ResetKey {
    /// Network namespace and local port.
    pub port: ListenerKey,
    /// 0 for one that was received, 1 and the reason for one that was sent.
    pub sort: u32,
}

/// Value of `RESETS`.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct ResetWindow {
    /// When the last event was made, nanoseconds of `CLOCK_MONOTONIC`.
    pub told_at: u64,
    /// Resets since then.
    pub untold: u64,
}

/// Nanoseconds in which one event is made of resets of one [`ResetKey`], so that thousands of rude clients cost next to nothing.
pub const RESET_WINDOW: u64 = 1_000_000_000;

/// Key of `SIGNALLED`: what was said of a process already, so that a thousand
/// threads that each receive the same SIGKILL make one event.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[repr(C)]
pub struct SignalledKey {
    /// Start of the process, nanoseconds.
    pub start_boottime: u64,
    /// The process.
    pub tgid: u32,
    /// The signal, and the event's flags from bit 8 on: the same signal is told
    /// again once it is certain to end the process.
    pub signal_and_flags: u32,
}

const _: () = {
    assert!(size_of::<Watched>() == 16);
    assert!(offset_of!(Watched, start_ticks) == 0);
    assert!(offset_of!(Watched, slot) == 8);
    assert!(offset_of!(Watched, signals_only) == 12);
    assert!(size_of::<ListenerKey>() == 8);
    assert!(offset_of!(ListenerKey, netns) == 0);
    assert!(offset_of!(ListenerKey, port) == 4);
    assert!(size_of::<ResetKey>() == 12);
    assert!(offset_of!(ResetKey, sort) == 8);
    assert!(size_of::<ResetWindow>() == 16);
    assert!(size_of::<SignalledKey>() == 16);
    assert!(offset_of!(SignalledKey, start_boottime) == 0);
    assert!(offset_of!(SignalledKey, tgid) == 8);
    assert!(offset_of!(SignalledKey, signal_and_flags) == 12);
    assert!(port_bit(u16::MAX).0 + 1 == PORT_WORDS);
    assert!(EVENTS_BYTES.is_power_of_two());
    assert!(WATCHED_MAX.is_power_of_two());
};

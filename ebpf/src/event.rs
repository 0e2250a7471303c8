//! The one record that travels through the ring buffer.

use core::mem::{offset_of, size_of};

/// Bytes of a task's `comm`, with its terminating zero (`TASK_COMM_LEN`,
/// include/linux/sched.h).
pub const COMM_BYTES: usize = 16;

/// The slot of an event whose worker the kernel side could not tell, if it has one at all.
///
/// An OOM event of an old kernel has it, see [`EventFlags::TGID_UNKNOWN`], and an
/// [`EventKind::Exec`] of a process that nobody watches.
pub const NO_SLOT: u32 = u32::MAX;

/// What happened. The number is also the index into the `DROPPED` map.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[repr(u32)]
pub enum EventKind {
    /// The last thread of a watched process entered `do_exit`. Exactly one per process.
    Exit = 0,
    /// A signal reached a thread of a watched process and its default action is to
    /// end it ([`EventFlags::HANDLER_DEFAULT`]); at most once per process, signal
    /// and certainty. Or it is SIGTERM or SIGINT and the process handles it: it
    /// was asked to leave. Or the signal is 0: one of its threads ends the others
    /// by `exit_group`, and [`Event::exit_code`] is the status.
    SignalDeliver = 1,
    /// A watched process made a child process; the child is watched from now on.
    Fork = 2,
    /// A watched process runs another program now; or, under [`NO_SLOT`], a process that nobody
    /// watches, of which only so many are told as user space has asked for.
    Exec = 3,
    /// The group leader of a watched process got another `comm`.
    Rename = 4,
    /// The OOM killer chose a watched process.
    MarkVictim = 5,
    /// A listening socket left LISTEN: on a watched port, or closed by a watched process.
    ListenerClosed = 6,
    /// Somebody sent a watched process a signal that may end it, ask it to end, or
    /// stop it (`SIGSTOP`); told by the sender's own thread. It may come after the
    /// process's own events about that signal: the victim may run on another CPU.
    SignalGenerate = 7,
    /// The kernel sent a TCP reset from a watched port. One in
    /// [`RESET_WINDOW`](crate::RESET_WINDOW) per port and reason, with the
    /// [`count`](Event::count) of all since the last one.
    TcpResetSent = 8,
    /// A connection of a watched port was reset by its peer; limited like the former.
    TcpResetReceived = 9,
}

impl EventKind {
    /// How many kinds there are.
    pub const COUNT: usize = Self::ALL.len();

    /// Every kind, in the order of its number.
    pub const ALL: [Self; 10] = [
        Self::Exit,
        Self::SignalDeliver,
        Self::Fork,
        Self::Exec,
        Self::Rename,
        Self::MarkVictim,
        Self::ListenerClosed,
        Self::SignalGenerate,
        Self::TcpResetSent,
        Self::TcpResetReceived,
    ];

    /// The kind with this number; `None` for a number that this build does not know.
    #[must_use]
    pub const fn from_u32(number: u32) -> Option<Self> {
        match number {
            0 => Some(Self::Exit),
            1 => Some(Self::SignalDeliver),
            2 => Some(Self::Fork),
            3 => Some(Self::Exec),
            4 => Some(Self::Rename),
            5 => Some(Self::MarkVictim),
            6 => Some(Self::ListenerClosed),
            7 => Some(Self::SignalGenerate),
            8 => Some(Self::TcpResetSent),
            9 => Some(Self::TcpResetReceived),
            _ => None,
        }
    }

    /// The name used in logs, metrics and JSON.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Exit => "exit",
            Self::SignalDeliver => "signal_deliver",
            Self::Fork => "fork",
            Self::Exec => "exec",
            Self::Rename => "rename",
            Self::MarkVictim => "mark_victim",
            Self::ListenerClosed => "listener_closed",
            Self::SignalGenerate => "signal_generate",
            Self::TcpResetSent => "tcp_reset_sent",
            Self::TcpResetReceived => "tcp_reset_received",
        }
    }
}

/// A set of facts about an [`Event`].
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(transparent)]
pub struct EventFlags(pub u32);

impl EventFlags {
    /// Exit: the tracepoint itself said that this was the last thread (Linux
    /// 6.16 and later). Without it, `signal->live` was read as zero.
    pub const GROUP_DEAD_KNOWN: Self = Self(1 << 0);
    /// Signal: the process is an init (`SIGNAL_UNKILLABLE`,
    /// include/linux/sched/signal.h): a default action other than KILL may
    /// still be ignored after this event.
    pub const UNKILLABLE: Self = Self(1 << 1);
    /// Signal, also when it is sent: the kernel has begun to end the whole process
    /// (`SIGNAL_GROUP_EXIT`). [`Event::exit_code`] is then its wait status.
    pub const GROUP_EXIT: Self = Self(1 << 2);
    /// Signal: no handler is installed, the default action follows. Certain to
    /// end the process if [`GROUP_EXIT`](Self::GROUP_EXIT) is set too, or
    /// [`UNKILLABLE`](Self::UNKILLABLE) is not.
    pub const HANDLER_DEFAULT: Self = Self(1 << 3);
    /// Exit, listener: the task that caused the event is on its way out (`PF_EXITING`).
    pub const EXITING: Self = Self(1 << 4);
    /// Listener: (netns, port) was registered; [`Event::slot`] is the port's.
    pub const PORT_WATCHED: Self = Self(1 << 5);
    /// Listener: the closing process is watched itself.
    pub const OWNER_WATCHED: Self = Self(1 << 6);
    /// Fork: the `WATCHED` map was full, nobody watches this child.
    pub const NOT_WATCHED: Self = Self(1 << 7);
    /// OOM: this kernel names a thread only, and it is not a group leader.
    /// [`Event::tgid`] is zero until user space has looked it up.
    pub const TGID_UNKNOWN: Self = Self(1 << 8);
    /// Signal sent: no process sent it, but the kernel itself (a fault, the OOM
    /// killer, a dying pid namespace, a timer); the sender's fields are zero.
    pub const FROM_KERNEL: Self = Self(1 << 9);
    /// TCP reset: this kernel tells why it sends one, in [`Event::reason`].
    pub const REASON_KNOWN: Self = Self(1 << 10);

    /// Whether every flag of `other` is set.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Both sets together.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// `other` joined in if `condition` holds.
    #[must_use]
    pub const fn with_if(self, condition: bool, other: Self) -> Self {
        if condition { self.with(other) } else { self }
    }
}

/// One event, as it lies in the ring buffer.
///
/// A process is `(tgid, start_boottime)`; process ids are those of the initial
/// pid namespace. Fields that a kind does not mention are zero.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(C)]
pub struct Event {
    /// When it happened: nanoseconds of `CLOCK_MONOTONIC` (`bpf_ktime_get_ns`),
    /// the clock of `std::time::Instant`.
    pub at: u64,
    /// When the process was made: nanoseconds of `CLOCK_BOOTTIME`, of the group
    /// leader. [`start_ticks`](crate::start_ticks) makes it field 22 of
    /// `/proc/PID/stat`. It survives exec, also that of another thread.
    pub start_boottime: u64,
    /// Signal sent: the sender's cgroup v2 id, which is the inode number of its
    /// directory; 1, the root's, for everybody on a host with cgroup v1.
    pub cgroup: u64,
    /// An [`EventKind`]; see [`Event::kind`].
    pub kind: u32,
    /// Facts about the event.
    pub flags: EventFlags,
    /// The worker, as user space numbered it.
    pub slot: u32,
    /// The process: for a fork the child, for a listener the one that closed it,
    /// for a signal the one that it reaches.
    pub tgid: u32,
    /// The thread in which it happened; for a fork the child's first. Not told for
    /// a TCP reset, which happens in whoever is running.
    pub tid: u32,
    /// Fork: the process that made this one.
    pub parent_tgid: u32,
    /// Signal sent: the process that sent it.
    pub sender_tgid: u32,
    /// Exit, and signal with `GROUP_EXIT`: the raw wait status. Low 7 bits the
    /// signal, 0x80 a core was dumped, then the exit status from bit 8.
    pub exit_code: u32,
    /// Exit: the signal that ended it, 0 for none. Signal: its number as delivered;
    /// a SIGTERM with its default action arrives as 9, and the truth is in
    /// `exit_code`.
    pub signal: u32,
    /// Listener, TCP reset: the network namespace, as the inode number of `/proc/PID/ns/net`.
    pub netns: u32,
    /// Listener, TCP reset: the local TCP port.
    pub port: u32,
    /// TCP reset: the peer's port.
    pub peer_port: u32,
    /// TCP reset: a number of `enum sk_rst_reason` of this kernel, see `REASON_KNOWN`.
    pub reason: u32,
    /// TCP reset: how many there were since the last event of this port and reason,
    /// this one included. About: CPUs do not wait for each other to count.
    pub count: u32,
    /// The group leader's `comm`, never another thread's. For a fork the name of
    /// the thread that forked; for a rename and an exec the new one; for a signal
    /// that is sent the sender's.
    pub comm: [u8; COMM_BYTES],
    /// TCP reset: the peer's address, an IPv4 one mapped into IPv6.
    pub peer: [u8; 16],
}

const _: () = {
    assert!(size_of::<Event>() == 112);
    assert!(align_of::<Event>() == 8);
    assert!(offset_of!(Event, at) == 0);
    assert!(offset_of!(Event, start_boottime) == 8);
    assert!(offset_of!(Event, cgroup) == 16);
    assert!(offset_of!(Event, kind) == 24);
    assert!(offset_of!(Event, flags) == 28);
    assert!(offset_of!(Event, slot) == 32);
    assert!(offset_of!(Event, tgid) == 36);
    assert!(offset_of!(Event, tid) == 40);
    assert!(offset_of!(Event, parent_tgid) == 44);
    assert!(offset_of!(Event, sender_tgid) == 48);
    assert!(offset_of!(Event, exit_code) == 52);
    assert!(offset_of!(Event, signal) == 56);
    assert!(offset_of!(Event, netns) == 60);
    assert!(offset_of!(Event, port) == 64);
    assert!(offset_of!(Event, peer_port) == 68);
    assert!(offset_of!(Event, reason) == 72);
    assert!(offset_of!(Event, count) == 76);
    assert!(offset_of!(Event, comm) == 80);
    // The last field ends where the struct ends: no padding, nowhere.
    assert!(offset_of!(Event, peer) + 16 == size_of::<Event>());
    let mut number = 0;
    while number < EventKind::COUNT {
        assert!(EventKind::ALL[number] as usize == number);
        number += 1;
    }
};

impl Event {
    /// What happened; `None` if the programs are newer than this build.
    #[must_use]
    pub const fn kind(&self) -> Option<EventKind> {
        EventKind::from_u32(self.kind)
    }

    /// When the process was made, in the ticks of field 22 of `/proc/PID/stat`.
    #[must_use]
    pub const fn start_ticks(&self) -> u64 {
        crate::start_ticks(self.start_boottime)
    }

    /// Reads an event from the bytes of a ring buffer record; `None` if their
    /// number is not that of an event.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; size_of::<Self>()] = bytes.try_into().ok()?;
        // The bounds are constants within a fixed-size array, so nothing is left of this but loads.
        let long = |at: usize| {
            let mut field = [0; 8];
            field.copy_from_slice(&bytes[at..at + 8]);
            u64::from_ne_bytes(field)
        };
        let word = |at: usize| {
            let mut field = [0; 4];
            field.copy_from_slice(&bytes[at..at + 4]);
            u32::from_ne_bytes(field)
        };
        let mut comm = [0; COMM_BYTES];
        comm.copy_from_slice(&bytes[offset_of!(Self, comm)..offset_of!(Self, peer)]);
        let mut peer = [0; 16];
        peer.copy_from_slice(&bytes[offset_of!(Self, peer)..]);
        Some(Self {
            at: long(offset_of!(Self, at)),
            start_boottime: long(offset_of!(Self, start_boottime)),
            cgroup: long(offset_of!(Self, cgroup)),
            kind: word(offset_of!(Self, kind)),
            flags: EventFlags(word(offset_of!(Self, flags))),
            slot: word(offset_of!(Self, slot)),
            tgid: word(offset_of!(Self, tgid)),
            tid: word(offset_of!(Self, tid)),
            parent_tgid: word(offset_of!(Self, parent_tgid)),
            sender_tgid: word(offset_of!(Self, sender_tgid)),
            exit_code: word(offset_of!(Self, exit_code)),
            signal: word(offset_of!(Self, signal)),
            netns: word(offset_of!(Self, netns)),
            port: word(offset_of!(Self, port)),
            peer_port: word(offset_of!(Self, peer_port)),
            reason: word(offset_of!(Self, reason)),
            count: word(offset_of!(Self, count)),
            comm,
            peer,
        })
    }

    /// The group leader's name, without its terminating zero.
    #[must_use]
    pub fn comm(&self) -> &[u8] {
        let end = self.comm.iter().position(|byte| *byte == 0);
        &self.comm[..end.unwrap_or(COMM_BYTES)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_and_its_number_are_one_to_one() {
        for kind in EventKind::ALL {
            assert_eq!(EventKind::from_u32(kind as u32), Some(kind));
        }
        assert_eq!(EventKind::from_u32(EventKind::COUNT as u32), None);
        assert_eq!(EventKind::from_u32(u32::MAX), None);
    }

    #[test]
    fn an_event_is_read_from_its_bytes_field_by_field() {
        let mut bytes = [0u8; size_of::<Event>()];
        for (at, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::try_from(at).expect("112 bytes");
        }
        let event = Event::from_bytes(&bytes).expect("the size of an event");
        let word = |at: u8| u32::from_ne_bytes([at, at + 1, at + 2, at + 3]);
        assert_eq!(event.at, u64::from_ne_bytes([0, 1, 2, 3, 4, 5, 6, 7]));
        assert_eq!(event.start_boottime, u64::from_ne_bytes([8, 9, 10, 11, 12, 13, 14, 15]));
        assert_eq!(event.cgroup, u64::from_ne_bytes([16, 17, 18, 19, 20, 21, 22, 23]));
        assert_eq!([event.kind, event.flags.0, event.slot], [word(24), word(28), word(32)]);
        assert_eq!([event.tgid, event.tid, event.parent_tgid, event.sender_tgid], [36, 40, 44, 48].map(word));
        assert_eq!([event.exit_code, event.signal], [word(52), word(56)]);
        assert_eq!([event.netns, event.port, event.peer_port], [word(60), word(64), word(68)]);
        assert_eq!([event.reason, event.count], [word(72), word(76)]);
        assert_eq!(event.comm, core::array::from_fn(|at| 80 + at as u8));
        assert_eq!(event.peer, core::array::from_fn(|at| 96 + at as u8));

        assert_eq!(Event::from_bytes(&bytes[1..]), None);
        assert_eq!(Event::from_bytes(&[]), None);
    }

    #[test]
    fn flags_join_and_are_found_again() {
        let flags = EventFlags::default()
            .with(EventFlags::GROUP_EXIT)
            .with_if(true, EventFlags::EXITING)
            .with_if(false, EventFlags::UNKILLABLE);
        assert!(flags.contains(EventFlags::GROUP_EXIT.with(EventFlags::EXITING)));
        assert!(!flags.contains(EventFlags::UNKILLABLE));
    }
}

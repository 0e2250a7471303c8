//! A listening socket closes: on a watched port, or in a watched process.
//!
//! ```text
//! inet_sock_set_state(const struct sock *sk, const int oldstate, const int newstate)
//! ```
//!
//! LISTEN to CLOSE happens in the task that closes the socket, the dying one
//! included (`exit_task_work`). The port is read from `inet_sport`, as the
//! tracepoint itself does (include/trace/events/sock.h): a port that the kernel
//! chose is no longer in `skc_num` by then (`tcp_set_state`, net/ipv4/tcp.c).

use aya_ebpf::{
    macros::{map, raw_tracepoint},
    maps::{Array, HashMap},
    programs::RawTracePointContext,
};
use lastgasp_ebpf::{EventFlags, EventKind, ListenerKey, PORT_WORDS, port_bit};

use super::{
    emit::{blank, emit},
    kernel::{Address, Offset, unresolved},
    task::{Task, current_tgid},
    watched::Process,
};

#[unsafe(no_mangle)]
pub(super) static INET_SPORT: Offset = unresolved();
#[unsafe(no_mangle)]
pub(super) static SOCK_NET: Offset = unresolved();
#[unsafe(no_mangle)]
pub(super) static NET_INUM: Offset = unresolved();

#[map]
static PORTS: HashMap<ListenerKey, u32> = HashMap::with_max_entries(4096, 0);

/// A bit for each port that is in `PORTS` in any network namespace.
#[map]
static PORT_BITS: Array<u64> = Array::with_max_entries(PORT_WORDS, 0);

/// `TCP_CLOSE`, include/net/tcp_states.h
const CLOSE: u32 = 7;
/// `TCP_LISTEN`
const LISTEN: u32 = 10;

/// The worker that a port belongs to.
#[inline(always)]
pub(super) fn port_slot(port: ListenerKey) -> Option<u32> {
    // SAFETY: the value is copied at once; a slot that was just freed is at
    // worst one that user space no longer knows.
    unsafe { PORTS.get(port) }.copied()
}

/// Whether some network namespace has a watched port of that number. One load from memory, while
/// the namespace is three pointers and a hash away.
#[inline(always)]
pub(super) fn may_be_watched(port: u16) -> bool {
    let (word, mask) = port_bit(port);
    PORT_BITS.get(word).is_some_and(|bits| bits & mask != 0)
}

#[raw_tracepoint(tracepoint = "inet_sock_set_state")]
fn lastgasp_listen(ctx: RawTracePointContext) -> i32 {
    on_state(&ctx);
    0
}

#[inline(always)]
fn on_state(ctx: &RawTracePointContext) -> Option<()> {
    if ctx.arg::<u32>(1) != LISTEN || ctx.arg::<u32>(2) != CLOSE {
        return None;
    }
    let socket = Address(ctx.arg(0));
    let key = ListenerKey {
        netns: socket.follow(&SOCK_NET)?.read(&NET_INUM)?,
        port: u32::from(u16::from_be(socket.read(&INET_SPORT)?)),
    };
    let task = Task::current();
    let tgid = current_tgid();
    let port_slot = port_slot(key);
    let owner = Process::of(task, tgid);
    let slot = match (port_slot, owner) {
        (Some(slot), _) => slot,
        (None, Some(process)) => process.slot,
        (None, None) => return None,
    };

    let leader = task.group_leader()?;
    let mut event = blank(EventKind::ListenerClosed);
    event.slot = slot;
    event.tgid = tgid;
    event.start_boottime = leader.start_boottime()?;
    event.comm = leader.comm();
    event.netns = key.netns;
    event.port = key.port;
    event.flags = EventFlags::default()
        .with_if(port_slot.is_some(), EventFlags::PORT_WATCHED)
        .with_if(owner.is_some(), EventFlags::OWNER_WATCHED)
        .with_if(task.is_exiting(), EventFlags::EXITING);
    emit(event);
    Some(())
}

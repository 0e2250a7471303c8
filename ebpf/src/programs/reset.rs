//! TCP resets of watched ports.
//!
//! ```text
//! up to 6.9:  tcp_send_reset(const struct sock *sk, const struct sk_buff *skb)
//! from 6.10:  tcp_send_reset(const struct sock *sk, const struct sk_buff *skb)                 sk may be NULL
//! from 6.11:  tcp_send_reset(const struct sock *sk, const struct sk_buff *skb, enum sk_rst_reason reason)
//!             tcp_receive_reset(struct sock *sk)
//! ```
//!
//! A reset says that a connection ended rudely, and next to nothing about the worker:
//! clients disconnect, ports are scanned, balancers check. So they are counted here, and
//! few are told.
//!
//! `sk` may be a mini-socket (`TIME_WAIT`, `NEW_SYN_RECV`), of which only `sock_common` may
//! be read, or NULL; then the packet that is answered tells. `skb` is NULL when a
//! living connection is aborted (`tcp_send_active_reset`, net/ipv4/tcp_output.c). They
//! run in whoever is interrupted by the packet, so no current task is looked at.

use aya_ebpf::{
    Global,
    bindings::BPF_ANY,
    helpers::{bpf_ktime_get_ns, bpf_probe_read_kernel},
    macros::{map, raw_tracepoint},
    maps::LruHashMap,
    programs::RawTracePointContext,
};
use lastgasp_ebpf::{EventFlags, EventKind, ListenerKey, RESET_WINDOW, ResetKey, ResetWindow};

use super::{
    emit::{blank, emit},
    kernel::{Address, Offset, Variant, unresolved},
    listener::{INET_SPORT, NET_INUM, SOCK_NET, may_be_watched, port_slot},
};

#[unsafe(no_mangle)]
static SOCK_FAMILY: Offset = unresolved();
#[unsafe(no_mangle)]
static SOCK_NUM: Offset = unresolved();
#[unsafe(no_mangle)]
static SOCK_DPORT: Offset = unresolved();
#[unsafe(no_mangle)]
static SOCK_DADDR: Offset = unresolved();
#[unsafe(no_mangle)]
static SOCK_V6_DADDR: Offset = unresolved();
#[unsafe(no_mangle)]
static SKB_HEAD: Offset = unresolved();
#[unsafe(no_mangle)]
static SKB_TRANSPORT: Offset = unresolved();
#[unsafe(no_mangle)]
static SKB_NETWORK: Offset = unresolved();
#[unsafe(no_mangle)]
static SKB_DEV: Offset = unresolved();
#[unsafe(no_mangle)]
static DEV_NET: Offset = unresolved();
#[unsafe(no_mangle)]
static RESET_HAS_REASON: Variant = Global::new(0);

#[map]
static RESETS: LruHashMap<ResetKey, ResetWindow> = LruHashMap::with_max_entries(1024, 0);

/// `AF_INET6`
const INET6: u16 = 10;

#[raw_tracepoint(tracepoint = "tcp_send_reset")]
fn lastgasp_rstout(ctx: RawTracePointContext) -> i32 {
    on_send(&ctx);
    0
}

#[raw_tracepoint(tracepoint = "tcp_receive_reset")]
fn lastgasp_rst_in(ctx: RawTracePointContext) -> i32 {
    on_receive(&ctx);
    0
}

#[inline(always)]
fn on_send(ctx: &RawTracePointContext) -> Option<()> {
    let (socket, packet) = (Address(ctx.arg(0)), Address(ctx.arg(1)));
    let reason = (RESET_HAS_REASON.load() != 0).then(|| ctx.arg::<u32>(2));
    let connection = if socket.0 == 0 { Connection::of_packet(packet)? } else { Connection::of_socket(socket)? };
    report(EventKind::TcpResetSent, connection, reason)
}

#[inline(always)]
fn on_receive(ctx: &RawTracePointContext) -> Option<()> {
    report(EventKind::TcpResetReceived, Connection::of_socket(Address(ctx.arg(0)))?, None)
}

/// The two ends of a connection, as far as they can be had from one place.
#[derive(Clone, Copy)]
struct Connection {
    local: ListenerKey,
    slot: u32,
    source: Source,
}

/// Where the peer stands; it is read only when it is told.
#[derive(Clone, Copy)]
enum Source {
    Socket(Address),
    /// The IP header and the TCP header of the packet that is answered.
    Packet(Address, Address),
}

impl Connection {
    #[inline(always)]
    fn of_socket(socket: Address) -> Option<Self> {
        // A closed socket may have forgotten its port here (`inet_put_port`,
        // net/ipv4/inet_hashtables.c), but not there; a mini-socket has it nowhere else.
        let port = match socket.read::<u16>(&SOCK_NUM)? {
            0 => u16::from_be(socket.read(&INET_SPORT)?),
            port => port,
        };
        // Nearly everything that is nobody's ends here.
        if !may_be_watched(port) {
            return None;
        }
        let netns = socket.follow(&SOCK_NET)?.read(&NET_INUM)?;
        Self::watched(ListenerKey { netns, port: port.into() }, Source::Socket(socket))
    }

    #[inline(always)]
    fn of_packet(packet: Address) -> Option<Self> {
        if packet.0 == 0 {
            return None;
        }
        let head = packet.follow(&SKB_HEAD)?;
        let at = |offset| Some(Address(head.0.wrapping_add(packet.read::<u16>(offset)?.into())));
        let tcp = at(&SKB_TRANSPORT)?;
        let port = u16::from_be(plain(tcp, 2)?);
        if !may_be_watched(port) {
            return None;
        }
        let ip = at(&SKB_NETWORK)?;
        let netns = packet.follow(&SKB_DEV)?.follow(&DEV_NET)?.read(&NET_INUM)?;
        Self::watched(ListenerKey { netns, port: port.into() }, Source::Packet(ip, tcp))
    }

    #[inline(always)]
    fn watched(local: ListenerKey, source: Source) -> Option<Self> {
        Some(Self { local, slot: port_slot(local)?, source })
    }
}

impl Source {
    /// Address and port of the peer.
    #[inline(always)]
    fn peer(self) -> Option<([u8; 16], u16)> {
        match self {
            Self::Socket(socket) => {
                let address = if socket.read::<u16>(&SOCK_FAMILY)? == INET6 {
                    socket.read(&SOCK_V6_DADDR)?
                } else {
                    mapped(socket.read(&SOCK_DADDR)?)
                };
                Some((address, u16::from_be(socket.read(&SOCK_DPORT)?)))
            }
            Self::Packet(ip, tcp) => {
                let address = if plain::<u8>(ip, 0)? >> 4 == 6 { plain(ip, 8)? } else { mapped(plain(ip, 12)?) };
                Some((address, u16::from_be(plain(tcp, 0)?)))
            }
        }
    }
}

/// Counts the reset, and tells of it if none was told lately.
#[inline(always)]
fn report(kind: EventKind, connection: Connection, reason: Option<u32>) -> Option<()> {
    let Connection { local, slot, source } = connection;
    let sort = match kind {
        EventKind::TcpResetSent => reason.unwrap_or(0).wrapping_add(1),
        _ => 0,
    };
    let key = ResetKey { port: local, sort };
    // SAFETY: the helper has no preconditions.
    let now = unsafe { bpf_ktime_get_ns() };
    let untold = match RESETS.get_ptr_mut(key) {
        Some(window) => {
            // SAFETY: the pointer is to a live value of the map, aligned, of two plain words. Two CPUs at
            // the same moment may count one reset too few, or tell the same ones twice, and an entry that is
            // evicted meanwhile is another key's. Nothing depends on the exact number.
            let window = unsafe { &mut *window };
            window.untold += 1;
            if now.wrapping_sub(window.told_at) < RESET_WINDOW {
                return None;
            }
            window.told_at = now;
            core::mem::take(&mut window.untold)
        }
        None => {
            let _ = RESETS.insert(key, ResetWindow { told_at: now, untold: 0 }, u64::from(BPF_ANY));
            1
        }
    };
    let mut event = blank(kind);
    event.tid = 0;
    event.slot = slot;
    event.netns = local.netns;
    event.port = local.port;
    event.count = untold as u32;
    if let Some(reason) = reason {
        event.reason = reason;
        event.flags = EventFlags::REASON_KNOWN;
    }
    if let Some((address, port)) = source.peer() {
        event.peer = address;
        event.peer_port = port.into();
    }
    emit(event);
    Some(())
}

/// `::ffff:a.b.c.d`
#[inline(always)]
fn mapped(v4: [u8; 4]) -> [u8; 16] {
    let [a, b, c, d] = v4;
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, a, b, c, d]
}

/// A field of a packet, whose layout is the protocol's.
#[inline(always)]
fn plain<T>(header: Address, offset: u64) -> Option<T> {
    // SAFETY: the helper checks the address and fails instead of faulting; every `T` here is an
    // integer or an array of them.
    unsafe { bpf_probe_read_kernel(header.0.wrapping_add(offset) as *const T) }.ok()
}

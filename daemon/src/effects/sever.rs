//! Destroys the established TCP connections of a lost worker, so that whoever reads a stream from it
//! sees the connection break, and need not wait for what will never come.
//!
//! A router that obeys our signals has no need of it. One that only watches its connections has:
//! nothing else tells it that an engine hangs, and a companion that outlives its engine (a sidecar)
//! would turn the death into an error that is not retried.
//!
//! Over `sock_diag` (sock_diag(7)): `SOCK_DESTROY` sends a RST to the peer and makes every call of
//! the owner fail with ECONNABORTED (`tcp_abort` in `net/ipv4/tcp.c`). It needs a kernel with
//! `CONFIG_INET_DIAG_DESTROY`, and CAP_NET_ADMIN where the socket lives; CAP_SYS_ADMIN to go there if
//! that is another network namespace (setns(2)). Each connection is named by the kernel's cookie, so
//! that none which has come since can be meant.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};

use netlink_packet_core::NLM_F_ACK;
use netlink_packet_sock_diag::constants::{AF_INET, AF_INET6, IPPROTO_TCP};
use netlink_packet_sock_diag::inet::{ExtensionFlags, InetRequest, SocketId, StateFlags};
use netlink_packet_sock_diag::{SockDiagDestroy, SockDiagMessage};
use netlink_sys::protocols::NETLINK_SOCK_DIAG;
use nix::errno::Errno;

use crate::core::ProcessId;
use crate::network::Namespace;
use crate::network::netlink::Netlink;
use crate::sensors::proc::{self, listeners};

/// A connection that was destroyed, as its owner saw it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Severed {
    /// Whose it was.
    pub owner: ProcessId,
    /// Its own end.
    pub local: SocketAddr,
    /// The other end.
    pub peer: SocketAddr,
}

/// Why connections could not be destroyed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SeverError {
    /// The network namespace cannot be entered.
    #[error("cannot enter the network namespace of process {process}; that needs CAP_SYS_ADMIN and CAP_SYS_PTRACE")]
    Namespace {
        /// Whose namespace.
        process: ProcessId,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The kernel does not say which connections there are.
    #[error("cannot list connections")]
    List(#[source] io::Error),
    /// The kernel refuses.
    #[error("cannot destroy a connection; that needs CAP_NET_ADMIN")]
    Denied,
    /// The kernel was built without it.
    #[error("the kernel cannot destroy connections: it was built without CONFIG_INET_DIAG_DESTROY")]
    Unsupported,
    /// Anything else.
    #[error("cannot destroy a connection")]
    Destroy(#[source] io::Error),
}

/// Destroys every established TCP connection that one of these processes holds, but none to a port
/// of `spared_ports`. Processes that are gone hold nothing.
///
/// Blocks for as long as the kernel needs, on a thread of its own that may enter other namespaces.
///
/// # Errors
/// See [`SeverError`]. Connections that were destroyed before stay destroyed.
pub(crate) fn sever(owners: &[ProcessId], spared_ports: &[u16]) -> Result<Vec<Severed>, SeverError> {
    if owners.is_empty() {
        return Ok(Vec::new());
    }
    let mut places: Vec<(Namespace, Vec<ProcessId>)> = Vec::new();
    let mut refused = None;
    for owner in owners {
        let place = match Namespace::of(*owner) {
            Ok(place) => place,
            // One that is gone has no namespace any more.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(source) => {
                refused.get_or_insert(SeverError::Namespace { process: *owner, source });
                continue;
            }
        };
        match places.iter_mut().find(|(known, _)| *known == place) {
            Some((_, owners)) => owners.push(*owner),
            None => places.push((place, vec![*owner])),
        }
    }
    let mut severed = Vec::new();
    for (place, owners) in &places {
        let there = place.within(|| sever_here(owners, spared_ports));
        severed.append(&mut there.map_err(|source| SeverError::Namespace { process: owners[0], source })??);
    }
    refused.map_or(Ok(severed), Err)
}

/// Destroys what these processes hold in this thread's namespace.
fn sever_here(owners: &[ProcessId], spared_ports: &[u16]) -> Result<Vec<Severed>, SeverError> {
    let mut held: BTreeMap<u32, ProcessId> = BTreeMap::new();
    for owner in owners {
        let inodes = listeners::socket_inodes(owner.tgid).unwrap_or_default();
        // The descriptors were those of this very process only if it is still there after the look.
        if proc::is_alive(*owner) {
            // sock_diag reports 32 bits of a socket's inode number, which are all that there are.
            held.extend(inodes.into_iter().filter_map(|inode| Some((u32::try_from(inode).ok()?, *owner))));
        }
    }
    if held.is_empty() {
        return Ok(Vec::new());
    }
    let kernel = Netlink::connect(NETLINK_SOCK_DIAG).map_err(SeverError::List)?;
    let mut severed = Vec::new();
    for (family, any) in [(AF_INET, SocketId::new_v4()), (AF_INET6, SocketId::new_v6())] {
        for (id, inode) in connections(&kernel, family, any).map_err(SeverError::List)? {
            let Some(owner) = held.get(&inode).filter(|_| !spared_ports.contains(&id.destination_port)) else {
                continue;
            };
            let ends = Severed {
                owner: *owner,
                local: end(id.source_address, id.source_port),
                peer: end(id.destination_address, id.destination_port),
            };
            if destroy(&kernel, family, id)? {
                severed.push(ends);
            }
        }
    }
    Ok(severed)
}

/// IPv4 in an IPv6 socket is written as what it is.
fn end(address: IpAddr, port: u16) -> SocketAddr {
    SocketAddr::new(address.to_canonical(), port)
}

const fn request(family: u8, states: StateFlags, socket_id: SocketId) -> SockDiagMessage {
    SockDiagMessage::InetRequest(InetRequest {
        family,
        protocol: IPPROTO_TCP,
        extensions: ExtensionFlags::empty(),
        states,
        socket_id,
    })
}

/// Every connection over which data may still come or go, with its socket's inode number.
fn connections(kernel: &Netlink, family: u8, any: SocketId) -> io::Result<Vec<(SocketId, u32)>> {
    let open = StateFlags::ESTABLISHED | StateFlags::CLOSE_WAIT | StateFlags::FIN_WAIT1 | StateFlags::FIN_WAIT2;
    let answers = kernel.dump(request(family, open, any))?;
    Ok(answers
        .into_iter()
        .filter_map(|answer| match answer {
            SockDiagMessage::InetResponse(response) => Some((response.header.socket_id, response.header.inode)),
            _ => None,
        })
        .collect())
}

/// Whether it was there to be destroyed.
fn destroy(kernel: &Netlink, family: u8, id: SocketId) -> Result<bool, SeverError> {
    let question = SockDiagDestroy::new(request(family, StateFlags::empty(), id));
    let Err(refused) = kernel.ask::<_, SockDiagMessage>(NLM_F_ACK, question) else { return Ok(true) };
    match refused.raw_os_error().map(Errno::from_raw) {
        // It was closed meanwhile.
        Some(Errno::ENOENT | Errno::ESTALE) => Ok(false),
        Some(Errno::EPERM | Errno::EACCES) => Err(SeverError::Denied),
        Some(Errno::EOPNOTSUPP) => Err(SeverError::Unsupported),
        _ => Err(SeverError::Destroy(refused)),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// A process that holds one connection.
    struct Holder {
        child: Child,
        process: ProcessId,
        /// Our end of the connection, and the address of the holder's.
        stream: TcpStream,
        local: SocketAddr,
    }

    impl Holder {
        fn of_a_connection_to(listener: &TcpListener) -> Self {
            let address = listener.local_addr().unwrap();
            let script = format!("exec 3<>/dev/tcp/{}/{}; exec sleep 1000", address.ip(), address.port());
            let child = Command::new("bash").args(["-c", &script]).stdin(Stdio::null()).spawn().unwrap();
            let (stream, local) = listener.accept().unwrap();
            while proc::comm(child.id()).as_deref() != Some("sleep") {
                std::thread::yield_now();
            }
            let process = proc::identify(child.id()).unwrap();
            Self { child, process, stream, local }
        }
    }

    impl Drop for Holder {
        fn drop(&mut self) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }

    #[test]
    fn only_what_the_process_holds_is_destroyed() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let listener = TcpListener::bind(address).unwrap();
            let peer = listener.local_addr().unwrap();
            let mut meant = Holder::of_a_connection_to(&listener);
            let mut other = Holder::of_a_connection_to(&listener);

            // Its pid is not enough: this is its predecessor.
            let predecessor = ProcessId { start_ticks: meant.process.start_ticks - 1, ..meant.process };
            assert_eq!(sever(&[predecessor], &[]).unwrap(), []);
            assert_eq!(sever(&[meant.process], &[peer.port()]).unwrap(), [], "the peer's port is spared");

            let severed = sever(&[meant.process], &[]).unwrap();
            assert_eq!(severed, [Severed { owner: meant.process, local: meant.local, peer }]);
            assert_eq!(meant.stream.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
            assert_eq!(sever(&[meant.process], &[]).unwrap(), [], "nothing is left");
            other.stream.set_nonblocking(true).unwrap();
            assert_eq!(other.stream.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
            other.stream.write_all(b"still there").unwrap();
        }
    }

    #[test]
    fn a_process_that_is_gone_holds_nothing() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut holder = Holder::of_a_connection_to(&listener);
        holder.child.kill().unwrap();
        holder.child.wait().unwrap();
        assert_eq!(sever(&[holder.process], &[]).unwrap(), []);
    }
}

//! Who listens on a TCP port, from `/proc/PID/net/tcp` and `tcp6` (proc(5)).

use std::collections::HashSet;
use std::fs;
use std::io::{self, BufRead as _};
use std::net::{IpAddr, SocketAddr};

/// `TCP_LISTEN` in `include/net/tcp_states.h`, as the table prints it.
const LISTEN: &str = "0A";

/// Whether any socket listens on `port` in the network namespace of that process, or in this
/// thread's own.
///
/// # Errors
/// Not found: no such process, or a zombie, which has no namespaces any more.
pub fn listening(netns_pid: Option<u32>, port: u16) -> io::Result<bool> {
    Ok(!sockets(netns_pid, port)?.is_empty())
}

/// A socket that listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Listener {
    /// The address that it is bound to; unspecified, if to every one of its namespace.
    pub address: SocketAddr,
    /// The user who made it.
    pub uid: u32,
    /// The inode number of the socket.
    pub inode: u64,
}

/// How exactly a socket is bound to an address. The kernel gives a connection to the most exact one
/// (`__inet_lookup_listener` and `compute_score` in `net/ipv4/inet_hashtables.c`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Exactness {
    /// Every IPv6 address, and so perhaps every IPv4 address: the table does not show `IPV6_V6ONLY` (ipv6(7)).
    PerhapsEvery,
    /// Every address of its family.
    Every,
    /// This one.
    This,
}

impl Listener {
    /// How exactly the socket is bound to `address`; none, if no connection to it comes here.
    fn exactness(&self, address: SocketAddr) -> Option<Exactness> {
        let (bound, wanted) = (self.address.ip(), address.ip().to_canonical());
        if self.address.port() != address.port() {
            return None;
        }
        if bound.to_canonical() == wanted {
            return Some(Exactness::This);
        }
        let of_its_family =
            if bound.is_ipv6() == wanted.is_ipv6() { Exactness::Every } else { Exactness::PerhapsEvery };
        (bound.is_unspecified() && (bound.is_ipv6() || wanted.is_ipv4())).then_some(of_its_family)
    }
}

/// The sockets among these that take connections to `address`: more than one with `SO_REUSEPORT` (socket(7)).
fn answering(listeners: Vec<Listener>, address: SocketAddr) -> Vec<Listener> {
    let best = listeners.iter().filter_map(|listener| listener.exactness(address)).max();
    listeners.into_iter().filter(|listener| best.is_some() && listener.exactness(address) == best).collect()
}

/// Who listens at an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Held {
    /// Nobody.
    ByNobody,
    /// Processes of the tree, and nobody else.
    ByTree,
    /// Others, if perhaps beside processes of the tree.
    ByOthers,
}

/// Whether a process of `tree` holds a socket that listens on `port`, in the namespace of the first
/// of them that is still there. Processes that are gone hold nothing.
///
/// # Errors
/// Permission denied: none was seen to hold it, but some may not be looked into.
pub fn owns_listener(tree: &[u32], port: u16) -> io::Result<bool> {
    let Some(listeners) = tree.iter().find_map(|tgid| all(Some(*tgid)).ok()) else { return Ok(false) };
    let inodes = listeners.iter().filter(|listener| listener.address.port() == port).map(|one| one.inode).collect();
    let (unheld, denied) = unheld_by(tree, &inodes);
    match denied {
        _ if unheld.len() < inodes.len() => Ok(true),
        Some(denied) if !inodes.is_empty() => Err(denied),
        _ => Ok(false),
    }
}

/// Who takes connections to `address`, in the network namespace of that process or in this thread's own. A process
/// of `tree` may be in another namespace by now: its sockets stay where it made them.
///
/// # Errors
/// Not found: no such process, or a zombie. Permission denied: some of the tree may not be looked into.
pub fn held_at(netns_pid: Option<u32>, tree: &[u32], address: SocketAddr) -> io::Result<Held> {
    let inodes: HashSet<u64> = answering(all(netns_pid)?, address).into_iter().map(|one| one.inode).collect();
    if inodes.is_empty() {
        return Ok(Held::ByNobody);
    }
    match unheld_by(tree, &inodes) {
        (unheld, _) if unheld.is_empty() => Ok(Held::ByTree),
        (_, Some(denied)) => Err(denied),
        _ => Ok(Held::ByOthers),
    }
}

/// The user who made the sockets that processes of `tree` hold: those that take connections to `address`, else all
/// on `port`. None if there are none, or several users made them.
#[must_use]
pub fn owner(tree: &[u32], address: Option<SocketAddr>, port: u16) -> Option<u32> {
    let mut listeners = tree.iter().find_map(|tgid| all(Some(*tgid)).ok())?;
    listeners.retain(|listener| listener.address.port() == port);
    let there = address.map(|address| answering(listeners.clone(), address)).filter(|there| !there.is_empty());
    let listeners = there.unwrap_or(listeners);
    let (unheld, _) = unheld_by(tree, &listeners.iter().map(|listener| listener.inode).collect());
    let mut users = listeners.iter().filter(|listener| !unheld.contains(&listener.inode)).map(|listener| listener.uid);
    let first = users.next()?;
    users.all(|uid| uid == first).then_some(first)
}

/// Those of these sockets that no process of `tree` holds, and why one may not be looked into.
fn unheld_by(tree: &[u32], inodes: &HashSet<u64>) -> (HashSet<u64>, Option<io::Error>) {
    let mut unheld = inodes.clone();
    let mut denied = None;
    for tgid in tree {
        if unheld.is_empty() {
            break;
        }
        match descriptors(*tgid) {
            Ok(held) => held.for_each(|inode| _ = unheld.remove(&inode)),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => denied = Some(error),
            Err(_) => {}
        }
    }
    (unheld, denied)
}

/// Inode numbers of the sockets that listen on `port`.
pub(super) fn sockets(netns_pid: Option<u32>, port: u16) -> io::Result<Vec<u64>> {
    let listeners = all(netns_pid)?.into_iter();
    Ok(listeners.filter(|listener| listener.address.port() == port).map(|listener| listener.inode).collect())
}

/// Every socket that listens in the network namespace of that process, or in this thread's own.
///
/// # Errors
/// Not found: no such process, or a zombie, which has no namespaces any more.
pub fn all(netns_pid: Option<u32>) -> io::Result<Vec<Listener>> {
    let directory = super::net_directory(netns_pid);
    let mut sockets = listeners(&fs::File::open(format!("{directory}/tcp"))?)?;
    match fs::File::open(format!("{directory}/tcp6")) {
        Ok(table) => sockets.append(&mut listeners(&table)?),
        // IPv6 may be switched off.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    Ok(sockets)
}

/// Reads only as far as the listeners: the table lists them before the connections
/// (`tcp_get_idx` in `net/ipv4/tcp_ipv4.c`), of which a busy node has many thousands.
fn listeners(table: &fs::File) -> io::Result<Vec<Listener>> {
    let mut sockets = Vec::new();
    for line in io::BufReader::new(table).lines().skip(1) {
        let Some(socket) = listener(&line?) else { break };
        sockets.push(socket);
    }
    Ok(sockets)
}

/// What a line of `/proc/net/tcp` or `tcp6` says (proc(5)), if it is a listener's:
/// `sl local_address rem_address st tx_queue:rx_queue tr:tm->when retrnsmt uid timeout inode …`
#[must_use]
pub fn listener(line: &str) -> Option<Listener> {
    let mut fields = line.split_ascii_whitespace().skip(1);
    let (address, port) = fields.next()?.rsplit_once(':')?;
    let address = SocketAddr::new(ip(address)?, u16::from_str_radix(port, 16).ok()?);
    let is_listening = fields.nth(1)? == LISTEN;
    let uid = fields.nth(3)?.parse().ok()?;
    let inode = fields.nth(1)?.parse().ok()?;
    is_listening.then_some(Listener { address, uid, inode })
}

/// An address as the table prints it: words of 32 bits, each in the machine's byte order (`get_tcp4_sock` in
/// `net/ipv4/tcp_ipv4.c`, `get_tcp6_sock` in `net/ipv6/tcp_ipv6.c`).
fn ip(hex: &str) -> Option<IpAddr> {
    let word = |at: usize| u32::from_str_radix(hex.get(at..at + 8)?, 16).ok().map(u32::to_ne_bytes);
    match hex.len() {
        8 => Some(IpAddr::from(word(0)?)),
        32 => {
            let mut bytes = [0; 16];
            for (at, place) in bytes.chunks_exact_mut(4).enumerate() {
                place.copy_from_slice(&word(at * 8)?);
            }
            Some(IpAddr::from(bytes))
        }
        _ => None,
    }
}

/// Whether one of the process's descriptors is one of these sockets.
pub(super) fn holds(tgid: u32, inodes: &[u64]) -> io::Result<bool> {
    Ok(!inodes.is_empty() && descriptors(tgid)?.any(|inode| inodes.contains(&inode)))
}

/// Inode numbers of all sockets that the process has descriptors of.
///
/// # Errors
/// Not found: no such process. Permission denied: another user's, without `CAP_SYS_PTRACE`.
pub fn socket_inodes(tgid: u32) -> io::Result<HashSet<u64>> {
    Ok(descriptors(tgid)?.collect())
}

fn descriptors(tgid: u32) -> io::Result<impl Iterator<Item = u64>> {
    // Descriptors close while we read.
    let links = fs::read_dir(format!("/proc/{tgid}/fd"))?.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    Ok(links.filter_map(|link| link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_port_is_listened_on_while_its_socket_is_open() {
        let me = std::process::id();
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(address) else { continue };
            let port = listener.local_addr().unwrap().port();
            assert!(listening(None, port).unwrap());
            assert!(listening(Some(me), port).unwrap());
            assert!(owns_listener(&[me], port).unwrap());
            assert!(!owns_listener(&[], port).unwrap());
            drop(listener);
            // A child that another test has just forked has our descriptors until it executes.
            while listening(Some(me), port).unwrap() {
                std::thread::yield_now();
            }
            assert!(!owns_listener(&[me], port).unwrap());
        }
    }

    #[test]
    fn another_process_does_not_own_our_listener() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        // The fork has our descriptors until it executes.
        while super::super::comm(child.id()).as_deref() != Some("sleep") {
            std::thread::yield_now();
        }
        assert!(listening(Some(child.id()), port).unwrap());
        assert!(!owns_listener(&[child.id()], port).unwrap());
        assert!(owns_listener(&[child.id(), std::process::id()], port).unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(listening(Some(child.id()), port).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn an_address_is_held_by_whoever_listens_on_it_or_on_every_address() {
        let me = [std::process::id()];
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        while super::super::comm(child.id()).as_deref() != Some("sleep") {
            std::thread::yield_now();
        }
        let others = [child.id()];
        for (bound, asked, elsewhere) in [
            ("127.0.0.1:0", "127.0.0.1", "127.0.0.2"),
            ("0.0.0.0:0", "127.0.0.1", "::1"),
            ("[::1]:0", "::1", "127.0.0.1"),
        ] {
            let Ok(listener) = TcpListener::bind(bound) else { continue };
            let port = listener.local_addr().unwrap().port();
            let at = |address: &str| SocketAddr::new(address.parse().unwrap(), port);
            assert_eq!(held_at(None, &me, at(asked)).unwrap(), Held::ByTree, "{bound}");
            assert_eq!(held_at(None, &others, at(asked)).unwrap(), Held::ByOthers, "{bound}");
            assert_eq!(held_at(None, &me, at(elsewhere)).unwrap(), Held::ByNobody, "{bound}");
            let myself = Some(nix::unistd::geteuid().as_raw());
            assert_eq!((owner(&me, Some(at(asked)), port), owner(&me, None, port)), (myself, myself));
            assert_eq!(owner(&others, Some(at(asked)), port), None);
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_connection_goes_to_the_socket_that_is_bound_most_exactly() {
        let bound = |address: &str, inode| Listener { address: address.parse().unwrap(), uid: 0, inode };
        let table = || {
            let v4 = [bound("127.0.0.2:80", 1), bound("0.0.0.0:80", 2), bound("0.0.0.0:80", 3)];
            v4.into_iter().chain([bound("[::]:80", 4), bound("[::ffff:127.0.0.3]:80", 5), bound("[::]:81", 6)])
        };
        let inodes = |address: &str| -> Vec<u64> {
            answering(table().collect(), address.parse().unwrap()).iter().map(|listener| listener.inode).collect()
        };
        for (address, takes) in [
            ("127.0.0.2:80", vec![1]),
            ("127.0.0.1:80", vec![2, 3]),
            ("127.0.0.3:80", vec![5]),
            ("[::1]:80", vec![4]),
            ("[::ffff:127.0.0.2]:80", vec![1]),
            // It takes them unless it was made for IPv6 alone, and there is nobody else.
            ("127.0.0.1:81", vec![6]),
            ("127.0.0.1:82", vec![]),
        ] {
            assert_eq!(inodes(address), takes, "{address}");
        }
    }

    #[test]
    fn whoever_listens_beside_the_tree_makes_the_address_not_the_trees() {
        let own = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = own.local_addr().unwrap();
        let me = [std::process::id()];
        let inodes = HashSet::from([1, all(None).unwrap().iter().find(|one| one.address == address).unwrap().inode]);
        let (unheld, denied) = unheld_by(&me, &inodes);
        assert!(unheld == HashSet::from([1]) && denied.is_none());
        assert_eq!(held_at(None, &me, address).unwrap(), Held::ByTree);
    }

    #[test]
    fn the_table_is_read_as_the_kernel_prints_it() {
        let line = "   1: 00000000000000000000000001000000:1F40 00000000000000000000000000000000:0000 0A \
                    00000000:00000000 00:00000000 00000000  1000        0 48127 1 00000000 100 0 0 10 0";
        let read = listener(line).unwrap();
        assert_eq!((read.address.port(), read.uid, read.inode), (8000, 1000, 48127));
        #[cfg(target_endian = "little")]
        assert_eq!(read.address, "[::1]:8000".parse().unwrap());
        assert!(listener(&line.replace(" 0A ", " 01 ")).is_none(), "a connection");
        assert!(listener("  sl  local_address").is_none());
    }
}

//! Who listens on a TCP port, from `/proc/PID/net/tcp` and `tcp6` (proc(5)).

use std::collections::HashSet;
use std::fs;
use std::io::{self, BufRead as _};

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

/// Whether a process of `tree` holds a socket that listens on `port`, in the namespace of the first
/// of them that is still there. Processes that are gone hold nothing.
///
/// # Errors
/// Permission denied: none was seen to hold it, but some may not be looked into.
pub fn owns_listener(tree: &[u32], port: u16) -> io::Result<bool> {
    let mut denied = None;
    let Some(inodes) = tree.iter().find_map(|tgid| sockets(Some(*tgid), port).ok()) else {
        return Ok(false);
    };
    for tgid in tree {
        match holds(*tgid, &inodes) {
            Ok(true) => return Ok(true),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => denied = Some(error),
            _ => {}
        }
    }
    denied.map_or(Ok(false), Err)
}

/// Inode numbers of the sockets that listen on `port`.
pub(super) fn sockets(netns_pid: Option<u32>, port: u16) -> io::Result<Vec<u64>> {
    Ok(all(netns_pid)?.into_iter().filter(|(listening, _)| *listening == port).map(|(_, inode)| inode).collect())
}

/// Port and inode number of every socket that listens in the network namespace of that process, or in this
/// thread's own.
///
/// # Errors
/// Not found: no such process, or a zombie, which has no namespaces any more.
pub fn all(netns_pid: Option<u32>) -> io::Result<Vec<(u16, u64)>> {
    let directory = netns_pid.map_or_else(|| "/proc/thread-self/net".to_owned(), |pid| format!("/proc/{pid}/net"));
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
fn listeners(table: &fs::File) -> io::Result<Vec<(u16, u64)>> {
    let mut sockets = Vec::new();
    for line in io::BufReader::new(table).lines().skip(1) {
        let Some(socket) = listener(&line?) else { break };
        sockets.push(socket);
    }
    Ok(sockets)
}

/// Port and inode of a line of `/proc/net/tcp` (proc(5)), if it is a listener's.
#[must_use]
pub fn listener(line: &str) -> Option<(u16, u64)> {
    let socket = Socket::parse(line).filter(|socket| socket.state == LISTEN)?;
    Some((socket.port, socket.inode))
}

struct Socket<'a> {
    port: u16,
    state: &'a str,
    inode: u64,
}

impl<'a> Socket<'a> {
    /// `sl local_address rem_address st tx_queue:rx_queue tr:tm->when retrnsmt uid timeout inode …`
    fn parse(line: &'a str) -> Option<Self> {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let (_, port) = fields.next()?.rsplit_once(':')?;
        let state = fields.nth(1)?;
        let inode = fields.nth(5)?;
        Some(Self { port: u16::from_str_radix(port, 16).ok()?, state, inode: inode.parse().ok()? })
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
    fn the_table_is_read_as_the_kernel_prints_it() {
        let line = "   1: 00000000000000000000000001000000:1F40 00000000000000000000000000000000:0000 0A \
                    00000000:00000000 00:00000000 00000000  1000        0 48127 1 00000000 100 0 0 10 0";
        let socket = Socket::parse(line).unwrap();
        assert_eq!((socket.port, socket.state, socket.inode), (8000, LISTEN, 48127));
        assert!(Socket::parse("  sl  local_address").is_none());
    }
}

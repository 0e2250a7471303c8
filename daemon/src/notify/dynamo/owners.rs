//! Which process an instance is.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::io;
use std::net::IpAddr;
use std::rc::Rc;

use nix::errno::Errno;

use crate::core::ProcessId;
use crate::sensors::proc::{self, addresses, listeners};

/// A process that listens on TCP ports.
pub(super) struct Listener {
    process: ProcessId,
    addresses: Rc<HashSet<IpAddr>>,
    ports: HashSet<u16>,
}

/// Of a network namespace: the addresses that are its own, and the ports of its sockets by their inode
/// numbers.
type Namespace = (Rc<HashSet<IpAddr>>, HashMap<u64, u16>);

/// Those among these processes, and those below them, that listen; and the last error by which one of them
/// may be missing. Blocks.
pub(super) fn listeners_of(processes: &[ProcessId]) -> (Vec<Listener>, Option<io::Error>) {
    let mut namespaces = HashMap::new();
    let (mut found, mut failed) = (Vec::new(), None);
    let below = |process: &ProcessId| proc::descendants(*process).into_iter().map(|info| info.id);
    for process in processes.iter().flat_map(|process| std::iter::once(*process).chain(below(process))) {
        match listener(process, &mut namespaces) {
            // The descriptors were those of this very process only if it is still there after the look.
            Ok(listener) => found.extend(listener.filter(|_| proc::is_alive(process))),
            Err(error) if is_gone(&error) => {}
            Err(error) => failed = Some(error),
        }
    }
    (found, failed)
}

/// The one that listens at this address. The same port of another host, or of another network namespace, is
/// somebody else's.
pub(super) fn owner(listeners: &[Listener], (host, port): (IpAddr, u16)) -> Option<ProcessId> {
    let is_it = |listener: &&Listener| listener.ports.contains(&port) && listener.addresses.contains(&host);
    listeners.iter().find(is_it).map(|listener| listener.process)
}

fn listener(process: ProcessId, namespaces: &mut HashMap<u32, Namespace>) -> io::Result<Option<Listener>> {
    let tgid = process.tgid;
    let inum = proc::netns_inum(tgid)?;
    let (addresses, sockets) = match namespaces.entry(inum) {
        Entry::Occupied(known) => known.into_mut(),
        Entry::Vacant(new) => {
            let sockets = listeners::all(Some(tgid))?.into_iter().map(|one| (one.inode, one.address.port()));
            new.insert((Rc::new(addresses::local(Some(tgid))?), sockets.collect()))
        }
    };
    let ports: HashSet<u16> =
        listeners::socket_inodes(tgid)?.iter().filter_map(|inode| sockets.get(inode).copied()).collect();
    Ok((!ports.is_empty()).then(|| Listener { process, addresses: Rc::clone(addresses), ports }))
}

/// It has no namespaces any more, or no descriptors.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(Errno::ESRCH as i32)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn an_instance_is_who_listens_where_it_says() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = (listener.local_addr().unwrap().ip(), listener.local_addr().unwrap().port());
        let me = proc::identify(std::process::id()).unwrap();
        let found = |processes: &[ProcessId], address| {
            let (listeners, failed) = listeners_of(processes);
            assert!(failed.is_none(), "{failed:?}");
            owner(&listeners, address)
        };
        assert_eq!(found(&[me], address), Some(me));
        let predecessor = ProcessId { start_ticks: me.start_ticks - 1, ..me };
        assert_eq!(found(&[predecessor], address), None);
        assert_eq!(found(&[me], ("192.0.2.77".parse().unwrap(), address.1)), None, "another host's port");
        let free = { TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port() };
        assert_eq!(found(&[me], (address.0, free)), None);
        assert_eq!(found(&[], address), None);
    }

    #[test]
    fn only_who_is_gone_is_known_not_to_listen() {
        assert!(is_gone(&io::ErrorKind::NotFound.into()) && is_gone(&Errno::ESRCH.into()));
        assert!(!is_gone(&Errno::EMFILE.into()) && !is_gone(&Errno::EACCES.into()));
    }
}

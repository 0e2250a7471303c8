//! Which process an instance is.

use std::net::IpAddr;

use crate::core::ProcessId;
use crate::sensors::proc::{self, addresses, listeners};

/// The one of these processes, or of those below them, that listens at this address. Blocks.
pub(super) fn owner(processes: &[ProcessId], (host, port): (IpAddr, u16)) -> Option<ProcessId> {
    let below = |process: &ProcessId| proc::descendants(*process).into_iter().map(|info| info.id);
    let mut candidates = processes.iter().flat_map(|process| std::iter::once(*process).chain(below(process)));
    candidates.find(|candidate| is_owner(*candidate, host, port))
}

/// Whether this very process listens at this address. Blocks.
pub(super) fn is_owner(process: ProcessId, host: IpAddr, port: u16) -> bool {
    // The same port of another host, or of another network namespace, is somebody else's.
    let is_here = addresses::local(process.tgid).is_ok_and(|local| local.contains(&host));
    // The descriptors were those of this very process only if it is still there after the look.
    is_here && listeners::owns_listener(&[process.tgid], port).unwrap_or(false) && proc::is_alive(process)
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
        assert_eq!(owner(&[me], address), Some(me));
        let predecessor = ProcessId { start_ticks: me.start_ticks - 1, ..me };
        assert_eq!(owner(&[predecessor], address), None);
        assert_eq!(owner(&[me], ("192.0.2.77".parse().unwrap(), address.1)), None, "another host's port");
        let free = { TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port() };
        assert_eq!(owner(&[me], (address.0, free)), None);
        assert_eq!(owner(&[], address), None);
    }
}

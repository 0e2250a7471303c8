//! Whether the addresses that a process declares are its own.
//!
//! Routers send requests to the endpoint, and the daemon asks the health address. A process chooses
//! freely what it declares, and in a user namespace of its own it gives its network namespace any
//! address. So neither word is enough:
//!
//! * In a namespace that the process shares with the host or with the daemon, an address is everybody's:
//!   the worker's own tree has to listen on the endpoint.
//! * Elsewhere the host has to route the endpoint into that very namespace ([`routes`]), or kubelet has to say
//!   that the process's pod has it ([`Pods`]).
//! * Health is asked from within the process's namespace. Where that may not be entered, its address has to
//!   be routed there as well.
//!
//! The process may move to another namespace at any moment (setns(2)). So a namespace is opened once and held, and
//! the tables of a shared one are read through a thread of the daemon or the kernel, never through the process.

use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, SocketAddr};

use axum::http::Uri;

use super::declare::{Refusal, RefusedClaim};
use super::listeners::{self, Held};
use super::{addresses, tree};
use crate::config::WorkerConfig;
use crate::core::ProcessId;
use crate::log::with_cause;
use crate::network::Namespace;
use crate::network::routes::{self, NotRouted};
use crate::sensors::health::Place;
use crate::sensors::kubelet::Pods;

/// From where addresses are judged.
pub(super) struct Reach<'a> {
    own: io::Result<Namespace>,
    host: io::Result<Namespace>,
    pods: Option<&'a Pods>,
}

/// Where a worker is that a process declares.
pub(super) struct Reached {
    /// Where its health is asked, and where it has to listen.
    pub(super) place: Place,
    /// Others listen on its endpoint.
    pub(super) others_listen: bool,
}

impl<'a> Reach<'a> {
    /// From this thread's namespace, and the host's; with kubelet's word, if it is asked.
    pub(super) fn here(pods: Option<&'a Pods>) -> Self {
        Self { own: Namespace::own(), host: Namespace::host(), pods }
    }

    /// Where a worker is that this process declares.
    ///
    /// # Errors
    /// An address is not the process's own, or kubelet has not said yet whether it is.
    pub(super) fn place(
        &self,
        process: ProcessId,
        pod_uid: Option<&str>,
        worker: &WorkerConfig,
    ) -> Result<Reached, RefusedClaim> {
        let elsewhere = |detail: String| RefusedClaim::new(Refusal::EndpointElsewhere, detail);
        let health_elsewhere = |detail: String| RefusedClaim::new(Refusal::HealthElsewhere, detail);
        let namespace = Namespace::of(process)
            .map_err(|error| elsewhere(format!("the network namespace of the process cannot be opened: {error}")))?;
        let is_own = self.own.as_ref().is_ok_and(|own| *own == namespace);
        let is_shared = is_own || self.host.as_ref().is_ok_and(|host| *host == namespace);
        let shared = is_shared.then(|| if is_own { None } else { super::kthreadd() });
        let entered = namespace.within(|| addresses::local(None).unwrap_or_default()).ok();
        let may_enter = entered.is_some();
        // Where the namespace may not be entered, the host's routes alone say whose an address is.
        let local = match shared {
            Some(netns_pid) => Some(addresses::local(netns_pid).unwrap_or_default()),
            None => entered,
        };

        let endpoint = local_address(&worker.endpoint, local.as_ref()).map_err(elsewhere)?;
        if endpoint.ip().to_canonical().is_loopback() && !is_own {
            let detail = "is a loopback address of another network namespace; write the pod's IP address";
            return Err(elsewhere(format!("{} {detail}", worker.endpoint)));
        }
        let health = worker.health.grpc.iter().chain(&worker.health.http);
        let health: Vec<SocketAddr> =
            health.map(|url| local_address(url, local.as_ref())).collect::<Result<_, _>>().map_err(health_elsewhere)?;
        let listens = shared.map(|netns_pid| Listens { netns_pid, address: endpoint });
        if listens.is_none() {
            self.belongs(endpoint.ip(), &namespace, pod_uid)
                .map_err(|error| RefusedClaim { refusal: Refusal::EndpointElsewhere, ..error })?;
        }
        if !may_enter {
            for address in health {
                self.belongs(address.ip(), &namespace, pod_uid).map_err(|error| {
                    let detail = "and its network namespace may not be entered, which takes CAP_SYS_ADMIN";
                    let detail = format!("{}; {detail}", error.detail);
                    RefusedClaim { refusal: Refusal::HealthElsewhere, detail, ..error }
                })?;
            }
        }
        let others_listen = listens
            .is_some_and(|listens| matches!(listens.held_by(&tree::with_descendants(process)), Ok(Held::ByOthers)));
        let namespace = (!is_own && may_enter).then_some(namespace);
        Ok(Reached { place: Place { namespace, listens }, others_listen })
    }
}

impl Reach<'_> {
    /// Whether an address belongs to a namespace that is not shared: the host's routes say so, or else kubelet, of
    /// an address that is neither the host's nor special.
    fn belongs(&self, address: IpAddr, namespace: &Namespace, pod_uid: Option<&str>) -> Result<(), RefusedClaim> {
        let Err(not_routed) = routes::lead_into(namespace, address) else { return Ok(()) };
        let of_the_host = match &not_routed {
            NotRouted::Special(_) | NotRouted::Host(_) => true,
            NotRouted::Away(_) | NotRouted::Elsewhere { .. } => false,
            NotRouted::Unseen(_) => {
                addresses::local(super::kthreadd()).is_ok_and(|host| host.contains(&address.to_canonical()))
            }
        };
        let refused = RefusedClaim::new(Refusal::EndpointElsewhere, with_cause(&not_routed));
        match self.pods {
            Some(pods) if !of_the_host => pods.have(pod_uid, address).map_err(|error| RefusedClaim {
                detail: format!("{}; {error}", refused.detail),
                is_open: error.is_open(),
                ..refused
            }),
            _ => Err(refused),
        }
    }
}

/// Where a worker has to listen that shares its network namespace with others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Listens {
    /// A process that always is in that namespace; none for the daemon's own.
    netns_pid: Option<u32>,
    /// Of its endpoint.
    pub address: SocketAddr,
}

impl Listens {
    /// Who listens there.
    ///
    /// # Errors
    /// Permission denied: some of the tree may not be looked into.
    pub fn held_by(&self, tree: &[u32]) -> io::Result<Held> {
        listeners::held_at(self.netns_pid, tree, self.address)
    }
}

/// Whether the tree below `root` alone listens where one of these URLs points.
///
/// In another network namespace the same address may be another's: a loopback address always is, and another one
/// where the host does not route it there. Where the host's routes may not be seen, the address has to do.
#[must_use]
pub(crate) fn serves<'a>(root: ProcessId, urls: impl IntoIterator<Item = &'a String>) -> bool {
    let Ok(namespace) = Namespace::of(root) else { return false };
    let is_own = namespace.is_own();
    let is_hosts = Namespace::host().is_ok_and(|host| host == namespace);
    let tree = tree::with_descendants(root);
    let local = addresses::local(Some(root.tgid)).unwrap_or_default();
    let is_there = |address: IpAddr| {
        is_own
            || !address.to_canonical().is_loopback()
                && (is_hosts || matches!(routes::lead_into(&namespace, address), Ok(()) | Err(NotRouted::Unseen(_))))
    };
    urls.into_iter().any(|url| match local_address(url, Some(&local)) {
        Ok(address) => {
            matches!(listeners::held_at(Some(root.tgid), &tree, address), Ok(Held::ByTree)) && is_there(address.ip())
        }
        // A name, or the address of a forwarder: its port may be the worker's own.
        Err(_) if is_own || is_hosts => {
            let port = url.parse::<Uri>().ok().and_then(|uri| uri.port_u16());
            port.is_some_and(|port| listeners::owns_listener(&tree, port).unwrap_or(false))
        }
        Err(_) => false,
    })
}

/// The user who owns the listener of a worker's endpoint, of the sockets that processes of `tree` hold, the root
/// first.
#[must_use]
pub(crate) fn owner(tree: &[u32], worker: &WorkerConfig) -> Option<u32> {
    let local = tree.first().and_then(|root| addresses::local(Some(*root)).ok()).unwrap_or_default();
    listeners::owner(tree, local_address(&worker.endpoint, Some(&local)).ok(), worker.port)
}

/// The address in a URL, if it is one of these.
fn local_address(url: &str, local: Option<&HashSet<IpAddr>>) -> Result<SocketAddr, String> {
    let uri: Uri = url.parse().map_err(|_| format!("{url} is not a URL"))?;
    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
    let address: IpAddr =
        host.parse().map_err(|_| format!("{url} names a host; write the pod's or the node's IP address"))?;
    if local.is_some_and(|local| !local.contains(&address)) {
        return Err(format!("{url} is no address of the process's network namespace"));
    }
    Ok(SocketAddr::new(address, uri.port_u16().unwrap_or(80)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_must_be_one_of_the_processs_network_namespace() {
        let local = HashSet::from(["10.0.0.7", "127.0.0.1", "fd00::7"].map(|address| address.parse().unwrap()));
        let is = |url: &str| local_address(url, Some(&local));
        assert_eq!(is("http://10.0.0.7:8000"), Ok("10.0.0.7:8000".parse().unwrap()));
        assert_eq!(is("http://[fd00::7]:8000/health"), Ok("[fd00::7]:8000".parse().unwrap()));
        for (url, wrong) in [("http://10.0.0.8:8000", "no address"), ("http://vllm:8000", "names a host")] {
            let error = is(url).unwrap_err();
            assert!(error.contains(wrong), "{error}");
        }
    }
}

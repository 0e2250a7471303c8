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

use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, SocketAddr};

use axum::http::Uri;

use super::declare::{Refusal, Refused};
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

impl<'a> Reach<'a> {
    /// From this thread's namespace, and the host's; with kubelet's word, if it is asked.
    pub(super) fn here(pods: Option<&'a Pods>) -> Self {
        Self { own: Namespace::own(), host: Namespace::host(), pods }
    }

    /// Where the health of a worker is asked that this process declares, and whether others listen on its
    /// endpoint.
    ///
    /// # Errors
    /// An address is not the process's own.
    pub(super) fn place(
        &self,
        process: ProcessId,
        pod_uid: Option<&str>,
        worker: &WorkerConfig,
    ) -> Result<(Place, bool), Refused> {
        let elsewhere = |detail: String| (Refusal::EndpointElsewhere, detail);
        let health_elsewhere = |detail: String| (Refusal::HealthElsewhere, detail);
        let namespace = Namespace::of(process)
            .map_err(|error| elsewhere(format!("the network namespace of the process cannot be opened: {error}")))?;
        let local = addresses::local(process.tgid).unwrap_or_default();
        let is_own = self.own.as_ref().is_ok_and(|own| *own == namespace);
        let is_shared = is_own || self.host.as_ref().is_ok_and(|host| *host == namespace);

        let endpoint = local_address(&worker.endpoint, &local).map_err(elsewhere)?;
        if endpoint.ip().to_canonical().is_loopback() && !is_own {
            let detail = "is a loopback address of another network namespace; write the pod's IP address";
            return Err(elsewhere(format!("{} {detail}", worker.endpoint)));
        }
        let (listener, others_listen) = if is_shared {
            let held = listeners::held_at(&tree::with_descendants(process), endpoint);
            (Some(endpoint), matches!(held, Ok(Held::ByOthers)))
        } else {
            self.belongs(endpoint.ip(), &namespace, pod_uid).map_err(elsewhere)?;
            (None, false)
        };

        let health = worker.health.grpc.iter().chain(&worker.health.http);
        let health: Vec<SocketAddr> =
            health.map(|url| local_address(url, &local)).collect::<Result<_, _>>().map_err(health_elsewhere)?;
        if is_own {
            return Ok((Place { namespace: None, listener }, others_listen));
        }
        if namespace.within(|| ()).is_ok() {
            return Ok((Place { namespace: Some(namespace), listener }, others_listen));
        }
        for address in health {
            self.belongs(address.ip(), &namespace, pod_uid).map_err(|error| {
                let detail = "and its network namespace may not be entered, which takes CAP_SYS_ADMIN";
                health_elsewhere(format!("{error}; {detail}"))
            })?;
        }
        Ok((Place { namespace: None, listener }, others_listen))
    }
}

impl Reach<'_> {
    /// Whether an address belongs to a namespace that is not shared: the host's routes say so, or else kubelet, of
    /// an address that is neither the host's nor special.
    fn belongs(&self, address: IpAddr, namespace: &Namespace, pod_uid: Option<&str>) -> Result<(), String> {
        let Err(refused) = routes::lead_into(namespace, address) else { return Ok(()) };
        let of_the_host = match &refused {
            NotRouted::Special(_) | NotRouted::Host(_) => true,
            NotRouted::Away(_) | NotRouted::Elsewhere { .. } => false,
            NotRouted::Unseen(_) => {
                let host = super::kthreadd().unwrap_or_else(std::process::id);
                addresses::local(host).is_ok_and(|host| host.contains(&address.to_canonical()))
            }
        };
        let refused = with_cause(&refused);
        match self.pods {
            Some(pods) if !of_the_host => pods.have(pod_uid, address).map_err(|error| format!("{refused}; {error}")),
            _ => Err(refused),
        }
    }
}

/// Whether a process of the tree below `root` listens where one of these URLs points.
#[must_use]
pub fn serves<'a>(root: ProcessId, urls: impl IntoIterator<Item = &'a String>) -> bool {
    let tree = tree::with_descendants(root);
    let local = addresses::local(root.tgid).unwrap_or_default();
    urls.into_iter().any(|url| match local_address(url, &local) {
        Ok(address) => matches!(listeners::held_at(&tree, address), Ok(Held::ByTree)),
        // A name, or the address of a forwarder: its port may be the worker's own.
        Err(_) => {
            let port = url.parse::<Uri>().ok().and_then(|uri| uri.port_u16());
            port.is_some_and(|port| listeners::owns_listener(&tree, port).unwrap_or(false))
        }
    })
}

/// The address in a URL, if it is one of these.
fn local_address(url: &str, local: &HashSet<IpAddr>) -> Result<SocketAddr, String> {
    let uri: Uri = url.parse().map_err(|_| format!("{url} is not a URL"))?;
    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
    let address: IpAddr =
        host.parse().map_err(|_| format!("{url} names a host; write the pod's or the node's IP address"))?;
    if !local.contains(&address) {
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
        let is = |url: &str| local_address(url, &local);
        assert_eq!(is("http://10.0.0.7:8000"), Ok("10.0.0.7:8000".parse().unwrap()));
        assert_eq!(is("http://[fd00::7]:8000/health"), Ok("[fd00::7]:8000".parse().unwrap()));
        for (url, wrong) in [("http://10.0.0.8:8000", "no address"), ("http://vllm:8000", "names a host")] {
            let error = is(url).unwrap_err();
            assert!(error.contains(wrong), "{error}");
        }
    }
}

//! To which network namespace the host routes an address.
//!
//! A process may give its own network namespace any address, so an address that is local there says
//! nothing about who answers at it. The host's own routing says it: the address has to be routed,
//! without a gateway, to an interface whose other end lies in that very namespace (a veth or netkit
//! pair), or to a bridge that has such an interface. The kernel names the other end's namespace by a
//! number (`IFLA_LINK_NETNSID`, `rtnl_fill_link_netnsid` in `net/core/rtnetlink.c`), and tells the
//! number of a namespace for its descriptor (`RTM_GETNSID`, `net/core/net_namespace.c`).

use std::io;
use std::net::IpAddr;

use netlink_packet_route::link::{InfoKind, LinkAttribute, LinkInfo, LinkMessage};
use netlink_packet_route::nsid::{NsidAttribute, NsidMessage};
use netlink_packet_route::route::{RouteAddress, RouteAttribute, RouteMessage, RouteType};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use netlink_sys::protocols::NETLINK_ROUTE;

use super::Namespace;
use super::netlink::Netlink;

/// Why an address does not belong to a namespace, as far as the host is concerned.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotRouted {
    /// It means another host everywhere, or nobody's.
    #[error("{0} is a loopback, link-local, multicast or unspecified address")]
    Special(IpAddr),
    /// The host itself answers there.
    #[error("{0} is an address of the host, and not of the process's network namespace")]
    Host(IpAddr),
    /// The host routes it to another machine, or not at all.
    #[error("the host does not route {0} to an interface of its own")]
    Away(IpAddr),
    /// The host routes it to an interface that does not lead to the namespace.
    #[error("the host routes {address} to {interface}, which does not lead to the process's network namespace")]
    Elsewhere {
        /// The address.
        address: IpAddr,
        /// The interface of the host.
        interface: String,
    },
    /// The host's routes may not be seen from here.
    #[error(
        "cannot read the host's routes: run lastgasp in the host's network namespace, or give it CAP_SYS_ADMIN \
         and CAP_SYS_PTRACE"
    )]
    Unseen(#[source] io::Error),
}

/// Whether the host routes `address` into that namespace. Blocks for a few questions to the kernel.
///
/// # Errors
/// See [`NotRouted`].
pub(crate) fn lead_into(namespace: &Namespace, address: IpAddr) -> Result<(), NotRouted> {
    let address = address.to_canonical();
    if is_special(address) {
        return Err(NotRouted::Special(address));
    }
    let host = Namespace::host().map_err(NotRouted::Unseen)?;
    host.within(|| look(namespace, address)).map_err(NotRouted::Unseen)?
}

/// An address that no pod has.
fn is_special(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => {
            v4.is_loopback() || v4.is_link_local() || v4.is_multicast() || v4.is_broadcast() || v4.is_unspecified()
        }
        IpAddr::V6(v6) => v6.is_loopback() || v6.is_unicast_link_local() || v6.is_multicast() || v6.is_unspecified(),
    }
}

/// On a thread that is in the host's namespace.
fn look(namespace: &Namespace, address: IpAddr) -> Result<(), NotRouted> {
    let kernel = Netlink::connect(NETLINK_ROUTE).map_err(NotRouted::Unseen)?;
    let index = route(&kernel, address)?;
    let link = link(&kernel, index).map_err(NotRouted::Unseen)?;
    // Asked after the interface: the kernel gives a namespace its number when it first shows one.
    let leads = |link: &LinkMessage| -> io::Result<bool> {
        let other_end = other_end(link);
        Ok(other_end.is_some() && other_end == number(&kernel, namespace)?)
    };
    let found = leads(&link).and_then(|leads_there| {
        if leads_there || !is_bridge(&link) {
            return Ok(leads_there);
        }
        let links = kernel.dump(RouteNetlinkMessage::GetLink(LinkMessage::default()))?;
        let mut ports = links.iter().filter_map(|link| match link {
            RouteNetlinkMessage::NewLink(link) if bridge_of(link) == Some(index) => Some(link),
            _ => None,
        });
        ports.try_fold(false, |found, port| Ok(found || leads(port)?))
    });
    match found {
        Ok(true) => Ok(()),
        Ok(false) => Err(NotRouted::Elsewhere { address, interface: name(&link, index) }),
        Err(error) => Err(NotRouted::Unseen(error)),
    }
}

/// The index of the interface behind which the address is, without a gateway.
fn route(kernel: &Netlink, address: IpAddr) -> Result<u32, NotRouted> {
    let mut question = RouteMessage::default();
    let (family, length) = match address {
        IpAddr::V4(_) => (AddressFamily::Inet, 32),
        IpAddr::V6(_) => (AddressFamily::Inet6, 128),
    };
    (question.header.address_family, question.header.destination_prefix_length) = (family, length);
    question.attributes.push(RouteAttribute::Destination(RouteAddress::from(address)));
    let answer = match kernel.ask(0, RouteNetlinkMessage::GetRoute(question)) {
        Ok(Some(RouteNetlinkMessage::NewRoute(route))) => route,
        // ENETUNREACH, or what an administrator's rule says instead.
        Ok(_) | Err(_) => return Err(NotRouted::Away(address)),
    };
    if answer.header.kind == RouteType::Local {
        return Err(NotRouted::Host(address));
    }
    let gateway = |attribute: &RouteAttribute| matches!(attribute, RouteAttribute::Gateway(_) | RouteAttribute::Via(_));
    if answer.header.kind != RouteType::Unicast || answer.attributes.iter().any(gateway) {
        return Err(NotRouted::Away(address));
    }
    let interface = answer.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Oif(index) => Some(*index),
        _ => None,
    });
    interface.ok_or(NotRouted::Away(address))
}

fn link(kernel: &Netlink, index: u32) -> io::Result<LinkMessage> {
    let mut question = LinkMessage::default();
    question.header.index = index;
    match kernel.ask(0, RouteNetlinkMessage::GetLink(question))? {
        Some(RouteNetlinkMessage::NewLink(link)) => Ok(link),
        _ => Err(io::ErrorKind::NotFound.into()),
    }
}

/// The host's number for the namespace; none, if no interface of the host leads there.
fn number(kernel: &Netlink, namespace: &Namespace) -> io::Result<Option<i32>> {
    let mut question = NsidMessage::default();
    question.attributes.push(NsidAttribute::Fd(namespace.as_raw_fd().cast_unsigned()));
    let Some(RouteNetlinkMessage::NewNsId(answer)) = kernel.ask(0, RouteNetlinkMessage::GetNsId(question))? else {
        return Ok(None);
    };
    Ok(answer.attributes.iter().find_map(|attribute| match attribute {
        NsidAttribute::Id(number) => u32::try_from(*number).is_ok().then_some(*number),
        _ => None,
    }))
}

fn other_end(link: &LinkMessage) -> Option<i32> {
    link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::LinkNetNsId(number) => Some(*number),
        _ => None,
    })
}

fn bridge_of(link: &LinkMessage) -> Option<u32> {
    link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::Controller(index) => Some(*index),
        _ => None,
    })
}

fn is_bridge(link: &LinkMessage) -> bool {
    link.attributes.iter().any(|attribute| match attribute {
        LinkAttribute::LinkInfo(infos) => infos.iter().any(|info| matches!(info, LinkInfo::Kind(InfoKind::Bridge))),
        _ => false,
    })
}

fn name(link: &LinkMessage, index: u32) -> String {
    let name = link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::IfName(name) => Some(name.clone()),
        _ => None,
    });
    name.unwrap_or_else(|| format!("interface {index}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_special_or_the_hosts_own_is_nobody_elses() {
        let own = Namespace::own().unwrap();
        for address in
            ["127.0.0.1", "169.254.169.254", "224.0.0.1", "0.0.0.0", "::1", "fe80::1", "ff02::1", "::ffff:127.0.0.1"]
        {
            let refused = lead_into(&own, address.parse().unwrap()).unwrap_err();
            assert!(matches!(refused, NotRouted::Special(_)), "{address}: {refused}");
        }
    }
}

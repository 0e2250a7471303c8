//! What lastgasp asks of the kernel's network: which namespace a process is in, what a namespace
//! reaches, and to which namespace the host routes an address.

pub(crate) mod dial;
pub(crate) mod namespace;
pub(crate) mod netlink;
pub(crate) mod routes;

pub(crate) use dial::Dialer;
pub(crate) use namespace::Namespace;

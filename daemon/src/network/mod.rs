//! What lastgasp asks of the kernel's network: which namespace a process is in, what a namespace
//! reaches, and to which namespace the host routes an address.

pub mod dial;
pub mod namespace;
pub mod netlink;
pub mod routes;

pub use dial::Dialer;
pub use namespace::Namespace;

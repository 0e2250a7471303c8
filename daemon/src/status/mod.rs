//! What the daemon tells people and programs: a gRPC service on a unix socket for `lastgasp status`
//! and `lastgasp events`, and `/metrics`, `/livez` and `/readyz` over HTTP.
//!
//! It runs on a thread of its own and reads only what the supervisor has put into the
//! [`StatusHub`]; a slow reader never holds up a decision.

pub(crate) mod client;
pub(crate) mod control;
mod http;
mod hub;
mod page;
pub(crate) mod render;
mod server;
mod service;
pub(crate) mod story;
#[cfg(test)]
mod tests;

pub(crate) use self::hub::StatusHub;
pub(crate) use self::proto::{
    ContainerStatus, Degradation, Event, LossStatus, NodeStatus, Privileges, ProcessStatus, ProgramStatus,
    RouterStatus, WorkerStatus,
};
pub(crate) use self::server::{StatusError, StatusServer};

/// Generated from `proto/status.proto`, which documents it.
#[expect(clippy::allow_attributes_without_reason, reason = "generated")]
#[allow(unreachable_pub, reason = "generated; the lint sees it with some targets only")]
pub(crate) mod proto {
    tonic::include_proto!("lastgasp.v1");

    /// The descriptors of all of it, for reflection.
    pub(crate) const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/status.bin"));
}

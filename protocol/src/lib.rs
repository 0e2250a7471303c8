//! What lastgasp daemons, workers and routers say to each other over NATS,
//! version 1: records in JetStream KV, migration signals, and the answers to them.
//!
//! A router author depends on this crate and nothing else of lastgasp. It holds
//! types, names and bounds; with the feature `nats` also how one logs in, and the few
//! ways in which the buckets are read and written. It must never decide anything: what a death is,
//! and what a router does about one, is written elsewhere.
#![forbid(unsafe_code)]

pub mod bounds;
pub mod certificate;
mod closed;
#[cfg(feature = "nats")]
pub mod kv;
#[cfg(feature = "nats")]
pub mod login;
pub mod names;
pub mod reason;
pub mod record;
pub mod signal;

pub use bounds::{ContractError, MAX_PROCESSES};
pub use certificate::{Certificate, Container, Moment, Orphan};
pub use closed::ClosedName;
pub use names::{Incarnation, Name, NameError};
pub use reason::{Cause, CauseKind, Sender};
pub use record::{LeaseKind, NodeLease, RecordedProcess, RouterLease, WorkerRecord, WorkerState, Writer};
pub use signal::{Action, Answer, Counts, MigrateSignal, Mode, Phase, WorkerRef};

/// The only `schema` this crate reads and writes.
pub const SCHEMA: u32 = 1;

/// KV bucket of [`WorkerRecord`]s; key `<node>.<worker>`.
pub const WORKERS_BUCKET: &str = "lastgasp_workers";
/// KV bucket of [`NodeLease`]s; key `<node>`.
pub const NODES_BUCKET: &str = "lastgasp_nodes";
/// KV bucket of [`RouterLease`]s; key `<router>`.
pub const ROUTERS_BUCKET: &str = "lastgasp_routers";
/// JetStream stream of [`Certificate`]s.
pub const DEATHS_STREAM: &str = "lastgasp_deaths";
/// Subject of every migration signal, as a router subscribes to it.
pub const MIGRATE_WILDCARD: &str = "lastgasp.v1.migrate.*";

/// The key of a worker's record: `<node>.<worker>`, both as tokens.
#[must_use]
pub fn worker_key(node: &Name, worker: &Name) -> String {
    format!("{}.{}", node.token(), worker.token())
}

/// The subject of a node's migration signals.
#[must_use]
pub fn migrate_subject(node: &Name) -> String {
    format!("lastgasp.v1.migrate.{}", node.token())
}

/// Prefix of the subjects on which a node's daemon is answered. Nobody else may listen there, so
/// that permissions can tell the nodes apart.
#[must_use]
pub fn node_inbox(node: &Name) -> String {
    format!("_INBOX.lastgasp-node.{}", node.token())
}

/// Prefix of the subjects on which a router is answered.
#[must_use]
pub fn router_inbox(router: &Name) -> String {
    format!("_INBOX.lastgasp-router.{}", router.token())
}

/// The subjects of the death certificates of all workers of a node.
#[must_use]
pub fn death_subjects(node: &Name) -> String {
    format!("lastgasp.v1.death.{}.*", node.token())
}

/// The subject of a worker's death certificates.
#[must_use]
pub fn death_subject(node: &Name, worker: &Name) -> String {
    format!("lastgasp.v1.death.{}.{}", node.token(), worker.token())
}

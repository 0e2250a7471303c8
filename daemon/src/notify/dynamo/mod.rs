//! `kind = "dynamo"`: lost workers are taken out of Dynamo's discovery, in etcd or in a folder. Dynamo
//! itself is not changed and does not know of it: docs/dynamo.md says what was found by running it.
//!
//! Dynamo's records live as long as the lease of the process that wrote them: that of a dead worker for
//! up to 30 s, that of a hung one or of a sidecar whose engine is dead for as long as it renews it. One
//! task on the side thread follows all records while workers live, so that it knows at a death which
//! ones are theirs: an instance names the port that its process listens on.
//!
//! What it deletes it keeps. A worker that recovers does not write its records again, so they are put
//! back then, with the lease that they had.
//!
//! Deletion keeps new requests away and leaves streams alone. To break those of a hung worker is the
//! business of `worker[].sever`, which waits for this.

mod folder;
mod owners;
mod records;
pub(crate) mod stores;
#[cfg(test)]
mod tests;
mod watcher;

use lastgasp_protocol::Name;

use crate::config::DynamoConfig;
use crate::core::ProcessId;
use crate::metrics::Metrics;
use crate::notify::handle::Handle;
use crate::notify::{Lost, Report};

/// What the supervisor asks of the bridge.
#[derive(Debug, Clone)]
pub(super) enum DynamoCommand {
    /// A worker is known, with its instance where that is configured.
    Watch(Name, Option<u64>),
    /// It will not be heard of again.
    Forget(Name),
    /// Its processes: the root of its life, and its companion.
    Lives(Name, Vec<ProcessId>),
    /// It is listed and takes work.
    Serves(Name),
    /// It takes no new work; its streams go on.
    Leaves(Name),
    /// These are lost, for what was seen at one time.
    Lost(Vec<Lost>),
}

/// One sink. Dropped, its task ends.
#[derive(Debug)]
pub struct Dynamo(pub(super) Handle<DynamoCommand>);

impl Dynamo {
    /// Starts its task on the runtime of `side`.
    #[must_use]
    pub fn start(config: &DynamoConfig, side: &tokio::runtime::Handle, metrics: &Metrics, report: Report) -> Self {
        let (handle, inbox) = Handle::new(&config.name, config.queue, metrics);
        side.spawn(watcher::watch(config.clone(), inbox, metrics.clone(), report));
        Self(handle)
    }
}

//! The node's lease in `lastgasp_nodes`: one daemon per name, and a word to routers that somebody
//! watches this node. It is not given back at the end, so that an upgrade removes nobody.

use std::time::Duration;

use bytes::Bytes;
use lastgasp_protocol::kv::{Bucket, Content, Entry, Expect, ReadError, WriteError, jittered};
use lastgasp_protocol::{Name, NodeLease};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::troubles::Troubles;
use crate::core::ProcessId;
use crate::fault;
use crate::sensors::proc;

/// What became of the lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LeaseEvent {
    /// It is ours, and renewed.
    Held,
    /// It cannot be renewed for now.
    Waiting(String),
    /// Somebody else holds it. The daemon must end.
    Refused(String),
    /// It is left alone: the daemon only observes.
    NotTaken,
}

/// Acquires the lease and renews it for as long as the daemon runs.
pub async fn keep(
    own: NodeLease,
    ttl: Duration,
    mut bucket: watch::Receiver<Option<Bucket>>,
    troubles: Troubles,
    events: mpsc::UnboundedSender<LeaseEvent>,
) {
    const COST: &str = "routers may take this node for one without a daemon";
    let Ok(bucket) = bucket.wait_for(Option::is_some).await.map(|bucket| bucket.clone()) else { return };
    let Some(bucket) = bucket else { return };
    let key = own.node.token();
    let value = Bytes::from(own.to_json());
    let mut revision: Option<u64> = None;
    // A foreign lease, and since when it has been seen unchanged.
    let mut foreign: Option<(u64, Instant)> = None;
    loop {
        let expect = match revision {
            Some(revision) => Ok(Expect::Revision(revision)),
            None => match bucket.read(&key).await {
                Ok(entry) => judge(&own, entry.as_ref(), &mut foreign, ttl),
                Err(error) => {
                    troubles.bad("lease", error.fault(), error.to_string(), COST);
                    Err(LeaseCheck::Trouble { why: error.to_string(), no_bucket: matches!(error, ReadError::NoBucket) })
                }
            },
        };
        let written = match expect {
            Ok(expect) => bucket.put(&key, value.clone(), expect, ttl).await.map_err(|error| {
                let (why, no_bucket) = (error.to_string(), matches!(error, WriteError::NoBucket));
                match error.fault() {
                    None => LeaseCheck::Wait("another daemon changed the lease".to_owned()),
                    Some(fault) => {
                        troubles.bad("lease", fault, why.clone(), COST);
                        LeaseCheck::Trouble { why, no_bucket }
                    }
                }
            }),
            Err(verdict) => Err(verdict),
        };
        let event = match written {
            Ok(written) => {
                troubles.good("lease");
                if revision.replace(written).is_none() {
                    fault::point("lease taken");
                }
                LeaseEvent::Held
            }
            Err(LeaseCheck::Wait(why)) => {
                revision = None;
                LeaseEvent::Waiting(why)
            }
            Err(LeaseCheck::Trouble { why, no_bucket }) => {
                revision = None;
                if no_bucket && let Err(error) = bucket.again().await {
                    tracing::debug!(%error, "no bucket, and the daemon cannot make one");
                }
                LeaseEvent::Waiting(why)
            }
            Err(LeaseCheck::Refuse(why)) => LeaseEvent::Refused(why),
        };
        let pause =
            if event == LeaseEvent::Held { jittered(ttl / 3) } else { (ttl / 12).max(Duration::from_millis(250)) };
        if events.send(event).is_err() {
            return;
        }
        tokio::time::sleep(pause).await;
    }
}

enum LeaseCheck {
    Wait(String),
    Trouble { why: String, no_bucket: bool },
    Refuse(String),
}

/// Whether the key may be taken, and at which revision.
fn judge(
    own: &NodeLease,
    entry: Option<&Entry>,
    foreign: &mut Option<(u64, Instant)>,
    ttl: Duration,
) -> Result<Expect, LeaseCheck> {
    let Some(entry) = entry else { return Ok(Expect::Absent) };
    let take = Ok(Expect::Revision(entry.revision));
    let Content::Put(value) = &entry.value else { return take };
    let Ok(holder) = NodeLease::parse(value) else { return take };
    let same_machine = holder.machine_id == own.machine_id && !own.machine_id.is_empty();
    if holder.boot_id == own.boot_id {
        let process = ProcessId { tgid: holder.pid, start_ticks: holder.start_ticks };
        let is_us = (holder.pid, holder.start_ticks) == (own.pid, own.start_ticks);
        if !is_us && proc::identify(holder.pid) == Some(process) {
            return Err(LeaseCheck::Refuse(format!(
                "another lastgasp daemon (pid {}) already watches node {:?} on this machine; stop it, or give one of \
                 them another `node` name",
                holder.pid, own.node
            )));
        }
        return take;
    }
    if same_machine {
        // The machine was booted since.
        return take;
    }
    // Another machine. If it lives, it renews; if not, the server lets the lease lapse.
    let now = Instant::now();
    let wait = Err(LeaseCheck::Wait("the lease of another machine has not lapsed yet".to_owned()));
    match *foreign {
        Some((revision, _)) if revision != entry.revision => Err(LeaseCheck::Refuse(format!(
            "node {:?} is the name of another machine (machine id {}), and its daemon is alive; give this node another \
             `node` name",
            own.node, holder.machine_id
        ))),
        // A server that does not let it lapse does not know message TTLs; so we measure it.
        Some((_, since)) if now.duration_since(since) > ttl * 2 => take,
        Some(_) => wait,
        None => {
            *foreign = Some((entry.revision, now));
            wait
        }
    }
}

/// What this process writes into the lease.
///
/// # Errors
/// `/proc` is not mounted.
pub fn own_lease(node: Name) -> std::io::Result<NodeLease> {
    let pid = std::process::id();
    Ok(NodeLease {
        schema: lastgasp_protocol::SCHEMA,
        node,
        machine_id: proc::machine_id().unwrap_or_default(),
        boot_id: proc::boot_id()?,
        pid,
        start_ticks: proc::identify(pid).map_or(0, |process| process.start_ticks),
    })
}

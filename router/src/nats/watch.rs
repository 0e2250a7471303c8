//! Following the buckets of workers and node leases.
//!
//! Each watch is read in a task of its own. Whatever ends it (an error, a reconnect) means "state
//! unknown": list again, then follow.

use lastgasp_protocol::ClosedName as _;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use jiff::Timestamp;
use lastgasp_protocol::kv::{Bucket, Change, Content, Entry, Fault, OpenError, backoff};
use lastgasp_protocol::{ContractError, NODES_BUCKET, Name, NodeLease, WORKERS_BUCKET, WorkerRecord, WorkerState};
use tokio::sync::watch as latest;
use tracing::{info, warn};

use super::NatsClient;

/// How long after the deadline of a drain its daemon is still waited for: its clock is another one.
const OVERDUE: Duration = Duration::from_secs(2);
/// Deadlines beyond this are taken for a wrong clock.
const LONGEST_DRAIN: Duration = Duration::from_secs(24 * 3600);

/// What is made of a bucket's changes.
trait Reader {
    fn entry(&mut self, entry: Entry);
    fn listed(&mut self);
    /// A new listing begins.
    fn begin(&mut self);
}

/// Keeps the workers as the bucket has them. `listing` becomes true after the first listing.
pub(super) async fn workers(client: NatsClient, listing: latest::Sender<bool>) {
    let reader = Workers { client: client.clone(), listing, present: None };
    follow(client, WORKERS_BUCKET, reader).await;
}

/// Keeps the node leases as the bucket has them.
pub(super) async fn nodes(client: NatsClient) {
    let reader = Nodes { client: client.clone(), present: None };
    follow(client, NODES_BUCKET, reader).await;
}

async fn follow(mut client: NatsClient, name: &'static str, mut reader: impl Reader) {
    let mut attempts = 0;
    loop {
        let ended = once(&mut client, name, &mut reader, &mut attempts).await;
        let wait = backoff(attempts);
        attempts += 1;
        match ended {
            Ok(()) => info!(bucket = name, "listing again"),
            Err(error) => client.troubles.bad(name, Fault::of(&*error), format!("not followed at present: {error}")),
        }
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            // The sender lives as long as the client.
            _ = client.connections.changed() => {}
        }
    }
}

/// One listing and what follows it, until the connection is made anew.
async fn once(
    client: &mut NatsClient,
    name: &'static str,
    reader: &mut impl Reader,
    attempts: &mut u32,
) -> Result<(), async_nats::Error> {
    // The first attempt would only time out before there is a connection.
    _ = client.connections.wait_for(|count| *count > 0).await;
    client.connections.borrow_and_update();
    if !client.troubles.is_new_enough(&client.client) {
        return Err("the server is too old".into());
    }
    let bucket = match Bucket::open(&client.context, name, client.settings.replicas).await {
        Ok(bucket) => bucket,
        Err(error @ OpenError::Misshapen { .. }) => {
            client.troubles.bad("buckets", Fault::Misshapen, &error);
            return Err(error.into());
        }
        Err(error) => return Err(error.into()),
    };
    client.troubles.good("buckets");
    let mut watch = bucket.watch(">").await?;
    reader.begin();
    loop {
        tokio::select! {
            change = watch.next() => match change {
                Some(Ok(Change::Entry(entry))) => reader.entry(entry),
                Some(Ok(Change::Listed)) => {
                    *attempts = 0;
                    client.troubles.good(name);
                    reader.listed();
                }
                Some(Err(error)) => return Err(error.into()),
                None => return Err("the watch ended".into()),
            },
            changed = client.connections.changed() => {
                // A watch has been seen to fall silent after a reconnect (nats.rs#1596).
                *attempts = 0;
                return changed.map_err(Into::into);
            }
        }
    }
}

struct Workers {
    client: NatsClient,
    listing: latest::Sender<bool>,
    /// Keys that were found by the listing, while it is under way.
    present: Option<HashSet<String>>,
}

impl Workers {
    /// Comes back to a drain after its deadline.
    fn remind(&self, key: String, record: WorkerRecord, deadline: Timestamp) {
        let workers = Arc::clone(&self.client.proxy.workers);
        let rest = Duration::try_from(deadline.duration_since(Timestamp::now())).unwrap_or_default();
        tokio::spawn(async move {
            tokio::time::sleep(rest.min(LONGEST_DRAIN) + OVERDUE).await;
            workers.overdue(&key, &record);
        });
    }
}

impl Reader for Workers {
    fn begin(&mut self) {
        self.present = Some(HashSet::new());
        self.client.proxy.workers.relisting();
    }

    fn entry(&mut self, entry: Entry) {
        let workers = &self.client.proxy.workers;
        let Entry { key, revision, value, payload: _, stored_at: _ } = entry;
        match value {
            Content::Put(bytes) => match WorkerRecord::parse(&key, &bytes) {
                Ok(record) => {
                    info!(key, revision, state = record.state.as_str(), epoch = record.epoch, "worker listed");
                    workers.put(&record, revision);
                    if let (WorkerState::Draining, Some(deadline)) = (record.state, record.deadline) {
                        self.remind(key.clone(), record, deadline);
                    }
                }
                Err(error) => {
                    warn!(key, revision, %error, "record not read");
                    self.client.proxy.metrics.records_refused.with_label_values(&[error.as_str()]).inc();
                    // A later version's record says something that is not understood here. Anything
                    // else is not by the worker's daemon at all, which will write over it.
                    if matches!(error, ContractError::UnknownSchema(_)) {
                        workers.unknown(&key);
                    }
                }
            },
            Content::Deleted => {
                info!(key, revision, "worker withdrawn");
                workers.deleted(&key, revision);
            }
            Content::Expired => {
                if workers.expired(&key) {
                    warn!(key, revision, "record expired: no new work for this worker");
                }
            }
        }
        if let Some(present) = &mut self.present {
            present.insert(key);
        }
    }

    fn listed(&mut self) {
        if let Some(present) = self.present.take() {
            self.client.proxy.workers.listed(&present);
        }
        self.listing.send_replace(true);
    }
}

struct Nodes {
    client: NatsClient,
    /// Nodes that were found by the listing, while it is under way.
    present: Option<HashSet<Name>>,
}

impl Reader for Nodes {
    fn begin(&mut self) {
        self.present = Some(HashSet::new());
    }

    fn entry(&mut self, entry: Entry) {
        let Ok(node) = Name::from_token(&entry.key) else { return };
        let workers = &self.client.proxy.workers;
        match entry.value {
            Content::Put(value) => match NodeLease::parse(&value) {
                Ok(lease) if lease.node == node => {
                    workers.lease_renewed(node.clone());
                    if let Some(present) = &mut self.present {
                        present.insert(node);
                    }
                }
                refused => {
                    let label = refused.map_or_else(|error| error.as_str(), |_| "misplaced");
                    warn!(%node, reason = label, "lease not read");
                    self.client.proxy.metrics.records_refused.with_label_values(&[label]).inc();
                }
            },
            Content::Deleted | Content::Expired => {
                info!(node = %node, "node lease lapsed");
                workers.lease_lapsed(node);
            }
        }
    }

    fn listed(&mut self) {
        if let Some(present) = self.present.take() {
            self.client.proxy.workers.leases_listed(&present);
        }
    }
}

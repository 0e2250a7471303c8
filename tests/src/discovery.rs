//! What NATS says of the workers, from the first revision on.

use lastgasp_protocol::ClosedName as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use lastgasp_protocol::kv::{Bucket, Change, Content};
use lastgasp_protocol::{Certificate, DEATHS_STREAM, WORKERS_BUCKET, WorkerRecord, WorkerState};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use crate::HarnessError;
use crate::nats::Nats;
use crate::process::GIVE_UP;

/// One change of one worker's key.
#[derive(Clone, Debug)]
pub struct Seen {
    /// When the watch yielded it.
    pub at: Instant,
    /// Worker name (the second token of the key).
    pub worker: String,
    /// Stream sequence.
    pub revision: u64,
    /// The record, or nothing for a deletion or expiry.
    pub record: Option<WorkerRecord>,
}

/// Watches `lastgasp_workers` as a router would.
#[derive(Debug)]
pub struct Discovery {
    context: async_nats::jetstream::Context,
    seen: Arc<(Mutex<Vec<Seen>>, Notify)>,
    task: JoinHandle<()>,
}

impl Discovery {
    /// Begins to watch.
    ///
    /// # Errors
    ///
    /// NATS refuses.
    pub async fn watch(nats: &Nats) -> Result<Self, HarnessError> {
        Self::over(nats.jetstream().await?, 1).await
    }

    /// As [`Self::watch`], over this connection; makes the bucket with so many replicas if need be.
    ///
    /// # Errors
    ///
    /// NATS refuses.
    pub async fn over(context: async_nats::jetstream::Context, replicas: usize) -> Result<Self, HarnessError> {
        let bucket = Bucket::open(&context, WORKERS_BUCKET, replicas).await;
        let bucket = bucket.map_err(|error| HarnessError::Nats(error.into()))?;
        let seen = Arc::new((Mutex::default(), Notify::new()));
        let task = tokio::spawn(follow(bucket, Arc::clone(&seen)));
        Ok(Self { context, seen, task })
    }

    /// Everything seen of a worker, in order.
    pub fn history(&self, worker: &str) -> Vec<Seen> {
        let seen = self.seen.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.iter().filter(|seen| seen.worker == worker).cloned().collect()
    }

    /// How often the worker was removed.
    pub fn removals(&self, worker: &str) -> usize {
        self.history(worker).iter().filter(|seen| seen.record.is_none()).count()
    }

    /// Waits until the worker's history satisfies `wanted`.
    ///
    /// # Errors
    ///
    /// It does not within [`GIVE_UP`].
    pub async fn wait_for(
        &self,
        worker: &str,
        what: &str,
        wanted: impl Fn(&[Seen]) -> bool,
    ) -> Result<Vec<Seen>, HarnessError> {
        let arrived = async {
            loop {
                let more = self.seen.1.notified();
                tokio::pin!(more);
                more.as_mut().enable();
                let history = self.history(worker);
                if wanted(&history) {
                    return history;
                }
                more.await;
            }
        };
        let arrived = tokio::time::timeout(GIVE_UP, arrived).await;
        arrived.map_err(|_| HarnessError::GaveUp(format!("{worker} {what}; seen: {:#?}", self.history(worker))))
    }

    /// Waits until the worker is listed in `state`; returns that record.
    ///
    /// # Errors
    ///
    /// It is not within [`GIVE_UP`].
    pub async fn listed(&self, worker: &str, state: WorkerState) -> Result<WorkerRecord, HarnessError> {
        let last = |history: &[Seen]| history.last().and_then(|seen| seen.record.clone());
        let is = |history: &[Seen]| last(history).is_some_and(|record| record.state == state);
        let history = self.wait_for(worker, &format!("listed as {}", state.as_str()), is).await?;
        Ok(last(&history).expect("it was waited for"))
    }

    /// Waits until the worker is removed; returns when that was seen.
    ///
    /// # Errors
    ///
    /// It is not within [`GIVE_UP`].
    pub async fn removed(&self, worker: &str) -> Result<Instant, HarnessError> {
        let gone = |history: &[Seen]| history.last().is_some_and(|seen| seen.record.is_none());
        let history = self.wait_for(worker, "removed", gone).await?;
        Ok(history.last().expect("it was waited for").at)
    }

    /// Waits for a death certificate of the worker that `wanted` holds for. The daemon may publish a
    /// certificate again when it knows more.
    ///
    /// # Errors
    ///
    /// None comes within [`GIVE_UP`].
    pub async fn certificate(
        &self,
        worker: &str,
        wanted: impl Fn(&Certificate) -> bool,
    ) -> Result<Certificate, HarnessError> {
        use async_nats::jetstream::consumer::{DeliverPolicy, pull};
        let find = async {
            // The daemon makes the stream; it may not have yet.
            let stream = loop {
                match self.context.get_stream(DEATHS_STREAM).await {
                    Ok(stream) => break stream,
                    Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
                }
            };
            let config = pull::OrderedConfig {
                filter_subject: format!("lastgasp.v1.death.*.{worker}"),
                deliver_policy: DeliverPolicy::All,
                ..pull::OrderedConfig::default()
            };
            let consumer = stream.create_consumer(config).await.map_err(|error| HarnessError::Nats(error.into()))?;
            let mut messages = consumer.messages().await.map_err(|error| HarnessError::Nats(error.into()))?;
            while let Some(message) = messages.next().await {
                let message = message.map_err(|error| HarnessError::Nats(error.into()))?;
                let certificate: Certificate =
                    serde_json::from_slice(&message.payload).map_err(|error| HarnessError::Nats(error.into()))?;
                if wanted(&certificate) {
                    return Ok(certificate);
                }
            }
            Err(HarnessError::GaveUp("the stream of certificates ended".to_owned()))
        };
        let found = tokio::time::timeout(GIVE_UP, find).await;
        found.map_err(|_| HarnessError::GaveUp(format!("a death certificate of {worker}")))?
    }
}

/// Watches for ever, through restarts of NATS; a revision counts once.
async fn follow(bucket: Bucket, seen: Arc<(Mutex<Vec<Seen>>, Notify)>) {
    let mut last = 0;
    loop {
        if let Ok(mut changes) = bucket.watch(">").await {
            while let Some(Ok(change)) = changes.next().await {
                let Change::Entry(entry) = change else { continue };
                if entry.revision <= last {
                    continue;
                }
                last = entry.revision;
                let record = match &entry.value {
                    Content::Put(value) => Some(WorkerRecord::parse(&entry.key, value).expect("a record")),
                    Content::Deleted | Content::Expired => None,
                };
                let worker = entry.key.rsplit('.').next().unwrap_or_default().to_owned();
                let change = Seen { at: Instant::now(), worker, revision: entry.revision, record };
                seen.0.lock().unwrap_or_else(PoisonError::into_inner).push(change);
                seen.1.notify_waiters();
            }
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

impl Drop for Discovery {
    fn drop(&mut self) {
        self.task.abort();
    }
}

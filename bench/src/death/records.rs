//! Which records stand, and the ones that the bench writes itself.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use lastgasp_protocol::kv::{Bucket, Change, Content, Expect};
use lastgasp_tests::HarnessError;
use lastgasp_tests::process::GIVE_UP;
use serde_json::json;
use tokio::sync::watch;
use tokio_stream::StreamExt as _;

use super::{BenchError, Watcher};

/// Of records and tombstones.
const TTL: Duration = Duration::from_secs(3600);

/// A bucket, followed.
#[derive(Clone)]
pub(super) struct Records {
    bucket: Bucket,
    /// The newest revision, and when it was seen to be one of a deletion or expiry (monotonic ns).
    known: Arc<Mutex<HashMap<String, Known>>>,
    changed: watch::Receiver<()>,
}

#[derive(Clone, Copy, Default)]
struct Known {
    revision: u64,
    gone_ns: Option<u64>,
}

fn failed(error: impl Into<async_nats::Error>) -> BenchError {
    HarnessError::Nats(error.into()).into()
}

impl Records {
    /// Follows a bucket for as long as the runtime lives.
    pub(super) async fn follow(
        context: &async_nats::jetstream::Context,
        name: &'static str,
    ) -> Result<Self, BenchError> {
        let bucket = Bucket::open(context, name, 1).await.map_err(failed)?;
        let mut changes = bucket.watch(">").await.map_err(failed)?;
        let known: Arc<Mutex<HashMap<String, Known>>> = Arc::default();
        let (tell, changed) = watch::channel(());
        let noted = Arc::clone(&known);
        tokio::spawn(async move {
            while let Some(Ok(change)) = changes.next().await {
                let at = super::stage::monotonic_ns();
                let Change::Entry(entry) = change else { continue };
                let gone_ns = (!matches!(entry.value, Content::Put(_))).then_some(at);
                let mut known = noted.lock().unwrap_or_else(PoisonError::into_inner);
                known.insert(entry.key, Known { revision: entry.revision, gone_ns });
                drop(known);
                if tell.send(()).is_err() {
                    return;
                }
            }
        });
        Ok(Self { bucket, known, changed })
    }

    fn of(&self, key: &str) -> Known {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).get(key).copied().unwrap_or_default()
    }

    /// Waits until the key holds a value.
    pub(super) async fn listed(&self, key: &str) -> Result<(), BenchError> {
        self.until(key, "listed", |known| (known.revision > 0 && known.gone_ns.is_none()).then_some(())).await
    }

    /// Waits until the key holds none; when that was seen.
    pub(super) async fn gone(&self, key: &str) -> Result<u64, BenchError> {
        self.until(key, "gone", |known| known.gone_ns).await
    }

    async fn until<T>(&self, key: &str, what: &str, wanted: impl Fn(Known) -> Option<T>) -> Result<T, BenchError> {
        let mut changed = self.changed.clone();
        let arrived = async {
            loop {
                changed.mark_unchanged();
                if let Some(arrived) = wanted(self.of(key)) {
                    return Some(arrived);
                }
                changed.changed().await.ok()?;
            }
        };
        let arrived = tokio::time::timeout(GIVE_UP, arrived).await;
        arrived.ok().flatten().ok_or_else(|| HarnessError::GaveUp(format!("{key} to be {what}")).into())
    }

    /// Lists a worker by hand.
    pub(super) async fn list(
        &self,
        watcher: &str,
        name: &str,
        life: usize,
        model: &str,
        endpoint: &str,
    ) -> Result<Record, BenchError> {
        let key = format!("{watcher}.{name}");
        let record = json!({
            "schema": 1, "node": watcher, "worker": name, "incarnation": format!("{name}-{life}"), "epoch": 1,
            "engine": "vllm", "models": [model], "endpoint": endpoint, "lease": "none",
        });
        let payload = Bytes::from(record.to_string());
        let revision = self.put(&key, payload.clone(), TTL).await?;
        Ok(Record { bucket: self.bucket.clone(), key, payload, revision })
    }

    /// A key that ends by itself.
    pub(super) async fn lease(&self, worker: &str, ttl: Duration) -> Result<u64, BenchError> {
        let key = format!("{}.{worker}", Watcher::Lease.node());
        self.put(&key, Bytes::from_static(b"{}"), ttl).await
    }

    async fn put(&self, key: &str, payload: Bytes, ttl: Duration) -> Result<u64, BenchError> {
        let found = self.bucket.read(key).await.map_err(failed)?;
        let expect = found.map_or(Expect::Absent, |entry| Expect::Revision(entry.revision));
        self.bucket.put(key, payload, expect, ttl).await.map_err(failed)
    }
}

/// One that stands, for who will delete it.
pub(super) struct Record {
    bucket: Bucket,
    key: String,
    payload: Bytes,
    revision: u64,
}

impl Record {
    /// Returns when that is acknowledged.
    pub(super) async fn delete(self) -> Result<(), BenchError> {
        let expect = Expect::Revision(self.revision);
        self.bucket.delete(&self.key, self.payload, expect, TTL).await.map(drop).map_err(failed)
    }
}

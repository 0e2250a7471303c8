//! Migration signals: published at once, repeated to routers that have not said `received`.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_nats::{Client, Subject};
use bytes::Bytes;
use futures_util::{FutureExt, StreamExt};
use lastgasp_protocol::kv::{Bucket, Change, Content, backoff};
use lastgasp_protocol::{Answer, MigrateSignal, Name, Phase, RouterLease};
use tokio::sync::{Notify, mpsc, watch};

use crate::core::Nanos;
use crate::fault;
use crate::losses::Loss;
use crate::metrics::Metrics;
use crate::sensors::proc;

/// When a signal is repeated, counted from the first.
const REPEATS: [Duration; 3] = [Duration::from_millis(50), Duration::from_millis(250), Duration::from_secs(1)];

/// A router's answer, with the time at which it was read.
#[derive(Debug, Clone)]
pub struct Answered {
    /// What it said.
    pub answer: Answer,
    /// When.
    pub at: Nanos,
}

/// Routers that have said `received`, by certificate.
#[derive(Debug, Default)]
struct Received {
    by_certificate: Mutex<HashMap<String, HashSet<Name>>>,
    changed: Notify,
}

/// Sends signals and collects the answers.
#[derive(Debug, Clone)]
pub struct Signals {
    client: Client,
    inbox: Arc<str>,
    received: Arc<Received>,
    routers: watch::Receiver<HashSet<Name>>,
    metrics: Metrics,
}

impl Signals {
    /// Subscribes to the answers. `routers` are those with a live lease.
    ///
    /// # Errors
    /// The client is closed.
    pub async fn new(
        client: Client,
        routers: watch::Receiver<HashSet<Name>>,
        answers: mpsc::UnboundedSender<Answered>,
        metrics: Metrics,
    ) -> Result<Self, async_nats::SubscribeError> {
        let inbox: Arc<str> = client.new_inbox().into();
        let received = Arc::new(Received::default());
        let mut subscription = client.subscribe(format!("{inbox}.*")).await?;
        let (collected, counted) = (Arc::clone(&received), metrics.clone());
        tokio::spawn(async move {
            while let Some(message) = subscription.next().await {
                let at = proc::monotonic_now();
                // The server's own word: no router has subscribed (NATS "no responders").
                if message.status.is_some() {
                    continue;
                }
                let Ok(answer) = Answer::parse(&message.payload) else {
                    tracing::debug!(subject = %message.subject, "message on the reply subject is not an answer");
                    counted.lose(Loss::Answer, 1);
                    continue;
                };
                if answer.phase == Phase::Received {
                    let mut by_certificate = collected.by_certificate.lock().unwrap_or_else(PoisonError::into_inner);
                    if let Some(routers) = by_certificate.get_mut(&answer.certificate) {
                        routers.insert(answer.router.clone());
                    }
                    drop(by_certificate);
                    collected.changed.notify_waiters();
                }
                if answers.send(Answered { answer, at }).is_err() {
                    return;
                }
            }
        });
        Ok(Self { client, inbox, received, routers, metrics })
    }

    /// Publishes `signal`, without waiting for anything, and sees to its repetition.
    pub fn send(&self, signal: &MigrateSignal) {
        let certificate = signal.certificate.clone();
        self.lock().insert(certificate.clone(), HashSet::new());
        let subject = Subject::from(lastgasp_protocol::migrate_subject(&signal.node));
        let reply = Subject::from(format!("{}.{certificate}", self.inbox));
        let payload = Bytes::from(signal.to_json());
        let publish = {
            let client = self.client.clone();
            move || {
                let (client, subject) = (client.clone(), subject.clone());
                let (reply, payload) = (reply.clone(), payload.clone());
                async move { client.publish_with_reply(subject, reply, payload).await }
            }
        };
        // A publish only fills the client's queue. It is done here, without a change of task,
        // unless that queue is full, as it can be while there is no connection.
        let first = Box::pin(publish());
        let mut first = Some(first);
        if first.as_mut().and_then(FutureExt::now_or_never).is_some() {
            first = None;
        }
        fault::point("signal queued");
        let this = self.clone();
        tokio::spawn(async move {
            if let Some(first) = first
                && let Err(error) = first.await
            {
                tracing::warn!(%error, certificate, "signal not published; the record's deletion says the same");
                this.metrics.lose(Loss::Signal, 1);
            }
            let started = tokio::time::Instant::now();
            for after in REPEATS {
                if this.all_received(&certificate, started + after).await {
                    fault::point("signal received");
                    break;
                }
                if let Err(error) = publish().await {
                    tracing::debug!(%error, certificate, "signal not repeated");
                }
            }
            // Answers that come later still count; they need no more repeats.
            this.lock().remove(&certificate);
        });
    }

    /// Waits until every router with a lease has said `received`, at most until `deadline`.
    async fn all_received(&self, certificate: &str, deadline: tokio::time::Instant) -> bool {
        loop {
            let changed = self.received.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let complete = {
                let by_certificate = self.lock();
                let received = by_certificate.get(certificate);
                self.routers.borrow().iter().all(|router| received.is_some_and(|set| set.contains(router)))
            };
            if complete {
                return true;
            }
            if tokio::time::timeout_at(deadline, changed).await.is_err() {
                return false;
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, HashSet<Name>>> {
        self.received.by_certificate.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Follows `lastgasp_routers`, so that it is known who should answer.
pub async fn follow_routers(bucket: Bucket, routers: watch::Sender<HashSet<Name>>) {
    let mut attempts = 0;
    while !routers.is_closed() {
        if let Err(error) = follow_routers_once(&bucket, &routers, &mut attempts).await {
            tracing::debug!(%error, "cannot follow the routers' bucket at present");
        }
        if let Err(error) = bucket.again().await {
            tracing::debug!(%error, "cannot open the routers' bucket");
        }
        tokio::time::sleep(backoff(attempts)).await;
        attempts += 1;
    }
}

async fn follow_routers_once(
    bucket: &Bucket,
    routers: &watch::Sender<HashSet<Name>>,
    attempts: &mut u32,
) -> Result<(), async_nats::Error> {
    let mut changes = bucket.watch(">").await?;
    let mut listed = HashSet::new();
    let mut complete = false;
    while let Some(change) = changes.next().await {
        match change? {
            Change::Listed => {
                complete = true;
                *attempts = 0;
            }
            Change::Entry(entry) => {
                let Ok(router) = Name::from_token(&entry.key) else { continue };
                match entry.value {
                    // What is no lease says nothing: neither that there is a router nor that it is gone.
                    Content::Put(value) => {
                        if RouterLease::parse(&value).is_ok_and(|lease| lease.router == router) {
                            listed.insert(router);
                        }
                    }
                    Content::Deleted | Content::Expired => drop(listed.remove(&router)),
                }
            }
        }
        if complete {
            routers.send_if_modified(|known| {
                let changed = *known != listed;
                known.clone_from(&listed);
                changed
            });
        }
    }
    Ok(())
}

//! One listing of a bucket, and the changes after it.
//!
//! The watch of async-nats 0.51 heals itself: after a gap or a silence it goes on from the last
//! sequence it saw. That is wrong for discovery. A bucket that was deleted and made again counts
//! from one, so such a watch would be silent until the new bucket has caught up with the old one.
//! Here whatever is not in order ends the watch, and whoever reads it lists again.

use std::time::Duration;

use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, ReplayPolicy, push};
use async_nats::jetstream::{self, Context};
use async_nats::{HeaderMap, Message, StatusCode, Subscriber};
use bytes::Bytes;
use futures_util::{Stream, StreamExt};

use super::{Change, Entry, timestamp, value};

/// How often the server says that a quiet watch is alive.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// A watch that is silent for so long is over. A deleted stream says nothing to those who watch it
/// (measured with nats-server 2.15); a loaded server may be late by a heartbeat or two.
const SILENCE: Duration = Duration::from_secs(3);
/// How long the server keeps the consumer of a watch whose client is gone.
const ABANDONED: Duration = Duration::from_secs(5);

/// Header of a heartbeat: what the consumer has sent so far.
const LAST_CONSUMER: &str = "Nats-Last-Consumer";
/// Header of a heartbeat of a consumer that waits for this flow control answer.
const STALLED: &str = "Nats-Consumer-Stalled";

/// Why a watch is over. The state of the bucket is unknown then: list again.
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    /// No change and no heartbeat: the bucket, its leader or the connection is gone.
    #[error("no heartbeat for {} s", SILENCE.as_secs())]
    Silent,
    /// The server has sent more than has come, as after a reconnect.
    #[error("changes are missing: the server sent {sent}, and {seen} arrived")]
    Missed {
        /// By the server's count.
        sent: u64,
        /// By ours.
        seen: u64,
    },
    /// The server ended it.
    #[error("ended by the server: {0}")]
    Ended(String),
    /// Something that is no message of a consumer.
    #[error("not a message of a consumer: {0}")]
    Unreadable(async_nats::Error),
}

/// A watch and how far it is.
struct Watch {
    context: Context,
    subscription: Subscriber,
    prefix: String,
    /// Messages that have come.
    seen: u64,
    listed: bool,
    /// Said next, before anything is read.
    next: Option<Change>,
    over: bool,
}

/// Begins to watch what matches `filter` in the stream `name`, whose keys follow `prefix`.
pub(super) async fn begin(
    context: &Context,
    name: &str,
    prefix: &str,
    filter: &str,
) -> Result<impl Stream<Item = Result<Change, WatchError>> + Send + Unpin + use<>, async_nats::Error> {
    let client = context.client();
    let inbox = client.new_inbox();
    let subscription = client.subscribe(inbox.clone()).await?;
    let config = push::Config {
        deliver_subject: inbox,
        description: Some("lastgasp watch".to_owned()),
        deliver_policy: DeliverPolicy::LastPerSubject,
        ack_policy: AckPolicy::None,
        replay_policy: ReplayPolicy::Instant,
        filter_subject: format!("{prefix}{filter}"),
        idle_heartbeat: HEARTBEAT,
        flow_control: true,
        inactive_threshold: ABANDONED,
        num_replicas: 1,
        memory_storage: true,
        ..push::Config::default()
    };
    let consumer = context.create_consumer_on_stream(config, name).await?;
    let info = consumer.cached_info();
    // What has been sent before the answer was written is not pending any more.
    let empty = info.num_pending == 0 && info.delivered.consumer_sequence == 0;
    let watch = Watch {
        context: context.clone(),
        subscription,
        prefix: prefix.to_owned(),
        seen: 0,
        listed: empty,
        next: empty.then_some(Change::Listed),
        over: false,
    };
    let stream = futures_util::stream::unfold(watch, |mut watch| async move {
        if watch.over {
            return None;
        }
        let change = watch.next().await;
        watch.over = change.is_err();
        Some((change, watch))
    });
    Ok(Box::pin(stream))
}

impl Watch {
    async fn next(&mut self) -> Result<Change, WatchError> {
        loop {
            if let Some(change) = self.next.take() {
                return Ok(change);
            }
            let message = match tokio::time::timeout(SILENCE, self.subscription.next()).await {
                Err(_) => return Err(WatchError::Silent),
                Ok(None) => return Err(WatchError::Ended("the client was closed".to_owned())),
                Ok(Some(message)) => message,
            };
            match message.status {
                None => return self.change(message),
                Some(StatusCode::IDLE_HEARTBEAT) => self.heartbeat(message).await?,
                Some(status) => {
                    let description = message.description.unwrap_or_default();
                    return Err(WatchError::Ended(format!("{status} {description}")));
                }
            }
        }
    }

    fn change(&mut self, message: Message) -> Result<Change, WatchError> {
        let message = jetstream::Message { message, context: self.context.clone() };
        let info = message.info().map_err(WatchError::Unreadable)?;
        if info.consumer_sequence != self.seen + 1 {
            return Err(WatchError::Missed { sent: info.consumer_sequence, seen: self.seen });
        }
        self.seen += 1;
        if info.pending == 0 && !std::mem::replace(&mut self.listed, true) {
            self.next = Some(Change::Listed);
        }
        let (revision, stored_at) = (info.stream_sequence, timestamp(info.published.unix_timestamp_nanos()));
        let Message { subject, payload, headers, .. } = message.message;
        let key = subject.strip_prefix(&self.prefix).unwrap_or(&subject).to_owned();
        let value = value(headers.as_ref().unwrap_or(&HeaderMap::new()), &payload);
        Ok(Change::Entry(Entry { key, revision, value, payload, stored_at }))
    }

    async fn heartbeat(&mut self, message: Message) -> Result<(), WatchError> {
        let header = |name: &str| message.headers.as_ref()?.get(name).map(|value| value.as_str().to_owned());
        let asked = message.reply.map(|reply| reply.to_string()).or_else(|| header(STALLED));
        let control = asked.is_some();
        if let Some(subject) = asked {
            // If it does not get there, the consumer stalls and the silence is noticed.
            let _ = self.context.client().publish(subject, Bytes::new()).await;
        }
        let sent = header(LAST_CONSUMER).and_then(|sent| sent.parse().ok());
        match sent {
            Some(sent) if sent != self.seen => Err(WatchError::Missed { sent, seen: self.seen }),
            // It is idle, so nothing is left to be listed: the last key went while it was.
            Some(_) if !control && !std::mem::replace(&mut self.listed, true) => {
                self.next = Some(Change::Listed);
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

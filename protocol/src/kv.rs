//! How the buckets are read and written. All of lastgasp's writes go through here,
//! because three things are easily got wrong:
//!
//! * every change names the revision it expects, so that a late report about a dead
//!   worker cannot hit the one that was started in its place;
//! * records, tombstones and leases carry a message TTL, which the key-value calls of
//!   async-nats 0.51 drop on `update` and `delete` (a leased key would become permanent);
//! * after a mismatch the truth is asked of the stream's leader, since direct gets may be
//!   answered by a replica that is behind (nats-server#4162, #6557).

use std::time::Duration;

use async_nats::jetstream::ErrorCode;
use async_nats::jetstream::context::{GetStreamError, GetStreamErrorKind, PublishErrorKind};
use async_nats::jetstream::message::PublishMessage;
use async_nats::jetstream::stream::{LastRawMessageErrorKind, StorageType};
use async_nats::jetstream::{self, kv};
use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use jiff::Timestamp;

/// Header that tells a delete from a put (NATS ADR-8).
const OPERATION: &str = "KV-Operation";
/// Header that the server sets on a marker it placed itself (NATS ADR-43).
const MARKER_REASON: &str = "Nats-Marker-Reason";
/// How long the server keeps the marker of a key that expired. A watcher that was away
/// longer finds no key and no marker, which means "unknown".
const MARKER_TTL: Duration = Duration::from_secs(3600);

/// Why a bucket cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The server did not answer, JetStream is off, or we may not.
    #[error("bucket {bucket}: {source}")]
    Unavailable {
        /// Which bucket.
        bucket: &'static str,
        /// What async-nats says.
        source: async_nats::Error,
    },
    /// The bucket exists, but does not keep per-message TTLs.
    #[error(
        "bucket {bucket} was created without per-message TTL (nats-server 2.11 or later, `limit_markers`); \
         delete it and start again, or let lastgasp create it"
    )]
    NoMessageTtl {
        /// Which bucket.
        bucket: &'static str,
    },
}

/// Why a write did not take effect, or may not have.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The key's last revision is another one. Read it and decide again.
    #[error("the key has changed since it was read")]
    Mismatch,
    /// No acknowledgement came: the write may or may not have happened.
    #[error("no acknowledgement: {0}")]
    Unknown(async_nats::Error),
    /// The server refused it; the same write will be refused again.
    #[error("refused: {0}")]
    Refused(async_nats::Error),
}

/// What a write expects to find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expect {
    /// Nothing at all, not even a tombstone.
    Absent,
    /// This revision, of a value or a tombstone.
    Revision(u64),
}

/// What a key holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// A value.
    Put(Bytes),
    /// Somebody deleted it.
    Deleted,
    /// Its TTL ran out.
    Expired,
}

/// A key as it was read or watched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The key, without the bucket's prefix.
    pub key: String,
    /// The stream sequence of this change.
    pub revision: u64,
    /// Value or tombstone.
    pub value: Value,
    /// The bytes of a value; under a tombstone of lastgasp, the record that it ends.
    pub payload: Bytes,
    /// When the server stored it.
    pub stored_at: Timestamp,
}

/// What a watch yields.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// A key changed, or was found by the listing that begins every watch.
    Entry(Entry),
    /// Everything that was there when the watch began has been yielded.
    Listed,
}

/// One of the three buckets.
#[derive(Debug, Clone)]
pub struct Bucket {
    context: jetstream::Context,
    store: kv::Store,
}

impl Bucket {
    /// Opens a bucket and creates it if it is missing: history 1, file storage, TTLs by message.
    ///
    /// # Errors
    /// The server is not reachable, refuses, or the bucket has another shape.
    pub async fn open(context: &jetstream::Context, name: &'static str, replicas: usize) -> Result<Self, OpenError> {
        let unavailable = |source: async_nats::Error| OpenError::Unavailable { bucket: name, source };
        let store = match context.get_key_value(name).await {
            Ok(store) => store,
            // Two daemons may race here; the server accepts the same configuration twice.
            Err(_) => context
                .create_key_value(kv::Config {
                    bucket: name.to_owned(),
                    history: 1,
                    num_replicas: replicas,
                    storage: StorageType::File,
                    limit_markers: Some(MARKER_TTL),
                    ..kv::Config::default()
                })
                .await
                .map_err(|error| unavailable(error.into()))?,
        };
        Self::checked(context, name, store)
    }

    fn checked(context: &jetstream::Context, name: &'static str, store: kv::Store) -> Result<Self, OpenError> {
        if !store.stream.cached_info().config.allow_message_ttl {
            return Err(OpenError::NoMessageTtl { bucket: name });
        }
        Ok(Self { context: context.clone(), store })
    }

    /// Opens a bucket that is there, and makes nothing: `None` if there is none.
    ///
    /// # Errors
    /// As for [`Self::open`].
    pub async fn existing(context: &jetstream::Context, name: &'static str) -> Result<Option<Self>, OpenError> {
        let unavailable = |source: async_nats::Error| OpenError::Unavailable { bucket: name, source };
        match context.get_stream(format!("KV_{name}")).await {
            Ok(_) => {}
            Err(error) if is_missing(&error) => return Ok(None),
            Err(error) => return Err(unavailable(error.into())),
        }
        let store = context.get_key_value(name).await.map_err(|error| unavailable(error.into()))?;
        Self::checked(context, name, store).map(Some)
    }

    /// Writes a value and returns its revision. `ttl` is rounded to whole seconds, at least one.
    ///
    /// # Errors
    /// See [`WriteError`].
    pub async fn put(&self, key: &str, value: Bytes, expect: Expect, ttl: Duration) -> Result<u64, WriteError> {
        self.publish(key, PublishMessage::build().payload(value), expect, ttl).await
    }

    /// Writes a tombstone and returns its revision. The tombstone carries the record that it ends,
    /// so that a daemon that was restarted knows which life and epoch that was.
    ///
    /// # Errors
    /// See [`WriteError`].
    pub async fn delete(&self, key: &str, ended: Bytes, expect: Expect, ttl: Duration) -> Result<u64, WriteError> {
        self.publish(key, PublishMessage::build().payload(ended).header(OPERATION, "DEL"), expect, ttl).await
    }

    async fn publish(
        &self,
        key: &str,
        message: PublishMessage,
        expect: Expect,
        ttl: Duration,
    ) -> Result<u64, WriteError> {
        let sequence = match expect {
            Expect::Absent => 0,
            Expect::Revision(revision) => revision,
        };
        let message = message.expected_last_subject_sequence(sequence).ttl(ttl.max(Duration::from_secs(1)));
        let classify = |error: jetstream::context::PublishError| match error.kind() {
            PublishErrorKind::WrongLastSequence => WriteError::Mismatch,
            PublishErrorKind::TimedOut | PublishErrorKind::BrokenPipe | PublishErrorKind::StreamNotFound => {
                WriteError::Unknown(error.into())
            }
            _ => WriteError::Refused(error.into()),
        };
        let subject = format!("{}{key}", self.store.put_prefix.as_ref().unwrap_or(&self.store.prefix));
        let acknowledgement = self.context.send_publish(subject, message).await.map_err(classify)?;
        Ok(acknowledgement.await.map_err(classify)?.sequence)
    }

    /// What the stream's leader holds under `key`, or `None` if there is neither value nor tombstone.
    ///
    /// # Errors
    /// The leader did not answer.
    pub async fn read(&self, key: &str) -> Result<Option<Entry>, async_nats::Error> {
        let subject = format!("{}{key}", self.store.prefix);
        match self.store.stream.get_last_raw_message_by_subject(&subject).await {
            Ok(message) => {
                let header = |name: &str| message.headers.get(name).map(|value| value.as_str().to_owned());
                let deleted = matches!(header(OPERATION).as_deref(), Some("DEL" | "PURGE"));
                Ok(Some(Entry {
                    key: key.to_owned(),
                    revision: message.sequence,
                    value: match header(MARKER_REASON).as_deref() {
                        Some("MaxAge") => Value::Expired,
                        Some(_) => Value::Deleted,
                        None if deleted => Value::Deleted,
                        None => Value::Put(message.payload.clone()),
                    },
                    payload: message.payload,
                    stored_at: timestamp(message.time.unix_timestamp_nanos()),
                }))
            }
            Err(error) if matches!(error.kind(), LastRawMessageErrorKind::NoMessageFound) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Lists all keys that match `filter` (`>` for all, `<node>.*` for one node), then follows them.
    ///
    /// The stream must be polled in a task of its own: an unpolled watch has hung for ever after a
    /// server restart (nats.rs#1596). An error means "state unknown": drop it, wait, watch again.
    ///
    /// # Errors
    /// The consumer could not be created.
    pub async fn watch(
        &self,
        filter: &str,
    ) -> Result<impl Stream<Item = Result<Change, async_nats::Error>> + Send + Unpin + use<>, async_nats::Error> {
        let watch = self.store.watch_with_history(filter).await?;
        // async-nats says that the listing is over only with an entry. Where no key matches
        // there is none, so that case is asked of the server.
        let subjects = format!("{}{filter}", self.store.prefix);
        let empty = self.store.stream.info_with_subjects(subjects).await?.next().await.is_none();
        let mut listed = empty;
        let head = futures_util::stream::iter(empty.then_some(Ok(Change::Listed)));
        Ok(head.chain(watch.flat_map(move |entry| {
            let changes = match entry {
                Ok(entry) => {
                    let end = entry.seen_current && !listed;
                    listed |= entry.seen_current;
                    [Some(Ok(Change::Entry(convert(entry)))), end.then_some(Ok(Change::Listed))]
                }
                Err(error) => [Some(Err(error.into())), None],
            };
            futures_util::stream::iter(changes.into_iter().flatten())
        })))
    }
}

/// Whether a stream could not be had because there is none.
#[must_use]
pub fn is_missing(error: &GetStreamError) -> bool {
    matches!(error.kind(), GetStreamErrorKind::JetStream(error) if error.error_code() == ErrorCode::STREAM_NOT_FOUND)
}

fn convert(entry: kv::Entry) -> Entry {
    Entry {
        revision: entry.revision,
        stored_at: timestamp(entry.created.unix_timestamp_nanos()),
        value: match entry.operation {
            // An unknown marker arrives as a put without a value.
            kv::Operation::Put if !entry.value.is_empty() => Value::Put(entry.value.clone()),
            // async-nats maps the marker of an expiry to a purge; nothing of lastgasp purges.
            kv::Operation::Purge => Value::Expired,
            kv::Operation::Put | kv::Operation::Delete => Value::Deleted,
        },
        payload: entry.value,
        key: entry.key,
    }
}

fn timestamp(nanoseconds: i128) -> Timestamp {
    Timestamp::from_nanosecond(nanoseconds).unwrap_or(Timestamp::UNIX_EPOCH)
}

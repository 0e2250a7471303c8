//! How the buckets are read and written. All of lastgasp's writes go through here,
//! because three things are easily got wrong:
//!
//! * every change names the revision it expects, so that a late report about a dead
//!   worker cannot hit the one that was started in its place;
//! * records, tombstones and leases carry a message TTL, which the key-value calls of
//!   async-nats 0.51 drop on `update` and `delete` (a leased key would become permanent);
//! * after a mismatch the truth is asked of the stream's leader, since direct gets may be
//!   answered by a replica that is behind (nats-server#4162, #6557).

mod fault;
mod watch;

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use async_nats::HeaderMap;
use async_nats::jetstream;
use async_nats::jetstream::ErrorCode;
use async_nats::jetstream::context::{GetStreamError, GetStreamErrorKind, PublishErrorKind};
use async_nats::jetstream::message::PublishMessage;
use async_nats::jetstream::stream::{self, DiscardPolicy, LastRawMessageErrorKind, StorageType};
use bytes::Bytes;
use futures_util::{Stream, TryStreamExt};
use jiff::Timestamp;

pub use fault::{Fault, OLDEST_SERVER};
pub use watch::WatchError;

/// Header that tells a delete from a put (NATS ADR-8).
const OPERATION: &str = "KV-Operation";
/// Header that the server sets on a marker it placed itself (NATS ADR-43).
const MARKER_REASON: &str = "Nats-Marker-Reason";
/// How long the server keeps the marker of a key that expired. A watcher that was away
/// longer finds no key and no marker, which means "unknown".
const MARKER_TTL: Duration = Duration::from_secs(3600);

/// Longest wait for an acknowledgement, after which a write is read and tried again. async-nats 0.51 waits for 5 s by
/// itself, and a lease that lasts 6 s could not be renewed after a single one that was lost.
const ACKNOWLEDGEMENT: Duration = Duration::from_secs(2);

/// Each daemon is a consumer of two buckets, and each router of two. A stream that says nothing gets 1,000 from
/// nats-server 2.15 on (`default_max_consumers`; any number below 1 means that default too), and a router that is
/// started beyond that lists nobody.
const MAX_CONSUMERS: i32 = 100_000;

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
    /// It would be made without what the contract needs: an old server takes no notice of what it does not know.
    #[error("bucket {bucket} cannot be made by nats-server {version}, which has no message TTLs")]
    OldServer {
        /// Which bucket.
        bucket: &'static str,
        /// What the server says that it is.
        version: String,
    },
    /// The bucket exists, but does not keep what it is given as the contract says.
    #[error("bucket {bucket} {shape}; delete it (`nats kv del {bucket}`), and lastgasp makes it again")]
    Misshapen {
        /// Which bucket.
        bucket: &'static str,
        /// In which way.
        shape: Misshapen,
    },
}

impl OpenError {
    /// What is wrong.
    #[must_use]
    pub fn fault(&self) -> Fault {
        match self {
            Self::Unavailable { source, .. } => Fault::of(&**source),
            Self::OldServer { .. } => Fault::OldServer,
            Self::Misshapen { .. } => Fault::Misshapen,
        }
    }
}

/// What is wrong with the shape of a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Misshapen {
    /// Leases of dead nodes would never lapse.
    #[error("was made without per-message TTL (allow_msg_ttl)")]
    NoMessageTtl,
    /// Routers would not hear that a lease has lapsed.
    #[error("was made without markers for what expires (subject_delete_marker_ttl)")]
    NoMarkers,
    /// Living workers would vanish.
    #[error("forgets every record after a while (max_age)")]
    MaxAge,
    /// What stands under another key would push out a worker's record.
    #[error("holds only so many records (max_msgs)")]
    MaxMessages,
}

/// Something about a bucket that is not as it was asked for, and yet it can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Remark {
    /// It would survive fewer failures, or more, than the operator thinks.
    #[error("has {found} replicas, and {wanted} were asked for")]
    Replicas {
        /// What it has.
        found: usize,
        /// What was asked for.
        wanted: usize,
    },
    /// It keeps what nobody reads.
    #[error("keeps {0} values of each key, and lastgasp reads only the last one")]
    History(i64),
    /// Its records are gone when the server restarts; they are listed again then.
    #[error("lives in the server's memory, and is gone when the server restarts")]
    InMemory,
}

impl Remark {
    /// Under which trouble it is shown.
    #[must_use]
    pub const fn fault(self) -> Fault {
        match self {
            Self::Replicas { .. } => Fault::Replicas,
            Self::History(_) | Self::InMemory => Fault::Misshapen,
        }
    }
}

/// Why a write did not take effect, or may not have.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The key's last revision is another one. Read it and decide again.
    #[error("the key has changed since it was read")]
    Mismatch,
    /// Nobody takes it: the bucket was deleted, or its stream has no leader now. See [`Bucket::again`].
    #[error("no bucket takes the write: the bucket was deleted, or has no leader")]
    NoBucket,
    /// No acknowledgement came: the write may or may not have happened.
    #[error("no acknowledgement: {0}")]
    Unknown(async_nats::Error),
    /// The server refused it; the same write will be refused again.
    #[error("refused: {0}")]
    Refused(async_nats::Error),
}

impl WriteError {
    /// What is wrong, if it is not only that somebody else was faster.
    #[must_use]
    pub fn fault(&self) -> Option<Fault> {
        match self {
            Self::Mismatch => None,
            Self::NoBucket | Self::Unknown(_) => Some(Fault::NoAnswer),
            Self::Refused(error) => Some(Fault::of(&**error)),
        }
    }
}

/// Why a key could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The bucket was deleted. See [`Bucket::again`].
    #[error("the bucket was deleted")]
    NoBucket,
    /// The stream's leader did not answer.
    #[error("not read: {0}")]
    Unavailable(async_nats::Error),
}

impl ReadError {
    fn of(error: impl std::error::Error + Send + Sync + 'static) -> Self {
        match fault::server_code(&error) {
            Some(ErrorCode::STREAM_NOT_FOUND) => Self::NoBucket,
            _ => Self::Unavailable(error.into()),
        }
    }

    /// What is wrong.
    #[must_use]
    pub fn fault(&self) -> Fault {
        match self {
            Self::NoBucket => Fault::NoAnswer,
            Self::Unavailable(error) => Fault::of(&**error),
        }
    }
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
pub enum Content {
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
    /// A value or a tombstone.
    pub value: Content,
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
    name: &'static str,
    replicas: usize,
    /// It may be made again: see [`Self::again`].
    made: bool,
    stream: stream::Stream,
}

impl Bucket {
    /// Opens a bucket and creates it if it is missing: history 1, file storage, TTLs by message.
    ///
    /// # Errors
    /// The server is not reachable, refuses, or the bucket has another shape.
    pub async fn open(context: &jetstream::Context, name: &'static str, replicas: usize) -> Result<Self, OpenError> {
        // Two daemons may race here; the server accepts the same configuration twice.
        if let Some(bucket) = Self::existing(context, name).await? {
            return Ok(Self { replicas, made: true, ..bucket });
        }
        let (client, (major, minor)) = (context.client(), OLDEST_SERVER);
        if !client.is_server_compatible(i64::from(major), i64::from(minor), 0) {
            return Err(OpenError::OldServer { bucket: name, version: client.server_info().version });
        }
        let config = stream::Config { num_replicas: replicas, ..contract(name) };
        let unavailable = |source: async_nats::Error| OpenError::Unavailable { bucket: name, source };
        let stream = match context.create_stream(config.clone()).await {
            // The account has fewer. They may do: then the account says how many.
            Err(error) if fault::server_code(&error) == Some(ErrorCode::MAXIMUM_CONSUMERS_LIMIT) => {
                let config = stream::Config { max_consumers: 0, ..config };
                context.create_stream(config).await.map_err(|error| unavailable(error.into()))?
            }
            made => made.map_err(|error| unavailable(error.into()))?,
        };
        Ok(Self { context: context.clone(), name, replicas, made: true, stream })
    }

    /// Opens a bucket that is there, and makes nothing: `None` if there is none.
    ///
    /// # Errors
    /// As for [`Self::open`].
    pub async fn existing(context: &jetstream::Context, name: &'static str) -> Result<Option<Self>, OpenError> {
        let stream = match context.get_stream(format!("KV_{name}")).await {
            Ok(stream) => stream,
            Err(error) if is_missing(&error) => return Ok(None),
            Err(error) => return Err(OpenError::Unavailable { bucket: name, source: error.into() }),
        };
        check(stream.cached_info()).map_err(|shape| OpenError::Misshapen { bucket: name, shape })?;
        let replicas = stream.cached_info().config.num_replicas;
        Ok(Some(Self { context: context.clone(), name, replicas, made: false, stream }))
    }

    /// Makes the bucket again if it was deleted. A handle of the old one stands for the new one too. One that was
    /// opened by [`Self::existing`] is never made.
    ///
    /// # Errors
    /// As for [`Self::open`].
    pub async fn again(&self) -> Result<(), OpenError> {
        if self.made { Self::open(&self.context, self.name, self.replicas).await.map(drop) } else { Ok(()) }
    }

    /// Lets a bucket that an earlier version made, or a person, have as many consumers as one that is made now.
    /// A number that somebody has chosen stays.
    ///
    /// # Errors
    /// The server does not answer, or this user may not.
    pub async fn admit_consumers(&self) -> Result<(), async_nats::Error> {
        let config = &self.stream.cached_info().config;
        // Servers before 2.15 allow any number, and not all of them can change it.
        if config.max_consumers > 0 || !self.context.client().is_server_compatible(2, 15, 0) {
            return Ok(());
        }
        match self.context.update_stream(stream::Config { max_consumers: MAX_CONSUMERS, ..config.clone() }).await {
            // The account says how many.
            Err(error) if fault::server_code(&error) == Some(ErrorCode::MAXIMUM_CONSUMERS_LIMIT) => Ok(()),
            changed => Ok(changed.map(drop)?),
        }
    }

    /// The name, as `nats kv ls` shows it.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// Where a key is kept in the stream (NATS ADR-8).
    fn subject(&self, key: &str) -> String {
        format!("$KV.{}.{key}", self.name)
    }

    /// What is not as it was asked for, as of the opening.
    #[must_use]
    pub fn remarks(&self) -> Vec<Remark> {
        let config = &self.stream.cached_info().config;
        let replicas = Remark::Replicas { found: config.num_replicas, wanted: self.replicas };
        [
            (config.num_replicas != self.replicas).then_some(replicas),
            (config.max_messages_per_subject != 1).then_some(Remark::History(config.max_messages_per_subject)),
            (config.storage == StorageType::Memory).then_some(Remark::InMemory),
        ]
        .into_iter()
        .flatten()
        .collect()
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
            PublishErrorKind::StreamNotFound => WriteError::NoBucket,
            PublishErrorKind::TimedOut | PublishErrorKind::BrokenPipe => WriteError::Unknown(error.into()),
            _ => match fault::server_code(&error) {
                // Of servers in a cluster, while another write to the key is under way.
                Some(ErrorCode::STREAM_WRONG_LAST_SEQUENCE_CONSTANT) => WriteError::Mismatch,
                Some(
                    ErrorCode::STREAM_EXPECTED_LAST_SEQ_PER_SUBJECT_NOT_READY | ErrorCode::STREAM_TOO_MANY_REQUESTS,
                ) => WriteError::Unknown(error.into()),
                _ => WriteError::Refused(error.into()),
            },
        };
        let subject = self.subject(key);
        let acknowledgement = self.context.send_publish(subject, message).await.map_err(classify)?;
        match tokio::time::timeout(ACKNOWLEDGEMENT, acknowledgement.into_future()).await {
            Ok(acknowledgement) => Ok(acknowledgement.map_err(classify)?.sequence),
            Err(late) => Err(WriteError::Unknown(late.into())),
        }
    }

    /// What the stream's leader holds under `key`, or `None` if there is neither value nor tombstone.
    ///
    /// # Errors
    /// See [`ReadError`].
    pub async fn read(&self, key: &str) -> Result<Option<Entry>, ReadError> {
        let subject = self.subject(key);
        match self.stream.get_last_raw_message_by_subject(&subject).await {
            Ok(message) => Ok(Some(Entry {
                key: key.to_owned(),
                revision: message.sequence,
                value: value(&message.headers, &message.payload),
                payload: message.payload,
                stored_at: timestamp(message.time.unix_timestamp_nanos()),
            })),
            Err(error) if matches!(error.kind(), LastRawMessageErrorKind::NoMessageFound) => Ok(None),
            Err(error) => Err(ReadError::of(error)),
        }
    }

    /// The keys that match `filter` and hold a value or a tombstone.
    ///
    /// # Errors
    /// See [`ReadError`].
    pub async fn keys(&self, filter: &str) -> Result<Vec<String>, ReadError> {
        let subjects = self.subject(filter);
        let found = self.stream.info_with_subjects(subjects).await.map_err(ReadError::of)?;
        let found: Vec<(String, usize)> = found.try_collect().await.map_err(ReadError::of)?;
        let prefix = self.subject("");
        let key = |subject: &str| subject.strip_prefix(&prefix).map(str::to_owned);
        Ok(found.iter().filter_map(|(subject, _)| key(subject)).collect())
    }

    /// Lists all keys that match `filter` (`>` for all, `<node>.*` for one node), then follows them.
    ///
    /// The stream must be polled in a task of its own. An error means "state unknown" and is the last
    /// item: drop it, wait ([`backoff`]), watch again. The server forgets it by itself.
    ///
    /// # Errors
    /// The consumer could not be created.
    pub async fn watch(
        &self,
        filter: &str,
    ) -> Result<impl Stream<Item = Result<Change, WatchError>> + Send + Unpin + use<>, async_nats::Error> {
        watch::begin(&self.context, &format!("KV_{}", self.name), &self.subject(""), filter).await
    }
}

/// How long to wait before attempt number `attempts`, from 0: doubling from 100 ms to 5 s, each time
/// between half and the whole of it, so that those who lost the server together come back apart.
#[must_use]
pub fn backoff(attempts: u32) -> Duration {
    const SHORTEST: Duration = Duration::from_millis(100);
    const LONGEST: Duration = Duration::from_secs(5);
    let most = (SHORTEST * 2u32.pow(attempts.min(8))).min(LONGEST);
    let share = RandomState::new().hash_one(attempts) % 1000;
    most / 2 + most / 2000 * u32::try_from(share).unwrap_or(0)
}

/// A pause between things that are done for ever, up to a tenth shorter than `most`: those who lost the
/// server together must not come to it together from then on.
#[must_use]
pub fn jittered(most: Duration) -> Duration {
    let share = RandomState::new().hash_one(most) % 1000;
    most - most / 10_000 * u32::try_from(share).unwrap_or(0)
}

fn check(info: &stream::Info) -> Result<(), Misshapen> {
    let config = &info.config;
    if !config.allow_message_ttl {
        return Err(Misshapen::NoMessageTtl);
    }
    if config.subject_delete_marker_ttl.is_none_or(|ttl| ttl.is_zero()) {
        return Err(Misshapen::NoMarkers);
    }
    if !config.max_age.is_zero() {
        return Err(Misshapen::MaxAge);
    }
    if config.max_messages > 0 {
        return Err(Misshapen::MaxMessages);
    }
    Ok(())
}

/// What a message of a bucket's stream says about its key.
fn value(headers: &HeaderMap, payload: &Bytes) -> Content {
    let deleted = headers.get(OPERATION).is_some_and(|operation| matches!(operation.as_str(), "DEL" | "PURGE"));
    if deleted {
        Content::Deleted
    } else if headers.get(MARKER_REASON).is_some() {
        // Nobody's word but the server's: nothing is known of the worker.
        Content::Expired
    } else if payload.is_empty() {
        Content::Deleted
    } else {
        Content::Put(payload.clone())
    }
}

/// The stream of a bucket (NATS ADR-8), as the key-value calls of async-nats 0.51 make it, but for the consumers.
fn contract(name: &str) -> stream::Config {
    stream::Config {
        name: format!("KV_{name}"),
        subjects: vec![format!("$KV.{name}.>")],
        max_messages_per_subject: 1,
        max_consumers: MAX_CONSUMERS,
        max_messages: -1,
        max_bytes: -1,
        max_message_size: -1,
        discard: DiscardPolicy::New,
        storage: StorageType::File,
        allow_rollup: true,
        allow_direct: true,
        deny_delete: true,
        allow_message_ttl: true,
        subject_delete_marker_ttl: Some(MARKER_TTL),
        ..stream::Config::default()
    }
}

/// Whether a stream could not be had because there is none.
#[must_use]
pub fn is_missing(error: &GetStreamError) -> bool {
    matches!(error.kind(), GetStreamErrorKind::JetStream(error) if error.error_code() == ErrorCode::STREAM_NOT_FOUND)
}

fn timestamp(nanoseconds: i128) -> Timestamp {
    Timestamp::from_nanosecond(nanoseconds).unwrap_or(Timestamp::UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_are_spread_and_bounded() {
        for attempts in 0..100 {
            let wait = backoff(attempts);
            assert!(wait >= Duration::from_millis(50) && wait <= Duration::from_secs(5), "{wait:?}");
        }
        assert!(backoff(40) >= Duration::from_millis(2500));
        for _ in 0..100 {
            let pause = jittered(Duration::from_secs(10));
            assert!(pause > Duration::from_secs(9) && pause <= Duration::from_secs(10), "{pause:?}");
        }
    }

    #[test]
    fn only_a_daemons_own_word_is_a_withdrawal() {
        let with = |name: &'static str, value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(name, value);
            headers
        };
        let record = Bytes::from_static(b"{}");
        assert_eq!(value(&HeaderMap::new(), &record), Content::Put(record.clone()));
        assert_eq!(value(&with(OPERATION, "DEL"), &record), Content::Deleted);
        assert_eq!(value(&with(OPERATION, "PURGE"), &Bytes::new()), Content::Deleted);
        for reason in ["MaxAge", "Purge", "Remove", "something new"] {
            assert_eq!(value(&with(MARKER_REASON, reason), &Bytes::new()), Content::Expired);
        }
    }
}

//! Why a request left a worker, and why a stream could not go on: closed lists, used verbatim in
//! metrics, logs and the client's error.

use crate::continuation::{Broken, Unmovable};
use crate::workers::Why;
use lastgasp_protocol::ClosedName as _;

/// Why a request left a worker; label `reason` of moves and retries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leaving {
    /// NATS said so.
    Signalled(Why),
    /// The worker's own bytes did.
    Broken(Broken),
    /// The router saw it.
    Seen(Seen),
}

/// What the router itself saw of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum Seen {
    /// The connection broke.
    ConnectionBroken,
    /// It was silent for `--stall-timeout`, and did not answer when asked how it is.
    Stalled,
    /// Its node's lease lapsed, the stream was silent, and it did not answer when asked how it is.
    LeaseLapsed,
    /// It answered with a status that is its own fault, or says "not now".
    Status,
    /// A request without a stream failed there before it was answered.
    Unary,
}

impl Leaving {
    /// The closed name of the reason.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Signalled(why) => why.as_str(),
            Self::Broken(broken) => broken.as_str(),
            Self::Seen(seen) => seen.as_str(),
        }
    }
}

/// Why a stream ended with an error; label `reason` of failed moves and `code` of the client's error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MoveFailure {
    /// Its nature forbids it.
    Unmovable(Unmovable),
    /// There was no way to.
    Unable(Unable),
}

/// Why the router could not continue a stream that may be continued.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr, strum::VariantNames, strum::VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum Unable {
    /// No other worker has the model, within `--wait-for-worker`.
    NoWorker,
    /// The next worker refused the continuation.
    RefusedByWorker,
    /// `--max-retries` more workers were tried, and not one gave a first chunk.
    RetriesExhausted,
    /// `--migration-limit` is 0.
    MigrationOff,
    /// It was moved `--migration-limit` times.
    LimitReached,
}

impl MoveFailure {
    /// The closed name of the reason.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unmovable(reason) => reason.as_str(),
            Self::Unable(reason) => reason.as_str(),
        }
    }
}

//! Why a request left a worker, and why a stream could not go on: closed lists, used verbatim in
//! metrics, logs and the client's error.

use crate::continuation::{Broken, Unmovable};
use crate::workers::Why;

/// Why a request left a worker; label `reason` of moves and retries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leaving {
    /// NATS said so.
    Signalled(Why),
    /// The worker's own bytes did.
    Broken(Broken),
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
    /// The metric label.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Signalled(why) => why.as_str(),
            Self::Broken(broken) => broken.as_str(),
            Self::ConnectionBroken => "connection_broken",
            Self::Stalled => "stalled",
            Self::LeaseLapsed => "lease_lapsed",
            Self::Status => "status",
            Self::Unary => "unary",
        }
    }
}

/// Why a stream ended with an error; label `reason` of failed moves and `code` of the client's error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MoveFailure {
    /// Its nature forbids it.
    Unmovable(Unmovable),
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
    /// The metric label.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Unmovable(reason) => reason.as_str(),
            Self::NoWorker => "no_worker",
            Self::RefusedByWorker => "refused_by_worker",
            Self::RetriesExhausted => "retries_exhausted",
            Self::MigrationOff => "migration_off",
            Self::LimitReached => "limit_reached",
        }
    }
}

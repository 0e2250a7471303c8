//! What the end-to-end tests, the demo and the benchmark start and observe.
//!
//! [`model`] is the pure part: what the mock engine says, to the token. The `mock-engine` binary
//! wraps it into the processes, sockets and failures of a real engine. The rest starts real
//! programs ([`nats`], [`engine`], [`daemon`], [`router`]), looks at what they do ([`client`],
//! [`discovery`]) and holds it against what they should do ([`reference`]).
//!
//! Nothing in this crate is part of the product, and nothing of the product may depend on it. It
//! ends only processes that it started itself, and talks to loopback only.

#![forbid(unsafe_code)]

pub mod binaries;
pub mod browser;
pub mod client;
pub mod daemon;
pub mod discovery;
pub mod distribution;
pub mod engine;
mod error;
pub mod etcd;
pub mod kernel_objects;
pub mod matrix;
pub mod model;
pub mod nats;
pub mod process;
pub mod proxy;
pub mod ready;
pub mod reference;
pub mod router;
pub mod shape;
pub mod skipped;
#[cfg(test)]
mod skipped_tests;
pub mod systems;
pub mod user;

pub use error::HarnessError;

/// Ends the running test, which then counts as skipped: says what this machine lacks, as `format!` does, and
/// returns.
#[macro_export]
macro_rules! skip {
    ($($lacking:tt)+) => {{
        $crate::skipped::here(&format!($($lacking)+));
        return;
    }};
}

//! What the core decided, carried out: concurrently, and retried as state
//! ("this life must not be listed"), never as a queue of past events.

pub mod actions;
pub(crate) mod deaths;
pub mod discovery;
pub mod lease;
pub mod nats;
pub(crate) mod sever;
pub mod signals;
pub mod troubles;

//! What the end-to-end tests, the demo and the benchmark start and observe.
//!
//! [`model`] is the pure part: what the mock engine says, to the token. The
//! `mock-engine` binary wraps it into the processes, sockets and failures of a real
//! engine.
//!
//! Nothing in this crate is part of the product, and nothing of the product may depend
//! on it. It ends only processes that it started itself, and talks to loopback only.

#![forbid(unsafe_code)]

pub mod model;
pub mod ready;

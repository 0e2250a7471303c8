//! What lastgasp may do, what it does without, and what `lastgasp doctor` says of it.
//!
//! They need root, to become others with less; setpriv of util-linux; a nats-server; and the
//! binaries `lastgasp` and `mock-engine`. `cargo xtask test` sees to all of it.

mod degradation;
mod doctor;
mod dropped;
mod measured;
mod priority;
mod scene;

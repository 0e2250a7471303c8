//! Infera's routers, its wrappers and its discovery, as stand-ins that were written from what is
//! known of it (Infera at 5890f7f), on a real nats-server and a real etcd. What is sent is compared
//! byte for byte.
//!
//! Those that need etcd are ignored unless asked for; `cargo xtask test` asks.
#![forbid(unsafe_code)]

mod etcd;
mod frames;
#[path = "../notifications.rs"]
mod notifications;
mod records;
mod sink;
mod standin;

//! Dynamo's discovery, in a real etcd and in a folder, with records as ai-dynamo 1.6.1 writes them, and
//! with processes that listen where these say. The real thing stands in `tests/peers/`.
//!
//! Those that need etcd are ignored unless asked for; `cargo xtask test` asks.
#![forbid(unsafe_code)]

mod etcd;
mod folder;
#[path = "../notifications.rs"]
mod notifications;
mod scene;

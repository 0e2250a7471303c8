//! `lastgasp-router`: an OpenAI-compatible streaming router that takes its workers from
//! the discovery contract of lastgasp, and continues a token stream on another worker when
//! its own is lost.
//!
//! [`continuation`] is the part that another router may take: pure, fed with bytes. The rest
//! is an HTTP server around it. It must never let a seam pass silently: a stream goes on
//! without a missing or repeated token, or it ends with a visible error.
#![forbid(unsafe_code)]

pub mod app;
pub mod cli;
pub mod config;
pub mod connections;
pub mod continuation;
mod errors;
pub mod introspect;
mod memory;
pub mod metrics;
pub mod nats;
mod open_files;
pub mod paths;
pub mod proxy;
pub mod server;
pub mod threads;
pub mod tls;
pub mod workers;

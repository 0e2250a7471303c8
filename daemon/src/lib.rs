//! The lastgasp daemon: one per node. It watches the engine processes of that node, decides once
//! whether a worker is gone, withdraws it from discovery and tells routers to move its streams.
//!
//! Data flows one way, and so do the folders:
//! [`sensors`] report evidence, the [`core`] decides, [`effects`] are carried out, and
//! [`supervisor`] is the loop that joins them. Everything else serves people.
//!
//! It must never withdraw a worker on soft evidence alone, never touch another node's records,
//! and never let NATS or a health channel that fails be taken for an engine that fails.
#![deny(unsafe_code)]

pub mod cli;
pub mod config;
pub mod core;
pub mod doctor;
pub mod effects;
mod engines;
mod fault;
mod https;
mod log;
pub mod losses;
pub mod metrics;
mod network;
pub mod notify;
mod open_files;
pub mod privileges;
pub mod processes;
pub mod sensors;
mod status;
pub mod supervisor;

//! Sensors report [`crate::core::Evidence`]. They never decide.

pub mod ebpf;
pub mod gpus;
pub mod health;
pub mod kmsg;
pub(crate) mod kubelet;
pub mod pidfd;
pub mod proc;
mod sys;

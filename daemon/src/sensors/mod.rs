//! Sensors report [`crate::core::Evidence`]. They never decide.

pub mod ebpf;

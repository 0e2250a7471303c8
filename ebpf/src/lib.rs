//! What the kernel programs and user space agree on: the events, the maps'
//! keys and values, and the names of programs, maps and globals.
//!
//! Everything here is plain data with a layout that is asserted when it is
//! compiled, for either side. It must never decide anything, allocate, or
//! depend on a kernel version.
//!
//! The programs themselves are the binary `lastgasp-probes`, built for the BPF
//! target by `cargo xtask build-ebpf`.
#![no_std]
#![cfg_attr(not(feature = "user"), forbid(unsafe_code))]

mod event;
mod maps;
pub mod names;
#[cfg(feature = "user")]
mod user;

pub use event::{COMM_BYTES, Event, EventFlags, EventKind, NO_SLOT};
pub use maps::{
    EVENTS_BYTES, ListenerKey, NANOS_PER_TICK, PORT_WORDS, RESET_WINDOW, ResetKey, ResetWindow, SignalledKey,
    WATCHED_MAX, Watched, port_bit, start_ticks,
};

//! The kernel's part of the sensors: loads the programs of `lastgasp-ebpf`,
//! tells them whom to watch, and hands their events on.
//!
//! eBPF makes deaths known early and tells their cause; it is never the truth.
//! Losing all of it must cost latency only, see [`crate::sensors`].
//!
//! [`KernelPrograms`] holds what is in the kernel and dies with it: nothing is pinned.
//! [`Events`] is the stream of what happened.
//!
//! ```text
//! /sys/kernel/btf/vmlinux ──btf──▶ offsets ──Plan──▶ loader ──▶ KernelPrograms, Ring ──▶ Events
//! ```

pub mod btf;
mod events;
mod loader;
mod lockdown;
mod object;
mod offsets;
mod poll;
mod program;

pub use events::{Drained, Events, Ring};
pub use loader::{EbpfError, KernelPrograms, LoadOptions, MapAccess};
pub use lockdown::Lockdown;
pub use object::OBJECT_VARIABLE;
pub use offsets::Plan;
pub use program::{KernelProgram, OffReason, ProgramState};

/// Where the kernel describes its own types.
pub const KERNEL_BTF: &str = "/sys/kernel/btf/vmlinux";

//! The kernel programs on the running kernel, as stories.
//!
//! Needs root (or `CAP_BPF`, `CAP_PERFMON` and what the single story needs):
//! `cargo test -p lastgasp-tests --test kernel`. With `LASTGASP_EBPF_OBJECT` set
//! it tests that object file instead of the embedded one.
#![forbid(unsafe_code)]

mod harness;

mod exec;
mod exit;
mod fork;
mod freezer;
mod kmsg;
mod listener;
mod loading;
mod loss;
mod oom;
mod rename;
mod reset;
mod residue;
mod sender;
mod signal;
mod storm;

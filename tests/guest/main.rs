//! What only a machine of its own can show: memory that runs out, a frozen cgroup, a locked-down
//! kernel, a clock that is set, a machine that sleeps. Whole stories, with a real nats-server.
//!
//! They change the machine that they run on, so they run in QEMU only: `cargo xtask test-kernels`.
#![forbid(unsafe_code)]

mod cgroup;
mod scene;

mod clock;
mod freezer;
mod lockdown;
mod oom;
mod suspend;

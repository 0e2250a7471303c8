//! What the daemon and the router ask of the kernel for their own process: to be scheduled soon, and to
//! open many files.
//!
//! Each of these may be refused, and then both go on without it: nothing here ever ends a process.
#![deny(unsafe_code)]

pub mod open_files;
pub mod priority;

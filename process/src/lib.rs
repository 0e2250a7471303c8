//! What the daemon and the router have in common: the catalogue of their metrics, and what they ask of the kernel for
//! their own process: to be scheduled soon, to open many files, and to write a log that nobody may read.
//!
//! Each of the latter may be refused, and then both go on without it: nothing here ever ends a process.
#![deny(unsafe_code)]

pub mod catalogue;
pub mod log;
pub mod open_files;
pub mod priority;

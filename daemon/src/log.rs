//! The log goes to standard error. That it cannot be written, because a disk is full or its reader is
//! gone, is counted and is no reason to end.

use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};

static LOST: AtomicU64 = AtomicU64::new(0);

/// Standard error, where no write fails.
#[derive(Debug)]
pub struct Stderr;

impl Write for Stderr {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if io::stderr().write_all(line).is_err() {
            LOST.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// An error and what caused it, as people are told of it.
#[must_use]
pub fn with_cause(error: &dyn std::error::Error) -> String {
    error.source().map_or_else(|| error.to_string(), |cause| format!("{error}: {cause}"))
}

/// How many lines could not be written since this was asked last.
#[must_use]
pub fn take_lost() -> u64 {
    LOST.swap(0, Ordering::Relaxed)
}

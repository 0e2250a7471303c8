//! The log, and how it says what went wrong.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use caps::CapSet;
use lastgasp_process::log::{self, Flush};
use tracing_appender::non_blocking::NonBlocking;

/// Lost lines that the log has mentioned.
static TAKEN: AtomicU64 = AtomicU64::new(0);

/// Starts the thread that writes the log. It holds no capability, whatever this process keeps: a thread has
/// those of the one that started it.
///
/// # Errors
/// There can be no further thread.
pub(crate) fn start() -> io::Result<(NonBlocking, Flush)> {
    let start = || {
        for set in [CapSet::Ambient, CapSet::Effective, CapSet::Permitted, CapSet::Inheritable] {
            // Less is always permitted; kernels without ambient capabilities have none to clear.
            let _ = caps::clear(None, set);
        }
        log::start()
    };
    let started = thread::Builder::new().name("lastgasp-log".to_owned()).spawn(start)?;
    started.join().map_err(|_| io::Error::other("no thread for the log"))
}

/// An error and what caused it, as people read it.
#[must_use]
pub(crate) fn with_cause(error: &dyn std::error::Error) -> String {
    error.source().map_or_else(|| error.to_string(), |cause| format!("{error}: {cause}"))
}

/// How many lines were lost since this was asked last.
#[must_use]
pub(crate) fn take_lost() -> u64 {
    let lost = log::lost();
    lost - TAKEN.swap(lost, Ordering::Relaxed).min(lost)
}

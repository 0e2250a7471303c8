//! The log goes to standard error, by a thread of its own: who logs a line never waits for its reader. A
//! reader that stands still, as a log collector on a sick node may, costs lines, which are counted. So does
//! a line that cannot be written, because a disk is full or the reader is gone.

use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{OnceLock, mpsc};
use std::time::Duration;

use tracing_appender::non_blocking::{ErrorCounter, NonBlocking, NonBlockingBuilder, WorkerGuard};

/// Lines that wait for their reader, at the most. A line has some hundred bytes.
const MAX_WAITING: usize = 4096;
/// How long the end of the process waits for the reader, at the most.
const PATIENCE: Duration = Duration::from_secs(1);

/// Lines for which there was no room.
static DROPPED: OnceLock<ErrorCounter> = OnceLock::new();
/// Lines that could not be written.
static FAILED: AtomicU64 = AtomicU64::new(0);

/// Standard error, where no write fails.
#[derive(Debug)]
struct Stderr;

impl Write for Stderr {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if io::stderr().write_all(line).is_err() {
            FAILED.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Dropped, it waits until the lines that are there are written, for a bounded time.
#[derive(Debug)]
pub struct Flush(Option<WorkerGuard>);

impl Drop for Flush {
    fn drop(&mut self) {
        // The guard's own wait is bounded, and its complaint on standard output is not.
        let guard = self.0.take();
        within_patience(move || drop(guard));
    }
}

/// Starts the thread that writes, once in a process. It has the capabilities of the calling thread.
///
/// # Panics
/// There can be no further thread.
#[must_use]
pub fn start() -> (NonBlocking, Flush) {
    let builder = NonBlockingBuilder::default().lossy(true).buffered_lines_limit(MAX_WAITING);
    let (lines, guard) = builder.thread_name("lastgasp-log").finish(Stderr);
    let _ = DROPPED.set(lines.error_counter());
    (lines, Flush(Some(guard)))
}

/// How many lines nobody will read, since the start.
#[must_use]
pub fn lost() -> u64 {
    let dropped = DROPPED.get().map_or(0, ErrorCounter::dropped_lines);
    FAILED.load(Ordering::Relaxed) + dropped as u64
}

/// Writes to standard error what a process says at its end, and waits for that for a bounded time.
pub fn last_words(text: String) {
    within_patience(move || {
        let _ = Stderr.write_all(text.as_bytes());
    });
}

/// Does something that may never end, and waits for the end no longer than that.
fn within_patience(act: impl FnOnce() + Send + 'static) {
    let (done, ended) = mpsc::channel();
    let thread = std::thread::Builder::new().spawn(move || {
        act();
        let _ = done.send(());
    });
    if thread.is_ok() {
        let _ = ended.recv_timeout(PATIENCE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_never_ends_is_not_waited_for() {
        let (_never, waits) = mpsc::channel::<()>();
        within_patience(move || _ = waits.recv());
    }
}

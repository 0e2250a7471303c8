//! What a person sees while a bench runs.

use std::io::{IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

/// Between two lines for someone who reads a log.
const SELDOM: Duration = Duration::from_secs(10);

/// How far a part of a bench is, on standard error.
pub(crate) struct Progress {
    what: String,
    of: usize,
    done: usize,
    begin: Instant,
    shown: Instant,
}

impl Progress {
    /// `what` has so many steps.
    pub(crate) fn begin(what: &str, of: usize) -> Self {
        let now = Instant::now();
        let progress = Self { what: what.to_owned(), of, done: 0, begin: now, shown: now };
        progress.tell();
        progress
    }

    /// One more.
    pub(crate) fn step(&mut self) {
        self.done += 1;
        let terminal = std::io::stderr().is_terminal();
        if terminal || self.shown.elapsed() > SELDOM || self.done == self.of {
            self.shown = Instant::now();
            self.tell();
        }
    }

    fn tell(&self) {
        let Self { what, of, done, begin, shown: _ } = self;
        let mut error = std::io::stderr().lock();
        let (start, end) = if error.is_terminal() { ("\r\x1b[K", "") } else { ("", "\n") };
        let _ = write!(error, "{start}  {what}: {done} of {of}, {} s{end}", begin.elapsed().as_secs());
        let _ = error.flush();
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if std::io::stderr().is_terminal() {
            eprintln!();
        }
    }
}

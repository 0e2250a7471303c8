//! Room for what must be opened at any moment: a file of `/proc`, a connection to NATS or to an engine.
//!
//! pidfds are the one thing that a daemon has many of and can do without, so a new one is opened only where
//! it leaves what the rest may need. Those that are open stay when more workers declare themselves.

use std::sync::Arc;

/// For what belongs to no worker: probes, NATS, status (up to 64 clients over HTTP), logs, `/proc`.
const OTHERS: u64 = 160;
/// For each worker: connections to its health, and what is open while it is withdrawn.
const EACH_WORKER: u64 = 4;

/// The limit of open files (`RLIMIT_NOFILE`), and how many of them pidfds have.
#[derive(Debug)]
pub(crate) struct OpenFiles {
    limit: u64,
    /// One more than there are [`Place`]s.
    places: Arc<()>,
}

/// One pidfd may be open for as long as this is held.
#[derive(Debug)]
pub(crate) struct Place {
    _place: Arc<()>,
}

/// No daemon can do its work with so few.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "at most {limit} files may be open, and {need} are needed at least: raise the hard limit (LimitNOFILE= in the unit, \
     `ulimit -Hn` in a shell, --ulimit nofile= for a container) to {need} or more"
)]
pub struct TooFew {
    limit: u64,
    need: u64,
}

impl OpenFiles {
    /// Raises the soft limit to the hard one.
    ///
    /// # Errors
    /// There is no room for so many workers, even without any pidfd.
    pub(crate) fn raise(workers: usize) -> Result<Self, TooFew> {
        let limit = lastgasp_process::open_files::raise().unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot raise the limit of open files");
            u64::MAX
        });
        let files = Self::of(limit);
        let need = need(workers);
        if files.limit < need { Err(TooFew { limit: files.limit, need }) } else { Ok(files) }
    }

    fn of(limit: u64) -> Self {
        Self { limit, places: Arc::new(()) }
    }

    /// A place for one more pidfd, if so many workers leave it.
    #[must_use]
    pub(crate) fn place(&self, workers: usize) -> Option<Place> {
        let others = Arc::strong_count(&self.places).saturating_sub(1);
        let room = self.limit.saturating_sub(need(workers));
        (u64::try_from(others).is_ok_and(|others| others < room)).then(|| Place { _place: Arc::clone(&self.places) })
    }
}

fn need(workers: usize) -> u64 {
    OTHERS.saturating_add(EACH_WORKER.saturating_mul(u64::try_from(workers).unwrap_or(u64::MAX)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pidfds_have_what_is_left_over() {
        let files = OpenFiles::of(need(2) + 2);
        let first = files.place(2).unwrap();
        let _second = files.place(2).unwrap();
        assert!(files.place(2).is_none());
        drop(first);
        assert!(files.place(3).is_none(), "a third worker needs more than that");
        assert!(files.place(2).is_some());
    }

    #[test]
    fn what_is_too_few_is_said_with_what_is_needed() {
        let text = TooFew { limit: 100, need: need(1) }.to_string();
        assert!(
            text.contains("at most 100") && text.contains("LimitNOFILE=") && text.contains("164 or more"),
            "{text}"
        );
    }
}

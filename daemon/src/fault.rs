//! Where a test may stop the daemon: after each thing that others can see.
//!
//! A debug build that is started with `LASTGASP_STOP_AFTER=<n>` kills itself at the n-th such
//! point, as SIGKILL would: nothing is flushed and nothing is sent. A release build has no such points.

/// Something was carried out.
#[cfg(debug_assertions)]
pub(crate) fn point(what: &str) {
    use std::sync::LazyLock;
    use std::sync::atomic::{AtomicU64, Ordering};

    static STOP_AFTER: LazyLock<Option<u64>> =
        LazyLock::new(|| std::env::var("LASTGASP_STOP_AFTER").ok()?.parse().ok());
    static PASSED: AtomicU64 = AtomicU64::new(0);
    if let Some(stop_after) = *STOP_AFTER
        && PASSED.fetch_add(1, Ordering::Relaxed) + 1 == stop_after
    {
        eprintln!("stopped after {what}");
        let _ = nix::sys::signal::raise(nix::sys::signal::Signal::SIGKILL);
    }
}

/// Something was carried out.
#[cfg(not(debug_assertions))]
pub(crate) const fn point(_what: &str) {}

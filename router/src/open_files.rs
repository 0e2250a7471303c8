//! Room for as many connections as the router promises.

use tracing::{debug, warn};

use crate::cli::Args;

/// For what is neither a client's connection nor a worker's: NATS, listeners, files, probes.
const OTHERS: u64 = 128;
/// What a thread that serves has open: its epoll, what wakes it, signals.
const EACH_THREAD: usize = 4;

/// Raises the limit, and warns if it is too low all the same.
pub(crate) fn raise(args: &Args) {
    match lastgasp_process::open_files::raise() {
        Ok(limit) => {
            debug!(limit, "open files");
            if let Some(text) = too_few(limit, args) {
                warn!("{text}");
            }
        }
        Err(error) => warn!(%error, "cannot raise the limit of open files"),
    }
}

/// What is wrong with this limit, and how it is put right.
fn too_few(limit: u64, args: &Args) -> Option<String> {
    let Args { max_connections: clients, max_requests: requests, threads, .. } = args;
    let count = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
    // Every request under way has a connection to a worker besides that of its client.
    let of_threads = count(threads.get().saturating_mul(EACH_THREAD));
    let need = count(*clients).saturating_add(count(*requests)).saturating_add(of_threads).saturating_add(OTHERS);
    (limit < need).then(|| {
        format!(
            "at most {limit} files may be open, and --max-connections {clients} with --max-requests {requests} need \
             {need}: raise the hard limit (LimitNOFILE={need} in the unit, --ulimit nofile={need} for the container), \
             or lower them"
        )
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[test]
    fn a_hard_limit_that_is_too_low_is_said_with_what_is_needed() {
        let args = Args::parse_from([
            "lastgasp-router",
            "--max-connections",
            "1000",
            "--max-requests",
            "500",
            "--threads",
            "2",
        ]);
        assert_eq!(too_few(1636, &args), None);
        let text = too_few(1635, &args).unwrap();
        for part in ["--max-connections 1000", "--max-requests 500", "LimitNOFILE=1636"] {
            assert!(text.contains(part), "{text}");
        }
        let boundless = Args { max_requests: usize::MAX, ..args };
        assert!(too_few(u64::MAX - 1, &boundless).is_some());
    }
}

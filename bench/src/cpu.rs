//! What processes use of the machine.

use std::time::Duration;

/// A process and its children.
fn tree(pid: u32) -> Vec<u32> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let below = children.split_whitespace().filter_map(|child| child.parse().ok()).flat_map(tree);
    std::iter::once(pid).chain(below).collect()
}

/// What the threads that a process has now have run so far (`/proc/PID/task/TID/schedstat`, in
/// nanoseconds).
pub(crate) fn time(pid: u32) -> Duration {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let stats = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("schedstat")).ok());
    Duration::from_nanos(stats.filter_map(|stat| stat.split(' ').next()?.parse::<u64>().ok()).sum())
}

/// The same, with its children.
pub(crate) fn time_of_tree(pid: u32) -> Duration {
    tree(pid).into_iter().map(time).sum()
}

/// Memory that is its own (`Pss` of `/proc/PID/smaps_rollup`), in bytes, its children's included.
pub(crate) fn memory(pid: u32) -> u64 {
    let of = |pid: u32| {
        let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("Pss:"));
        line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()).unwrap_or_default() * 1024
    };
    tree(pid).into_iter().map(of).sum()
}

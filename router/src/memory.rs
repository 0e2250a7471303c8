//! How much memory the router may use.

use std::path::{Path, PathBuf};

/// Where nothing says how much there is.
const UNKNOWN: usize = 1024 * 1024 * 1024;

/// Bytes: the machine's, or fewer if a cgroup of the router has a limit.
#[must_use]
pub fn usable() -> usize {
    let machine = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| total(&text)).unwrap_or(UNKNOWN);
    let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    limit(Path::new("/sys/fs/cgroup"), &own).map_or(machine, |limit| limit.min(machine))
}

/// `MemTotal` of `/proc/meminfo`, proc(5).
fn total(meminfo: &str) -> Option<usize> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()?.checked_mul(1024)
}

/// The lowest `memory.max` from the cgroup that `/proc/self/cgroup` names up to the root. In a container the root
/// may be the container's own.
fn limit(root: &Path, own: &str) -> Option<usize> {
    let path = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let at: PathBuf = root.join(path);
    let limits = at.ancestors().take_while(|folder| folder.starts_with(root));
    limits.filter_map(|folder| std::fs::read_to_string(folder.join("memory.max")).ok()?.trim().parse().ok()).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_limit_of_the_cgroups_above_counts() {
        let root = std::env::temp_dir().join(format!("lastgasp-memory-{}", std::process::id()));
        let inner = root.join("a/b");
        std::fs::create_dir_all(&inner).unwrap();
        std::fs::write(root.join("a/memory.max"), "1000\n").unwrap();
        std::fs::write(inner.join("memory.max"), "max\n").unwrap();
        let found = ["0::/a/b\n", "0::/\n", "1:memory:/a\n"].map(|own| limit(&root, own));
        std::fs::remove_dir_all(&root).unwrap();
        assert_eq!(found, [Some(1000), None, None]);
    }

    #[test]
    fn the_machines_memory_is_read() {
        assert_eq!(total("MemFree: 1 kB\n"), None);
        assert_eq!(total("MemTotal:       32 kB\nMemFree: 1 kB\n"), Some(32 * 1024));
        assert!(usable() > 0);
    }
}

//! How much memory the router may use.

use std::path::{Path, PathBuf};

/// Where nothing says how much there is.
const UNKNOWN: usize = 1024 * 1024 * 1024;

/// Bytes: the machine's, or fewer if a cgroup of the router has a limit.
#[must_use]
pub(crate) fn usable() -> usize {
    let machine = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| total(&text)).unwrap_or(UNKNOWN);
    let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    limit(Path::new("/sys/fs/cgroup"), &own).map_or(machine, |limit| limit.min(machine))
}

/// `MemTotal` of `/proc/meminfo`, proc(5).
fn total(meminfo: &str) -> Option<usize> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()?.checked_mul(1024)
}

/// The lowest limit from the cgroup that `/proc/self/cgroup` names up to the root: `memory.max` of cgroup v2, or
/// `memory.limit_in_bytes` of v1 (cgroups(7)). In a container the root may be the container's own.
fn limit(root: &Path, own: &str) -> Option<usize> {
    let of = |root: PathBuf, path: &str, file: &str| {
        let at = root.join(path.trim_start_matches('/'));
        let limits = at.ancestors().take_while(|folder| folder.starts_with(&root));
        limits.filter_map(|folder| std::fs::read_to_string(folder.join(file)).ok()?.trim().parse().ok()).min()
    };
    let limits = own.lines().filter_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        match controllers {
            "" => of(root.to_owned(), path, "memory.max"),
            _ if controllers.split(',').any(|one| one == "memory") => {
                of(root.join("memory"), path, "memory.limit_in_bytes")
            }
            _ => None,
        }
    });
    limits.min()
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
        let v1 = root.join("memory/c");
        std::fs::create_dir_all(&v1).unwrap();
        std::fs::write(v1.join("memory.limit_in_bytes"), "2000\n").unwrap();
        std::fs::write(root.join("memory/memory.limit_in_bytes"), "9223372036854771712\n").unwrap();
        let found = [
            "0::/a/b\n",
            "0::/\n",
            "1:pids:/a\n",
            "4:memory:/c/d\n1:name=systemd:/\n0::/\n",
            // A container without a cgroup namespace: its path is the host's, and its root is its own.
            "4:cpu,memory:/kubepods/x\n",
        ]
        .map(|own| limit(&root, own));
        std::fs::remove_dir_all(&root).unwrap();
        let without_limit = Some(9_223_372_036_854_771_712);
        assert_eq!(found, [Some(1000), None, None, Some(2000), without_limit]);
    }

    #[test]
    fn the_machines_memory_is_read() {
        assert_eq!(total("MemFree: 1 kB\n"), None);
        assert_eq!(total("MemTotal:       32 kB\nMemFree: 1 kB\n"), Some(32 * 1024));
        assert!(usable() > 0);
    }
}

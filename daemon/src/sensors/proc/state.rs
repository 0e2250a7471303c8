//! Whether a process that does not answer could.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::{id_of, stat};
use crate::core::ProcessId;

/// Why a process may not run, as far as that can be seen from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, strum::IntoStaticStr)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum ProcessState {
    /// Nothing keeps it.
    Running,
    /// By SIGSTOP, or a debugger.
    Stopped,
    /// By the cgroup freezer.
    Frozen,
    /// It waits in the kernel, and no signal wakes it: a driver, a disk, a network file system.
    Uninterruptible,
}

/// What keeps this very process; `None` if it is gone.
#[must_use]
pub fn process_state(process: ProcessId) -> Option<ProcessState> {
    let stat = stat(process.tgid).filter(|stat| id_of(process.tgid, stat) == process)?;
    Some(match stat.state {
        'T' | 't' => ProcessState::Stopped,
        // Frozen by v1 it shows as D, by v2 as S (kernel/freezer.c, kernel/cgroup/freezer.c).
        _ if is_frozen(process.tgid) => ProcessState::Frozen,
        'D' => ProcessState::Uninterruptible,
        _ => ProcessState::Running,
    })
}

fn is_frozen(tgid: u32) -> bool {
    let cgroups = fs::read_to_string(format!("/proc/{tgid}/cgroup")).unwrap_or_default();
    cgroups
        .lines()
        .filter_map(freezer)
        .any(|(file, frozen)| fs::read_to_string(file).is_ok_and(|text| text.lines().any(|line| line.trim() == frozen)))
}

/// The file of a line of `/proc/PID/cgroup` (cgroups(7)) that says whether the cgroup is frozen, and
/// what it says then.
fn freezer(line: &str) -> Option<(PathBuf, &'static str)> {
    let mut parts = line.splitn(3, ':');
    let (_hierarchy, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
    let root = Path::new("/sys/fs/cgroup");
    let path = path.trim_start_matches('/');
    match controllers {
        "" if root.join("cgroup.controllers").exists() => Some((root.join(path).join("cgroup.events"), "frozen 1")),
        "" => Some((root.join("unified").join(path).join("cgroup.events"), "frozen 1")),
        _ if controllers.split(',').any(|controller| controller == "freezer") => {
            Some((root.join("freezer").join(path).join("freezer.state"), "FROZEN"))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stopped_process_is_stopped_and_then_runs() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().expect("sleep is there");
        let id = super::super::identify(child.id()).expect("it runs");
        let pid = nix::unistd::Pid::from_raw(child.id().cast_signed());
        let signal = |signal| nix::sys::signal::kill(pid, signal).expect("it is our child");
        let wait_for = |wanted| {
            while process_state(id) != Some(wanted) {
                std::thread::yield_now();
            }
        };
        signal(nix::sys::signal::Signal::SIGSTOP);
        wait_for(ProcessState::Stopped);
        signal(nix::sys::signal::Signal::SIGCONT);
        wait_for(ProcessState::Running);
        let predecessor = ProcessId { start_ticks: id.start_ticks - 1, ..id };
        assert_eq!(process_state(predecessor), None);
        child.kill().and_then(|()| child.wait()).expect("it ends");
    }

    #[test]
    fn the_freezers_file_is_found_for_both_hierarchies() {
        let (file, frozen) = freezer("7:freezer:/pod/engine").expect("the v1 controller");
        assert_eq!((file.to_str(), frozen), (Some("/sys/fs/cgroup/freezer/pod/engine/freezer.state"), "FROZEN"));
        let (file, frozen) = freezer("0::/pod").expect("v2");
        assert!(file.ends_with("pod/cgroup.events"));
        assert_eq!(frozen, "frozen 1");
        assert_eq!(freezer("3:cpu,cpuacct:/pod"), None);
        assert_eq!(freezer("nonsense"), None);
    }
}

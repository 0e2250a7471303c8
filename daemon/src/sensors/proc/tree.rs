//! A process and what came out of it.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::{fs, io};

use crate::core::ProcessId;

/// One process, as it looked at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessInfo {
    /// Which process.
    pub id: ProcessId,
    /// Its parent at that moment. A process whose parent died belongs to init, or to the nearest
    /// subreaper (prctl(2)).
    pub parent_tgid: u32,
    /// The leader's name, at most 15 bytes.
    pub comm: String,
    /// See [`super::cmdline`]. Engines overwrite it with their title.
    pub cmdline: String,
}

/// One living process by what takes no lock of its memory: its identity and its name.
#[must_use]
pub fn named(tgid: u32) -> Option<(ProcessId, String)> {
    let stat = super::stat(tgid).filter(|stat| !super::is_dead(stat))?;
    Some((super::id_of(tgid, &stat), super::printable(&stat.comm)))
}

/// One living process, whatever its place in a tree.
#[must_use]
pub fn describe(tgid: u32) -> Option<ProcessInfo> {
    let stat = super::stat(tgid).filter(|stat| !super::is_dead(stat))?;
    Some(ProcessInfo {
        id: super::id_of(tgid, &stat),
        parent_tgid: stat.ppid.unsigned_abs(),
        comm: super::printable(&stat.comm),
        cmdline: super::cmdline(tgid)?,
    })
}

/// The living descendants of `root`, parents before children, without `root` itself; none if that
/// very process is gone. Orphans of a dead process are not found below it any more.
///
/// A child that is born or dies meanwhile may be missed (proc(5) on `children`): ask again.
#[must_use]
pub fn descendants(root: ProcessId) -> Vec<ProcessInfo> {
    if super::identify(root.tgid) != Some(root) {
        return Vec::new();
    }
    let mut scanned = None;
    let mut found = Vec::new();
    let mut seen = BTreeSet::from([root.tgid]);
    let mut queue = VecDeque::from([root.tgid]);
    while let Some(parent) = queue.pop_front() {
        let children = children(parent)
            .unwrap_or_else(|| scanned.get_or_insert_with(children_by_scan).get(&parent).cloned().unwrap_or_default());
        for child in children {
            // A zombie's children have been given away, but the leader of a living group may be one.
            if let Some(info) = describe(child).filter(|_| seen.insert(child)) {
                found.push(info);
                queue.push_back(child);
            }
        }
    }
    found
}

/// The pids of `root` and of its living descendants, `root` first.
#[must_use]
pub fn with_descendants(root: ProcessId) -> Vec<u32> {
    std::iter::once(root.tgid).chain(descendants(root).into_iter().map(|process| process.id.tgid)).collect()
}

/// From `/proc/PID/task/TID/children`: a child belongs to the thread that forked it. None if this
/// kernel was built without `CONFIG_PROC_CHILDREN`.
fn children(tgid: u32) -> Option<Vec<u32>> {
    let mut children = Vec::new();
    let Ok(threads) = fs::read_dir(format!("/proc/{tgid}/task")) else {
        return Some(children);
    };
    for thread in threads.flatten() {
        match fs::read_to_string(thread.path().join("children")) {
            Ok(list) => children.extend(list.split_ascii_whitespace().filter_map(|pid| pid.parse::<u32>().ok())),
            // Either the thread has just ended, or no kernel thread list knows the file.
            Err(error) if error.kind() == io::ErrorKind::NotFound && thread.path().exists() => return None,
            Err(_) => {}
        }
    }
    Some(children)
}

fn children_by_scan() -> HashMap<u32, Vec<u32>> {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    for tgid in super::all().into_iter().flatten() {
        if let Some(stat) = super::stat(tgid) {
            children.entry(stat.ppid.unsigned_abs()).or_default().push(tgid);
        }
    }
    children
}

/// The parents of a process up to init, nearest first.
pub(super) fn ancestors(tgid: u32) -> Vec<u32> {
    let mut ancestors = Vec::new();
    let mut current = tgid;
    while let Some(parent) = super::stat(current).map(|stat| stat.ppid.unsigned_abs()) {
        // The parent of init, and of a process whose parent lies outside this PID namespace, is 0.
        if parent == 0 || ancestors.contains(&parent) {
            break;
        }
        ancestors.push(parent);
        current = parent;
    }
    ancestors
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// A shell with a child shell with a child `sleep`; it prints the pid of the sleep.
    fn family() -> (Child, u32) {
        let mut root = Command::new("sh")
            .args(["-c", "sh -c 'sleep 1000 & echo $!; wait' & read line; wait"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(root.stdout.take().unwrap()).read_line(&mut line).unwrap();
        (root, line.trim().parse().unwrap())
    }

    fn end(mut root: Child, grandchild: u32) {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(grandchild.cast_signed()), nix::sys::signal::SIGKILL)
            .unwrap();
        let _ = root.stdin.take().unwrap().write_all(b"\n");
        root.wait().unwrap();
    }

    #[test]
    fn grandchildren_belong_to_the_tree() {
        let (root, grandchild) = family();
        let id = super::super::identify(root.id()).unwrap();
        let tree = descendants(id);
        assert_eq!(tree.len(), 2, "{tree:?}");
        assert_eq!(tree[0].parent_tgid, root.id());
        assert_eq!((tree[1].id.tgid, tree[1].parent_tgid), (grandchild, tree[0].id.tgid));
        assert_eq!(ancestors(grandchild)[..2], [tree[0].id.tgid, root.id()]);
        let scanned = children_by_scan();
        assert_eq!(scanned[&root.id()], [tree[0].id.tgid]);
        assert!(descendants(ProcessId { start_ticks: id.start_ticks + 1, ..id }).is_empty());
        end(root, grandchild);
        assert!(descendants(id).is_empty());
    }

    #[test]
    fn a_child_of_another_thread_belongs_to_the_process() {
        let child = std::thread::spawn(|| Command::new("sleep").arg("1000").spawn().unwrap()).join().unwrap();
        let me = super::super::identify(std::process::id()).unwrap();
        assert!(descendants(me).iter().any(|info| info.id.tgid == child.id()));
        let mut child = child;
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

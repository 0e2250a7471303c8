//! What `/proc` says about processes (proc(5)), with the identity that the kernel programs use.
//!
//! Everything here may be out of date when it returns: a pid is only worth something together with
//! its start time, and a process that is absent is an answer, not an error.

pub mod addresses;
pub mod cgroup;
pub mod declare;
pub(crate) mod find;
pub mod listeners;
pub(crate) mod memory;
pub(crate) mod reach;
mod state;
pub mod tree;

use std::fs;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use procfs::process::{Process, Stat};

use crate::core::{Nanos, ProcessId};

use memory::MemoryFile;

/// The pids of this process and of everything above it.
#[must_use]
pub fn ours() -> std::collections::HashSet<u32> {
    find::ours()
}

pub use find::{FindError, Finder, WORKER, find_root};
pub use state::{ProcessState, process_state};
pub use tree::{ProcessInfo, descendants, describe};

/// Longest command line that is read, in bytes. Titles and what people search for come first.
const MAX_CMDLINE: u64 = 4096;
/// Longest environment that is read, in bytes.
const MAX_ENVIRON: u64 = 1 << 20;

/// The random id of this boot (random(4)), as `5f0c1d2e-…`.
///
/// # Errors
/// `/proc` is not mounted.
pub fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

/// The id of this installation (machine-id(5)). Containers often have none.
#[must_use]
pub fn machine_id() -> Option<String> {
    ["/etc/machine-id", "/var/lib/dbus/machine-id"].iter().find_map(|path| {
        let id = fs::read_to_string(path).ok()?.trim().to_owned();
        // systemd writes "uninitialized" into images that have not booted yet.
        (!id.is_empty() && id != "uninitialized").then_some(id)
    })
}

/// The present moment on `CLOCK_MONOTONIC`.
#[must_use]
pub fn monotonic_now() -> Nanos {
    Nanos(super::sys::monotonic_ns())
}

fn stat(tgid: u32) -> Option<Stat> {
    Process::new(i32::try_from(tgid).ok()?).ok()?.stat().ok()
}

/// The leader shows as a zombie as soon as its own thread left, while others may go on for ever;
/// only a group of one is dead.
const fn is_dead(stat: &Stat) -> bool {
    matches!(stat.state, 'Z' | 'X') && stat.num_threads <= 1
}

const fn id_of(tgid: u32, stat: &Stat) -> ProcessId {
    ProcessId { tgid, start_ticks: stat.starttime }
}

/// The process that has this pid now. A zombie still has its pid.
#[must_use]
pub fn identify(tgid: u32) -> Option<ProcessId> {
    Some(id_of(tgid, &stat(tgid)?))
}

/// Whether a process is still there. Nobody is taken for dead because he could not be looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    /// This very process, perhaps as a zombie.
    Same {
        /// None of its threads runs any more.
        dead: bool,
    },
    /// Its pid is free, or another's.
    Gone,
    /// There is a process of its pid, and no descriptor to open its `/proc` files with.
    Unknown,
}

/// Whether a file could not be opened because there are too many of them, in this process or on the
/// whole node: that says nothing about the file.
#[must_use]
pub fn is_want_of_files(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

/// Whether there are descriptors left to open the files of a process with. They are opened and not read.
#[must_use]
pub fn can_be_opened(tgid: u32) -> bool {
    !fs::File::open(format!("/proc/{tgid}/stat")).is_err_and(|error| is_want_of_files(&error))
}

/// Looks whether this very process is there.
#[must_use]
pub fn presence(process: ProcessId) -> Presence {
    if let Some(stat) = stat(process.tgid) {
        let same = id_of(process.tgid, &stat) == process;
        return if same { Presence::Same { dead: is_dead(&stat) } } else { Presence::Gone };
    }
    // kill(2) with signal 0 takes no descriptor.
    let pid = nix::unistd::Pid::from_raw(process.tgid.cast_signed());
    match nix::sys::signal::kill(pid, None) {
        Err(nix::errno::Errno::ESRCH) => Presence::Gone,
        // It may have ended between the two looks; then the next one says so.
        _ => Presence::Unknown,
    }
}

/// This very process is there and at least one of its threads runs, however stuck.
#[must_use]
pub fn is_alive(process: ProcessId) -> bool {
    matches!(presence(process), Presence::Same { dead: false } | Presence::Unknown)
}

/// How long this very process has been there; `None` if it is gone.
#[must_use]
pub fn age(process: ProcessId) -> Option<Duration> {
    let stat = stat(process.tgid).filter(|stat| id_of(process.tgid, stat) == process)?;
    // start_time is counted from boot, suspended time included (fs/proc/array.c, do_task_stat).
    let started = Duration::from_millis(stat.starttime.saturating_mul(1000) / procfs::ticks_per_second());
    let since_boot = nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME).ok()?;
    Some(Duration::from(since_boot).saturating_sub(started))
}

/// The process is writing its core dump (proc(5), `CoreDumping` in `status`, Linux 4.15).
#[must_use]
pub fn is_dumping_core(tgid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{tgid}/status")).unwrap_or_default();
    status.lines().any(|line| line.strip_prefix("CoreDumping:").is_some_and(|rest| rest.trim() == "1"))
}

/// The leader's state letter: R, S, D, T, t, Z, X, I (proc(5), field 3 of `stat`).
#[must_use]
pub fn state(tgid: u32) -> Option<char> {
    Some(stat(tgid)?.state)
}

/// The leader's name: at most 15 bytes, control characters replaced.
#[must_use]
pub fn comm(tgid: u32) -> Option<String> {
    Some(printable(&stat(tgid)?.comm))
}

/// The command line with blanks for NULs, trimmed, at most 4 KiB, control characters replaced.
/// Empty for zombies, kernel threads, and processes that are [`memory::Stuck`].
#[must_use]
pub fn cmdline(tgid: u32) -> Option<String> {
    let mut bytes = match memory::read(tgid, MemoryFile::CommandLine, MAX_CMDLINE) {
        Err(error) if memory::is_stuck(&error) => Vec::new(),
        read => read.ok()?,
    };
    for byte in &mut bytes {
        if *byte == 0 {
            *byte = b' ';
        }
    }
    Some(printable(String::from_utf8_lossy(&bytes).trim()))
}

/// The file that the process runs, also when it was deleted since. Needs ptrace access
/// (ptrace(2)): the same user, or CAP_SYS_PTRACE.
#[must_use]
pub fn exe(tgid: u32) -> Option<PathBuf> {
    let path = fs::read_link(format!("/proc/{tgid}/exe")).ok()?;
    let kept = path.to_str().and_then(|text| text.strip_suffix(" (deleted)")).map(PathBuf::from);
    Some(kept.unwrap_or(path))
}

/// Names come from strangers and go to logs and terminals.
#[must_use]
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

/// The value of `name` in the environment that the process was started with.
///
/// # Errors
/// Not found: no such process. Permission denied: another user's process, and not both CAP_SYS_PTRACE
/// and CAP_DAC_READ_SEARCH. Timed out: the process is [`memory::Stuck`].
pub fn environ_value(tgid: u32, name: &str) -> io::Result<Option<String>> {
    Ok(environ_values(tgid, &[name])?.pop().map(|(_, value)| value))
}

/// The values of those of `names` that are in the environment that the process was started with.
/// Of a name that stands there twice the first counts (getenv(3)).
///
/// # Errors
/// As [`environ_value`].
pub fn environ_values(tgid: u32, names: &[&str]) -> io::Result<Vec<(String, String)>> {
    let bytes = memory::read(tgid, MemoryFile::Environment, MAX_ENVIRON)?;
    let value = |name: &str| {
        let mut entries = bytes.split(|byte| *byte == 0);
        entries.find_map(|entry| entry.strip_prefix(name.as_bytes())?.strip_prefix(b"="))
    };
    let found = names.iter().filter_map(|name| Some((*name, value(name)?)));
    Ok(found.map(|(name, value)| (name.to_owned(), printable(&String::from_utf8_lossy(value)))).collect())
}

/// The users of the process in our user namespace: real, effective, saved and file system's
/// (credentials(7)). They differ where somebody runs a set-user-ID program of another's.
#[must_use]
pub fn uids(tgid: u32) -> Option<[u32; 4]> {
    let status = Process::new(i32::try_from(tgid).ok()?).ok()?.status().ok()?;
    Some([status.ruid, status.euid, status.suid, status.fuid])
}

/// The user as whom the process acts: the effective one.
#[must_use]
pub fn effective_user(tgid: u32) -> Option<u32> {
    uids(tgid).map(|[_, effective, ..]| effective)
}

/// The pid that the process has in its own PID namespace (proc(5), `NSpid` in `status`).
#[must_use]
pub fn innermost_pid(tgid: u32) -> Option<u32> {
    let status = Process::new(i32::try_from(tgid).ok()?).ok()?.status().ok()?;
    u32::try_from(*status.nspid?.last()?).ok()
}

/// The inode number of the process's network namespace, as in `ns.inum` of the kernel.
///
/// # Errors
/// Not found: no such process, or a zombie. Permission denied: another user's process, and no
/// CAP_SYS_PTRACE.
pub fn netns_inum(tgid: u32) -> io::Result<u32> {
    namespace(tgid, "net")
}

/// Where the tables of that process's network namespace stand, or those of this thread's own.
fn net_directory(netns_pid: Option<u32>) -> String {
    netns_pid.map_or_else(|| "/proc/thread-self/net".to_owned(), |pid| format!("/proc/{pid}/net"))
}

/// The inode number of a namespace of the process, as `net` or `pid` (namespaces(7)).
fn namespace(tgid: u32, kind: &str) -> io::Result<u32> {
    use std::os::unix::fs::MetadataExt as _;
    let inode = fs::metadata(format!("/proc/{tgid}/ns/{kind}"))?.ino();
    u32::try_from(inode).map_err(io::Error::other)
}

/// The thread group that a thread id belongs to. `/proc/TID` exists for every thread.
#[must_use]
pub fn thread_group(tid: u32) -> Option<u32> {
    let status = Process::new(i32::try_from(tid).ok()?).ok()?.status().ok()?;
    u32::try_from(status.tgid).ok()
}

/// The parent of the host's kernel threads, if this PID namespace is the host's: it has pid 2 there
/// (`rest_init` in `init/main.c`), the host's network namespace and the root of its cgroups.
#[must_use]
pub fn kthreadd() -> Option<u32> {
    const KTHREADD: u32 = 2;
    stat(KTHREADD).filter(|stat| stat.flags & find::KERNEL_THREAD != 0).map(|_| KTHREADD)
}

/// Every thread group on this node, as far as this PID namespace shows them.
///
/// # Errors
/// `/proc` is not mounted.
pub fn all() -> io::Result<impl Iterator<Item = u32>> {
    Ok(fs::read_dir("/proc")?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()))
}

/// The wait status of a process that ended and was not reaped: field 52 of `/proc/PID/stat`.
///
/// The kernel shows zero to those who may not trace the process (`do_task_stat` in
/// `fs/proc/array.c`), and so it does for a status that is zero. Following `/proc/PID/exe` asks the
/// same question (`PTRACE_MODE_READ_FSCREDS`, `proc_pid_get_link` in `fs/proc/base.c`): a zombie
/// has no executable any more, so "not found" means permitted.
pub fn zombie_wait_status(process: ProcessId) -> Option<i32> {
    let stat = stat(process.tgid).filter(|stat| id_of(process.tgid, stat) == process && is_dead(stat))?;
    let status = stat.exit_code?;
    let permitted = || {
        fs::read_link(format!("/proc/{}/exe", process.tgid))
            .is_err_and(|error| error.kind() == io::ErrorKind::NotFound && is_zombie(process))
    };
    (status != 0 || permitted()).then_some(status)
}

fn is_zombie(process: ProcessId) -> bool {
    stat(process.tgid).is_some_and(|stat| id_of(process.tgid, &stat) == process && is_dead(&stat))
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn this_process_is_itself() {
        let me = identify(std::process::id()).unwrap();
        assert_eq!(identify(me.tgid), Some(me));
        assert!(is_alive(me));
        assert!(!is_alive(ProcessId { start_ticks: me.start_ticks + 1, ..me }));
        assert!(cmdline(me.tgid).unwrap().starts_with(&std::env::args().next().unwrap()));
        assert!(netns_inum(me.tgid).unwrap() > 0);
    }

    #[test]
    fn a_pid_that_nobody_has_is_absent() {
        // Above the kernel's limit of 2^22 (PID_MAX_LIMIT).
        let nobody = 1 << 22 | 1;
        assert_eq!(identify(nobody), None);
        assert_eq!(comm(nobody), None);
        assert_eq!(cmdline(nobody), None);
        assert_eq!(environ_value(nobody, "PATH").unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(identify(u32::MAX), None);
    }

    #[test]
    fn a_zombie_has_its_pid_but_does_not_live() {
        let mut child = Command::new("true").spawn().unwrap();
        let process = identify(child.id()).unwrap();
        while is_alive(process) {
            std::thread::yield_now();
        }
        assert_eq!(state(process.tgid), Some('Z'));
        assert_eq!(identify(process.tgid), Some(process));
        assert_eq!(zombie_wait_status(process), Some(0));
        child.wait().unwrap();
        assert_eq!(identify(process.tgid), None);
        assert_eq!(zombie_wait_status(process), None);
    }

    #[test]
    fn what_a_process_says_of_itself_is_made_printable() {
        let mut child = Command::new("sh")
            .args(["-c", "echo ready; read line # \u{1b}[31mred"])
            .env("LASTGASP_WORKER", "vllm-0\n")
            .env("NOT_LASTGASP_WORKER", "other")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // Between fork and exec it still shows what the parent shows.
        let mut ready = [0; 5];
        child.stdout.take().unwrap().read_exact(&mut ready).unwrap();
        assert_eq!(cmdline(child.id()).unwrap(), "sh -c echo ready; read line # \u{fffd}[31mred");
        assert_eq!(comm(child.id()).unwrap(), "sh");
        assert_eq!(environ_value(child.id(), "LASTGASP_WORKER").unwrap().unwrap(), "vllm-0\u{fffd}");
        assert_eq!(environ_value(child.id(), "LASTGASP").unwrap(), None);
        drop(child.stdin.take());
        child.wait().unwrap();
    }

    #[test]
    fn a_thread_is_not_a_process() {
        let (sender, receiver) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            sender.send(nix::unistd::gettid().as_raw().cast_unsigned()).unwrap();
            let _ = ended.recv();
        });
        let tid = receiver.recv().unwrap();
        assert_ne!(tid, std::process::id());
        assert_eq!(thread_group(tid), Some(std::process::id()));
        assert!(all().unwrap().all(|tgid| tgid != tid));
        drop(end);
        thread.join().unwrap();
    }

    #[test]
    fn the_clock_only_goes_forward() {
        let earlier = monotonic_now();
        assert!(earlier.0 > 0 && monotonic_now() >= earlier);
    }

    #[test]
    fn the_boot_has_an_id() {
        assert_eq!(boot_id().unwrap().len(), 36);
        assert!(machine_id().is_none_or(|id| !id.contains(char::is_whitespace)));
    }
}

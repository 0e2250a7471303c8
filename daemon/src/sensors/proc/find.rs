//! From what a person wrote in the configuration to the root process of a worker.

use std::cell::OnceCell;
use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::time::{Duration, SystemTime};
use std::{fs, io};

use super::{listeners, tree};
use crate::config::Find;
use crate::core::ProcessId;

/// The variable by which an engine's environment names its worker.
pub const WORKER: &str = "LASTGASP_WORKER";
/// `PF_KTHREAD` in `include/linux/sched.h`: nothing that a worker could be.
pub(super) const KERNEL_THREAD: u32 = 0x0020_0000;
/// Longest process id in a pid file, with blanks.
const MAX_PID_FILE: usize = 64;

/// Why no root process was found, where "not there yet" is not the whole answer.
#[derive(Debug, thiserror::Error)]
pub enum FindError {
    /// The configured pid is a thread's.
    #[error("find.pid {pid} is a thread of process {tgid}: write find = {{ pid = {tgid} }}")]
    Thread {
        /// As configured.
        pid: u32,
        /// The thread's process.
        tgid: u32,
    },
    /// The pid file cannot be read, or holds no pid.
    #[error("find.pid_file {}: {reason}", path.display())]
    PidFile {
        /// As configured.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The pid file is older than the process that has the pid now.
    #[error(
        "find.pid_file {} is older than process {}, which has been given a pid that was another's: remove the file, \
         or let the engine write it. Should a clock have been set since, the process counts once it listens on the \
         worker's endpoint",
        path.display(), process.tgid
    )]
    OldPidFile {
        /// As configured.
        path: PathBuf,
        /// Whom it names.
        process: ProcessId,
    },
    /// Several processes fit, and none of them is an ancestor of all others.
    #[error("find.{key} fits several processes ({}): make it more exact, or use pid or pid_file", list(tgids))]
    Ambiguous {
        /// The key of `find`.
        key: &'static str,
        /// The topmost of those that fit, in ascending order.
        tgids: Vec<u32>,
    },
    /// Nothing was found among the processes that may be looked into.
    #[error(
        "find.{key} fits no process, but lastgasp may not look into {hidden} processes of other users: \
             give lastgasp CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH, or use pid or pid_file"
    )]
    Hidden {
        /// The key of `find`.
        key: &'static str,
        /// Processes that could not be looked into.
        hidden: usize,
    },
    /// `/proc` itself does not answer.
    #[error("cannot read /proc")]
    Proc(#[from] io::Error),
}

fn list(tgids: &[u32]) -> String {
    tgids.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// The root process that `find` means now; none if there is no such process yet.
///
/// # Errors
/// See [`FindError`]. Each may go away by itself: ask again.
pub fn find_root(find: &Find) -> Result<Option<ProcessId>, FindError> {
    Finder::default().root(find, &HashSet::new())
}

/// One look at all processes, in which the roots of any number of workers are found. What is read of a
/// process is read once: a node has hundreds of both.
#[derive(Debug, Default)]
pub struct Finder {
    snapshot: OnceCell<Snapshot>,
}

/// All living processes but those of the kernel.
#[derive(Debug)]
struct Snapshot {
    candidates: Vec<Candidate>,
    parents: HashMap<u32, u32>,
    /// This process and the shells and supervisors above it, whose command lines quote ours.
    ours: HashSet<u32>,
}

impl Finder {
    /// As [`find_root`], without the processes of earlier lives of the worker: children of a root that
    /// was killed live on for minutes with its environment (vllm#55510), and are not its successor.
    ///
    /// # Errors
    /// See [`FindError`].
    pub fn root(&self, find: &Find, earlier: &HashSet<ProcessId>) -> Result<Option<ProcessId>, FindError> {
        let found = match find {
            Find::Pid(pid) => by_pid(*pid)?,
            Find::PidFile(path) => by_pid_file(path)?,
            Find::Port(port) => {
                let inodes = listeners::sockets(None, *port)?;
                if inodes.is_empty() {
                    return Ok(None);
                }
                let holds = |candidate: &Candidate| {
                    listeners::holds(candidate.process.tgid, &inodes).map_err(|error| error.kind())
                };
                self.snapshot()?.search("port", earlier, holds)?
            }
            Find::Cmdline(part) => {
                let snapshot = self.snapshot()?;
                snapshot.search("cmdline", earlier, |candidate| {
                    Ok(candidate.may_be_root(&snapshot.ours)
                        && candidate.cmdline().is_some_and(|line| line.contains(part)))
                })?
            }
            Find::Env(worker) => {
                let snapshot = self.snapshot()?;
                snapshot.search("env", earlier, |candidate| {
                    Ok(candidate.may_be_root(&snapshot.ours)
                        && candidate.declared()?.is_some_and(|declared| declared == worker))
                })?
            }
        };
        Ok(found.filter(|process| !earlier.contains(process)))
    }

    fn snapshot(&self) -> io::Result<&Snapshot> {
        if self.snapshot.get().is_none() {
            let _ = self.snapshot.set(Snapshot::take()?);
        }
        Ok(self.snapshot.get().expect("it was just taken"))
    }
}

fn living(tgid: u32) -> Option<ProcessId> {
    Some(tree::describe(tgid)?.id)
}

fn by_pid(pid: u32) -> Result<Option<ProcessId>, FindError> {
    match super::thread_group(pid) {
        Some(tgid) if tgid != pid => Err(FindError::Thread { pid, tgid }),
        _ => Ok(living(pid)),
    }
}

fn by_pid_file(path: &PathBuf) -> Result<Option<ProcessId>, FindError> {
    let wrong = |reason: String| FindError::PidFile { path: path.clone(), reason };
    let text = match fs::read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(wrong(error.to_string())),
    };
    // Made, but not written yet.
    if text.is_empty() {
        return Ok(None);
    }
    let pid = (text.len() <= MAX_PID_FILE)
        .then(|| std::str::from_utf8(&text).ok()?.trim().parse().ok())
        .flatten()
        .ok_or_else(|| wrong("holds no process id: it must be one decimal number".to_owned()))?;
    match super::thread_group(pid) {
        Some(tgid) if tgid != pid => Err(wrong(format!("{pid} is a thread of process {tgid}, not a process"))),
        _ => match living(pid) {
            Some(process) if is_older(path, process) => Err(FindError::OldPidFile { path: path.clone(), process }),
            living => Ok(living),
        },
    }
}

/// Whether a file was written before the process was made. The clock of the file may have been set since, or be
/// another machine's, so a little is allowed.
fn is_older(path: &PathBuf, process: ProcessId) -> bool {
    const CLOCKS_DIFFER: Duration = Duration::from_secs(2);
    let written = fs::metadata(path).and_then(|metadata| metadata.modified());
    let started = super::age(process).and_then(|age| SystemTime::now().checked_sub(age + CLOCKS_DIFFER));
    matches!((written, started), (Ok(written), Some(started)) if written < started)
}

/// This process and the shells and supervisors above it, whose command lines quote ours.
pub(super) fn ours() -> HashSet<u32> {
    let me = std::process::id();
    tree::ancestors(me).into_iter().chain([me]).collect()
}

/// One process, and what was read of it so far.
#[derive(Debug)]
struct Candidate {
    process: ProcessId,
    comm: String,
    cmdline: OnceCell<Option<String>>,
    declared: OnceCell<Result<Option<String>, io::ErrorKind>>,
}

impl Candidate {
    /// A title such as `VLLM::EngineCore` is a child's: it may be an orphan of the worker's last life,
    /// with its environment, but never the root of the next one.
    fn may_be_root(&self, ours: &HashSet<u32>) -> bool {
        !self.comm.starts_with("lastgasp") && !self.comm.contains("::") && !ours.contains(&self.process.tgid)
    }

    fn cmdline(&self) -> Option<&str> {
        self.cmdline.get_or_init(|| super::cmdline(self.process.tgid)).as_deref()
    }

    /// The worker that its environment names.
    fn declared(&self) -> Result<Option<&str>, io::ErrorKind> {
        let read = || super::environ_value(self.process.tgid, WORKER).map_err(|error| error.kind());
        self.declared.get_or_init(read).as_ref().map(Option::as_deref).map_err(|kind| *kind)
    }
}

impl Snapshot {
    fn take() -> io::Result<Self> {
        let mut candidates = Vec::new();
        let mut parents = HashMap::new();
        for tgid in super::all()? {
            let Some(stat) = super::stat(tgid).filter(|stat| !super::is_dead(stat)) else { continue };
            if stat.flags & KERNEL_THREAD != 0 {
                continue;
            }
            parents.insert(tgid, stat.ppid.unsigned_abs());
            let process = super::id_of(tgid, &stat);
            let (cmdline, declared) = (OnceCell::new(), OnceCell::new());
            candidates.push(Candidate { process, comm: stat.comm, cmdline, declared });
        }
        Ok(Self { candidates, parents, ours: ours() })
    }

    /// The topmost of the living processes that fit.
    fn search(
        &self,
        key: &'static str,
        earlier: &HashSet<ProcessId>,
        fits: impl Fn(&Candidate) -> Result<bool, io::ErrorKind>,
    ) -> Result<Option<ProcessId>, FindError> {
        let mut fitting = HashMap::new();
        let mut hidden = 0;
        for candidate in self.candidates.iter().filter(|candidate| !earlier.contains(&candidate.process)) {
            match fits(candidate) {
                Ok(true) => _ = fitting.insert(candidate.process.tgid, candidate.process),
                Err(io::ErrorKind::PermissionDenied) => hidden += 1,
                // It does not fit, or is gone.
                _ => {}
            }
        }
        let fits = fitting.values();
        let mut topmost: Vec<_> = fits.filter(|process| !below(process.tgid, &self.parents, &fitting)).collect();
        topmost.sort_unstable();
        match topmost[..] {
            [] if hidden > 0 => Err(FindError::Hidden { key, hidden }),
            [] => Ok(None),
            [process] => Ok(Some(*process)),
            _ => Err(FindError::Ambiguous { key, tgids: topmost.iter().map(|process| process.tgid).collect() }),
        }
    }
}

/// Whether an ancestor fits too, with others between them or not.
fn below(tgid: u32, parents: &HashMap<u32, u32>, fitting: &HashMap<u32, ProcessId>) -> bool {
    let mut current = tgid;
    // Parents were read one after the other: what looks like a circle is a pid that was used again.
    for _ in 0..parents.len() {
        match parents.get(&current) {
            Some(parent) if fitting.contains_key(parent) => return true,
            Some(parent) => current = *parent,
            None => return false,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader};
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// A word that no other process on this machine has in its command line or environment.
    fn word(test: &str) -> String {
        format!("{test}-{}-{}", std::process::id(), super::super::monotonic_now().0)
    }

    /// A shell and a shell below it, both with `word` in their command lines; both have executed.
    fn two_shells(word: &str) -> Child {
        let inner = format!("echo up; read line # {word}");
        let mut shell = Command::new("sh")
            .args(["-c", &format!("sh -c '{inner}' <&0; true")])
            .env(WORKER, word)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(shell.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "up\n");
        shell
    }

    /// Where this test may not look into other users' processes, that is said instead.
    fn is_absent(find: &Find, earlier: &HashSet<ProcessId>) -> bool {
        matches!(Finder::default().root(find, earlier), Ok(None) | Err(FindError::Hidden { .. }))
    }

    fn end(mut shell: Child) {
        drop(shell.stdin.take());
        shell.wait().unwrap();
    }

    #[test]
    fn the_topmost_of_those_that_fit_is_the_root() {
        let word = word("topmost");
        let shell = two_shells(&word);
        let root = super::super::identify(shell.id());
        assert_eq!(find_root(&Find::Cmdline(word.clone())).unwrap(), root);
        assert_eq!(find_root(&Find::Env(word.clone())).unwrap(), root);
        assert!(is_absent(&Find::Env(word[1..].to_owned()), &HashSet::new()));
        assert_eq!(find_root(&Find::Pid(shell.id())).unwrap(), root);
        end(shell);
        assert_eq!(find_root(&Find::Cmdline(word.clone())).unwrap(), None);
        assert!(is_absent(&Find::Env(word), &HashSet::new()));
    }

    #[test]
    fn two_strangers_that_fit_are_an_error_that_lists_them() {
        let word = word("strangers");
        let (one, two) = (two_shells(&word), two_shells(&word));
        let mut both = vec![one.id(), two.id()];
        both.sort_unstable();
        let Err(FindError::Ambiguous { key: "cmdline", tgids }) = find_root(&Find::Cmdline(word.clone())) else {
            panic!("should be ambiguous");
        };
        assert_eq!(tgids, both);
        end(one);
        assert_eq!(find_root(&Find::Env(word)).unwrap(), super::super::identify(two.id()));
        end(two);
    }

    #[test]
    fn the_orphan_of_an_earlier_life_is_not_the_next_root() {
        let word = word("orphan");
        let shell = two_shells(&word);
        let root = super::super::identify(shell.id()).unwrap();
        let child = tree::descendants(root).remove(0).id;
        // While the root lives it is found, and after it only the orphan would be.
        let earlier = HashSet::from([root, child]);
        assert!(is_absent(&Find::Env(word.clone()), &earlier));
        assert_eq!(Finder::default().root(&Find::Env(word), &HashSet::from([root])).unwrap(), Some(child));
        assert_eq!(Finder::default().root(&Find::Pid(root.tgid), &earlier).unwrap(), None);
        end(shell);
    }

    #[test]
    fn a_titled_child_or_our_own_shell_is_never_a_root() {
        let ours = HashSet::from([7]);
        let may = |tgid, comm: &str| {
            let process = ProcessId { tgid, start_ticks: 0 };
            let (cmdline, declared) = (OnceCell::new(), OnceCell::new());
            Candidate { process, comm: comm.to_owned(), cmdline, declared }.may_be_root(&ours)
        };
        assert!(may(8, "vllm"));
        assert!(!may(7, "bash"));
        assert!(!may(8, "VLLM::EngineCor"));
        assert!(!may(8, "lastgasp"));
    }

    #[test]
    fn the_holder_of_the_listening_socket_is_the_root() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        assert_eq!(find_root(&Find::Port(port)).unwrap(), super::super::identify(std::process::id()));
        drop(listener);
        // A child that another test has just forked has our descriptors until it executes.
        while find_root(&Find::Port(port)).unwrap().is_some() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_zombie_is_not_found() {
        let mut child = Command::new("true").spawn().unwrap();
        let process = super::super::identify(child.id()).unwrap();
        while super::super::is_alive(process) {
            std::thread::yield_now();
        }
        assert_eq!(find_root(&Find::Pid(child.id())).unwrap(), None);
        child.wait().unwrap();
    }

    #[test]
    fn a_pid_file_may_come_later_and_must_hold_a_pid() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("engine.pid");
        let find = Find::PidFile(path.clone());
        assert_eq!(find_root(&find).unwrap(), None);
        fs::write(&path, "").unwrap();
        assert_eq!(find_root(&find).unwrap(), None);
        fs::write(&path, format!("{}\n", std::process::id())).unwrap();
        assert_eq!(find_root(&find).unwrap(), super::super::identify(std::process::id()));
        let file = fs::File::options().write(true).open(&path).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(3600 * 24 * 3650)).unwrap();
        let error = find_root(&find).unwrap_err().to_string();
        assert!(error.contains("engine.pid") && error.contains("is older than process"), "{error}");
        for text in ["vllm", "-1", "12 34", "1\u{0}"] {
            fs::write(&path, text).unwrap();
            let error = find_root(&find).unwrap_err().to_string();
            assert!(error.contains("engine.pid") && error.contains("one decimal number"), "{error}");
        }
    }

    #[test]
    fn a_thread_is_named_with_its_process() {
        let (sender, receiver) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            sender.send(nix::unistd::gettid().as_raw().cast_unsigned()).unwrap();
            let _ = ended.recv();
        });
        let error = find_root(&Find::Pid(receiver.recv().unwrap())).unwrap_err().to_string();
        assert!(error.contains(&format!("find = {{ pid = {} }}", std::process::id())), "{error}");
        drop(end);
        thread.join().unwrap();
    }
}

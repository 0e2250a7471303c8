//! Processes that a test started, and that are gone when it ends.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::process::{Child, Command};

use crate::HarnessError;

/// After so long a test gives up waiting. It bounds a hang and nothing else: no test is about it.
pub const GIVE_UP: Duration = Duration::from_secs(60);

/// Gives up once nothing has moved for [`GIVE_UP`]: for what consists of many parts and may take long on a
/// busy machine, as long as it goes on.
#[derive(Debug)]
pub struct Patience<T> {
    seen: T,
    since: Instant,
}

impl<T: PartialEq> Patience<T> {
    /// How far it is at the beginning.
    pub fn new(seen: T) -> Self {
        Self { seen, since: Instant::now() }
    }

    /// When it is over, if nothing moves: it is as far as this now.
    pub fn ends(&mut self, now: T) -> Instant {
        if self.seen != now {
            *self = Self::new(now);
        }
        self.since + GIVE_UP
    }
}

/// One process, not merely its pid: a pid may have been given away when it is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    /// Its pid (tgid).
    pub pid: u32,
    /// Start time in clock ticks since boot: field 22 of `/proc/PID/stat`.
    pub start_ticks: u64,
}

impl Identity {
    /// The process that has this pid now.
    pub fn of(pid: u32) -> Option<Self> {
        let (_, start_ticks) = state_and_start(pid)?;
        Some(Self { pid, start_ticks })
    }

    /// It exists and is neither a zombie nor being torn down.
    pub fn is_alive(self) -> bool {
        state_and_start(self.pid).is_some_and(|(state, start)| start == self.start_ticks && !matches!(state, 'Z' | 'X'))
    }

    /// Whether SIGSTOP has stopped all of its threads: a moment after the signal was sent, later on a busy
    /// machine (proc_pid_stat(5), `state`). One in state D stops before it runs any further.
    pub fn is_stopped(self) -> bool {
        let threads = fs::read_dir(format!("/proc/{}/task", self.pid));
        let mut threads = threads.into_iter().flatten().flatten();
        self.is_alive()
            && threads.all(|thread| {
                let stat = fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
                stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(['T', 'D']))
            })
    }

    /// Sends a signal if it is still this process; says whether it was.
    pub fn signal(self, signal: Signal) -> bool {
        self.is_alive() && kill(Pid::from_raw(self.pid.cast_signed()), signal).is_ok()
    }
}

/// State letter and start time (fields 3 and 22 of proc_pid_stat(5)).
fn state_and_start(pid: u32) -> Option<(char, u64)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(") ")?.1.split_whitespace();
    let state = fields.next()?.chars().next()?;
    Some((state, fields.nth(18)?.parse().ok()?))
}

/// A child process. Dropping it kills it and the processes recorded with it, and waits until it is
/// gone.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    /// Of the child.
    pub identity: Identity,
    tree: Vec<Identity>,
    log: PathBuf,
}

impl Process {
    /// Starts `command`; what it writes goes to `<folder>/<name>.log`.
    ///
    /// # Errors
    ///
    /// The log cannot be created or the program cannot be run.
    pub fn spawn(name: &str, mut command: Command, folder: &Path) -> Result<Self, HarnessError> {
        let log = folder.join(format!("{name}.log"));
        let failed = |what: String| move |source| HarnessError::Io { what, source };
        let file = File::options().create(true).append(true).open(&log).map_err(failed(log.display().to_string()))?;
        let copy = file.try_clone().map_err(failed(log.display().to_string()))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(file)
            .stderr(copy)
            .spawn()
            .map_err(failed(format!("starting {name}")))?;
        let identity = child.id().and_then(Identity::of).ok_or_else(|| HarnessError::Ended {
            name: name.to_owned(),
            log: String::new(),
            status: "before it was looked at".to_owned(),
        })?;
        Ok(Self { name: name.to_owned(), child, identity, tree: Vec::new(), log })
    }

    /// What it was called when it was started.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Processes that end with this one, such as its children.
    pub fn record(&mut self, pids: impl IntoIterator<Item = u32>) {
        self.tree.extend(pids.into_iter().filter_map(Identity::of));
    }

    /// Waits for its exit.
    ///
    /// # Errors
    ///
    /// It does not end within [`GIVE_UP`].
    pub async fn exited(&mut self) -> Result<ExitStatus, HarnessError> {
        match tokio::time::timeout(GIVE_UP, self.child.wait()).await {
            Ok(status) => status.map_err(|source| HarnessError::Io { what: self.name.clone(), source }),
            Err(_) => Err(HarnessError::GaveUp(format!("the exit of {}", self.name))),
        }
    }

    /// Whether it has been seen to exit.
    pub fn has_exited(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits until `path` exists and reads it.
    ///
    /// # Errors
    ///
    /// The process ends first, or the file does not come within [`GIVE_UP`].
    pub async fn ready_file<T: serde::de::DeserializeOwned>(&mut self, path: &Path) -> Result<T, HarnessError> {
        let deadline = Instant::now() + GIVE_UP;
        loop {
            // Files of this kind appear by being renamed: what can be read is complete.
            if let Ok(content) = fs::read(path) {
                return serde_json::from_slice(&content)
                    .map_err(|error| HarnessError::GaveUp(format!("{}: {error}", path.display())));
            }
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(HarnessError::Ended {
                    name: self.name.clone(),
                    status: status.to_string(),
                    log: self.log_tail(),
                });
            }
            if Instant::now() > deadline {
                let what = format!("{} of {}; it said:\n{}", path.display(), self.name, self.log_tail());
                return Err(HarnessError::GaveUp(what));
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// How much it has written, in bytes.
    pub fn written(&self) -> u64 {
        fs::metadata(&self.log).map_or(0, |log| log.len())
    }

    /// The last lines that it wrote.
    pub fn log_tail(&self) -> String {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(40)..].join("\n")
    }

    /// Kills it and what was recorded with it, at once, and reaps it.
    pub fn end(&mut self) {
        for process in &self.tree {
            process.signal(Signal::SIGKILL);
        }
        let _ = self.child.start_kill();
        let deadline = Instant::now() + GIVE_UP;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.end();
        if std::thread::panicking() {
            eprintln!("--- {} said:\n{}", self.name, self.log_tail());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_process_and_what_was_recorded_with_it_are_gone_after_the_drop() {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        let said = folder.path().join("child");
        command.arg("-c").arg(format!("sleep 1000 & echo $! > {0}.tmp; mv {0}.tmp {0}; wait", said.display()));
        let mut shell = Process::spawn("shell", command, folder.path()).unwrap();
        let child: u32 = shell.ready_file(&said).await.unwrap();
        shell.record([child]);
        let (shell_id, child) = (shell.identity, Identity::of(child).unwrap());
        assert!(shell_id.is_alive() && child.is_alive());
        drop(shell);
        assert!(!shell_id.is_alive());
        // Its new parent has to reap it; killed it is already.
        let deadline = Instant::now() + GIVE_UP;
        while child.is_alive() {
            assert!(Instant::now() < deadline, "the child lives on");
            std::thread::yield_now();
        }
    }

    #[tokio::test]
    async fn a_program_that_ends_too_soon_is_named_with_what_it_said() {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "echo no such thing; exit 3"]);
        let mut process = Process::spawn("fails", command, folder.path()).unwrap();
        let error = process.ready_file::<u32>(&folder.path().join("never")).await.unwrap_err().to_string();
        assert!(
            error.contains("fails") && error.contains("exit status: 3") && error.contains("no such thing"),
            "{error}"
        );
    }

    #[test]
    fn patience_begins_anew_whenever_something_has_moved() {
        let mut patience = Patience::new(1);
        let first = patience.ends(1);
        assert_eq!(patience.ends(1), first);
        let moved = patience.ends(2);
        assert!(moved > first);
        assert_eq!(patience.ends(2), moved);
    }

    #[test]
    fn another_process_of_the_same_pid_is_not_signalled() {
        let me = Identity::of(std::process::id()).unwrap();
        assert!(me.is_alive());
        let predecessor = Identity { start_ticks: me.start_ticks - 1, ..me };
        assert!(!predecessor.is_alive() && !predecessor.signal(Signal::SIGKILL));
    }
}

//! Files of `/proc` that the kernel reads out of a process's memory: `cmdline` and `environ`.
//!
//! Whoever reads them waits for the process's `mmap_lock` (`access_remote_vm` in `mm/memory.c`), and a process
//! that is stuck in the kernel, or wants it so, holds that lock for ever. `stat`, `status` and `comm` take no
//! such lock. So each of these files is read on a thread of its own that nobody waits for longer than
//! [`PATIENCE`]. A thread that does not come back is left to itself, its process is known as [`Stuck`], and
//! nobody asks that process again until the thread has returned.

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io::{self, Read as _};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::core::ProcessId;

/// How long one file is waited for. A machine that is merely busy answers within it.
const PATIENCE: Duration = Duration::from_millis(250);
/// Threads that may be stuck at one time, each of which costs its stack and a task of the kernel. Beyond that
/// nothing is read any more of users that have stuck processes, and beyond twice as many of nobody.
const MAX_STUCK: usize = 32;
/// See [`MAX_STUCK`].
const TOO_MANY: usize = 2 * MAX_STUCK;
/// Threads that wait for the next file.
const MAX_IDLE: usize = 4;
/// Enough for one read.
const STACK: usize = 64 << 10;

/// A process whose memory could not be read in time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stuck {
    /// Which process.
    pub id: ProcessId,
    /// Its name, at most 15 bytes.
    pub comm: String,
    /// The user as whom it acts.
    pub user: Option<u32>,
    /// Since when it is known.
    pub since: Instant,
}

impl fmt::Display for Stuck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, comm, user: _, since } = self;
        let seconds = since.elapsed().as_secs();
        write!(
            f,
            "{comm} (pid {}) has held its memory locked for {seconds} s: the daemon does not read its command line and environment",
            id.tgid
        )
    }
}

/// What is read.
#[derive(Debug, Clone, Copy)]
pub(super) enum MemoryFile {
    CommandLine,
    Environment,
}

impl MemoryFile {
    const fn name(self) -> &'static str {
        match self {
            Self::CommandLine => "cmdline",
            Self::Environment => "environ",
        }
    }
}

struct Job {
    /// Names the job, among those whose threads are stuck.
    number: u64,
    path: String,
    most: u64,
    answer: SyncSender<io::Result<Vec<u8>>>,
}

#[derive(Default)]
struct Readers {
    idle: Vec<SyncSender<Job>>,
    /// By the number of the job that does not come back.
    stuck: HashMap<u64, Stuck>,
    jobs: u64,
}

impl Readers {
    /// Whether reading of this process has to be left alone.
    fn spare(&self, tgid: u32) -> bool {
        let mut stuck = self.stuck.values();
        if stuck.any(|stuck| stuck.id.tgid == tgid && super::identify(tgid) == Some(stuck.id)) {
            return true;
        }
        let number = self.stuck.len();
        number >= TOO_MANY
            || number >= MAX_STUCK && {
                let user = super::effective_user(tgid);
                self.stuck.values().any(|stuck| stuck.user == user)
            }
    }
}

static READERS: LazyLock<Mutex<Readers>> = LazyLock::new(Mutex::default);

fn readers() -> MutexGuard<'static, Readers> {
    READERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Every process that is known to be stuck, the oldest first.
#[must_use]
pub(crate) fn stuck() -> Vec<Stuck> {
    let mut stuck: Vec<Stuck> = readers().stuck.values().cloned().collect();
    stuck.sort_by_key(|one| (one.since, one.id));
    stuck
}

/// What reading is left out, if so many processes are stuck that more than theirs is.
#[must_use]
pub(crate) fn bound_reached() -> Option<String> {
    let number = readers().stuck.len();
    let whose = if number >= TOO_MANY { "of any user" } else { "of the users who have them" };
    (number >= MAX_STUCK).then(|| format!(
        "{number} processes hold their memory locked: the daemon reads no command line and no environment {whose}, and \
         finds no worker among those processes"
    ))
}

/// Whether an error means that the process is stuck, and not that it is gone or may not be read.
#[must_use]
pub(crate) fn is_stuck(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::TimedOut
}

/// Reads at most so many bytes.
///
/// # Errors
/// Timed out: the process is stuck, or so many are that nobody else is read. Else what open(2) and read(2) say.
pub(super) fn read(tgid: u32, file: MemoryFile, most: u64) -> io::Result<Vec<u8>> {
    let (answer, answered) = sync_channel(1);
    let path = format!("/proc/{tgid}/{}", file.name());
    let number = hand_over(tgid, |number| Job { number, path, most, answer })?;
    match answered.recv_timeout(PATIENCE) {
        Ok(read) => read,
        Err(_) => give_up(tgid, number, &answered),
    }
}

/// To a thread that waits, or to a new one. The job's number.
fn hand_over(tgid: u32, job: impl FnOnce(u64) -> Job) -> io::Result<u64> {
    let mut readers = readers();
    if readers.spare(tgid) {
        return Err(io::ErrorKind::TimedOut.into());
    }
    readers.jobs += 1;
    let number = readers.jobs;
    let mut job = job(number);
    while let Some(reader) = readers.idle.pop() {
        match reader.try_send(job) {
            Ok(()) => return Ok(number),
            Err(TrySendError::Full(same) | TrySendError::Disconnected(same)) => job = same,
        }
    }
    let (reader, jobs) = sync_channel(1);
    // It takes this job before it is idle.
    let _ = reader.try_send(job);
    std::thread::Builder::new()
        .name("lastgasp-proc".to_owned())
        .stack_size(STACK)
        .spawn(move || serve(&reader, &jobs))
        .map(|_| number)
}

/// Notes that a process is stuck, unless its answer came at the last moment.
fn give_up(tgid: u32, number: u64, answered: &Receiver<io::Result<Vec<u8>>>) -> io::Result<Vec<u8>> {
    // One that is stuck keeps its pid.
    let id = super::identify(tgid).ok_or(io::ErrorKind::NotFound)?;
    let (comm, user) = (super::comm(tgid).unwrap_or_default(), super::effective_user(tgid));
    let mut readers = readers();
    // Under the lock: a reader that answers after this look finds the note, and takes it back.
    if let Ok(read) = answered.try_recv() {
        return read;
    }
    let stuck = Stuck { id, comm, user, since: Instant::now() };
    tracing::warn!(
        tgid = id.tgid,
        comm = stuck.comm,
        "process holds its memory locked: the daemon does not read its command line and environment"
    );
    readers.stuck.insert(number, stuck);
    let known = readers.stuck.len();
    drop(readers);
    if let (MAX_STUCK | TOO_MANY, Some(reached)) = (known, bound_reached()) {
        tracing::warn!("{reached}");
    }
    Err(io::ErrorKind::TimedOut.into())
}

fn serve(reader: &SyncSender<Job>, jobs: &Receiver<Job>) {
    while let Ok(Job { number, path, most, answer }) = jobs.recv() {
        let mut bytes = Vec::new();
        let read = File::open(path).and_then(|file| file.take(most).read_to_end(&mut bytes));
        let mut readers = readers();
        let _ = answer.try_send(read.map(|_| bytes));
        if let Some(stuck) = readers.stuck.remove(&number) {
            tracing::info!(
                tgid = stuck.id.tgid,
                comm = stuck.comm,
                "process no longer holds its memory locked, or is gone"
            );
        }
        if readers.idle.len() >= MAX_IDLE {
            return;
        }
        readers.idle.push(reader.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_answers_is_not_stuck() {
        let me = std::process::id();
        for _ in 0..100 {
            let read = read(me, MemoryFile::CommandLine, 4096).unwrap();
            assert!(!read.is_empty());
        }
        assert!(stuck().iter().all(|stuck| stuck.id.tgid != me));
        assert!(readers().idle.len() <= MAX_IDLE);
        assert_eq!(read(u32::MAX, MemoryFile::Environment, 1).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}

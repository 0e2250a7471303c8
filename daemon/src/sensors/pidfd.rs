//! The end of a process, from its pidfd: needs no privilege, misses nothing, comes late.
//!
//! A pidfd becomes readable once the whole thread group is gone: after the memory was torn down
//! and the core was dumped. It is the truth that faster sensors are checked against.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};

use tokio::io::unix::AsyncFd;

use super::proc::{self, Presence};
use super::sys;
use crate::core::{Exit, ProcessId};

/// Why a process cannot be watched.
#[derive(Debug, thiserror::Error)]
pub enum PidfdError {
    /// It is gone, or its pid belongs to another process by now. That is a death, not a failure.
    #[error("process {0} is gone")]
    Gone(ProcessId),
    /// EMFILE or ENFILE. One descriptor is needed for each watched process.
    #[error("too many open files to watch process {0}: raise the limit (LimitNOFILE=, ulimit -n)")]
    TooManyFiles(ProcessId),
    /// ENOSYS: Linux before 5.3, or a seccomp filter that does not know the call.
    #[error("the kernel or the container's seccomp profile has no pidfd_open (Linux 5.3)")]
    Unsupported,
    /// Anything else, from `pidfd_open` or from the reactor.
    #[error("cannot watch process {process}")]
    Io {
        /// Which process.
        process: ProcessId,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
}

/// One process, held so that its pid cannot come to mean another.
#[derive(Debug)]
pub struct PidFd {
    process: ProcessId,
    fd: AsyncFd<OwnedFd>,
}

impl PidFd {
    /// Opens the pidfd of exactly this process. One that is a zombie still opens, and has exited.
    ///
    /// The start time is compared before and after `pidfd_open`: if it is the same both times, the
    /// descriptor is that process, since a pid is not given again while its owner exists.
    ///
    /// # Errors
    /// See [`PidfdError`].
    ///
    /// # Panics
    /// Outside a tokio runtime with I/O enabled.
    pub fn open(process: ProcessId) -> Result<Self, PidfdError> {
        let fd = open_fd(process)?;
        let fd = sys::watch_readable(fd).map_err(|source| PidfdError::Io { process, source })?;
        Ok(Self { process, fd })
    }

    /// Whose pidfd this is.
    #[must_use]
    pub const fn process(&self) -> ProcessId {
        self.process
    }

    /// Waits until the whole thread group is gone, and tells how it ended as far as that is known
    /// at that moment. It does not wait for the parent to reap: a parent may never do so.
    ///
    /// Cancel safe; every later call returns at once.
    pub async fn exited(&self) -> Exit {
        // Readiness is never cleared: a process does not come back. An error means that the
        // reactor is shutting down with the runtime, so nobody will read the answer.
        if self.fd.readable().await.is_err() {
            std::future::pending::<()>().await;
        }
        self.exit()
    }

    /// How it ended. The kernel tells everyone from 6.15 on, but promises it only after the reap;
    /// `/proc/PID/stat` tells those who may trace the process, but only before the reap.
    fn exit(&self) -> Exit {
        let status = || sys::pidfd_wait_status(self.fd.get_ref().as_fd()).ok().flatten();
        status()
            .or_else(|| proc::zombie_wait_status(self.process))
            // It may have been reaped between the two questions.
            .or_else(status)
            .map_or(Exit::Unknown, Exit::from_wait_status)
    }
}

/// Sends a signal to exactly this process. Its pidfd comes back: it becomes readable when the
/// process is gone.
///
/// # Errors
/// Gone: it has ended, so nothing was sent. Otherwise see [`PidfdError`]; without CAP_KILL other
/// users' processes are refused.
pub fn signal(process: ProcessId, signal: i32) -> Result<OwnedFd, PidfdError> {
    let fd = open_fd(process)?;
    sys::pidfd_send_signal(fd.as_fd(), signal).map_err(|source| match source.raw_os_error() {
        Some(libc::ESRCH) => PidfdError::Gone(process),
        _ => PidfdError::Io { process, source },
    })?;
    Ok(fd)
}

fn open_fd(process: ProcessId) -> Result<OwnedFd, PidfdError> {
    let same = || match proc::presence(process) {
        Presence::Same { .. } => Ok(()),
        Presence::Gone => Err(PidfdError::Gone(process)),
        Presence::Unknown => Err(PidfdError::TooManyFiles(process)),
    };
    same()?;
    let fd = sys::pidfd_open(process.tgid).map_err(|source| match source.raw_os_error() {
        Some(libc::ESRCH) => PidfdError::Gone(process),
        _ if proc::is_want_of_files(&source) => PidfdError::TooManyFiles(process),
        Some(libc::ENOSYS) => PidfdError::Unsupported,
        _ => PidfdError::Io { process, source },
    })?;
    same()?;
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::{Child, Command, Stdio};
    use std::time::Duration;

    use super::*;

    fn sleeper() -> Child {
        Command::new("sleep").arg("1000").spawn().unwrap()
    }

    fn kill(child: &Child, signal: nix::sys::signal::Signal) {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(child.id().cast_signed()), signal).unwrap();
    }

    async fn soon<T>(event: impl Future<Output = T>) -> T {
        tokio::time::timeout(Duration::from_secs(30), event).await.expect("the event should have come")
    }

    #[tokio::test]
    async fn a_killed_process_is_told_with_its_signal_before_anybody_reaps_it() {
        let mut child = sleeper();
        let pidfd = PidFd::open(proc::identify(child.id()).unwrap()).unwrap();
        kill(&child, nix::sys::signal::Signal::SIGKILL);
        // Not reaped yet: std reaps only in wait().
        assert_eq!(soon(pidfd.exited()).await, Exit::Signal { signal: libc::SIGKILL, core: false });
        assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGKILL));
        // Afterwards only the kernel can tell, from 6.15 on.
        let has_status = sys::pidfd_wait_status(pidfd.fd.get_ref().as_fd()).is_ok();
        let exit = if has_status { Exit::Signal { signal: libc::SIGKILL, core: false } } else { Exit::Unknown };
        assert_eq!(soon(pidfd.exited()).await, exit);
    }

    #[tokio::test]
    async fn an_exit_status_is_told_even_when_it_is_zero() {
        for status in [0, 3] {
            let mut child = Command::new("sh")
                .args(["-c", &format!("read line; exit {status}")])
                .stdin(Stdio::piped())
                .spawn()
                .unwrap();
            let pidfd = PidFd::open(proc::identify(child.id()).unwrap()).unwrap();
            drop(child.stdin.take());
            assert_eq!(soon(pidfd.exited()).await, Exit::Status(status));
            child.wait().unwrap();
        }
    }

    #[tokio::test]
    async fn a_process_that_lives_is_not_reported() {
        let mut child = sleeper();
        let pidfd = PidFd::open(proc::identify(child.id()).unwrap()).unwrap();
        let exited = tokio::time::timeout(Duration::from_millis(50), pidfd.exited()).await;
        assert!(exited.is_err());
        child.kill().unwrap();
        soon(pidfd.exited()).await;
        child.wait().unwrap();
    }

    #[tokio::test]
    async fn a_zombie_opens_and_has_exited() {
        let mut child = Command::new("true").spawn().unwrap();
        let process = proc::identify(child.id()).unwrap();
        while proc::is_alive(process) {
            tokio::task::yield_now().await;
        }
        assert_eq!(soon(PidFd::open(process).unwrap().exited()).await, Exit::Status(0));
        child.wait().unwrap();
    }

    #[tokio::test]
    async fn a_signal_reaches_the_process_that_is_meant_and_no_successor_of_its_pid() {
        let mut child = sleeper();
        let process = proc::identify(child.id()).unwrap();
        let predecessor = ProcessId { start_ticks: process.start_ticks - 1, ..process };
        assert!(matches!(signal(predecessor, libc::SIGKILL), Err(PidfdError::Gone(_))));
        let pidfd = PidFd::open(process).unwrap();
        signal(process, libc::SIGTERM).unwrap();
        assert_eq!(soon(pidfd.exited()).await, Exit::Signal { signal: libc::SIGTERM, core: false });
        child.wait().unwrap();
        assert!(matches!(signal(process, libc::SIGKILL), Err(PidfdError::Gone(_))));
    }

    #[tokio::test]
    async fn the_successor_of_a_pid_is_not_its_predecessor() {
        let mut child = sleeper();
        let process = proc::identify(child.id()).unwrap();
        let predecessor = ProcessId { start_ticks: process.start_ticks - 1, ..process };
        assert!(matches!(PidFd::open(predecessor), Err(PidfdError::Gone(gone)) if gone == predecessor));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(matches!(PidFd::open(process), Err(PidfdError::Gone(_))));
    }
}

//! Network namespaces, held by a descriptor.
//!
//! A pid says where a process is at one moment. A descriptor of `/proc/PID/ns/net` keeps meaning the
//! namespace that was looked at, whatever becomes of the process (namespaces(7)).

use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd as _, RawFd};
use std::os::unix::fs::MetadataExt as _;
use std::sync::Arc;

use nix::sched::{CloneFlags, setns};
use tokio::net::TcpSocket;

use crate::core::ProcessId;
use crate::sensors::proc;

/// One network namespace.
#[derive(Debug, Clone)]
pub struct Namespace {
    file: Arc<File>,
    inode: u64,
}

impl PartialEq for Namespace {
    fn eq(&self, other: &Self) -> bool {
        self.inode == other.inode
    }
}

impl Namespace {
    /// The namespace of this very process.
    ///
    /// # Errors
    /// Not found: the process is gone, or another has its pid. Permission denied: another user's
    /// process, and no CAP_SYS_PTRACE.
    pub fn of(process: ProcessId) -> io::Result<Self> {
        let namespace = Self::open(&process.tgid.to_string())?;
        // Opened first: the pid may have been given away before that, but not since.
        if proc::identify(process.tgid) == Some(process) { Ok(namespace) } else { Err(io::ErrorKind::NotFound.into()) }
    }

    /// The namespace of this thread.
    ///
    /// # Errors
    /// `/proc` is not mounted.
    pub fn own() -> io::Result<Self> {
        Self::open("thread-self")
    }

    /// The namespace of the host: that of its kernel threads where they are to be seen, else this thread's
    /// own.
    ///
    /// # Errors
    /// It may not be opened without CAP_SYS_PTRACE.
    pub fn host() -> io::Result<Self> {
        match proc::kthreadd() {
            Some(tgid) => Self::open(&tgid.to_string()),
            None => Self::own(),
        }
    }

    fn open(process: &str) -> io::Result<Self> {
        let file = File::open(format!("/proc/{process}/ns/net"))?;
        let inode = file.metadata()?.ino();
        Ok(Self { file: Arc::new(file), inode })
    }

    /// The descriptor's number, for as long as this lives.
    pub(super) fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Whether this thread is in it.
    #[must_use]
    pub fn is_own(&self) -> bool {
        Self::own().is_ok_and(|own| own == *self)
    }

    /// Does something within the namespace, on a thread that ends with it. Blocks until that is done.
    ///
    /// # Errors
    /// It may not be entered: that takes CAP_SYS_ADMIN here and in the user namespace that owns it
    /// (setns(2)). Or there is no room for a thread.
    pub fn within<T: Send>(&self, what: impl FnOnce() -> T + Send) -> io::Result<T> {
        if self.is_own() {
            return Ok(what());
        }
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("lastgasp-netns".to_owned()).spawn_scoped(scope, || {
                setns(&self.file, CloneFlags::CLONE_NEWNET)?;
                Ok(what())
            })?;
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// A TCP socket that lives in the namespace: whoever connects it connects from there.
    ///
    /// # Errors
    /// As [`Self::within`]; and a socket cannot be made.
    pub async fn socket(&self, peer: SocketAddr) -> io::Result<TcpSocket> {
        let namespace = self.clone();
        let make = move || namespace.within(|| socket(peer))?;
        tokio::task::spawn_blocking(make).await.map_err(io::Error::other)?
    }
}

/// A TCP socket in this thread's namespace, for a peer of that family.
pub(super) fn socket(peer: SocketAddr) -> io::Result<TcpSocket> {
    if peer.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_is_gone_has_no_namespace() {
        let me = proc::identify(std::process::id()).unwrap();
        let mine = Namespace::of(me).unwrap();
        assert!(mine.is_own());
        assert_eq!(mine.within(|| 7).unwrap(), 7);
        let predecessor = ProcessId { start_ticks: me.start_ticks - 1, ..me };
        assert_eq!(Namespace::of(predecessor).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}

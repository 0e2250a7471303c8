//! The kernel's log, for what no tracepoint tells: GPU faults, and what the OOM killer ran out of.
//!
//! Reading begins at the end of the log. What was logged before, and while no daemon ran, is not
//! seen: a fault of that time shows in the worker's health, or not at all. When the log is written
//! faster than it is read, the kernel drops its oldest records, and that is counted.
//!
//! Only records of the kernel itself count (facility 0). The kernel gives those that processes write
//! into `/dev/kmsg` another facility, whatever they ask for (`devkmsg_write`,
//! kernel/printk/printk.c), so nobody can fake a fault.

mod parse;
mod xids;

use std::fs::OpenOptions;
use std::io::{self, Seek as _, SeekFrom};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt as _;

pub use parse::{Facilities, Fact, OomScope, parse};
pub use xids::policy as xid_policy;

/// Where the kernel's log is (Documentation/ABI/testing/dev-kmsg).
pub const KMSG: &str = "/dev/kmsg";
/// Longest record; the kernel's own limit (`PRINTK_MESSAGE_MAX`, kernel/printk/internal.h).
const RECORD: usize = 8192;

/// What the log holds for us.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LogEntry {
    /// A record that matters.
    Fact(Fact),
    /// The log was overwritten before it was read: records are missing, nobody knows how many.
    Overrun,
}

/// The log, open at its end.
#[derive(Debug)]
pub struct Kmsg {
    descriptor: OwnedFd,
    facilities: Facilities,
}

impl Kmsg {
    /// Opens the log at its end.
    ///
    /// # Errors
    /// Permission denied: `kernel.dmesg_restrict` is set and CAP_SYSLOG is missing, or the container
    /// has no such device. Not found: likewise.
    pub fn open(facilities: Facilities) -> io::Result<Self> {
        let mut file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(KMSG)?;
        file.seek(SeekFrom::End(0))?;
        Ok(Self { descriptor: file.into(), facilities })
    }

    /// Tells of every record that matters, until `tell` says that nobody listens.
    ///
    /// # Errors
    /// The log cannot be polled or read any more.
    ///
    /// # Panics
    /// Outside a tokio runtime with I/O enabled.
    pub async fn follow(self, mut tell: impl FnMut(LogEntry) -> bool) -> io::Result<()> {
        let Self { descriptor, facilities } = self;
        let log = super::sys::watch_readable(descriptor)?;
        let mut record = vec![0; RECORD];
        loop {
            let mut ready = log.readable().await?;
            let entry = match nix::unistd::read(ready.get_inner(), &mut record) {
                // Each read is one record.
                Ok(length) => parse(&String::from_utf8_lossy(&record[..length]), facilities).map(LogEntry::Fact),
                Err(nix::errno::Errno::EAGAIN) => {
                    ready.clear_ready();
                    None
                }
                Err(nix::errno::Errno::EPIPE) => Some(LogEntry::Overrun),
                // A record longer than any that the kernel writes is skipped by it.
                Err(nix::errno::Errno::EINVAL | nix::errno::Errno::EINTR) => None,
                Err(error) => return Err(error.into()),
            };
            if entry.is_some_and(|entry| !tell(entry)) {
                return Ok(());
            }
        }
    }
}

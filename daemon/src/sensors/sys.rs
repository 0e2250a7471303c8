//! The system calls that no crate wraps for us, each as one safe function.
#![expect(
    unsafe_code,
    reason = "pidfd_open, pidfd_send_signal, PIDFD_GET_INFO and CLOCK_MONOTONIC have no safe wrapper here"
)]

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// `pidfd_open(2)`, since Linux 5.3. The descriptor is close-on-exec.
///
/// # Errors
/// ESRCH: no such process, or it was reaped. EINVAL or ENOENT: a thread that leads no group. EMFILE,
/// ENFILE: too many open files. ENOSYS: Linux before 5.3, or a seccomp filter that does not know
/// the call.
pub(super) fn pidfd_open(tgid: u32) -> io::Result<OwnedFd> {
    let pid = libc::pid_t::try_from(tgid).map_err(|_| io::Error::from_raw_os_error(libc::ESRCH))?;
    // SAFETY: two integers go in, a new descriptor or -1 comes out.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    match i32::try_from(fd) {
        // SAFETY: the kernel has just made this descriptor, and nobody else knows its number.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// `pidfd_send_signal(2)`, since Linux 5.1: to the process that the descriptor means, and no other.
///
/// # Errors
/// ESRCH: it is gone and reaped. EPERM: not permitted, CAP_KILL is missing.
pub(super) fn pidfd_send_signal(pidfd: BorrowedFd<'_>, signal: i32) -> io::Result<()> {
    let info: *const libc::siginfo_t = std::ptr::null();
    // SAFETY: the descriptor is open for the time of the call; without a siginfo the kernel makes
    // one as kill(2) does, and reads nothing of ours.
    let done = unsafe { libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_raw_fd(), signal, info, 0) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Lets the reactor of this tokio runtime watch a descriptor for reading.
///
/// # Errors
/// The reactor is shutting down, or its epoll instance has no room.
///
/// # Panics
/// Outside a tokio runtime with I/O enabled.
pub(super) fn watch_readable(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the descriptor is owned, moves in, and is neither replaced nor closed before the
    // registration is: `AsyncFd` gives it out by shared reference only, to those that hold no `&mut`.
    unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }.map_err(|error| error.into_parts().1)
}

/// The wait status of the process, if the kernel already tells it: `PIDFD_GET_INFO` with
/// `PIDFD_INFO_EXIT`, since Linux 6.15, promised once the process is reaped (`fs/pidfs.c`).
///
/// # Errors
/// ENOTTY or EINVAL on older kernels; ESRCH from 6.13 and 6.14 once the process is gone.
pub(super) fn pidfd_wait_status(pidfd: BorrowedFd<'_>) -> io::Result<Option<i32>> {
    // SAFETY: `pidfd_info` is made of integers only, for which zero is a value.
    let mut info: libc::pidfd_info = unsafe { MaybeUninit::zeroed().assume_init() };
    info.mask = u64::from(libc::PIDFD_INFO_EXIT);
    // SAFETY: the request number carries the size of `info`, which outlives the call.
    let done = unsafe { libc::ioctl(pidfd.as_raw_fd(), libc::PIDFD_GET_INFO, &raw mut info) };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok((info.mask & u64::from(libc::PIDFD_INFO_EXIT) != 0).then_some(info.exit_code))
}

/// `clock_gettime(CLOCK_MONOTONIC)` in nanoseconds: the clock of `bpf_ktime_get_ns`.
pub(super) fn monotonic_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is a valid place for one timespec.
    let done = unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    debug_assert_eq!(done, 0, "CLOCK_MONOTONIC is always there");
    // Both are never negative on this clock.
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}

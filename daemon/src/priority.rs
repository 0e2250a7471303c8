//! Being first when all cores are busy.
//!
//! From the ring buffer to the published signal everything happens on the main thread. Among
//! processes that never sleep, a thread of normal priority may have to wait for its turn; one of
//! `SCHED_RR` takes a core at once (sched(7)). It sleeps nearly all the time.
#![expect(unsafe_code, reason = "sched_setscheduler has no safe wrapper here")]

use std::io;

/// The lowest real-time priority: above everything normal, below the kernel's own threads.
const LOWEST: libc::c_int = 1;

/// Gives this thread, and no thread or process that it makes, real-time priority.
///
/// # Errors
/// EPERM: neither CAP_SYS_NICE nor RLIMIT_RTPRIO allows it, or the cgroup has no real-time budget
/// (`CONFIG_RT_GROUP_SCHED`).
pub fn realtime() -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: LOWEST };
    let policy = libc::SCHED_RR | libc::SCHED_RESET_ON_FORK;
    // SAFETY: 0 is the calling thread; the parameters are only read, and outlive the call.
    let done = unsafe { libc::syscall(libc::SYS_sched_setscheduler, 0, policy, &raw const parameters) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The policy of a thread of this process, field 41 of its `stat`.
    fn policy(tid: i32) -> u32 {
        let stat = std::fs::read_to_string(format!("/proc/self/task/{tid}/stat")).unwrap();
        stat.rsplit_once(") ").unwrap().1.split(' ').nth(41 - 3).unwrap().parse().unwrap()
    }

    #[test]
    fn the_thread_that_asks_is_raised_and_its_children_are_not() {
        let raised = || {
            let own = nix::unistd::gettid().as_raw();
            match realtime() {
                Ok(()) => assert_eq!(policy(own), libc::SCHED_RR.cast_unsigned()),
                Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EPERM)),
            }
            let child = std::thread::spawn(|| policy(nix::unistd::gettid().as_raw()));
            assert_eq!(child.join().unwrap(), libc::SCHED_OTHER.cast_unsigned());
        };
        std::thread::spawn(raised).join().unwrap();
    }
}

//! Being first when all cores are busy.
//!
//! From the ring buffer to the published signal everything happens on the daemon's main thread. Among
//! processes that never sleep, a thread of normal priority may have to wait for its turn; one of
//! `SCHED_RR` takes a core at once (sched(7)). It sleeps nearly all the time.
//!
//! Where real-time priority is not wanted or not permitted, and for the threads of the router that serve
//! requests, a short slice is asked for. Who wakes with a shorter slice than the one who runs is let in at
//! once if it has not had more than its share, which a thread that sleeps has not (Linux 6.12,
//! `do_preempt_short` in `kernel/sched/fair.c`). It takes no privilege and gives no more of a core than
//! before.
#![expect(unsafe_code, reason = "sched_setscheduler and sched_setattr have no safe wrappers here")]

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

/// The shortest slice that the kernel grants (`__setparam_fair` in `kernel/sched/syscalls.c`); some turns of
/// a loop take longer, and then it waits as everybody does.
const SHORT_SLICE_NS: u64 = 100_000;

/// Asks for a short slice for this thread, and no thread or process that it makes. A kernel before 6.12 takes
/// no notice.
///
/// # Errors
/// The kernel refuses: a sandbox does not let `sched_setattr` pass.
pub fn short_slice() -> io::Result<()> {
    // SAFETY: the type consists of integers, for which zero is a value.
    let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
    attributes.size = size_of::<libc::sched_attr>() as u32;
    let size = attributes.size;
    // SAFETY: 0 is the calling thread; the kernel writes at most `size` bytes, which is all of the value.
    let done = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    // The nice value stays.
    attributes.sched_flags = libc::SCHED_FLAG_RESET_ON_FORK as u64;
    attributes.sched_runtime = SHORT_SLICE_NS;
    // SAFETY: 0 is the calling thread; the attributes are only read, and outlive the call.
    let done = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_slice_changes_neither_policy_nor_nice_value_and_is_not_inherited() {
        let short = || {
            let own = nix::unistd::gettid().as_raw();
            let before = (policy(own), nice(own));
            match short_slice() {
                Ok(()) => assert!(inherits_nothing()),
                Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EPERM)),
            }
            assert_eq!((policy(own), nice(own)), before);
        };
        std::thread::spawn(short).join().unwrap();
    }

    /// Whether this thread resets what it makes (sched(7)).
    fn inherits_nothing() -> bool {
        // SAFETY: 0 is the calling thread.
        let policy = unsafe { libc::sched_getscheduler(0) };
        policy & libc::SCHED_RESET_ON_FORK != 0
    }

    /// Field 19 of its `stat`.
    fn nice(tid: i32) -> i32 {
        let stat = std::fs::read_to_string(format!("/proc/self/task/{tid}/stat")).unwrap();
        stat.rsplit_once(") ").unwrap().1.split(' ').nth(19 - 3).unwrap().parse().unwrap()
    }

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

//! The kernel programs of lastgasp: raw tracepoints only, each independent of
//! the others, so that one that does not fit a kernel can stay unloaded.
//!
//! They filter on `WATCHED` (tgid) and `PORTS` (netns, port), read what an event
//! needs, and put it into the ring. They must never decide whether a worker is
//! gone, and never read a kernel field at an offset that the loader has not
//! resolved from this kernel's BTF.
//!
//! # Why these hooks
//!
//! The way of a process out of the kernel (kernel/signal.c, kernel/exit.c),
//! with our hooks in brackets:
//!
//! ```text
//! get_signal
//!   [signal_deliver]            in each thread; earliest sure sign, before a core is written
//!   vfs_coredump                sockets stay open, seconds to minutes for a large process
//!   do_group_exit
//! do_exit
//!   exit_signals                PF_EXITING
//!   group_dead = atomic_dec_and_test(&signal->live)
//!   tsk->exit_code = code
//!   [sched_process_exit]        from 6.16 on here, with group_dead
//!   exit_mm                     frees memory: 227 ms for 6 GiB
//!   [sched_process_exit]        up to 6.15 here, without group_dead
//!   exit_files
//!   exit_task_work              delayed fput: sockets close, FIN and RST leave
//!     tcp_close
//!       [inet_sock_set_state]   LISTEN -> CLOSE, in the dying task itself
//!   exit_notify                 pidfd wakes
//! ```
//!
//! `signal_deliver` precedes the dump and the teardown on every kernel;
//! `sched_process_exit` is the sure one and the only one that an `exit(2)` of a
//! single thread passes; pidfd, in user space, is the truth that counts what
//! these missed.
//!
//! `signal_generate` runs in the sender and says who that is; it can come after the death.
//! `tcp_send_reset` and `tcp_receive_reset` count what rude clients do, and tell of it once a second.
//!
//! `fork` makes children watched before they run, `exec` and `rename` tell user
//! space that a process may have got another role, and `exec` that a process may have
//! declared itself a worker; `mark_victim` says that it was the OOM killer.
#![cfg_attr(target_arch = "bpf", no_std, no_main)]

#[cfg(target_arch = "bpf")]
mod programs;

/// The machine that runs this never gets here: the verifier accepts no program that can panic.
#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

#[cfg(not(target_arch = "bpf"))]
fn main() -> std::process::ExitCode {
    eprintln!("lastgasp-probes runs in the kernel: build it with `cargo xtask build-ebpf`");
    std::process::ExitCode::FAILURE
}

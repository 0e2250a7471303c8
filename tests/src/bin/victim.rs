//! Programs that live and die in particular ways, for the stories in
//! `tests/kernel`: one binary, one subcommand per way.
//!
//! Each says `ready` (and what the story needs to know) on standard output, and
//! goes on when it reads a line. It ends when its standard input closes, so that
//! no story leaves one behind.

use std::{
    io::{BufRead as _, Write as _},
    net::TcpListener,
    os::unix::process::CommandExt as _,
    process::{Child, Command, ExitCode, Stdio},
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use clap::Parser;

/// How to live and die.
#[derive(Parser)]
enum Victim {
    /// Wait for a line, then exit with this status.
    Exit { status: u8 },
    /// So many threads besides the first; exit with this status at a line.
    Threads {
        count: usize,
        #[arg(default_value_t = 0)]
        status: u8,
    },
    /// All of so many threads leave at the same moment, each by itself.
    ThreadsExit { count: usize },
    /// The first thread leaves at the first line, the last one at the second.
    LeaderExitsFirst,
    /// A thread that is not the first runs `exit 0` in place of this program.
    ExecFromThread,
    /// At each line a child process `exit 0`, whose id is printed.
    Fork,
    /// As many children as fast as possible, one after the other.
    ForkMany { count: usize },
    /// Touch so many MiB, then at a line read address zero with cores allowed.
    Segv { mib: usize },
    /// So many child processes that sleep until they are killed, all in one process group, whose
    /// id is printed, then the children's.
    Sleepers { count: usize },
    /// Processes that fork and exit as fast as they can, from so many threads; at a line it ends, and
    /// how many there were is printed.
    Storm { threads: usize },
    /// Touch so many MiB, listen on a port that the kernel chooses, and accept connections, until
    /// it is killed. With cores allowed.
    Serve { mib: usize },
    /// At a line call `abort`, without a core.
    Abort,
    /// At a line write to address zero, without a core.
    Fault,
    /// A child of this process gets SIGTERM when this process dies.
    DeathSignal,
    #[command(hide = true)]
    DeathSignalChild,
    /// Wait for SIGTERM with `sigwait`, then make a child process `exit 0`, whose id is printed, and exit.
    SigwaitTerm,
    /// Ignore SIGTERM.
    IgnoreTerm,
    /// Handle SIGTERM, SIGINT and SIGUSR1 by doing nothing.
    HandleTerm,
    /// Be the first process of a pid namespace and outlive a SIGTERM with its default action.
    Init,
    #[command(hide = true)]
    UnkillableTerm,
    /// At the first line another thread takes this name, at the second the first one does, at
    /// the third another thread names the first one `by a thread`.
    Rename { name: String },
    /// Listen on a port that the kernel chooses, close it at the first line, exit at the second.
    Listen,
    /// The same on this port.
    ListenOn { port: u16 },
    /// The same in a network namespace of its own, on this port.
    ListenElsewhere { port: u16 },
    /// Listen on a port that the kernel chooses, and accept connections, whose numbers are
    /// printed, without ever reading from them.
    Accept,
    /// Join the cgroup whose directory this is, and allocate until it is full.
    Allocate { cgroup: std::path::PathBuf },
    /// Take one name after the other, as fast as possible, until the parent ends. It reads nothing.
    RenameFlood,
    /// Listen on this port of `::1` and close it again, as fast as possible, until the parent ends. It reads nothing.
    ListenerFlood { port: u16 },
}

fn end_with_parent() {
    nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL).expect("prctl");
}

fn listen_once(port: u16) -> nix::Result<()> {
    use nix::sys::socket::{self, sockopt};
    let (family, kind) = (socket::AddressFamily::Inet6, socket::SockType::Stream);
    let socket = socket::socket(family, kind, socket::SockFlag::SOCK_CLOEXEC, None)?;
    // Beside the engine's, which is an IPv4 address.
    socket::setsockopt(&socket, sockopt::Ipv6V6Only, &true)?;
    socket::setsockopt(&socket, sockopt::ReuseAddr, &true)?;
    let address = std::net::SocketAddrV6::new(std::net::Ipv6Addr::LOCALHOST, port, 0, 0);
    socket::bind(std::os::fd::AsRawFd::as_raw_fd(&socket), &socket::SockaddrIn6::from(address))?;
    socket::listen(&socket, socket::Backlog::new(1)?)
}

fn main() -> ExitCode {
    match Victim::parse() {
        Victim::Exit { status } => {
            ready("");
            wait();
            return ExitCode::from(status);
        }
        Victim::Threads { count, status } => {
            let all = Arc::new(Barrier::new(count + 1));
            for _ in 0..count {
                let all = Arc::clone(&all);
                thread::spawn(move || {
                    all.wait();
                    loop {
                        thread::park();
                    }
                });
            }
            all.wait();
            ready("");
            wait();
            return ExitCode::from(status);
        }
        Victim::RenameFlood => {
            end_with_parent();
            for number in (0..8_u8).cycle() {
                let name = std::ffi::CString::new(format!("name-{number}")).expect("no NUL");
                nix::sys::prctl::set_name(&name).expect("prctl");
            }
        }
        Victim::ListenerFlood { port } => {
            end_with_parent();
            loop {
                if let Err(error) = listen_once(port) {
                    return fail("listen", &error.into());
                }
            }
        }
        Victim::ThreadsExit { count } => {
            let all = Arc::new(Barrier::new(count));
            for _ in 1..count {
                let all = Arc::clone(&all);
                thread::spawn(move || {
                    all.wait();
                    exit_thread()
                });
            }
            ready("");
            wait();
            all.wait();
            exit_thread()
        }
        Victim::LeaderExitsFirst => {
            thread::spawn(|| {
                wait();
                exit_thread()
            });
            // The other thread must not be the one that reads the first line.
            ready("");
            exit_thread()
        }
        Victim::ExecFromThread => {
            ready("");
            wait();
            let exec = thread::spawn(|| Command::new(this()).args(["exit", "0"]).exec());
            return fail("exec", &exec.join().expect("exec does not panic"));
        }
        Victim::Fork => {
            ready("");
            let mut children = Vec::new();
            while wait() {
                let child = child(&["exit", "0"]);
                say(&format!("child {}", child.id()));
                children.push(child);
            }
        }
        Victim::ForkMany { count } => {
            ready("");
            wait();
            for _ in 0..count {
                let status = child(&["exit", "0"]).wait();
                assert!(status.is_ok_and(|status| status.success()), "the child read no end of input");
            }
            say("done");
            wait();
        }
        Victim::Segv { mib } => {
            let memory = vec![1u8; mib << 20];
            default_action(libc::SIGSEGV);
            nix::sys::resource::setrlimit(
                nix::sys::resource::Resource::RLIMIT_CORE,
                nix::sys::resource::RLIM_INFINITY,
                nix::sys::resource::RLIM_INFINITY,
            )
            .expect("root may raise the limit");
            ready("");
            wait();
            std::hint::black_box(&memory);
            raise(libc::SIGSEGV);
        }
        Victim::Sleepers { count } => {
            let mut pids = Vec::new();
            for _ in 0..count {
                pids.push(fork_child(|| {
                    // It does not outlive its parent, whose end is the end of the story.
                    let _ = nix::sys::prctl::set_pdeathsig(nix::sys::signal::SIGKILL);
                    loop {
                        nix::unistd::pause();
                    }
                }));
            }
            let group = nix::unistd::Pid::from_raw(pids[0]);
            for pid in &pids {
                nix::unistd::setpgid(nix::unistd::Pid::from_raw(*pid), group).expect("it is our child, and there");
            }
            let pids: Vec<_> = pids.iter().map(ToString::to_string).collect();
            ready(&pids.join(" "));
            wait();
        }
        Victim::Storm { threads } => {
            let over = Arc::new(AtomicBool::new(false));
            let storms: Vec<_> = (0..threads)
                .map(|_| {
                    let over = Arc::clone(&over);
                    thread::spawn(move || {
                        let mut exits = 0_u64;
                        let mut stack = vec![0; 16 << 10];
                        while !over.load(Ordering::Relaxed) {
                            let child = exit_at_once(&mut stack);
                            nix::sys::wait::waitpid(child, None).expect("it is our child");
                            exits += 1;
                        }
                        exits
                    })
                })
                .collect();
            ready("");
            wait();
            over.store(true, Ordering::Relaxed);
            let exits: u64 = storms.into_iter().map(|storm| storm.join().expect("it does not panic")).sum();
            say(&format!("exits {exits}"));
        }
        Victim::Serve { mib } => {
            let memory = vec![1_u8; mib << 20];
            default_action(libc::SIGSEGV);
            nix::sys::resource::setrlimit(
                nix::sys::resource::Resource::RLIMIT_CORE,
                nix::sys::resource::RLIM_INFINITY,
                nix::sys::resource::RLIM_INFINITY,
            )
            .expect("root may raise the limit");
            let listener = TcpListener::bind(("127.0.0.1", 0)).expect("bind");
            let port = listener.local_addr().expect("it is bound").port();
            thread::spawn(move || {
                let mut accepted = Vec::new();
                while let Ok((stream, _)) = listener.accept() {
                    accepted.push(stream);
                    say("accepted");
                }
            });
            ready(&port.to_string());
            wait();
            std::hint::black_box(&memory);
        }
        Victim::Abort => {
            no_core();
            ready("");
            wait();
            std::process::abort();
        }
        Victim::Fault => {
            no_core();
            default_action(libc::SIGSEGV);
            ready("");
            wait();
            // SAFETY: it is not safe, and that is the point: the kernel ends this process here.
            unsafe { std::ptr::null_mut::<u8>().write_volatile(1) };
        }
        Victim::DeathSignal => {
            let mut child = Command::new(this());
            child.arg("death-signal-child").stdin(Stdio::null()).stdout(Stdio::piped());
            let mut child = child.spawn().expect("this program runs, so it can run again");
            let mut line = String::new();
            let output = child.stdout.take().expect("it is piped");
            std::io::BufReader::new(output).read_line(&mut line).expect("a pipe can be read");
            ready(&child.id().to_string());
            wait();
            let _ = child.kill();
            let _ = child.wait();
        }
        Victim::DeathSignalChild => {
            nix::sys::prctl::set_pdeathsig(nix::sys::signal::SIGTERM).expect("a valid signal");
            ready("");
            loop {
                thread::park();
            }
        }
        Victim::SigwaitTerm => {
            let term = nix::sys::signal::SigSet::from_iter([nix::sys::signal::SIGTERM]);
            term.thread_block().expect("a valid set");
            ready("");
            term.wait().expect("a valid set");
            let mut child = child(&["exit", "0"]);
            say(&format!("child {}", child.id()));
            child.wait().expect("a child can be waited for");
        }
        Victim::IgnoreTerm => {
            // SAFETY: SIG_IGN is a valid disposition, and there is no other thread.
            unsafe { libc::signal(libc::SIGTERM, libc::SIG_IGN) };
            ready("");
            wait();
        }
        Victim::HandleTerm => {
            extern "C" fn handler(_signal: i32) {}
            for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGUSR1] {
                let handler: extern "C" fn(i32) = handler;
                // SAFETY: the handler does nothing, so it may interrupt anything.
                unsafe { libc::signal(signal, handler as libc::sighandler_t) };
            }
            ready("");
            wait();
        }
        Victim::Init => {
            ready("");
            wait();
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWPID).expect("root may make a pid namespace");
            let status = Command::new(this()).arg("unkillable-term").status();
            assert!(status.is_ok_and(|status| status.success()), "the init died of SIGTERM");
        }
        Victim::UnkillableTerm => {
            assert_eq!(std::process::id(), 1, "not an init");
            default_action(libc::SIGTERM);
            // A signal that is blocked when it is sent is not thrown away then:
            // the kernel delivers it, and only then sees that this is an init.
            let term = nix::sys::signal::SigSet::from_iter([nix::sys::signal::SIGTERM]);
            term.thread_block().expect("a valid set");
            raise(libc::SIGTERM);
            term.thread_unblock().expect("a valid set");
            say("survived");
            wait();
        }
        Victim::Rename { name } => {
            let name = std::ffi::CString::new(name).expect("no zero in an argument");
            ready("");
            wait();
            let other = name.clone();
            thread::spawn(move || rename(&other)).join().expect("renaming does not panic");
            say("other");
            wait();
            rename(&name);
            say("leader");
            wait();
            // This file is the first thread's name, whichever thread of the process writes it.
            let write = || std::fs::write("/proc/self/comm", "by a thread").expect("the same process may");
            thread::spawn(write).join().expect("writing does not panic");
            say("by a thread");
            wait();
        }
        Victim::Accept => {
            let listener = TcpListener::bind(("127.0.0.1", 0)).expect("bind");
            let port = listener.local_addr().expect("it is bound").port();
            thread::spawn(move || {
                let mut accepted = Vec::new();
                while let Ok((stream, _)) = listener.accept() {
                    accepted.push(stream);
                    say(&format!("accepted {}", accepted.len()));
                }
            });
            ready(&port.to_string());
            wait();
        }
        Victim::Listen => {
            listen(0);
        }
        Victim::ListenOn { port } => {
            listen(port);
        }
        Victim::ListenElsewhere { port } => {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("root may make a network namespace");
            listen(port);
        }
        Victim::Allocate { cgroup } => {
            ready("");
            wait();
            std::fs::write(cgroup.join("cgroup.procs"), std::process::id().to_string()).expect("join the cgroup");
            let mut memory: Vec<Vec<u8>> = Vec::new();
            loop {
                memory.push(vec![1; 1 << 20]);
            }
        }
    }
    ExitCode::SUCCESS
}

fn listen(port: u16) {
    let listener = TcpListener::bind(("127.0.0.1", port)).expect("bind");
    ready(&listener.local_addr().expect("it is bound").port().to_string());
    wait();
    drop(listener);
    say("closed");
    wait();
}

/// Ends the calling thread, and no other: not `exit_group`, which is what a Rust `main` ends with.
fn exit_thread() -> ! {
    // SAFETY: the thread ends here. Nothing it owns is used afterwards: the
    // threads of these victims share only reference-counted barriers.
    unsafe { libc::syscall(libc::SYS_exit, 0) };
    unreachable!("SYS_exit does not return")
}

/// A child process that exits at once, made without a copy of the memory, which is what takes long.
fn exit_at_once(stack: &mut [u8]) -> nix::unistd::Pid {
    use nix::sched::{CloneFlags, clone};
    let flags = CloneFlags::CLONE_VM | CloneFlags::CLONE_VFORK;
    // SAFETY: the child returns at once, touching nothing but its own stack, which this thread lends it
    // and does not use, as CLONE_VFORK has it wait for the child's end.
    unsafe { clone(Box::new(|| 0), stack, flags, Some(libc::SIGCHLD)) }.expect("there is room for a process")
}

/// A child process that does only this, and exits; its pid. `run` must not allocate or lock: the
/// threads that may hold the locks are not in the child.
fn fork_child(run: impl FnOnce()) -> i32 {
    // SAFETY: the child calls nothing but system calls before it exits.
    match unsafe { nix::unistd::fork() }.expect("there is room for a process") {
        nix::unistd::ForkResult::Parent { child } => child.as_raw(),
        nix::unistd::ForkResult::Child => {
            run();
            // SAFETY: it ends the process at once, without any of its parent's exit handlers.
            unsafe { libc::_exit(0) }
        }
    }
}

fn no_core() {
    nix::sys::resource::setrlimit(nix::sys::resource::Resource::RLIMIT_CORE, 0, 0).expect("anybody may lower it");
}

fn default_action(signal: i32) {
    // SAFETY: SIG_DFL is a valid disposition. Rust's runtime handles SIGSEGV
    // itself otherwise, to report stack overflows.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
}

fn raise(signal: i32) {
    // SAFETY: any number is fine, the kernel checks it.
    unsafe { libc::raise(signal) };
}

fn rename(name: &std::ffi::CStr) {
    // SAFETY: the name is a string that ends with zero, and lives through the call.
    unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
}

fn child(arguments: &[&str]) -> Child {
    let mut command = Command::new(this());
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null());
    command.spawn().expect("this program runs, so it can run again")
}

fn this() -> std::path::PathBuf {
    std::env::current_exe().expect("procfs is mounted")
}

fn ready(what: &str) {
    say(format!("ready {what}").trim_end());
}

fn say(line: &str) {
    println!("{line}");
    std::io::stdout().flush().expect("the story reads this");
}

/// Waits for a line; false at the end of the input.
fn wait() -> bool {
    std::io::stdin().lock().read_line(&mut String::new()).is_ok_and(|bytes| bytes > 0)
}

fn fail(what: &str, error: &std::io::Error) -> ExitCode {
    eprintln!("victim: {what}: {error}");
    ExitCode::FAILURE
}

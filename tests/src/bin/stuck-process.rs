//! A process that holds its own `mmap_lock` for as long as its server lives, as one does that is stuck in a
//! device driver: whoever reads its `/proc/PID/cmdline`, `environ` or `maps` waits in state D.
//!
//! It maps a file of a FUSE file system of its own with direct I/O while a page of it is being read, and that
//! read is never answered: `mmap` waits for the page (`fuse_direct_mmap` and `invalidate_inode_pages2`), and holds
//! the lock meanwhile. It takes root and `/dev/fuse`.
//!
//! `stuck-process` serves the file system, and its child gets stuck; `stuck-process PROGRAM ARGUMENT…` lets that
//! child start a program first, whose parent is stuck then. It prints `stuck PID`, and `child PID` before.
#![expect(unsafe_code, reason = "mmap and mount have no safe wrapper among the crates of this workspace")]

use std::fs::{File, OpenOptions};
use std::io::{BufRead as _, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};

/// Tells the process that it is the one to get stuck, and where the file is.
const FILE: &str = "STUCK_PROCESS_FILE";

fn main() -> ExitCode {
    let program: Vec<String> = std::env::args().skip(1).collect();
    match std::env::var(FILE) {
        Ok(file) => get_stuck(Path::new(&file), &program),
        Err(_) => match serve(&program) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("stuck-process: {error}");
                ExitCode::FAILURE
            }
        },
    }
}

/// The child. It comes back only once the server is gone.
fn get_stuck(file: &Path, program: &[String]) -> ExitCode {
    let _child: Option<Child> = program.split_first().map(|(program, arguments)| {
        let child = Command::new(program).args(arguments).env_remove(FILE).stdin(Stdio::null()).spawn();
        let child = child.expect("the program can be started");
        println!("child {}", child.id());
        child
    });
    // The first descriptor reads through the page cache, the second one does not: see `opened`.
    let [cached, direct] = [(); 2].map(|()| File::open(file).expect("the file system is mounted"));
    std::thread::spawn(move || cached.read_at(&mut [0], 0));
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).expect("the server says when the page is being read");
    let mapping = std::thread::spawn(move || {
        let fd = direct.as_raw_fd();
        // SAFETY: a new private mapping of an open file, of which nothing is ever read.
        unsafe { libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ, libc::MAP_PRIVATE, fd, 0) as usize }
    });
    let me = std::process::id();
    let waits = || {
        let threads = std::fs::read_dir("/proc/self/task").expect("/proc is mounted");
        let wait = threads.flatten().filter_map(|thread| std::fs::read_to_string(thread.path().join("stat")).ok());
        wait.filter(|stat| stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('D'))).count() > 0
    };
    while !waits() {
        std::thread::yield_now();
    }
    println!("stuck {me}");
    let _ = mapping.join();
    ExitCode::SUCCESS
}

/// Mounts the file system in a mount namespace of its own, starts the child, and answers everything but reads.
fn serve(program: &[String]) -> std::io::Result<()> {
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS)?;
    let folder = tempfile::tempdir()?;
    let mut device = OpenOptions::new().read(true).write(true).open("/dev/fuse")?;
    let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
    mount(None, Path::new("/"), None, libc::MS_REC | libc::MS_PRIVATE, "")?;
    mount(Some("stuck"), folder.path(), Some("fuse"), 0, &options)?;
    // Not to be inherited: the connection ends with this process.
    nix::fcntl::fcntl(&device, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::FD_CLOEXEC))?;
    let mut child = Command::new(std::env::current_exe()?)
        .args(program)
        .env(FILE, folder.path().join("file"))
        .stdin(Stdio::piped())
        .spawn()?;
    let mut held = child.stdin.take();
    let mut request = vec![0; 1 << 20];
    let mut opened = 0;
    loop {
        let length = match device.read(&mut request) {
            Ok(length) => length,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        let request = Request::of(&request[..length]);
        let body = match request.operation {
            Operation::Init => Some(init()),
            Operation::Lookup => Some(entry()),
            Operation::GetAttributes => {
                Some([&0_u64.to_ne_bytes()[..], &0_u64.to_ne_bytes(), &attributes(request.node)].concat())
            }
            Operation::Open => {
                opened += 1;
                Some(open(opened))
            }
            Operation::Read => {
                if let Some(mut held) = held.take() {
                    held.write_all(b"reading\n")?;
                }
                continue;
            }
            Operation::Forget => continue,
            Operation::Close => Some(Vec::new()),
            Operation::Other => None,
        };
        device.write_all(&answer(request.unique, body))?;
    }
}

/// What is asked, of `include/uapi/linux/fuse.h`.
enum Operation {
    Lookup,
    Forget,
    GetAttributes,
    Open,
    Read,
    Close,
    Init,
    Other,
}

struct Request {
    operation: Operation,
    unique: u64,
    node: u64,
}

impl Request {
    /// `struct fuse_in_header`: length, operation, unique, node, and more.
    fn of(bytes: &[u8]) -> Self {
        let word = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let operation = match u32::from_ne_bytes(bytes[4..8].try_into().expect("four bytes")) {
            1 => Operation::Lookup,
            2 => Operation::Forget,
            3 => Operation::GetAttributes,
            14 => Operation::Open,
            15 => Operation::Read,
            18 | 25 => Operation::Close,
            26 => Operation::Init,
            _ => Operation::Other,
        };
        Self { operation, unique: word(8), node: word(16) }
    }
}

/// `struct fuse_out_header` and what follows it; none: not implemented.
fn answer(unique: u64, body: Option<Vec<u8>>) -> Vec<u8> {
    let error = if body.is_some() { 0 } else { -libc::ENOSYS };
    let body = body.unwrap_or_default();
    let length = u32::try_from(16 + body.len()).expect("short");
    [&length.to_ne_bytes()[..], &error.to_ne_bytes(), &unique.to_ne_bytes(), &body].concat()
}

/// `struct fuse_init_out`: version 7.31.
fn init() -> Vec<u8> {
    let mut bytes = [7_u32, 31, 0, 0].map(u32::to_ne_bytes).concat();
    bytes.extend([16_u16, 12].map(u16::to_ne_bytes).concat());
    bytes.extend(4096_u32.to_ne_bytes());
    bytes.resize(64, 0);
    bytes
}

/// `struct fuse_entry_out`: node 2, valid for ever.
fn entry() -> Vec<u8> {
    let mut bytes = [2_u64, 0, 1 << 30, 1 << 30, 0].map(u64::to_ne_bytes).concat();
    bytes.extend(attributes(2));
    bytes
}

/// `struct fuse_attr`: a folder, or a file of one page.
fn attributes(node: u64) -> Vec<u8> {
    let mode = if node == 1 { libc::S_IFDIR | 0o755 } else { libc::S_IFREG | 0o644 };
    let mut bytes = [node, 4096, 8, 0, 0, 0].map(u64::to_ne_bytes).concat();
    bytes.extend([0_u32, 0, 0, mode, 1, 0, 0, 0, 4096, 0].map(u32::to_ne_bytes).concat());
    bytes
}

/// `struct fuse_open_out`. The first descriptor keeps the page cache (`FOPEN_KEEP_CACHE`); later ones also go around it
/// (`FOPEN_DIRECT_IO`).
fn open(opened: u64) -> Vec<u8> {
    let flags: u32 = if opened > 1 { 1 | 2 } else { 2 };
    [&opened.to_ne_bytes()[..], &flags.to_ne_bytes(), &0_u32.to_ne_bytes()].concat()
}

fn mount(source: Option<&str>, target: &Path, kind: Option<&str>, flags: u64, options: &str) -> std::io::Result<()> {
    let text = |text: &str| std::ffi::CString::new(text).map_err(std::io::Error::other);
    let (source, kind) = (text(source.unwrap_or("none"))?, text(kind.unwrap_or(""))?);
    let (target, options) = (text(&target.to_string_lossy())?, text(options)?);
    // SAFETY: all five are texts that end with a NUL and outlive the call.
    let done = unsafe { libc::mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, options.as_ptr().cast()) };
    if done == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

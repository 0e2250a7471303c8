//! The processes of the tree are one executable under different roles.

use std::process::{Child, Command, Stdio};
use std::{env, io};

use serde::{Deserialize, Serialize};

use crate::args::CoreSettings;

const ROLE: &str = "MOCK_ENGINE_ROLE";

/// What a process of the tree is; the API server is the one without a role.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Role {
    /// Produces tokens; connects to the API server's abstract unix socket.
    EngineCore { socket: String, settings: CoreSettings },
    /// Between the Rust frontend and the engine core.
    Headless { socket: String, settings: CoreSettings },
    /// Does nothing, as long as the API server lives.
    ResourceTracker,
    /// Compiles nothing for a moment.
    Compiler { millis: u64 },
}

impl Role {
    /// The role of this process, from its environment.
    pub(crate) fn current() -> Option<Self> {
        let role = env::var(ROLE).ok()?;
        Some(serde_json::from_str(&role).expect("the parent wrote it"))
    }

    /// The command line under which the real process starts.
    fn command_line(&self) -> &'static [&'static str] {
        match self {
            Self::EngineCore { .. } => &[
                "python3",
                "-c",
                "from multiprocessing.spawn import spawn_main; \
                 spawn_main(tracker_fd=33, pipe_handle=41)",
                "--multiprocessing-fork",
            ],
            Self::Headless { .. } => &["python", "-m", "vllm.entrypoints.cli.main", "serve", "./tiny", "--headless"],
            Self::ResourceTracker => {
                &["python", "-B", "-c", "from multiprocessing.resource_tracker import main;main(32)"]
            }
            Self::Compiler { .. } => &["/usr/bin/gcc", "-O3", "-shared", "kernel.c"],
        }
    }

    /// The comm under which it starts.
    fn comm(&self) -> &'static str {
        match self {
            Self::EngineCore { .. } => "python3",
            Self::Headless { .. } | Self::ResourceTracker => "python",
            Self::Compiler { .. } => "gcc",
        }
    }

    /// Starts a child of this role.
    pub(crate) fn spawn(&self) -> io::Result<Child> {
        self.command()?.spawn()
    }

    /// The command that starts it, for callers that add to it.
    pub(crate) fn command(&self) -> io::Result<Command> {
        use std::os::unix::process::CommandExt;
        let line = self.command_line();
        let mut command = Command::new(env::current_exe()?);
        command.arg0(line[0]).args(&line[1..]).env(ROLE, serde_json::to_string(self)?).stdin(Stdio::null());
        Ok(command)
    }

    /// Takes the comm of the real process. (`exec` set it to that of the executable.)
    pub(crate) fn take_comm(&self) -> io::Result<()> {
        set_comm(self.comm())
    }
}

/// Sets the comm of the main thread; the kernel cuts it to 15 bytes.
pub(crate) fn set_comm(comm: &str) -> io::Result<()> {
    // Not /proc/thread-self: `/proc/self/comm` is that of the thread group's leader.
    std::fs::write("/proc/self/comm", comm)
}

/// Takes `title` as comm and as the whole command line, as Python's `setproctitle` does: the
/// memory of the arguments is overwritten and padded with blanks.
pub(crate) fn set_title(title: &str) -> io::Result<()> {
    use std::os::unix::fs::FileExt;
    set_comm(title)?;
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    // Fields 48 and 49 of proc_pid_stat(5), counted behind the comm, which is field 2 and may
    // contain anything.
    let fields: Vec<&str> =
        stat.rsplit_once(") ").map(|(_, rest)| rest.split_whitespace().collect()).unwrap_or_default();
    let address = |field: usize| {
        fields
            .get(field - 3)
            .and_then(|text| text.parse::<u64>().ok())
            .ok_or_else(|| io::Error::other(format!("no field {field} in /proc/self/stat")))
    };
    let (start, end) = (address(48)?, address(49)?);
    let mut memory = vec![b' '; usize::try_from(end - start).unwrap_or(0)];
    let length = title.len().min(memory.len().saturating_sub(1));
    memory[..length].copy_from_slice(&title.as_bytes()[..length]);
    // Without a final NUL the kernel reads on into the environment (fs/proc/base.c,
    // get_mm_cmdline).
    if let Some(last) = memory.last_mut() {
        *last = 0;
    }
    std::fs::OpenOptions::new().write(true).open("/proc/self/mem")?.write_all_at(&memory, start)
}

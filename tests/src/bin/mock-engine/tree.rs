//! The children of the API server.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::os::unix::process::CommandExt;
use std::process::{Child, Stdio};

use lastgasp_tests::model::Frontend;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;

use crate::args::Args;
use crate::role::Role;

/// Children, killed and reaped when this is dropped.
#[derive(Debug)]
pub(crate) struct Tree {
    tracker: Child,
    /// The engine core, or the launcher that has it as its child.
    engine: Child,
    /// The engine is a process group of its own.
    grouped: bool,
}

impl Tree {
    /// Starts the children; the engine core will connect to the listener.
    pub(crate) fn start(args: &Args) -> io::Result<(Self, tokio::net::UnixListener)> {
        let socket = format!("mock-engine-{}", std::process::id());
        let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&socket)?)?;
        listener.set_nonblocking(true)?;
        let listener = tokio::net::UnixListener::from_std(listener)?;

        // It ends when its end of the pipe is closed, that is when the API server is gone.
        let tracker = Role::ResourceTracker.command()?.stdin(Stdio::piped()).spawn()?;
        let settings = args.core_settings();
        let (role, grouped) = match args.frontend {
            Frontend::Python => (Role::EngineCore { socket, settings }, false),
            Frontend::Rust => (Role::Headless { socket, settings }, true),
        };
        let mut command = role.command()?;
        if grouped {
            command.process_group(0);
        }
        let engine = command.spawn()?;
        Ok((Self { tracker, engine, grouped }, listener))
    }

    pub(crate) fn tracker(&self) -> u32 {
        self.tracker.id()
    }

    /// The launcher, where there is one.
    pub(crate) fn launcher(&self) -> Option<u32> {
        self.grouped.then(|| self.engine.id())
    }

    /// Reaps an engine core that is dead; until then it is a zombie.
    pub(crate) fn reap_engine_core(&mut self) {
        if !self.grouped {
            let _ = self.engine.wait();
        }
    }

    /// Ends the engine without reaping it.
    pub(crate) fn kill_engine(&self) {
        let pid = Pid::from_raw(self.engine.id().cast_signed());
        // Not reaped yet, so the pid is still its own.
        let _ = if self.grouped { killpg(pid, Signal::SIGKILL) } else { kill(pid, Signal::SIGKILL) };
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        self.kill_engine();
        let _ = self.engine.wait();
        drop(self.tracker.stdin.take());
        let _ = self.tracker.wait();
    }
}

//! Where a bench ran, and what else the machine had to do.

use std::fs;
use std::process::Command;

use serde::{Deserialize, Serialize};

/// The machine.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Machine {
    /// As `/proc/cpuinfo` has it.
    pub(crate) cpu: String,
    /// That this process may run on.
    pub(crate) cores: usize,
    pub(crate) memory_bytes: u64,
    pub(crate) kernel: String,
    pub(crate) nats_server: String,
}

impl Machine {
    pub(crate) fn this() -> Self {
        let field = |path: &str, name: &str| {
            let text = fs::read_to_string(path).unwrap_or_default();
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.trim_start().strip_prefix(':'));
            line.map(|value| value.trim().to_owned())
        };
        let memory = field("/proc/meminfo", "MemTotal").unwrap_or_default();
        let kib: u64 = memory.trim_end_matches("kB").trim().parse().unwrap_or_default();
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let server = lastgasp_tests::binaries::nats_server().ok();
        let said = server.and_then(|server| said(Command::new(server).arg("--version")));
        Self {
            cpu: field("/proc/cpuinfo", "model name").unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_bytes: kib * 1024,
            kernel: kernel.trim().to_owned(),
            nats_server: said.unwrap_or_default().trim_start_matches("nats-server: ").to_owned(),
        }
    }
}

/// What the machine does besides: a bench on a busy machine measures that.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Load {
    /// Tasks that ran or wanted to: averages of 1, 5 and 15 minutes (proc_loadavg(5)).
    pub(crate) average: [f64; 3],
    /// Since boot, in clock ticks, how long the hypervisor gave cores to others (`steal`, proc_stat(5)).
    pub(crate) stolen_ticks: u64,
}

impl Load {
    pub(crate) fn now() -> Self {
        let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let mut numbers = text.split(' ').map_while(|number| number.parse().ok());
        let average = [(); 3].map(|()| numbers.next().unwrap_or_default());
        let text = fs::read_to_string("/proc/stat").unwrap_or_default();
        let stolen_ticks = text.lines().next().and_then(|all| all.split_whitespace().nth(8)?.parse().ok());
        Self { average, stolen_ticks: stolen_ticks.unwrap_or_default() }
    }
}

/// The revision of the sources.
pub(crate) fn revision() -> String {
    let revision = said(Command::new("git").args(["rev-parse", "--short=12", "HEAD"]));
    let changes = said(Command::new("git").args(["status", "--porcelain", "--untracked-files=no"]));
    let changed = if changes.unwrap_or_default().is_empty() { "" } else { "+changes" };
    revision.map_or_else(|| "unknown".to_owned(), |revision| revision + changed)
}

fn said(command: &mut Command) -> Option<String> {
    let output = command.output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

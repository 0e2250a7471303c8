//! `cargo xtask test-kernels`: the stories of `tests/kernel` and `tests/guest` on Debian's kernels, in
//! QEMU.
//!
//! Plain emulation, no KVM: it works wherever the tests do. The guest is an initramfs that holds
//! the test binaries, what they start, and the libraries; everything else is the kernel's. It is
//! booted once for each [`Boot`].

mod guest;
mod image;

use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use serde::Deserialize;
use thiserror::Error;

use crate::debian::DebianError;
use crate::nats_server::{self, NatsServerError};
use crate::tools::{self, ToolError};

/// The kernel's stories on other kernels than this machine's, and what needs a machine of its own.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask test-kernels                      Debian's 6.1 and 6.12
  cargo xtask test-kernels --kernel 6.12        one of them
  cargo xtask test-kernels --filter signal::    only stories whose name contains this
  cargo xtask test-kernels --boot machine       only memory, freezer and clock

Each kernel is booted four times, for some minutes. `cargo xtask test`, and so CI, does it with 6.1 and
leaves out the boot in which the machine sleeps; `cargo xtask test --long` does it with all.

Kernels come from Debian's linux-image packages and stay in target/kernels. As root, what is missing
(qemu-system-x86, busybox-static, cpio) is installed with apt-get.
Exit status: 0 all passed, 1 something failed.")]
pub(crate) struct Arguments {
    /// Which kernel; all of them if none is named.
    #[arg(long, value_name = "VERSION", value_parser = image::KERNELS)]
    kernel: Vec<String>,
    /// Which boot; all if none is named.
    #[arg(long, value_enum)]
    boot: Vec<Boot>,
    /// Only stories whose name contains this.
    #[arg(long, value_name = "NAME")]
    filter: Option<String>,
    /// Seconds after which a guest is stopped.
    #[arg(long, value_name = "SECONDS", default_value_t = 900)]
    timeout: u64,
}

/// What a kernel is booted for.
#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum)]
enum Boot {
    /// tests/kernel.
    Kernel,
    /// Of tests/guest: memory runs out, a cgroup is frozen, the clock is set.
    Machine,
    /// tests/guest/lockdown.rs, with lockdown=confidentiality.
    Lockdown,
    /// tests/guest/suspend.rs. An emulated machine does not always wake up, where the real one is busy.
    Sleep,
}

impl Boot {
    const ALL: [Self; 4] = [Self::Kernel, Self::Machine, Self::Lockdown, Self::Sleep];

    /// What is added to the kernel's command line. What it does not know becomes a variable of init's.
    const fn parameters(self) -> &'static str {
        match self {
            Self::Kernel => "stories=kernel",
            Self::Machine => "stories=machine",
            Self::Lockdown => "stories=lockdown lockdown=confidentiality",
            Self::Sleep => "stories=sleep",
        }
    }
}

/// Why the stories could not be run.
#[derive(Debug, Error)]
pub(crate) enum KernelsError {
    /// A program is missing.
    #[error("{program} is missing: as root, `apt-get install {package}`")]
    Missing {
        /// What.
        program: &'static str,
        /// Where it comes from.
        package: &'static str,
    },
    /// Another program failed.
    #[error(transparent)]
    Tool(#[from] ToolError),
    /// The kernel's package.
    #[error(transparent)]
    Package(#[from] DebianError),
    /// There is no kernel of that version to be had.
    #[error("no package linux-image-{version}.*-cloud-amd64: `apt-get update`, and look at apt's sources")]
    NoKernel {
        /// Which version.
        version: String,
    },
    /// A file.
    #[error("{what}: {source}")]
    Io {
        /// Which.
        what: String,
        /// Why.
        source: std::io::Error,
    },
    /// The guest did not say how the stories ended.
    #[error("the guest ended, or was stopped after {0:?}, before its tests did")]
    NoVerdict(Duration),
    /// Cargo built no test binary.
    #[error("cargo named no test binary {0:?}")]
    NoBinary(&'static str),
    /// There is no nats-server.
    #[error(transparent)]
    Nats(#[from] NatsServerError),
}

/// For errors of files.
fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> KernelsError {
    let what = what.into();
    move |source| KernelsError::Io { what, source }
}

pub(crate) fn main(arguments: &Arguments) -> ExitCode {
    match run(arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("cargo xtask test-kernels: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<bool, KernelsError> {
    for (program, package) in [
        ("qemu-system-x86_64", "qemu-system-x86"),
        ("busybox", "busybox-static"),
        ("cpio", "cpio"),
        ("ldd", "libc-bin"),
    ] {
        need(program, package)?;
    }
    let nats = nats_server::ensure(&tools::target())?;
    let nats = tools::on_path("nats-server").filter(|_| nats.is_relative()).unwrap_or(nats);
    tools::step(
        "build what the stories start",
        &mut cargo(&["build", "-p", "lastgasp", "-p", "lastgasp-tests", "--bins"]),
    )?;
    let debug = tools::target().join("debug");
    let stories = Stories {
        kernel: test_binary("kernel")?,
        guest: test_binary("guest")?,
        started: ["victim", "mock-engine", "lastgasp"].map(|name| debug.join(name)).into(),
        nats,
    };
    let versions: Vec<&str> = match &arguments.kernel[..] {
        [] => image::KERNELS.to_vec(),
        some => some.iter().map(String::as_str).collect(),
    };
    let boots = if arguments.boot.is_empty() { &Boot::ALL[..] } else { &arguments.boot };
    let mut passed = true;
    for version in versions {
        let kernel = image::kernel(version)?;
        let initramfs = image::initramfs(&kernel, &stories, arguments.filter.as_deref())?;
        for boot in boots {
            let begin = Instant::now();
            let name = [&kernel.name, boot.parameters()].join(" ");
            eprintln!("==> {name}");
            let status = guest::run(&kernel, &initramfs, *boot, Duration::from_secs(arguments.timeout))?;
            eprintln!("==> {name}: exit status {status} after {:.0} s", begin.elapsed().as_secs_f64());
            passed &= status == 0;
        }
    }
    Ok(passed)
}

/// What the guest runs.
struct Stories {
    /// The test binary of `tests/kernel`.
    kernel: PathBuf,
    /// That of `tests/guest`.
    guest: PathBuf,
    /// The programs that they start.
    started: Vec<PathBuf>,
    /// nats-server.
    nats: PathBuf,
}

/// Installs a program if it is missing and this is root.
fn need(program: &'static str, package: &'static str) -> Result<(), KernelsError> {
    if tools::on_path(program).is_none() && tools::is_root() {
        tools::step(&format!("{program} is missing"), Command::new("apt-get").args(["install", "-y", package]))?;
    }
    if tools::on_path(program).is_none() {
        return Err(KernelsError::Missing { program, package });
    }
    Ok(())
}

fn cargo(arguments: &[&str]) -> Command {
    let mut command = tools::cargo();
    command.args(arguments);
    command
}

/// Builds a test binary; where it is.
fn test_binary(name: &'static str) -> Result<PathBuf, KernelsError> {
    let arguments = ["test", "-p", "lastgasp-tests", "--test", name, "--no-run", "--message-format=json"];
    let said = tools::output(cargo(&arguments).stderr(Stdio::inherit()))?;

    #[derive(Deserialize)]
    struct Artifact {
        target: Target,
        executable: Option<PathBuf>,
    }
    #[derive(Deserialize)]
    struct Target {
        name: String,
    }
    let artifacts = said.lines().filter_map(|line| serde_json::from_str::<Artifact>(line).ok());
    let mut tests = artifacts.filter(|artifact| artifact.target.name == name);
    tests.find_map(|artifact| artifact.executable).ok_or(KernelsError::NoBinary(name))
}

//! Fetches what is needed to build the kernel programs.

use std::{path::PathBuf, process::Command};

use super::{
    BuildError,
    toolchain::{LINKER, Rustc},
};
use crate::{debian, tools};

/// The compiler of Debian's packages.
pub(super) const SYSTEM_RUSTC: &str = "/usr/bin/rustc";
/// Debian's newest compiler (it follows what browsers need), and its source.
const PACKAGES: [&str; 2] = ["rustc-web", "rust-web-src"];
/// Of bpf-linker. Another may give other bytes.
const LINKER_VERSION: &str = "0.13.0";
/// The LLVM of `rustc-web` where it is not installed yet, to show commands.
const LLVM: u32 = 22;

/// Where the linker is put.
pub(super) fn linker_root() -> PathBuf {
    tools::target().join("toolchain")
}

/// What to type, for both ways.
pub(super) fn commands() -> String {
    let lines = |commands: &[Command]| commands.iter().map(|c| format!("  {}\n", tools::shown(c))).collect::<String>();
    let llvm = major(SYSTEM_RUSTC.into()).unwrap_or(LLVM);
    format!(
        "on Debian:\n{}elsewhere, with rustup and an LLVM of the nightly's major version (`rustc +nightly -vV`):\n{}",
        lines(&[debian::update(), debian::install(&PACKAGES), debian::install(&[&llvm_package(llvm)]), linker(llvm)]),
        lines(&[nightly(), linker(nightly_rustc().and_then(major).unwrap_or(LLVM))]),
    )
}

/// Runs the commands for this machine.
pub(super) fn install() -> Result<(), BuildError> {
    if tools::on_path("apt-get").is_some() {
        tools::step("1/4 package lists", &mut debian::update())?;
        tools::step("2/4 compiler with the source of its library", &mut debian::install(&PACKAGES))?;
        let llvm = major(SYSTEM_RUSTC.into()).unwrap_or(LLVM);
        tools::step(&format!("3/4 LLVM {llvm}"), &mut debian::install(&[&llvm_package(llvm)]))?;
        tools::step("4/4 linker, some minutes", &mut linker(llvm))?;
    } else {
        tools::step("1/2 nightly compiler with the source of its library", &mut nightly())?;
        let llvm = nightly_rustc().and_then(major).unwrap_or(LLVM);
        tools::step("2/2 linker, some minutes", &mut linker(llvm))?;
    }
    Ok(())
}

/// The major version of a compiler's LLVM, if it comes with the source of its library.
fn major(rustc: PathBuf) -> Option<u32> {
    Rustc::at(rustc).map(|rustc| rustc.llvm.major())
}

fn nightly_rustc() -> Option<PathBuf> {
    let path = tools::output(Command::new("rustup").args(["which", "--toolchain", "nightly", "rustc"])).ok()?;
    Some(path.trim().into())
}

fn llvm_package(llvm: u32) -> String {
    format!("llvm-{llvm}-dev")
}

fn nightly() -> Command {
    let mut command = Command::new("rustup");
    command.args(["toolchain", "install", "nightly", "--profile=minimal", "--component=rust-src"]);
    command
}

/// Builds the linker against the LLVM that the compiler has.
fn linker(llvm: u32) -> Command {
    let mut command = Command::new("cargo");
    // Where Debian and its relatives have it; elsewhere llvm-config on the PATH tells.
    if tools::on_path("apt-get").is_some() {
        command.env("LLVM_PREFIX", format!("/usr/lib/llvm-{llvm}"));
    }
    command
        .args(["install", LINKER, "--locked", "--version", LINKER_VERSION, "--no-default-features", "--features"])
        .arg(format!("llvm-{llvm}"))
        .arg("--root")
        .arg(linker_root());
    // Flags meant for the kernel programs or for this workspace are not meant for the linker.
    for name in ["RUSTC", "RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS"] {
        command.env_remove(name);
    }
    command
}

//! Programs of the workspace that take over the command line: built in release mode, then run.

use std::path::Path;
use std::process::{Command, ExitCode};

use crate::{nats_server, tools};

/// Builds what they start and the packages of `more`, and runs `bin` in `folder` with `arguments`.
///
/// It ends what it started, also after Ctrl-C, which the terminal sends to both of us: so this process only
/// waits.
pub(crate) fn run(bin: &str, more: &[&str], folder: &Path, arguments: &[String]) -> ExitCode {
    handed(bin, more, folder, arguments).unwrap_or_else(|error| {
        eprintln!("cargo xtask {bin}: {error}");
        ExitCode::FAILURE
    })
}

fn handed(
    bin: &str,
    more: &[&str],
    folder: &Path,
    arguments: &[String],
) -> Result<ExitCode, Box<dyn std::error::Error>> {
    let nats = nats_server::ensure(&tools::target())?;
    let mut build = tools::cargo();
    build.args(["build", "--release", "--bins"]);
    for package in ["lastgasp", "lastgasp-router", "lastgasp-tests"].iter().chain(more) {
        build.args(["-p", package]);
    }
    tools::step("building in release mode (minutes the first time)", &mut build)?;
    let program = tools::target().join("release").join(bin);
    let mut program = Command::new(program);
    let status = program.current_dir(folder).args(arguments).env(nats_server::ENVIRONMENT, nats).status()?;
    Ok(match status.code() {
        Some(0) => ExitCode::SUCCESS,
        Some(code) => ExitCode::from(u8::try_from(code).unwrap_or(1)),
        None => ExitCode::FAILURE,
    })
}

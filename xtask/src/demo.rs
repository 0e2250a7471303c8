//! `cargo xtask demo`: builds what the demo needs in release mode and runs it.

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use crate::{nats_server, tools};

/// Kill an engine in the middle of an answer, and watch the answer go on.
#[derive(clap::Args)]
#[command(
    disable_help_flag = true,
    after_help = "\
Everything after `demo` is handed to it; `cargo xtask demo --help` lists it all.

Example:
  cargo xtask demo --json result.json"
)]
pub(crate) struct Arguments {
    /// Handed to the demo.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    handed_on: Vec<String>,
}

pub(crate) fn main(arguments: &Arguments) -> ExitCode {
    match run(arguments) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("cargo xtask demo: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<ExitCode, Box<dyn std::error::Error>> {
    let nats = nats_server::ensure(&tools::target())?;
    tools::step("building in release mode (minutes the first time)", &mut build())?;
    let demo: PathBuf = tools::target().join("release").join("demo");
    // The demo ends what it started, also after Ctrl-C, which the terminal sends to both of us:
    // so this process only waits.
    let status = Command::new(demo).args(&arguments.handed_on).env(nats_server::ENVIRONMENT, nats).status()?;
    Ok(match status.code() {
        Some(0) => ExitCode::SUCCESS,
        Some(code) => ExitCode::from(u8::try_from(code).unwrap_or(1)),
        None => ExitCode::FAILURE,
    })
}

fn build() -> Command {
    let mut build = Command::new(tools::cargo());
    build.current_dir(tools::workspace()).args(["build", "--release", "--bins"]);
    build.args(["-p", "lastgasp", "-p", "lastgasp-router", "-p", "lastgasp-tests"]);
    build
}

//! `cargo xtask bench`: builds what the benches need in release mode and runs them.

use std::process::{Command, ExitCode};

use crate::{nats_server, tools};

/// Measure what lastgasp is worth and what it costs.
#[derive(clap::Args)]
#[command(
    disable_help_flag = true,
    after_help = "\
Everything after `bench` is handed to it; `cargo xtask bench --help` lists it all.

Example:
  cargo xtask bench node --json result.json"
)]
pub(crate) struct Arguments {
    /// Handed to the benches.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    handed_on: Vec<String>,
}

pub(crate) fn main(arguments: &Arguments) -> ExitCode {
    match run(arguments) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("cargo xtask bench: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<ExitCode, Box<dyn std::error::Error>> {
    let nats = nats_server::ensure(&tools::target())?;
    let mut build = Command::new(tools::cargo());
    build.current_dir(tools::workspace()).args(["build", "--release", "--bins"]);
    build.args(["-p", "lastgasp", "-p", "lastgasp-router", "-p", "lastgasp-tests", "-p", "lastgasp-bench"]);
    tools::step("building in release mode (minutes the first time)", &mut build)?;
    let mut bench = Command::new(tools::target().join("release").join("bench"));
    bench.current_dir(tools::workspace()).args(&arguments.handed_on).env(nats_server::ENVIRONMENT, nats);
    // It ends what it started, also after Ctrl-C, which the terminal sends to both of us.
    let status = bench.status()?;
    Ok(match status.code() {
        Some(0) => ExitCode::SUCCESS,
        Some(code) => ExitCode::from(u8::try_from(code).unwrap_or(1)),
        None => ExitCode::FAILURE,
    })
}

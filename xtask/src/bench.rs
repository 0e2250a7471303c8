//! `cargo xtask bench`: builds what the benches need in release mode and runs them.

use std::process::ExitCode;

use crate::{handed, tools};

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
    handed::run("bench", &["lastgasp-bench"], &tools::workspace(), &arguments.handed_on)
}

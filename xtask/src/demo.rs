//! `cargo xtask demo`: builds what the demo needs in release mode and runs it.

use std::path::Path;
use std::process::ExitCode;

use crate::handed;

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
    handed::run("demo", &[], Path::new("."), &arguments.handed_on)
}

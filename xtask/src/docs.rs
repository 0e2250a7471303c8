//! `cargo xtask docs`: writes the parts of `docs/` anew that follow from the code.
//!
//! What is written, and everything else that is checked about the pages, are tests of this package
//! (`cargo test -p xtask docs::`): a plain `cargo test` fails when a page says what the code does not.

#[cfg(test)]
mod commands;
#[cfg(test)]
mod links;
#[cfg(test)]
mod names;
#[cfg(test)]
mod page;
#[cfg(test)]
mod series;
#[cfg(test)]
mod wording;
#[cfg(test)]
mod written;

use std::process::ExitCode;

use crate::tools;

/// Set to `write`, the tests write the generated parts instead of comparing them.
const ENVIRONMENT: &str = "LASTGASP_DOCS";

/// Write the generated parts of docs/ anew: settings, metrics, closed names.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask docs               after a change of settings, flags, metrics or closed names
  cargo test -p xtask docs::     are the pages right?")]
pub(crate) struct Arguments {}

pub(crate) fn main(Arguments {}: &Arguments) -> ExitCode {
    let mut command = tools::cargo();
    command.args(["test", "--quiet", "-p", "xtask", "docs::written"]);
    command.env(ENVIRONMENT, "write");
    match tools::step("write the generated parts of docs/", &mut command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cargo xtask docs: {error}");
            ExitCode::FAILURE
        }
    }
}

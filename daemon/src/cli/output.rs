//! How answers are written.

use std::io::{self, IsTerminal, Write};

use clap::{Args, ValueEnum};
use serde::Serialize;

use super::CliError;
use crate::status::render::Style;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// For people
    Text,
    /// For programs
    Json,
}

#[derive(Debug, Clone, Copy, Args)]
pub(super) struct OutputArgs {
    /// Format of the answer
    #[arg(long, short, value_enum, value_name = "FORMAT", default_value = "text")]
    output: Format,
    /// Short for --output json
    #[arg(long, conflicts_with = "output")]
    json: bool,
}

impl OutputArgs {
    pub(super) fn is_json(self) -> bool {
        self.json || self.output == Format::Json
    }
}

/// `println!` would panic when the reader has gone.
pub(super) fn say(text: &str) -> Result<(), CliError> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// As [`say`], for programs.
pub(super) fn say_json(value: &impl Serialize) -> Result<(), CliError> {
    say(&format!("{}\n", serde_json::to_string_pretty(value).map_err(io::Error::from)?))
}

/// Colours for a terminal whose user has not said no (no-color.org).
pub(super) fn style(stream: &impl IsTerminal) -> Style {
    let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    if stream.is_terminal() && !refused { Style::Coloured } else { Style::Plain }
}

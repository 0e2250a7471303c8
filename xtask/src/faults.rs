//! `cargo xtask faults`: breaks everything that the stories know how to break, and writes down what came of it.
//!
//! Every story about a fault appends lines to a file while it runs (`tests/src/matrix.rs`): a row of the
//! table once its assertions held, and counts. Nothing in `docs/faults.md` is written by hand.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use serde::Deserialize;

use crate::{nats_server, tools};

/// Runs the stories and writes docs/faults.md.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask faults          all stories, within a quarter of an hour, and damaged input
  cargo xtask faults --long   random faults for ten minutes, 10,000 worker restarts

It needs root. Exit status: 0 written, 1 a story failed and nothing was written.")]
pub(crate) struct Arguments {
    /// As `cargo xtask test --long`.
    #[arg(long)]
    long: bool,
    /// Run nothing: write the page from what an earlier run has left in this file.
    #[arg(long, value_name = "FILE", conflicts_with = "long")]
    from: Option<PathBuf>,
}

/// What the stories append: a row, or a count.
#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Row { fault: String, expected: String, observed: String, test: String },
    Count { count: String, number: u64 },
}

/// Test binaries that break things: those of several packages may have one name.
const SUITES: [(&[&str], &str); 2] =
    [(&["lastgasp-tests"], "stories"), (&["lastgasp-protocol", "lastgasp", "lastgasp-router"], "fuzz")];

pub(crate) fn main(arguments: &Arguments) -> ExitCode {
    match run(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cargo xtask faults: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<(), Box<dyn std::error::Error>> {
    let lines = match &arguments.from {
        Some(lines) => lines.clone(),
        None => run_stories(arguments.long)?,
    };
    let document = tools::workspace().join("docs/faults.md");
    std::fs::write(&document, render(&read(&lines)?))?;
    println!("{} is written", document.display());
    Ok(())
}

/// Runs them, and says where their lines are.
fn run_stories(long: bool) -> Result<PathBuf, Box<dyn std::error::Error>> {
    if !tools::is_root() {
        return Err("the stories need root".into());
    }
    let nats = nats_server::ensure(&tools::target())?;
    let old = nats_server::ensure_old(&tools::target())?;
    let lines = tools::target().join("faults.jsonl");
    if lines.exists() {
        std::fs::remove_file(&lines)?;
    }
    let mut build = cargo(&["build", "--bins", "-p", "lastgasp", "-p", "lastgasp-router", "-p", "lastgasp-tests"]);
    let mut commands = vec![&mut build];
    let mut suites = SUITES.map(|(packages, suite)| {
        let mut command = cargo(&["test", "--test", suite]);
        command.args(packages.iter().flat_map(|package| ["-p", package]));
        command
    });
    for suite in &mut suites {
        suite.env(nats_server::ENVIRONMENT, &nats).env(nats_server::OLD_ENVIRONMENT, &old);
        suite.env("LASTGASP_MATRIX", &lines);
        if long {
            suite.env(crate::test::LONG, "1");
        }
    }
    commands.extend(suites.iter_mut());
    for command in commands {
        eprintln!("==> {}", tools::shown(command));
        if !command.status()?.success() {
            return Err(format!("{} failed; docs/faults.md is as it was", tools::shown(command)).into());
        }
    }
    Ok(lines)
}

fn cargo(arguments: &[&str]) -> Command {
    let mut command = tools::cargo();
    command.args(arguments);
    command
}

fn read(path: &Path) -> Result<Vec<Line>, Box<dyn std::error::Error>> {
    let text = std::fs::read_to_string(path)?;
    Ok(text.lines().map(serde_json::from_str).collect::<Result<_, _>>()?)
}

fn render(lines: &[Line]) -> String {
    let mut rows = Vec::new();
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    for line in lines {
        match line {
            Line::Row { fault, expected, observed, test } => rows.push((test, fault, expected, observed)),
            Line::Count { count, number } => *counts.entry(count).or_default() += number,
        }
    }
    rows.sort();
    let mut out = String::from(
        "# What was broken, and what came of it\n\n\
         Written by `cargo xtask faults` from what its stories saw; do not edit it. A row says that the assertions of its\n\
         story held. A stream that is neither exact nor visibly failed makes its story fail, and then nothing is written.\n\n",
    );
    let silent = counts.entry("streams silently wrong").or_default();
    debug_assert_eq!(*silent, 0);
    for (count, number) in &counts {
        let _ = writeln!(out, "* {count}: {number}");
    }
    out.push_str("\n| what was broken | what should come of it | what came of it | story |\n|---|---|---|---|\n");
    for (test, fault, expected, observed) in rows {
        let cell = |text: &str| text.replace('|', "\\|").replace('\n', " ");
        let _ = writeln!(out, "| {} | {} | {} | `{test}` |", cell(fault), cell(expected), cell(observed));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_summed_and_rows_are_sorted_by_their_story() {
        let lines = [
            r#"{"fault":"b|c","expected":"e","observed":"o","test":"z::b"}"#,
            r#"{"count":"streams exact","number":2,"test":"z::b"}"#,
            r#"{"fault":"a","expected":"e","observed":"o","test":"a::b"}"#,
            r#"{"count":"streams exact","number":3,"test":"a::b"}"#,
        ];
        let lines: Vec<Line> = lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
        let document = render(&lines);
        assert!(document.contains("* streams exact: 5\n* streams silently wrong: 0\n"), "{document}");
        let rows: Vec<&str> = document.lines().filter(|line| line.contains("::b")).collect();
        assert_eq!(rows, ["| a | e | o | `a::b` |", "| b\\|c | e | o | `z::b` |"]);
    }
}

//! `cargo xtask systems`: breaks systems that people run, without lastgasp and with it, and writes down
//! what their users saw.
//!
//! The tests of `tests/peers/` append a line for each cell of the table (`tests/src/systems.rs`). The lines
//! are kept in `docs/systems.jsonl`, so that one system can be measured again without the others.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use serde::{Deserialize, Serialize};

use crate::{debian, nats_server, tools};

/// Measures real systems without lastgasp and with it, and writes docs/systems.md.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask systems            all of them, some hours with the downloads
  cargo xtask systems dynamo     only tests whose name contains this; the other rows stay
  cargo xtask systems --runs 3   fewer repetitions
  cargo xtask systems --from dynamo.jsonl
                                 nothing is measured: rows that were measured elsewhere, by the tests
                                 with LASTGASP_SYSTEMS=dynamo.jsonl, take the place of those there are

  LASTGASP_INFERA_SRC=/src/Infera cargo xtask systems infera
                                 Infera, from a checkout; without one its rows stay

Their packages are installed into target/ by pip, 6 GB. It needs root. The rows of the tests that ended
well are written, whatever became of the others.
Exit status: 0 all were measured, 1 a test failed.")]
pub(crate) struct Arguments {
    /// Only tests whose name contains this.
    name: Option<String>,
    /// How often each fault is repeated.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..))]
    runs: u16,
    /// Writes the table anew with the rows of this file, and measures nothing.
    #[arg(long, value_name = "FILE", conflicts_with = "name")]
    from: Vec<PathBuf>,
}

/// What one fault did to one stream.
#[derive(Clone, Deserialize, Serialize)]
struct Run {
    gap_ms: Option<f64>,
    complete: bool,
    safe_ms: Option<f64>,
}

/// A cell of the table.
#[derive(Clone, Deserialize, Serialize)]
struct Cell {
    system: String,
    fault: String,
    lastgasp: bool,
    runs: Vec<Run>,
    remark: String,
    waited_ms: u64,
}

pub(crate) fn main(arguments: &Arguments) -> ExitCode {
    match run(arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => {
            eprintln!("cargo xtask systems: a test failed; its rows are as they were");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("cargo xtask systems: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Whether every test ended well.
fn run(arguments: &Arguments) -> Result<bool, Box<dyn std::error::Error>> {
    if !arguments.from.is_empty() {
        let cells: Vec<Vec<Cell>> = arguments.from.iter().map(|file| given(file)).collect::<Result<_, _>>()?;
        write(false, cells.concat())?;
        return Ok(true);
    }
    if !tools::is_root() {
        return Err("these tests need root".into());
    }
    let lines = tools::target().join("systems.jsonl");
    if lines.exists() {
        std::fs::remove_file(&lines)?;
    }
    let mut build = tools::cargo();
    build.arg("build");
    build.args(["--bins", "-p", "lastgasp", "-p", "lastgasp-router", "-p", "lastgasp-tests"]);
    tools::step("build", &mut build)?;
    let mut peers = peers(&[])?;
    peers.args(arguments.name.iter()).env("LASTGASP_SYSTEMS", &lines);
    peers.env("LASTGASP_SYSTEMS_RUNS", arguments.runs.to_string());
    let well = tools::step("measure", &mut peers).is_ok();

    // After a whole run nothing is left of what was measured before, as of an older version.
    write(well && arguments.name.is_none(), read(&lines)?)?;
    Ok(well)
}

/// Writes table and lines: these cells, and those that were there before unless they are about the same, or
/// all are to go.
fn write(instead: bool, fresh: Vec<Cell>) -> Result<(), Box<dyn std::error::Error>> {
    let kept = tools::workspace().join("docs/systems.jsonl");
    let older = if instead { Vec::new() } else { read(&kept)? };
    let cells = merged(older, fresh);
    let text: Vec<String> = cells.iter().map(serde_json::to_string).collect::<Result<_, _>>()?;
    std::fs::write(&kept, text.join("\n") + "\n")?;
    let document = tools::workspace().join("docs/systems.md");
    std::fs::write(&document, render(&cells))?;
    println!("{} is written", document.display());
    Ok(())
}

/// Runs the tests beside large third-party systems, one after the other: they are measured. `options` are
/// for cargo.
pub(crate) fn peers(options: &[&str]) -> Result<Command, Box<dyn std::error::Error>> {
    let mut peers = tools::cargo();
    peers.arg("test").args(options);
    peers.args(["-p", "lastgasp-tests", "--test", "peers", "--", "--ignored", "--test-threads", "1"]);
    peers.env(nats_server::ENVIRONMENT, nats_server::ensure(&tools::target())?);
    peers.env(debian::ETCD.variable, debian::ETCD.ensure()?);
    Ok(peers)
}

/// Nothing, if there is no such file yet.
fn read(path: &Path) -> Result<Vec<Cell>, Box<dyn std::error::Error>> {
    if path.exists() { given(path) } else { Ok(Vec::new()) }
}

fn given(path: &Path) -> Result<Vec<Cell>, Box<dyn std::error::Error>> {
    let named = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let text = std::fs::read_to_string(path).map_err(|error| named(&error))?;
    let lines = text.lines().enumerate();
    let cells = lines
        .map(|(at, line)| serde_json::from_str(line).map_err(|error| named(&format_args!("line {}: {error}", at + 1))));
    Ok(cells.collect::<Result<_, _>>()?)
}

/// `fresh` in place of those of `kept` that are about the same, in the order of the names.
fn merged(kept: Vec<Cell>, fresh: Vec<Cell>) -> Vec<Cell> {
    let cells = kept.into_iter().chain(fresh);
    let by_name: BTreeMap<_, _> =
        cells.map(|cell| ((cell.system.clone(), cell.fault.clone(), cell.lastgasp), cell)).collect();
    by_name.into_values().collect()
}

fn render(cells: &[Cell]) -> String {
    let mut out = String::from(
        "# What a fault does to systems that people run, without lastgasp and with it\n\n\
         Written by `cargo xtask systems`; do not edit it. The systems are unchanged, as they are installed from their\n\
         packages, on this machine with whatever else ran on it: read ratios, not absolute times. Both rows of a pair\n\
         are of one run.\n\n\
         * gap: from the fault to the next token that the client of a running stream saw, median / longest.\n\
         * complete: streams that came to their end with every token.\n\
         * safe: from the fault until no new request was sent to the lost worker, median / longest. `never` was waited\n\
         \x20 for as long as the row says.\n\n\
         | system | fault | lastgasp | gap | complete | safe | |\n|---|---|---|---|---|---|---|\n",
    );
    for cell in cells {
        let column = |value: fn(&Run) -> Option<f64>| spread(&cell.runs, value, cell.waited_ms);
        let complete = cell.runs.iter().filter(|run| run.complete).count();
        let text = |text: &str| text.replace('|', "\\|").replace('\n', " ");
        let _ = writeln!(
            out,
            "| {} | {} | {} | {} | {complete} of {} | {} | {} |",
            text(&cell.system),
            text(&cell.fault),
            if cell.lastgasp { "**with**" } else { "without" },
            column(|run| run.gap_ms),
            cell.runs.len(),
            column(|run| run.safe_ms),
            text(&cell.remark),
        );
    }
    out
}

/// `median / longest` of those that there are. `never` counts as longer than any other.
fn spread(runs: &[Run], value: fn(&Run) -> Option<f64>, waited_ms: u64) -> String {
    let mut values: Vec<f64> = runs.iter().map(|run| value(run).unwrap_or(f64::INFINITY)).collect();
    values.sort_by(f64::total_cmp);
    let (Some(&median), Some(&most)) = (values.get(values.len() / 2), values.last()) else {
        return "–".to_owned();
    };
    let never = format!("never ({} s)", waited_ms / 1000);
    let shown = |millis: f64| match millis {
        f64::INFINITY => never.clone(),
        millis if millis < 100.0 => format!("{millis:.1} ms"),
        millis if millis < 1000.0 => format!("{millis:.0} ms"),
        millis => format!("{:.2} s", millis / 1000.0),
    };
    if median == f64::INFINITY { never.clone() } else { format!("{} / {}", shown(median), shown(most)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(fault: &str, lastgasp: bool, gaps: &[Option<f64>]) -> Cell {
        let run = |&gap_ms: &Option<f64>| Run { gap_ms, complete: gap_ms.is_some(), safe_ms: Some(1500.0) };
        Cell {
            system: "A 1.0".to_owned(),
            fault: fault.to_owned(),
            lastgasp,
            runs: gaps.iter().map(run).collect(),
            remark: String::new(),
            waited_ms: 60_000,
        }
    }

    #[test]
    fn what_never_came_is_longer_than_all_else() {
        let table = render(&[
            cell("kill", false, &[None, None, Some(3.0)]),
            cell("kill", true, &[Some(250.0), None, Some(3.0)]),
        ]);
        assert!(table.contains("| A 1.0 | kill | without | never (60 s) | 1 of 3 | 1.50 s / 1.50 s |  |\n"), "{table}");
        assert!(table.contains("| **with** | 250 ms / never (60 s) | 2 of 3 |"), "{table}");
    }

    #[test]
    fn a_cell_that_is_measured_again_takes_the_place_of_the_old_one() {
        let kept = vec![cell("kill", false, &[None]), cell("stop", false, &[None])];
        let cells = merged(kept, vec![cell("kill", true, &[Some(1.0)]), cell("kill", false, &[Some(9.0)])]);
        let seen: Vec<_> = cells.iter().map(|c| (c.fault.as_str(), c.lastgasp, c.runs[0].gap_ms)).collect();
        assert_eq!(seen, [("kill", false, Some(9.0)), ("kill", true, Some(1.0)), ("stop", false, None)]);
    }
}

//! Tables, for the terminal and for `docs/bench/README.md`.

use std::fmt::Write as _;

use lastgasp_tests::distribution::{Distribution, Unit};

use crate::report::{Report, Section};

/// All that is known, as a page. `reports` are in the order in which they shall be read.
pub(crate) fn render(reports: &[Report]) -> String {
    let mut out = String::from(
        "# Benchmarks\n\n\
         Written by `cargo xtask bench` from the JSON files beside it; do not edit it. Every line is a distribution from one\n\
         run, and what is compared was measured in the same run, in turns or at the same time. Of less than 100 values the\n\
         99th percentile is the largest.\n",
    );
    for report in reports {
        let _ = write!(out, "\n## {}\n\n{}\n", report.title, circumstances(report));
        for section in &report.sections {
            let _ = write!(out, "\n### {}\n\n{}\n\n{}", section.title, section.about, table(section));
            for plot in &section.plots {
                let _ = write!(out, "\n![{}]({}-{}.svg)\n", plot.title, report.bench, plot.name);
            }
        }
    }
    out
}

/// One bench, for the terminal.
pub(crate) fn show(report: &Report) -> String {
    let mut out = format!("\n{}\n{}\n", report.title, circumstances(report));
    for section in &report.sections {
        let _ = write!(out, "\n{}\n\n{}", section.title, table(section));
    }
    out
}

fn circumstances(report: &Report) -> String {
    let Report { command, revision, at, took_s, quick, machine, load: [before, after], .. } = report;
    let average = |average: [f64; 3]| average.map(|load| format!("{load:.2}")).join(" ");
    let stolen = after.stolen_ticks.saturating_sub(before.stolen_ticks);
    let warning =
        if *quick { "**A quick run, to show that the bench runs; its numbers mean nothing.**\n\n" } else { "" };
    format!(
        "{warning}* `{command}`, revision {revision}, {at}, {} min {} s.\n\
         * {}, {} cores, {}, Linux {}, nats-server {}.\n\
         * Load average before {}, after {}; stolen by the hypervisor {:.1} s.",
        took_s / 60,
        took_s % 60,
        machine.cpu,
        machine.cores,
        Unit::Bytes.show(machine.memory_bytes as f64),
        machine.kernel,
        machine.nats_server,
        average(before.average),
        average(after.average),
        stolen as f64 / 100.0,
    )
}

/// In Markdown, in columns that are straight in a terminal too.
fn table(section: &Section) -> String {
    let mut lines: Vec<Vec<String>> = Vec::new();
    let mut head = section.labels.clone();
    head.extend(["n", "p50", "p99", "max"].map(str::to_owned));
    head.extend(section.compared_with.clone());
    lines.push(head);
    for row in &section.rows {
        let Distribution { unit, n, p50, p99, max, percentiles: _ } = &row.values;
        let mut cells = row.labels.clone();
        cells.push(n.to_string());
        cells.extend([p50, p99, max].map(|value| unit.show(*value)));
        if section.compared_with.is_some() {
            cells.push(row.ratio.map_or_else(String::new, times));
        }
        lines.push(cells);
    }
    let widths: Vec<usize> = (0..lines[0].len())
        .map(|column| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or_default())
        .collect();
    let labels = section.labels.len();
    let mut out = String::new();
    for (index, line) in lines.iter().enumerate() {
        for (column, (cell, width)) in line.iter().zip(&widths).enumerate() {
            let _ = if column < labels { write!(out, "| {cell:<width$} ") } else { write!(out, "| {cell:>width$} ") };
        }
        out.push_str("|\n");
        if index == 0 {
            for (column, width) in widths.iter().enumerate() {
                let end = if column < labels { '-' } else { ':' };
                let _ = write!(out, "|{}{end}", "-".repeat(width + 1));
            }
            out.push_str("|\n");
        }
    }
    out
}

/// A ratio with three digits that count.
fn times(ratio: f64) -> String {
    match ratio {
        100.0.. => format!("× {ratio:.0}"),
        10.0.. => format!("× {ratio:.1}"),
        _ => format!("× {ratio:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Row;

    #[test]
    fn a_table_has_every_distribution_and_its_ratio() {
        let first = Row::of(["lastgasp"], Unit::Microseconds, [400.0, 500.0]).unwrap();
        let second = Row::of(["a poll"], Unit::Microseconds, [500_000.0]).unwrap().against(Some(&first));
        let section = Section {
            title: String::new(),
            about: String::new(),
            labels: vec!["who".to_owned()],
            compared_with: Some("median".to_owned()),
            rows: vec![first, second],
            plots: Vec::new(),
        };
        let expected = "\
| who      | n |    p50 |    p99 |    max | median |
|----------|--:|-------:|-------:|-------:|-------:|
| lastgasp | 2 | 400 µs | 500 µs | 500 µs |        |
| a poll   | 1 | 500 ms | 500 ms | 500 ms | × 1250 |
";
        assert_eq!(table(&section), expected);
    }
}

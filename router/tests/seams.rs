//! `docs/seams.md` has every seam trap and every defect, and names only tests that exist.
#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::fs;
use std::path::Path;

/// One row of a table.
struct Row<'a> {
    number: &'a str,
    here: &'a str,
    shown_by: &'a str,
}

fn router() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The rows of the table under a heading.
fn table<'a>(text: &'a str, heading: &str) -> Vec<Row<'a>> {
    let (_, section) = text.split_once(&format!("\n## {heading}\n")).expect("the heading is there");
    let section = section.split("\n## ").next().unwrap();
    let lines = section.lines().filter(|line| line.starts_with('|')).skip(2);
    let row = |line: &'a str| {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [number, _, here, shown_by] = cells[..] else { panic!("four cells: {line}") };
        Row { number, here, shown_by }
    };
    lines.map(row).collect()
}

/// What stands between backticks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// The names of a file's tests.
fn tests(file: &str) -> HashSet<String> {
    let path = router().join(file);
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.starts_with("#[ignore")).collect();
    let name = |pair: &[&str]| {
        let test = pair[0] == "#[test]" || pair[0].starts_with("#[tokio::test");
        let (name, _) = pair[1].trim_start_matches("async ").strip_prefix("fn ")?.split_once('(')?;
        test.then(|| name.to_owned())
    };
    lines.windows(2).filter_map(name).collect()
}

/// A row without a test gives the reason after `without`.
fn check(rows: &[Row<'_>], numbers: impl Iterator<Item = String>, without: &str) {
    let have: Vec<&str> = rows.iter().map(|row| row.number).collect();
    assert_eq!(have, numbers.collect::<Vec<_>>(), "every number, once and in order");
    for Row { number, here, shown_by } in rows {
        let mut named = 0;
        for quote in quoted(shown_by) {
            if let Some((file, test)) = quote.split_once("::") {
                assert!(tests(file).contains(test), "{number}: {file} has no test {test}");
                named += 1;
            } else {
                assert!(router().join(quote).is_file(), "{number}: there is no {quote}");
            }
        }
        let reason = here.split_once(without).is_some_and(|(_, reason)| !reason.is_empty());
        assert!(named > 0 || reason, "{number} has neither a test nor a reason: {without}");
    }
}

#[test]
fn every_trap_and_every_defect_has_a_test_that_exists_or_a_reason() {
    let text = fs::read_to_string(router().join("../docs/seams.md")).unwrap();
    let traps = || (1..=32).map(|number| format!("T{number}"));
    check(&table(&text, "Traps"), traps(), "*Cannot occur*: ");
    check(&table(&text, "On the real engine"), traps(), "*Not shown*: ");
    check(&table(&text, "Defects of another router"), (1..=12).map(|number| number.to_string()), "*Cannot occur*: ");
}

//! The fault matrix: each story about a fault says in one line what was broken, what should have
//! come of it, and what did. The table in `docs/` is made of these lines.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::Path;

use serde::Serialize;

/// Names the file that the rows are appended to, one JSON object a line. Unset: nothing is written.
pub const ENVIRONMENT: &str = "LASTGASP_MATRIX";

#[derive(Serialize)]
struct Row<'a> {
    fault: &'a str,
    expected: &'a str,
    observed: &'a str,
    test: &'a str,
}

#[derive(Serialize)]
struct Count<'a> {
    count: &'a str,
    number: usize,
}

/// Appends the row of the running test, named after its thread, as the test runner names them.
///
/// Call it last: a row says that the assertions before it held.
///
/// # Panics
///
/// [`ENVIRONMENT`] is set and its file cannot be written: a matrix with a hole is worse than none.
pub fn row(fault: &str, expected: &str, observed: &str) {
    let Some(path) = std::env::var_os(ENVIRONMENT) else { return };
    let thread = std::thread::current();
    let row = Row { fault, expected, observed, test: thread.name().unwrap_or("unnamed") };
    if let Err(error) = append(Path::new(&path), &row) {
        panic!("{}: {error}", path.display());
    }
}

/// Adds to a total over all stories, as `streams exact`.
///
/// # Panics
///
/// As [`row`].
pub fn count(what: &str, number: usize) {
    let Some(path) = std::env::var_os(ENVIRONMENT) else { return };
    if let Err(error) = append(Path::new(&path), &Count { count: what, number }) {
        panic!("{}: {error}", path.display());
    }
}

/// Whether stories may take long: `cargo xtask test --long` says so.
pub fn is_long() -> bool {
    std::env::var_os("LASTGASP_LONG").is_some()
}

/// One write, so that rows of tests that run at once do not mix (`O_APPEND`).
pub(crate) fn append(path: &Path, row: &impl Serialize) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(row)?;
    line.push(b'\n');
    OpenOptions::new().create(true).append(true).open(path)?.write_all(&line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_appended_one_json_object_a_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows.jsonl");
        for observed in ["moved\nonce", "moved twice"] {
            append(&path, &Row { fault: "a \"fault\"", expected: "moved", observed, test: "a::test" }).unwrap();
        }
        let rows: Vec<serde_json::Value> =
            std::fs::read_to_string(&path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(rows.len(), 2);
        assert_eq!(rows[0]["observed"], "moved\nonce");
        assert_eq!(rows[1]["test"], "a::test");
    }
}

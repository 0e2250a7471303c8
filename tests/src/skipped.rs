//! What a test cannot check on this machine. The runner has no word for it while a test runs, so it
//! is written where `cargo xtask test` looks, and listed in its summary.

use std::fs::OpenOptions;
use std::io::Write as _;

/// Names the file that the lines are appended to. Unset: it is only printed.
pub const ENVIRONMENT: &str = "LASTGASP_SKIPPED";

/// Says that the running test, named after its thread, ends here, and what this machine lacks.
///
/// # Panics
///
/// [`ENVIRONMENT`] is set and its file cannot be written: a check that is skipped in silence is worse
/// than none.
pub fn here(lacking: &str) {
    let thread = std::thread::current();
    let line = format!("{}: {lacking}\n", thread.name().unwrap_or("unnamed"));
    eprint!("SKIPPED: {line}");
    let Some(path) = std::env::var_os(ENVIRONMENT) else { return };
    let written = OpenOptions::new().create(true).append(true).open(&path).and_then(|mut file| {
        // In one write, since several tests may do so at the same time.
        file.write_all(line.as_bytes())
    });
    if let Err(error) = written {
        panic!("{}: {error}", path.display());
    }
}

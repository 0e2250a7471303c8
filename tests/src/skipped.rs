//! What a test cannot check on this machine. libtest has no word for it while a test runs, so it is written
//! where `cargo xtask test` looks: the test then counts as skipped and not as passed.
//!
//! It needs nothing but `std`: a crate that cannot depend on this one may take it in by its path.

use std::fs::OpenOptions;
use std::io::Write as _;

/// Names the file that a line `name<TAB>reason` is appended to. Unset: it is only printed.
pub const ENVIRONMENT: &str = "LASTGASP_SKIPPED";

/// Says that the running test ends here, and what this machine lacks. The caller returns at once, as
/// [`skip!`](crate::skip) does: a test that is skipped has checked nothing.
///
/// # Panics
///
/// The thread does not bear the test's name, or [`ENVIRONMENT`] is set and its file cannot be written: a
/// check that is skipped in silence is worse than none.
pub fn here(lacking: &str) {
    let thread = std::thread::current();
    // libtest names a thread after its test; the threads of a runtime are called otherwise.
    let name = thread.name().filter(|name| *name != "main" && !name.starts_with("tokio-"));
    let name = name.unwrap_or_else(|| panic!("no test's thread skips this, but {:?}: {lacking}", thread.name()));
    let lacking = lacking.replace(['\t', '\n'], " ");
    // Past what catches the output of a test that passes: whoever runs it by hand is to see it.
    let _ = writeln!(std::io::stderr(), "SKIPPED: {name}: {lacking}");
    let Some(path) = std::env::var_os(ENVIRONMENT) else { return };
    let written = OpenOptions::new().create(true).append(true).open(&path).and_then(|mut file| {
        // In one write, since several tests may do so at the same time.
        file.write_all(format!("{name}\t{lacking}\n").as_bytes())
    });
    if let Err(error) = written {
        panic!("{}: {error}", path.display());
    }
}

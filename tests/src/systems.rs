//! Systems that people run, with and without lastgasp: each test about one says what a reader of a
//! stream saw of a fault, and for how long new requests were in danger. The table in `docs/` is made
//! of these lines.
//!
//! Both sides of a pair are measured in one run of one test, in turns where they can be.

use std::path::Path;
use std::time::Duration;

use serde::Serialize;

use crate::matrix;

/// Names the file that the cells are appended to, one JSON object a line. Unset: nothing is written.
pub const ENVIRONMENT: &str = "LASTGASP_SYSTEMS";

/// How often a fault is repeated: `cargo xtask systems` asks for ten.
///
/// # Panics
///
/// `LASTGASP_SYSTEMS_RUNS` is set and is not a number above 0.
pub fn runs() -> usize {
    let Ok(runs) = std::env::var("LASTGASP_SYSTEMS_RUNS") else { return 3 };
    runs.parse().ok().filter(|&runs| runs > 0).expect("LASTGASP_SYSTEMS_RUNS is a number above 0")
}

/// What one fault did to one stream and to those who came after it.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Run {
    /// From the fault to the next token at the client, ms. None: there was none for as long as it was
    /// waited for.
    gap_ms: Option<f64>,
    /// Whether the stream then came to its end, with every token that it should have.
    complete: bool,
    /// From the fault until no new request went to the dead worker any more, ms. None: that was not seen
    /// for as long as it was waited for.
    safe_ms: Option<f64>,
}

impl Run {
    /// `gap` until the next token, if there was one; `safe` until new requests went elsewhere.
    pub fn new(gap: Option<Duration>, complete: bool, safe: Option<Duration>) -> Self {
        let millis = |time: Duration| time.as_secs_f64() * 1000.0;
        Self { gap_ms: gap.map(millis), complete, safe_ms: safe.map(millis) }
    }
}

/// One cell of the table: a system, a fault, with or without lastgasp.
#[derive(Debug, Serialize)]
pub struct Cell<'a> {
    /// With its version, and what it was set up with: `Dynamo 1.6.1, etcd, migration limit 3`.
    pub system: &'a str,
    /// What was done to which process: `SIGSTOP of the worker`.
    pub fault: &'a str,
    /// Whether lastgasp watched.
    pub lastgasp: bool,
    /// How long a silent stream, or a record in discovery, was waited for at most.
    #[serde(skip)]
    pub waited: Duration,
    /// One by one.
    pub runs: &'a [Run],
    /// What else is worth a word: why a stream failed, what new requests got.
    pub remark: &'a str,
}

impl Cell<'_> {
    /// Appends the cell. Call it once its assertions held.
    ///
    /// # Panics
    ///
    /// [`ENVIRONMENT`] is set and its file cannot be written: a table with a hole is worse than none.
    pub fn record(&self) {
        #[derive(Serialize)]
        struct Line<'a> {
            #[serde(flatten)]
            cell: &'a Cell<'a>,
            waited_ms: u128,
        }

        eprintln!("{self:?}");
        let Some(path) = std::env::var_os(ENVIRONMENT) else { return };
        let line = Line { cell: self, waited_ms: self.waited.as_millis() };
        if let Err(error) = matrix::append(Path::new(&path), &line) {
            panic!("{}: {error}", path.display());
        }
    }
}

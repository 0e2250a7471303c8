//! What is wrong with a configuration, where, and what would be right.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Where a setting comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// A line of the file, counted from 1.
    File {
        /// As given on the command line.
        file: Arc<Path>,
        /// Counted from 1.
        line: usize,
    },
    /// An environment variable, by its name.
    Env(String),
    /// A flag of the command line, as `--nats`.
    Flag(&'static str),
    /// Nowhere: the setting is missing, and there is no file.
    Nowhere,
}

impl Place {
    /// Its line in the file, counted from 1.
    #[must_use]
    pub const fn line(&self) -> Option<usize> {
        match self {
            Self::File { line, .. } => Some(*line),
            Self::Env(_) | Self::Flag(_) | Self::Nowhere => None,
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { file, line } => write!(f, "{}:{line}", file.display()),
            Self::Env(name) => f.write_str(name),
            Self::Flag(flag) => f.write_str(flag),
            Self::Nowhere => f.write_str("configuration"),
        }
    }
}

/// One thing that is wrong, or for a warning, odd.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Where.
    pub place: Place,
    /// Which setting, as `worker[0].engine`; empty where no setting is meant.
    pub path: String,
    /// What is wrong, and what is allowed.
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { place, path, message } = self;
        if path.is_empty() { write!(f, "{place}: {message}") } else { write!(f, "{place}: {path}: {message}") }
    }
}

/// Why there is no configuration. Exit code 78 (`EX_CONFIG`, sysexits.h).
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file is not there, or not readable, or not text.
    #[error("{}: cannot be read: {error}; name an existing TOML file with --config or LASTGASP_CONFIG", file.display())]
    Unreadable {
        /// Which file.
        file: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// One or more things are wrong; all of them are listed, one a line.
    #[error("{}", .0.iter().map(Problem::to_string).collect::<Vec<_>>().join("\n"))]
    Invalid(Vec<Problem>),
}

/// ` (did you mean "x"?)` for the candidate nearest to `wrong`, or nothing if none is near.
pub(super) fn did_you_mean<'a>(wrong: &str, candidates: impl IntoIterator<Item = &'a str>) -> String {
    let near = wrong.chars().count() / 3 + 1;
    candidates
        .into_iter()
        .map(|candidate| (distance(&wrong.to_lowercase(), &candidate.to_lowercase()), candidate))
        .filter(|(distance, _)| *distance <= near)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| format!(" (did you mean {candidate:?}?)"))
        .unwrap_or_default()
}

/// Edits between two texts, two neighbours in the wrong order counting as one (optimal string alignment).
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows = vec![vec![0; b.len() + 1]; a.len() + 1];
    for (i, row) in rows.iter_mut().enumerate() {
        row[0] = i;
    }
    for (j, cell) in rows[0].iter_mut().enumerate() {
        *cell = j;
    }
    for i in 1..=a.len() {
        for j in 1..=b.len() {
            let change = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut best = change.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(rows[i - 2][j - 2] + 1);
            }
            rows[i][j] = best;
        }
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_of_the_finger_is_understood() {
        assert_eq!(did_you_mean("vlm", ["vllm", "sglang"]), r#" (did you mean "vllm"?)"#);
        assert_eq!(did_you_mean("ulr", ["url", "user"]), r#" (did you mean "url"?)"#);
        assert_eq!(did_you_mean("Enforce", ["enforce", "observe"]), r#" (did you mean "enforce"?)"#);
    }

    #[test]
    fn a_guess_is_not_made_at_any_price() {
        assert_eq!(did_you_mean("tensorrt", ["vllm", "sglang"]), "");
        assert_eq!(did_you_mean("", ["vllm"]), "");
    }
}

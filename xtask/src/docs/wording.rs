//! No pronoun begins a log line, an error, the help of a flag, a setting or a metric: whoever reads one line
//! of a log does not know what "it" was.

use std::fs;
use std::path::{Path, PathBuf};

use clap::{Command, CommandFactory};
use lastgasp::config::schema::SCHEMA;

use super::series::Series;
use crate::tools;

/// What no text begins with.
const PRONOUNS: [&str; 36] = [
    "he",
    "her",
    "his",
    "i",
    "it",
    "its",
    "my",
    "our",
    "she",
    "that",
    "their",
    "them",
    "there",
    "these",
    "they",
    "this",
    "those",
    "we",
    "what",
    "whatever",
    "which",
    "who",
    "whoever",
    "whom",
    "whose",
    "you",
    "your",
    "anybody",
    "anyone",
    "anything",
    "everything",
    "nobody",
    "nothing",
    "some",
    "somebody",
    "something",
];

/// The crates that speak to people.
const CRATES: [&str; 4] = ["daemon/src", "process/src", "protocol/src", "router/src"];

/// What a text for people stands in: log lines, errors, problems of the configuration.
const OPENINGS: [&str; 7] = ["#[error(", "error!(", "warn!(", "info!(", "debug!(", "trace!(", ".refuse("];

#[test]
fn no_pronoun_begins_a_log_line_or_an_error() {
    let mut wrong = Vec::new();
    let mut seen = 0;
    for file in CRATES.iter().flat_map(|folder| sources(&tools::workspace().join(folder))) {
        let source = fs::read_to_string(&file).expect("a source file");
        for (line, text) in texts(&source) {
            seen += 1;
            if begins_with_a_pronoun(&text) {
                wrong.push(format!("{}:{line}: {text}", file.display()));
            }
        }
    }
    assert!(seen > 300, "only {seen} texts were found");
    assert!(wrong.is_empty(), "name the actor (House style in CONTRIBUTING.md):\n{}", wrong.join("\n"));
}

#[test]
fn no_pronoun_begins_a_help() {
    let mut helps: Vec<(String, String)> = Vec::new();
    helps.extend(SCHEMA.iter().map(|setting| (setting.path.to_owned(), setting.help.to_owned())));
    helps.extend(Series::exported().into_iter().map(|series| (series.name, series.help)));
    for command in [lastgasp::cli::command(), lastgasp_router::cli::Args::command()] {
        collect(&command, &mut helps);
    }
    let wrong: Vec<String> = helps
        .iter()
        .filter(|(_, help)| help.is_empty() || begins_with_a_pronoun(help))
        .map(|(name, help)| format!("{name}: {help}"))
        .collect();
    assert!(helps.len() > 150, "only {} helps were found", helps.len());
    assert!(wrong.is_empty(), "name the actor (House style in CONTRIBUTING.md):\n{}", wrong.join("\n"));
}

/// The helps of a command, its arguments and its commands.
fn collect(command: &Command, helps: &mut Vec<(String, String)>) {
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    helps.push((command.get_name().to_owned(), about));
    for argument in command.get_arguments() {
        let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
        helps.push((format!("{} {}", command.get_name(), argument.get_id()), help));
    }
    for command in command.get_subcommands() {
        collect(command, helps);
    }
}

/// All `.rs` files below a folder.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder of the repository") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found
}

/// The strings between the parentheses of every opening, each with its line.
fn texts(source: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for opening in OPENINGS {
        for (at, _) in source.match_indices(opening) {
            let line = source[..at].matches('\n').count() + 1;
            found.extend(strings(&source[at + opening.len()..]).into_iter().map(|text| (line, text)));
        }
    }
    found
}

/// String literals up to the parenthesis that closes one opened before.
fn strings(source: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut depth = 1;
    let mut inside: Option<String> = None;
    let mut characters = source.chars();
    while depth > 0
        && let Some(c) = characters.next()
    {
        match (c, &mut inside) {
            // What is escaped is a quote, or the end of a line: no matter for the first word.
            ('\\', Some(_)) => _ = characters.next(),
            ('"', Some(_)) => found.extend(inside.take()),
            (c, Some(text)) => text.push(c),
            ('"', None) => inside = Some(String::new()),
            ('(', None) => depth += 1,
            (')', None) => depth -= 1,
            _ => {}
        }
    }
    found
}

fn begins_with_a_pronoun(text: &str) -> bool {
    let first = text.split(|c: char| !c.is_alphabetic()).next().unwrap_or_default().to_lowercase();
    // A single word is a name, as in `what = "…"`.
    text.trim().contains(' ') && PRONOUNS.contains(&first.as_str())
}

#[test]
fn texts_are_found_in_source() {
    let source =
        "tracing::warn!(worker = %name(a), \"it (\\\"x\\\") ended\");\n#[error(\"gone: {}\", f(\"that is it\"))]\n";
    let found = [(2, "gone: {}"), (2, "that is it"), (1, "it (x) ended")];
    assert_eq!(texts(source), found.map(|(line, text)| (line, text.to_owned())));
    assert_eq!(found.map(|(_, text)| begins_with_a_pronoun(text)), [false, true, true]);
    for (text, begins) in [("Its name", true), ("italic letters", false), ("who", false), ("{it} was", false)] {
        assert_eq!(begins_with_a_pronoun(text), begins, "{text}");
    }
}

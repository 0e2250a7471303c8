//! Every command line that a page shows is one that the programs accept.

use clap::error::ErrorKind;
use clap::{Command, CommandFactory};

use super::page::Page;
use crate::Xtask;

/// What may stand before a command without being part of it, with how many words follow it.
const BEFORE: [(&str, usize); 4] = [("sudo", 0), ("-u", 1), ("exec", 0), ("--", 0)];

#[test]
fn every_command_line_parses() {
    let mut wrong = Vec::new();
    let mut seen = 0;
    for page in Page::all() {
        let mut lines: Vec<(usize, String, Whole)> =
            page.spans().into_iter().map(|(at, span)| (at, span.to_owned(), Whole::Perhaps)).collect();
        for fence in page.fences().into_iter().filter(|fence| matches!(fence.language, "sh" | "bash" | "console")) {
            let typed = joined(&fence.lines).into_iter();
            lines.extend(typed.map(|(at, line)| (fence.line + at, line, Whole::Surely)));
        }
        for (number, line, whole) in lines {
            for words in commands(&line) {
                if let Some(result) = accepted(&words, whole) {
                    seen += 1;
                    if let Err(error) = result {
                        wrong.push(format!("{}:{number}: {}: {error}", page.path.display(), words.join(" ")));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "command lines that do not parse:\n{}", wrong.join("\n"));
    assert!(seen > 20, "only {seen} command lines were found");
}

/// Whether a command line could be typed as it stands.
#[derive(Clone, Copy, PartialEq)]
enum Whole {
    /// It stands in a block for a shell.
    Surely,
    /// It stands in a sentence, which may leave arguments out and have WORDS for them.
    Perhaps,
}

/// Whether the program takes these words; `None` for other programs.
fn accepted(words: &[String], whole: Whole) -> Option<Result<(), String>> {
    let program = words.first()?.rsplit('/').next()?;
    let (command, words): (Command, &[String]) = match program {
        "lastgasp" if words.len() > 1 => (lastgasp::cli::command(), words),
        "lastgasp-router" if words.len() > 1 => (lastgasp_router::cli::Args::command(), words),
        "cargo" if words.get(1).is_some_and(|word| word == "xtask") && words.len() > 2 => {
            (Xtask::command(), &words[1..])
        }
        _ => return None,
    };
    Some(match command.try_get_matches_from(words) {
        Ok(_) => Ok(()),
        Err(error) => match error.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Ok(()),
            ErrorKind::MissingRequiredArgument | ErrorKind::InvalidValue | ErrorKind::ValueValidation
                if whole == Whole::Perhaps =>
            {
                Ok(())
            }
            _ => Err(error.to_string().lines().next().unwrap_or_default().to_owned()),
        },
    })
}

/// Lines with those that they go on in, by `\` at the end, and where they begin.
fn joined(lines: &[&str]) -> Vec<(usize, String)> {
    let mut joined: Vec<(usize, String)> = Vec::new();
    let mut goes_on = false;
    for (at, line) in lines.iter().enumerate() {
        let (text, more) = line.trim_end().strip_suffix('\\').map_or((*line, false), |text| (text, true));
        match joined.last_mut() {
            Some((_, last)) if goes_on => last.push_str(text),
            _ => joined.push((at, text.to_owned())),
        }
        goes_on = more;
    }
    joined
}

/// The commands of a line as a shell would see them, without what stands before them.
fn commands(line: &str) -> Vec<Vec<String>> {
    let mut commands = vec![Vec::new()];
    let mut word: Option<String> = None;
    let mut quote: Option<char> = None;
    for c in line.chars() {
        match (c, quote) {
            (c, Some(open)) if c == open => quote = None,
            (c, Some(_)) => word.get_or_insert_default().push(c),
            ('\'' | '"', None) => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            ('#', None) if word.is_none() => break,
            ('|' | '&' | ';' | '(' | ')', None) => {
                end(&mut commands, &mut word);
                commands.push(Vec::new());
            }
            (' ', None) => end(&mut commands, &mut word),
            // What goes into a file is no argument.
            ('<' | '>', None) => break,
            (c, None) => word.get_or_insert_default().push(c),
        }
    }
    end(&mut commands, &mut word);
    commands.into_iter().map(without_prefix).filter(|words| !words.is_empty()).collect()
}

fn end(commands: &mut [Vec<String>], word: &mut Option<String>) {
    if let (Some(word), Some(words)) = (word.take(), commands.last_mut()) {
        words.push(word);
    }
}

fn without_prefix(words: Vec<String>) -> Vec<String> {
    let mut rest = &words[..];
    while let Some(first) = rest.first() {
        let variable = first.split_once('=').is_some_and(|(name, _)| {
            !name.is_empty() && name.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_')
        });
        let skipped = BEFORE.iter().find(|(word, _)| word == first).map(|(_, more)| 1 + more);
        match skipped.or((variable || first == "$").then_some(1)) {
            Some(count) => rest = rest.get(count..).unwrap_or_default(),
            None => break,
        }
    }
    rest.to_vec()
}

#[test]
fn a_line_is_read_as_a_shell_reads_it() {
    let words = |line| commands(line).into_iter().map(|words| words.join("|")).collect::<Vec<_>>();
    assert_eq!(
        words("A_1=b sudo -u x lastgasp status --json | jq -r '.a b'  # c"),
        ["lastgasp|status|--json", "jq|-r|.a b"]
    );
    assert_eq!(words("lastgasp run --config \"a b\" &"), ["lastgasp|run|--config|a b"]);
    assert_eq!(joined(&["a \\", "  b", "c"]), [(0, "a   b".to_owned()), (2, "c".to_owned())]);
}

#[test]
fn an_unknown_flag_is_found() {
    let refused =
        |line: &str| commands(line).iter().any(|words| matches!(accepted(words, Whole::Surely), Some(Err(_))));
    assert!(
        refused("lastgasp status --wacth") && refused("cargo xtask dmo") && refused("x/lastgasp-router --lissten :1")
    );
    assert!(!refused("lastgasp status --watch") && !refused("cargo test --nothing"));
}

//! The parts of pages that follow from the code. With `LASTGASP_DOCS=write` they are written, else
//! compared.

use std::fmt::Write;
use std::fs;
use std::sync::{Mutex, PoisonError};

use clap::CommandFactory;
use lastgasp::config::schema::SCHEMA;

use lastgasp_process::catalogue::Label;

use super::ENVIRONMENT;
use super::names::{self, CLOSED, Closed};
use super::page::{Page, anchor};
use super::series::Series;
use crate::tools;

#[test]
fn settings() {
    let mut text = String::new();
    let mut table = "";
    for setting in SCHEMA {
        let begin = match setting.path.split_once("[]") {
            Some((list, _)) => list,
            None => setting.path.split_once('.').map_or("", |(table, _)| table),
        };
        if begin != table || text.is_empty() {
            let heading = match begin {
                "" => "At the top".to_owned(),
                "worker" => "`[[worker]]`".to_owned(),
                other => format!("`[{other}]`"),
            };
            table = begin;
            write!(text, "\n### {heading}\n\n| setting | allowed | default | what it is for |\n|---|---|---|---|\n")
                .unwrap();
        }
        let default = match setting.default {
            None => String::new(),
            Some("") => "empty".to_owned(),
            Some(default) => format!("`{default}`"),
        };
        let (path, allowed, help) = (setting.path, setting.kind.allowed(), setting.help);
        writeln!(text, "| `{path}`<br>`{}` | {} | {default} | {} |", setting.env(), cell(&allowed), cell(help))
            .unwrap();
    }
    written("docs/configuration.md", "settings", &text);
}

#[test]
fn router_flags() {
    let mut text = "\n| flag | variable | default | what it is for |\n|---|---|---|---|\n".to_owned();
    for argument in lastgasp_router::cli::Args::command().get_arguments() {
        let value = argument.get_value_names().filter(|_| argument.get_action().takes_values());
        let value = value.map(|names| format!(" {}", names[0])).unwrap_or_default();
        let flag = argument.get_long().expect("only long flags");
        let variable = argument.get_env().map(|name| format!("`{}`", name.to_string_lossy())).unwrap_or_default();
        // One that is hidden is this machine's.
        let shown = argument.get_action().takes_values() && !argument.is_hide_default_value_set();
        let defaults = argument.get_default_values().iter().filter(|_| shown);
        let default = defaults.map(|default| format!("`{}`", default.to_string_lossy())).collect::<String>();
        let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
        writeln!(text, "| `--{flag}{value}` | {variable} | {default} | {} |", cell(&help)).unwrap();
    }
    written("docs/configuration.md", "router flags", &text);
}

#[test]
fn metrics() {
    for by in ["daemon", "router"] {
        let mut text = "\n| metric | type | what it says | labels |\n|---|---|---|---|\n".to_owned();
        for Series { name, help, kind, labels, .. } in Series::exported().iter().filter(|series| series.by == by) {
            let labels: Vec<String> = labels.iter().map(explained).collect();
            writeln!(text, "| `{name}` | {kind} | {} | {} |", cell(help), labels.join("<br>")).unwrap();
        }
        written("docs/reference.md", &format!("metrics of the {by}"), &text);
    }
}

fn explained(label: &Label) -> String {
    let said = label.lists.iter().flat_map(|list| match names::heading(list) {
        Some(title) => vec![format!("[{}](#{})", title.replace('`', ""), anchor(title))],
        None => list.names.iter().map(|value| format!("`{value}`")).collect(),
    });
    let open = Some(label.open.to_owned()).filter(|open| !open.is_empty());
    format!("`{}`: {}", label.name, said.chain(open).collect::<Vec<_>>().join(", "))
}

#[test]
fn closed_names() {
    let mut text = String::new();
    for closed in CLOSED.iter() {
        let Closed { title, met, file, .. } = closed;
        write!(text, "\n### {title}\n\n{met} Defined in [{file}](../{file}).\n\n| name | |\n|---|---|\n").unwrap();
        for (name, said) in names::variants(closed) {
            writeln!(text, "| `{name}` | {said} |").unwrap();
        }
    }
    write!(
        text,
        "\n### Losses\n\n`lastgasp_losses_total`. Defined in [daemon/src/losses.rs](../daemon/src/losses.rs).\n\n"
    )
    .unwrap();
    writeln!(text, "| hop | kind | |\n|---|---|---|").unwrap();
    for (hop, kind, said) in names::losses() {
        writeln!(text, "| `{hop}` | `{kind}` | {said} |").unwrap();
    }
    written("docs/reference.md", "closed names", &text);
}

/// Text that may stand in a cell of a table.
fn cell(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}

/// Compares the part of this name of a page, or writes it.
fn written(path: &str, part: &str, text: &str) {
    // Tests run at once, and several parts are of one page.
    static WRITING: Mutex<()> = Mutex::new(());
    let _turn = WRITING.lock().unwrap_or_else(PoisonError::into_inner);
    let page = Page::read(path);
    let begin = format!("<!-- {part}: begin; written by `cargo xtask docs` -->\n");
    let end = format!("<!-- {part}: end -->");
    let from = page.text.find(&begin).unwrap_or_else(|| panic!("{path} has no line {begin}")) + begin.len();
    let to = page.text[from..].find(&end).unwrap_or_else(|| panic!("{path} has no line {end}")) + from;
    let text = format!("{}\n", text.trim_end());
    if page.text[from..to] == text {
        return;
    }
    assert!(
        std::env::var_os(ENVIRONMENT).is_some_and(|value| value == "write"),
        "{path}: the part {part:?} is not what the code says; run `cargo xtask docs` and commit what it writes"
    );
    let whole = format!("{}{text}{}", &page.text[..from], &page.text[to..]);
    fs::write(tools::workspace().join(path), whole).expect("the page can be written");
}

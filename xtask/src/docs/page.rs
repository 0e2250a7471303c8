//! A page in Markdown, as far as the checks look at it.

use std::fs;
use std::path::{Path, PathBuf};

use crate::tools;

/// A page.
pub(super) struct Page {
    /// From the workspace's root.
    pub(super) path: PathBuf,
    pub(super) text: String,
}

/// A block between two lines of three backticks.
pub(super) struct Fence<'a> {
    /// Of its first line, from 1.
    pub(super) line: usize,
    pub(super) language: &'a str,
    pub(super) lines: Vec<&'a str>,
}

impl Page {
    pub(super) fn read(path: &str) -> Self {
        let text = fs::read_to_string(tools::workspace().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
        Self { path: path.into(), text }
    }

    /// Every page for people: those at the root, and all of `docs/`.
    pub(super) fn all() -> Vec<Self> {
        let root = tools::workspace();
        let mut paths = Vec::new();
        for folder in ["", "docs"] {
            for entry in fs::read_dir(root.join(folder)).expect("a folder of the repository") {
                let path = entry.expect("an entry").path();
                if path.extension().is_some_and(|extension| extension == "md") {
                    paths.push(path.strip_prefix(&root).expect("below the root").to_owned());
                }
            }
        }
        paths.sort();
        paths.iter().map(|path| Self::read(path.to_str().expect("a plain name"))).collect()
    }

    /// The folder that relative links begin at.
    pub(super) fn folder(&self) -> &Path {
        self.path.parent().expect("a file is in a folder")
    }

    pub(super) fn fences(&self) -> Vec<Fence<'_>> {
        let mut fences = Vec::new();
        let mut open: Option<Fence<'_>> = None;
        for (number, line) in self.text.lines().enumerate() {
            match (line.trim_start().strip_prefix("```"), &mut open) {
                (Some(_), Some(_)) => fences.extend(open.take()),
                (Some(language), None) => open = Some(Fence { line: number + 2, language, lines: Vec::new() }),
                (None, Some(fence)) => fence.lines.push(line),
                (None, None) => {}
            }
        }
        assert!(open.is_none(), "{}: a block without end", self.path.display());
        fences
    }

    /// Lines outside of blocks, with their numbers from 1.
    pub(super) fn prose(&self) -> Vec<(usize, &str)> {
        let mut lines = Vec::new();
        let mut inside = false;
        for (number, line) in self.text.lines().enumerate() {
            if line.trim_start().starts_with("```") {
                inside = !inside;
            } else if !inside {
                lines.push((number + 1, line));
            }
        }
        lines
    }

    /// What stands between single backticks, with its line.
    pub(super) fn spans(&self) -> Vec<(usize, &str)> {
        let mut spans = Vec::new();
        for (number, line) in self.prose() {
            let pieces: Vec<&str> = line.split('`').collect();
            let closed = (pieces.len() - 1) / 2;
            spans.extend(pieces.into_iter().skip(1).step_by(2).take(closed).map(|span| (number, span)));
        }
        spans
    }

    /// Targets of links and pictures, with their lines.
    pub(super) fn links(&self) -> Vec<(usize, &str)> {
        let mut links = Vec::new();
        for (number, line) in self.prose() {
            let mut rest = line;
            while let Some(begin) = rest.find("](") {
                rest = &rest[begin + 2..];
                let Some(end) = rest.find(')') else { break };
                links.push((number, &rest[..end]));
            }
        }
        links
    }

    /// What headings may be linked to by, as GitHub makes it of their text.
    pub(super) fn anchors(&self) -> Vec<String> {
        let heading = |(_, line): (usize, &str)| {
            let title = line.strip_prefix('#')?.trim_start_matches('#').strip_prefix(' ')?;
            Some(anchor(title))
        };
        self.prose().into_iter().filter_map(heading).collect()
    }
}

/// Lower case, blanks as hyphens, and of the rest only letters, digits, `-` and `_`.
pub(super) fn anchor(title: &str) -> String {
    let kept = title.trim().to_lowercase().replace(' ', "-");
    kept.chars().filter(|c| c.is_alphanumeric() || matches!(c, '-' | '_')).collect()
}

#[test]
fn headings_are_linked_as_github_does() {
    assert_eq!(anchor("What is refused, and `why`?"), "what-is-refused-and-why");
}

#[test]
fn a_page_is_taken_apart() {
    let text = "# A b\n`x y` and [z](c.md#d)\n```sh\nls `pwd`\n```\n".to_owned();
    let page = Page { path: "docs/a.md".into(), text };
    assert_eq!(page.spans(), [(2, "x y")]);
    assert_eq!(page.links(), [(2, "c.md#d")]);
    assert_eq!(page.anchors(), ["a-b"]);
    let fences = page.fences();
    assert_eq!((fences[0].line, fences[0].language, &fences[0].lines[..]), (4, "sh", &["ls `pwd`"][..]));
}

//! Every link and every file that a page names is there.

use std::path::{Path, PathBuf};

use super::page::Page;
use crate::tools;

/// Folders of the repository; a path that begins with one of them is meant as such.
const FOLDERS: [&str; 10] =
    ["bench/", "daemon/", "deploy/", "docs/", "ebpf/", "protocol/", "router/", "tests/", "xtask/", "src/"];

#[test]
fn every_link_leads_somewhere() {
    let mut broken = Vec::new();
    for page in Page::all() {
        for (line, target) in page.links() {
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
            let path = if file.is_empty() { page.path.clone() } else { page.folder().join(file) };
            let missing = !tools::workspace().join(&path).exists();
            let unknown = !missing && !anchor.is_empty() && {
                let there = Page::read(path.to_str().expect("a plain name"));
                !there.anchors().contains(&anchor.to_owned())
            };
            if missing || unknown {
                broken.push(format!("{}:{line}: {target}", page.path.display()));
            }
        }
    }
    assert!(broken.is_empty(), "links to nothing:\n{}", broken.join("\n"));
}

#[test]
fn every_file_that_is_named_exists() {
    let mut missing = Vec::new();
    for page in Page::all() {
        let spans = page.spans();
        let fences = page.fences();
        let words = fences.iter().filter(|fence| matches!(fence.language, "sh" | "console")).flat_map(|fence| {
            let numbered = fence.lines.iter().enumerate();
            numbered.flat_map(move |(at, line)| line.split_whitespace().map(move |word| (fence.line + at, word)))
        });
        for (line, text) in spans.into_iter().chain(words) {
            if let Some(path) = named(text)
                && !exists(&page, &path)
            {
                missing.push(format!("{}:{line}: {text}", page.path.display()));
            }
        }
    }
    assert!(missing.is_empty(), "files that are not there:\n{}", missing.join("\n"));
}

/// Every page can be found from the first one.
#[test]
fn the_readme_links_every_page() {
    let readme = Page::read("README.md");
    let links: Vec<&str> = readme.links().into_iter().map(|(_, target)| target).collect();
    for page in Page::all() {
        let path = page.path.to_str().expect("a plain name");
        assert!(path == "README.md" || links.contains(&path), "README.md does not link {path}");
    }
}

/// The path, if the text is one, without what says where in the file.
fn named(text: &str) -> Option<PathBuf> {
    let text = text.trim_end_matches([',', ';']);
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-:".contains(c);
    if !FOLDERS.iter().any(|folder| text.starts_with(folder)) || !text.chars().all(plain) {
        return None;
    }
    Some(PathBuf::from(text.split(':').next().unwrap_or(text)))
}

/// From the root, from the page, or from one of the packages.
fn exists(page: &Page, path: &Path) -> bool {
    let root = tools::workspace();
    let places = ["", "daemon", "ebpf", "protocol", "router", "tests", "xtask"];
    places.iter().any(|place| root.join(place).join(path).exists()) || root.join(page.folder()).join(path).exists()
}

#[test]
fn a_path_is_told_from_other_words() {
    assert_eq!(named("tests/rules.rs::a_test"), Some("tests/rules.rs".into()));
    assert_eq!(named("daemon/src/core/ladder.rs:12"), Some("daemon/src/core/ladder.rs".into()));
    for other in ["target/debug/lastgasp", "docs/*.md", "lastgasp status", "nats://h/docs/"] {
        assert_eq!(named(other), None);
    }
}

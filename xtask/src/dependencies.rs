//! `cargo xtask dependencies`: licences, bans and sources of all dependencies, as `deny.toml` has them.
//!
//! Advisories are not checked here: their database has to be fetched. `cargo deny check advisories`
//! does it where there is a network.

use std::collections::{BTreeMap, BTreeSet};
use std::process::ExitCode;

use serde::Deserialize;

use crate::tools;

/// Check licences, bans and sources of all dependencies against deny.toml.
#[derive(clap::Args)]
#[command(after_help = "\
Example:
  cargo xtask dependencies

Exit status: 0 all is allowed, 1 something is not; it is named.")]
pub(crate) struct Arguments {}

#[derive(Deserialize)]
struct Rules {
    licenses: Licenses,
    bans: Bans,
}

#[derive(Deserialize)]
struct Licenses {
    allow: BTreeSet<String>,
}

#[derive(Deserialize)]
struct Bans {
    deny: Vec<Banned>,
}

#[derive(Deserialize)]
struct Banned {
    #[serde(rename = "crate")]
    name: String,
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    version: String,
    license: Option<String>,
    source: Option<String>,
}

pub(crate) fn main(_: &Arguments) -> ExitCode {
    let wrong = match check() {
        Ok(wrong) => wrong,
        Err(error) => vec![error.to_string()],
    };
    for line in &wrong {
        eprintln!("cargo xtask dependencies: {line}");
    }
    if wrong.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn check() -> Result<Vec<String>, Box<dyn std::error::Error>> {
    let rules: Rules = toml::from_str(&std::fs::read_to_string(tools::workspace().join("deny.toml"))?)?;
    let mut command = tools::cargo();
    command.args(["metadata", "--locked", "--format-version", "1"]);
    let metadata: Metadata = serde_json::from_str(&tools::output(&mut command)?)?;
    let mut versions: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for package in &metadata.packages {
        versions.entry(&package.name).or_default().insert(&package.version);
    }
    for (name, versions) in versions.iter().filter(|(_, versions)| versions.len() > 1) {
        let versions: Vec<&str> = versions.iter().copied().collect();
        println!("side by side: {name} {}", versions.join(", "));
    }
    println!("{} packages", metadata.packages.len());
    Ok(metadata.packages.iter().flat_map(|package| wrong(package, &rules)).collect())
}

fn wrong(package: &Package, rules: &Rules) -> Vec<String> {
    let Package { name, version, license, source } = package;
    let mut wrong = Vec::new();
    match license.as_deref().map(|license| (license, holds(license, &rules.licenses.allow))) {
        Some((_, true)) => {}
        Some((license, false)) => {
            wrong.push(format!("{name} {version}: licence {license} is not allowed in deny.toml"))
        }
        None => wrong.push(format!("{name} {version}: it names no licence")),
    }
    if rules.bans.deny.iter().any(|banned| banned.name == *name) {
        wrong.push(format!("{name} {version} is banned in deny.toml"));
    }
    if source.as_ref().is_some_and(|source| !source.starts_with("registry+")) {
        wrong.push(format!("{name} {version} comes from {source:?}, not from the registry"));
    }
    wrong
}

/// Whether an SPDX expression can be met with these licences. `/` is how crates wrote OR before
/// there were expressions; AND binds more tightly (SPDX 2.3, annex D).
fn holds(expression: &str, allowed: &BTreeSet<String>) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let mut words = spaced.split_whitespace().peekable();
    let met = any(&mut words, allowed);
    met && words.next().is_none()
}

type Words<'a> = std::iter::Peekable<std::str::SplitWhitespace<'a>>;

fn any(words: &mut Words<'_>, allowed: &BTreeSet<String>) -> bool {
    let mut met = all(words, allowed);
    while words.next_if_eq(&"OR").is_some() {
        met |= all(words, allowed);
    }
    met
}

fn all(words: &mut Words<'_>, allowed: &BTreeSet<String>) -> bool {
    let mut met = one(words, allowed);
    while words.next_if_eq(&"AND").is_some() {
        met &= one(words, allowed);
    }
    met
}

fn one(words: &mut Words<'_>, allowed: &BTreeSet<String>) -> bool {
    match words.next() {
        Some("(") => {
            let met = any(words, allowed);
            met & words.next_if_eq(&")").is_some()
        }
        // An exception only adds permissions.
        Some(license) => {
            if words.next_if_eq(&"WITH").is_some() {
                words.next();
            }
            allowed.contains(license)
        }
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expression_holds_if_an_alternative_of_it_does() {
        let allowed: BTreeSet<String> = ["MIT", "Apache-2.0", "Unicode-3.0"].map(str::to_owned).into();
        for expression in [
            "MIT",
            "GPL-2.0-only OR MIT",
            "MIT/GPL-3.0",
            "(MIT OR X) AND Unicode-3.0",
            "Apache-2.0 WITH LLVM-exception",
        ] {
            assert!(holds(expression, &allowed), "{expression}");
        }
        for expression in ["GPL-2.0-only", "MIT AND X", "(MIT OR X) AND Y", "", "MIT MIT", "(MIT"] {
            assert!(!holds(expression, &allowed), "{expression}");
        }
    }

    #[test]
    fn what_is_banned_or_from_elsewhere_is_named() {
        let rules: Rules =
            toml::from_str("[licenses]\nallow = [\"MIT\"]\n[bans]\ndeny = [{ crate = \"bad\" }]").expect("TOML");
        let package = |name: &str, source: Option<&str>| Package {
            name: name.to_owned(),
            version: "1.0.0".to_owned(),
            license: Some("MIT".to_owned()),
            source: source.map(str::to_owned),
        };
        assert!(wrong(&package("good", Some("registry+x")), &rules).is_empty());
        assert_eq!(wrong(&package("bad", None), &rules), ["bad 1.0.0 is banned in deny.toml"]);
        assert!(wrong(&package("good", Some("git+x")), &rules)[0].contains("not from the registry"));
    }
}

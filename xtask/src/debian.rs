//! Debian's packages: installed, or only unpacked.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, io};

use crate::tools::{self, ToolError};

/// Why a package cannot be had.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DebianError {
    /// A program failed.
    #[error(transparent)]
    Tool(#[from] ToolError),
    /// A file could not be written or found.
    #[error("the package {package}: {source}")]
    File {
        /// Which.
        package: String,
        /// What went wrong.
        source: io::Error,
    },
}

/// Reads the lists of packages, by sudo where this is not root.
pub(crate) fn update() -> Command {
    let mut command = apt_get();
    command.arg("update");
    command
}

/// Installs packages, by sudo where this is not root.
pub(crate) fn install(packages: &[&str]) -> Command {
    let mut command = apt_get();
    command.args(["install", "--yes", "--no-install-recommends"]).args(packages);
    command
}

fn apt_get() -> Command {
    if tools::is_root() {
        Command::new("apt-get")
    } else {
        let mut command = Command::new("sudo");
        command.arg("apt-get");
        command
    }
}

/// Unpacks a package into a folder of its own, which needs no root and starts no service.
pub(crate) fn unpack(package: &str, folder: &Path) -> Result<(), DebianError> {
    let file = |source| DebianError::File { package: package.to_owned(), source };
    let _ = fs::remove_dir_all(folder);
    fs::create_dir_all(folder).map_err(file)?;
    let mut download = Command::new("apt-get");
    tools::step(&format!("fetch {package}"), download.args(["download", package]).current_dir(folder))?;
    let fetched = fs::read_dir(folder).map_err(file)?.next();
    let fetched = fetched.ok_or_else(|| file(io::ErrorKind::NotFound.into()))?.map_err(file)?.path();
    tools::step("unpack it", Command::new("dpkg-deb").arg("-x").arg(&fetched).arg(folder))?;
    Ok(())
}

/// A program whose package would start a service if it were installed.
pub(crate) struct Program {
    name: &'static str,
    package: &'static str,
    /// Names the one to be used.
    pub(crate) variable: &'static str,
}

/// What Infera's discovery is kept in.
pub(crate) const ETCD: Program = Program { name: "etcd", package: "etcd-server", variable: "LASTGASP_ETCD" };
/// What checks and tests alert rules.
pub(crate) const PROMTOOL: Program = Program { name: "promtool", package: "prometheus", variable: "LASTGASP_PROMTOOL" };

impl Program {
    /// The one that is named, the one on the PATH, or the package's, unpacked under `target/tools/`.
    pub(crate) fn ensure(&self) -> Result<PathBuf, DebianError> {
        let named = std::env::var_os(self.variable).map(PathBuf::from);
        if let Some(path) = named.or_else(|| tools::on_path(self.name)) {
            return Ok(path);
        }
        let folder = tools::target().join("tools").join(self.package);
        let program = folder.join("usr/bin").join(self.name);
        if !program.exists() {
            unpack(self.package, &folder)?;
        }
        Ok(program)
    }
}

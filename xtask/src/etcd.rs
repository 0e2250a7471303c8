//! etcd, which is the discovery of Infera: the one on the PATH, or else the one of Debian's
//! package `etcd-server`, unpacked under `target/tools/`. Installed it would start a server.

use std::path::PathBuf;
use std::process::Command;
use std::{fs, io};

use crate::tools::{self, ToolError};

/// Names the etcd to be used.
pub(crate) const ENVIRONMENT: &str = "LASTGASP_ETCD";

/// Debian's package.
const PACKAGE: &str = "etcd-server";

/// Why there is no etcd.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EtcdError {
    /// The package cannot be had.
    #[error("{0}; put etcd on the PATH")]
    Fetch(#[from] ToolError),
    /// A file could not be written or found.
    #[error("the package {PACKAGE}: {0}; put etcd on the PATH")]
    Package(#[from] io::Error),
}

/// The etcd to use.
pub(crate) fn ensure() -> Result<PathBuf, EtcdError> {
    if let Some(path) = std::env::var_os(ENVIRONMENT).map(PathBuf::from).or_else(|| tools::on_path("etcd")) {
        return Ok(path);
    }
    let folder = tools::target().join("tools").join(PACKAGE);
    let program = folder.join("usr/bin/etcd");
    if !program.exists() {
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder)?;
        tools::step("fetch etcd", Command::new("apt-get").args(["download", PACKAGE]).current_dir(&folder))?;
        let package = fs::read_dir(&folder)?.next().ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))??.path();
        tools::step("unpack it", Command::new("dpkg-deb").arg("-x").arg(&package).arg(&folder))?;
    }
    Ok(program)
}

//! `ebpf/prebuilt/`: the object, its checksum, and what it was built with.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use sha2::{Digest as _, Sha256};

use super::BuildError;

/// The object's file name.
pub(super) const OBJECT: &str = "lastgasp-probes.bpf.o";
const TOOLCHAIN: &str = "toolchain.txt";

/// The folder.
pub(super) struct Prebuilt(PathBuf);

/// What is committed there.
pub(super) struct Committed {
    /// SHA-256 of the object, in hexadecimal digits.
    pub(super) digest: String,
    /// The record of the toolchain.
    pub(super) toolchain: String,
}

impl Prebuilt {
    pub(super) fn at(workspace: &Path) -> Self {
        Self(workspace.join("ebpf").join("prebuilt"))
    }

    pub(super) fn object(&self) -> PathBuf {
        self.0.join(OBJECT)
    }

    fn checksum(&self) -> PathBuf {
        self.0.join(format!("{OBJECT}.sha256"))
    }

    /// What is committed. The object has the checksum beside it.
    pub(super) fn read(&self) -> Result<Committed, BuildError> {
        let digest = digest(&read(&self.object())?);
        if read(&self.checksum())? != line(&digest).as_bytes() {
            return Err(BuildError::Checksum);
        }
        let toolchain = String::from_utf8_lossy(&read(&self.0.join(TOOLCHAIN))?).into_owned();
        Ok(Committed { digest, toolchain })
    }

    pub(super) fn write(&self, object: &[u8], toolchain: &str) -> Result<(), BuildError> {
        write(&self.object(), object)?;
        write(&self.checksum(), line(&digest(object)).as_bytes())?;
        write(&self.0.join(TOOLCHAIN), toolchain.as_bytes())
    }
}

/// As `sha256sum` writes and checks it.
fn line(digest: &str) -> String {
    format!("{digest}  {OBJECT}\n")
}

/// SHA-256 in hexadecimal digits.
pub(super) fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().fold(String::new(), |mut digits, byte| {
        let _infallible = write!(digits, "{byte:02x}");
        digits
    })
}

fn read(path: &Path) -> Result<Vec<u8>, BuildError> {
    fs::read(path).map_err(|source| BuildError::File { path: path.to_owned(), source })
}

/// Writes a file, and the folders above it.
pub(super) fn write(path: &Path, bytes: &[u8]) -> Result<(), BuildError> {
    let folder = path.parent().map_or(Ok(()), fs::create_dir_all);
    folder.and_then(|()| fs::write(path, bytes)).map_err(|source| BuildError::File { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_again() {
        let root = tempfile::tempdir().expect("a temporary folder");
        let prebuilt = Prebuilt::at(root.path());
        prebuilt.write(b"abc", "rustc 1\n").expect("the folder can be written");
        let committed = prebuilt.read().expect("it was just written");
        // From FIPS 180-2.
        assert_eq!(committed.digest, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert_eq!(committed.toolchain, "rustc 1\n");

        write(&prebuilt.object(), b"abd").expect("the folder can be written");
        assert!(matches!(prebuilt.read(), Err(BuildError::Checksum)));
    }
}

//! Finds a compiler that comes with the source of `core`, and a linker for BPF
//! whose LLVM can read what that compiler writes.

use std::{
    env, fmt,
    path::{Path, PathBuf},
    process::Command,
};

use thiserror::Error;

use super::install;
use crate::tools;

/// The linker's name.
pub(super) const LINKER: &str = "bpf-linker";

/// A compiler and a linker that fit each other.
pub(super) struct Toolchain {
    pub(super) rustc: Rustc,
    pub(super) linker: Linker,
}

/// A compiler whose sysroot has the source of `core`.
#[derive(Clone)]
pub(super) struct Rustc {
    pub(super) path: PathBuf,
    /// Where the standard library's source lies below the sysroot.
    pub(super) source: PathBuf,
    /// As in `rustc 1.96.0 (ac68faa20 2026-05-25)`, without what a packager appended.
    version: String,
    pub(super) llvm: Version,
}

/// A bpf-linker.
pub(super) struct Linker {
    pub(super) path: PathBuf,
    /// As in `bpf-linker 0.13.0`.
    version: String,
    llvm: Version,
}

/// Of LLVM: its major, minor and patch number.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Version([u32; 3]);

impl Version {
    pub(super) fn major(self) -> u32 {
        self.0[0]
    }

    /// From text that has `LLVM version` and then it, as rustc and LLVM itself write.
    fn after_llvm(text: &str) -> Option<Self> {
        let at = text.find("LLVM version")? + "LLVM version".len();
        let word = text[at..].trim_start_matches([':', ' ']).split_whitespace().next()?;
        let mut numbers = word.split(['.', '-']).map(|number| number.parse().ok());
        Some(Self([numbers.next()??, numbers.next()??, numbers.next()??]))
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [major, minor, patch] = self.0;
        write!(f, "{major}.{minor}.{patch}")
    }
}

/// There is nothing to build with, and how to get it.
#[derive(Debug, Error)]
#[error(
    "cannot build the kernel programs here: {what}.\n\
     `cargo xtask build-ebpf --install` runs, or you do:\n\n{}\n\
     (Nobody needs this but who changes ebpf/: the daemon embeds the object that is committed.)",
    install::commands()
)]
pub(super) struct NoToolchain {
    what: String,
}

impl Toolchain {
    /// A rustup nightly if it has what is needed, else the system's compiler.
    pub(super) fn find() -> Result<Self, NoToolchain> {
        let compilers = Rustc::all();
        let linkers = Linker::all();
        for rustc in &compilers {
            let fits = |linker: &Linker| linker.llvm.major() == rustc.llvm.major();
            if let Some(linker) = linkers.iter().find(|linker| fits(linker)) {
                return Ok(Self { rustc: rustc.clone(), linker: linker.clone() });
            }
        }
        let what = match (compilers.first(), linkers.first()) {
            (None, _) => {
                "neither a rustup nightly with rust-src nor a system rustc with its source is there".to_owned()
            }
            (Some(rustc), None) => format!("{} has LLVM {}, but there is no {LINKER}", rustc.version, rustc.llvm),
            (Some(rustc), Some(linker)) => format!(
                "{} has LLVM {}, but {} has LLVM {}, which has to be of the same major version",
                rustc.version, rustc.llvm, linker.version, linker.llvm
            ),
        };
        Err(NoToolchain { what })
    }

    /// What the bytes of the object depend on beside the source, one per line.
    pub(super) fn record(&self) -> String {
        let Self { rustc, linker } = self;
        format!("{} with LLVM {}\n{} with LLVM {}\n", rustc.version, rustc.llvm, linker.version, linker.llvm)
    }
}

impl Rustc {
    /// Every compiler that comes with the source of `core`, the preferred first.
    fn all() -> Vec<Self> {
        let nightlies = tools::output(Command::new("rustup").args(["toolchain", "list"])).unwrap_or_default();
        let nightlies = nightlies.lines().filter_map(|line| line.split_whitespace().next());
        let nightlies = nightlies.filter(|name| name.starts_with("nightly")).filter_map(|name| {
            let path = tools::output(Command::new("rustup").args(["which", "--toolchain", name, "rustc"]));
            Some(PathBuf::from(path.ok()?.trim()))
        });
        nightlies.chain([PathBuf::from(install::SYSTEM_RUSTC)]).filter_map(Self::at).collect()
    }

    pub(super) fn at(path: PathBuf) -> Option<Self> {
        let sysroot = tools::output(Command::new(&path).args(["--print", "sysroot"])).ok()?;
        let source = Path::new(sysroot.trim()).join("lib/rustlib/src/rust");
        if !source.join("library/core/src/lib.rs").is_file() {
            return None;
        }
        let verbose = tools::output(Command::new(&path).arg("-vV")).ok()?;
        let version = verbose.lines().next()?;
        // Debian appends "(built from a source tarball)".
        let version = version.split_inclusive(')').next()?.to_owned();
        Some(Self { path, source, version, llvm: Version::after_llvm(&verbose)? })
    }
}

impl Clone for Linker {
    fn clone(&self) -> Self {
        Self { path: self.path.clone(), version: self.version.clone(), llvm: self.llvm }
    }
}

impl Linker {
    /// Where [`install`] puts it, then the PATH.
    fn all() -> Vec<Self> {
        let installed = install::linker_root().join("bin").join(LINKER);
        let folders = env::var_os("PATH").unwrap_or_default();
        let on_path = env::split_paths(&folders).map(|folder| folder.join(LINKER)).collect::<Vec<_>>();
        std::iter::once(installed).chain(on_path).filter(|path| path.is_file()).filter_map(Self::at).collect()
    }

    fn at(path: PathBuf) -> Option<Self> {
        let version = tools::output(Command::new(&path).arg("--version")).ok()?.trim().to_owned();
        // It does not say with which LLVM it was built, but LLVM itself does when asked.
        let asked = ["--llvm-args=--version", "--output=/dev/null", "/dev/null"];
        let said = tools::output(Command::new(&path).args(asked)).ok()?;
        Some(Self { path, version, llvm: Version::after_llvm(&said)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_llvm_version_is_found_in_what_its_users_print() {
        let rustc = "rustc 1.96.0 (ac68faa20 2026-05-25)\nrelease: 1.96.0\nLLVM version: 22.1.8\n";
        let llvm = "Debian LLVM version 22.1.8\n  Optimized build.\n";
        for said in [rustc, llvm, "LLVM version 22.1.8-rust-1.99.0-nightly"] {
            assert_eq!(Version::after_llvm(said), Some(Version([22, 1, 8])), "{said}");
        }
        assert_eq!(Version::after_llvm("LLVM version: none"), None);
        assert_eq!(Version::after_llvm(""), None);
    }
}

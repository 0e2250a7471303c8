//! `cargo xtask build-ebpf`: from the source of the kernel programs to the object
//! that the daemon embeds.
//!
//! The object is committed, so that nobody but who changes the programs needs
//! this. What it must never do is change bytes for any other reason than a
//! change of source or toolchain: not for the folder it runs in, not for the
//! machine's architecture, not for what was built before.

mod build;
mod install;
mod prebuilt;
mod toolchain;

use std::{io, path::PathBuf, process::ExitCode};

use thiserror::Error;

use crate::tools::{self, ToolError};
use prebuilt::{Prebuilt, digest};
use toolchain::{NoToolchain, Toolchain};

/// Build the kernel programs into `ebpf/prebuilt/`, where the daemon embeds them from.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask build-ebpf             after a change in ebpf/
  cargo xtask build-ebpf --check     does the committed object come from this source?
  cargo xtask build-ebpf --install   fetch what is missing to build it, then build

Exit status: 0 done, 1 object and source disagree or the build failed, 2 no toolchain.")]
pub(crate) struct Arguments {
    /// Build, but write nothing to `ebpf/prebuilt/`: with the toolchain on record the bytes must
    /// agree, with another the object is put into `target/` to be tested.
    #[arg(long)]
    check: bool,
    /// Install what is missing, with apt-get or rustup, and with cargo.
    #[arg(long)]
    install: bool,
}

/// Why there is no object, or the wrong one.
#[derive(Debug, Error)]
enum BuildError {
    /// There is nothing to build with.
    #[error(transparent)]
    NoToolchain(#[from] NoToolchain),
    /// A program that was needed failed.
    #[error(transparent)]
    Tool(#[from] ToolError),
    /// A file could not be read or written.
    #[error("{}: {source}", path.display())]
    File {
        /// Its path.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// What the linker made could not be stripped.
    #[error("the linked object is not what was expected: {0}")]
    Object(#[from] object::build::Error),
    /// The committed object is not what its checksum says.
    #[error(
        "ebpf/prebuilt/{object} does not have the checksum in ebpf/prebuilt/{object}.sha256: \
         one of them was changed by hand; run `cargo xtask build-ebpf`",
        object = prebuilt::OBJECT
    )]
    Checksum,
    /// The committed object was not made from this source.
    #[error(
        "ebpf/prebuilt/{object} was not built from this source: it has sha256 {committed}, this source gives {built} \
         with the same toolchain; run `cargo xtask build-ebpf` and commit the result. The fresh object is {}",
        fresh.display(), object = prebuilt::OBJECT
    )]
    Differs {
        /// Checksum of the committed one.
        committed: String,
        /// Checksum of the one just built.
        built: String,
        /// Where that one is.
        fresh: PathBuf,
    },
}

/// Runs the command.
pub(crate) fn main(arguments: &Arguments) -> ExitCode {
    match run(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(if matches!(error, BuildError::NoToolchain(_)) { 2 } else { 1 })
        }
    }
}

/// Whether there is something to build with.
pub(crate) fn toolchain_is_there() -> bool {
    Toolchain::find().is_ok()
}

fn run(arguments: &Arguments) -> Result<(), BuildError> {
    let toolchain = match Toolchain::find() {
        Err(missing) if arguments.install => {
            eprintln!("{missing}\n");
            install::install()?;
            Toolchain::find()?
        }
        found => found?,
    };
    eprintln!("{}", toolchain.record().trim_end());
    let object = build::build(&toolchain)?;
    let prebuilt = Prebuilt::at(&tools::workspace());
    if arguments.check { check(&prebuilt, &toolchain, &object) } else { write(&prebuilt, &toolchain, &object) }
}

fn write(prebuilt: &Prebuilt, toolchain: &Toolchain, object: &[u8]) -> Result<(), BuildError> {
    prebuilt.write(object, &toolchain.record())?;
    println!("{}: {} bytes, sha256 {}", prebuilt.object().display(), object.len(), digest(object));
    Ok(())
}

fn check(prebuilt: &Prebuilt, toolchain: &Toolchain, object: &[u8]) -> Result<(), BuildError> {
    let committed = prebuilt.read()?;
    let built = digest(object);
    if committed.digest == built {
        println!("object and source agree: sha256 {built}");
        return Ok(());
    }
    let fresh = tools::target().join("ebpf").join(prebuilt::OBJECT);
    prebuilt::write(&fresh, object)?;
    if committed.toolchain == toolchain.record() {
        return Err(BuildError::Differs { committed: committed.digest, built, fresh });
    }
    println!(
        "the committed object was built with another toolchain, so its bytes say nothing:\n{}\nThe fresh object is {}\n\
         Test it on this kernel with:\n  LASTGASP_EBPF_OBJECT={} cargo test -p lastgasp-tests --test kernel",
        committed.toolchain.trim_end(),
        fresh.display(),
        fresh.display()
    );
    Ok(())
}

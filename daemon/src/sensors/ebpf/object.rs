//! The object file with the programs: the one in this binary, or another for tests.

use std::{borrow::Cow, env, fs, io, path::PathBuf};

/// Names an object file to load instead of the one in this binary.
///
/// For testing an object that was just built, see `cargo xtask build-ebpf --check`.
pub const OBJECT_VARIABLE: &str = "LASTGASP_EBPF_OBJECT";

/// Built by `cargo xtask build-ebpf`; `ebpf/prebuilt/toolchain.txt` says with what.
static EMBEDDED: &[u8] =
    aya::include_bytes_aligned!(concat!(env!("CARGO_MANIFEST_DIR"), "/../ebpf/prebuilt/lastgasp-probes.bpf.o"));

/// The object to load.
///
/// # Errors
///
/// The file that [`OBJECT_VARIABLE`] names cannot be read.
pub(super) fn object() -> Result<Cow<'static, [u8]>, (PathBuf, io::Error)> {
    let Some(path) = env::var_os(OBJECT_VARIABLE).filter(|path| !path.is_empty()) else {
        return Ok(Cow::Borrowed(EMBEDDED));
    };
    let path = PathBuf::from(path);
    let bytes = fs::read(&path).map_err(|error| (path.clone(), error))?;
    tracing::warn!(
        path = %path.display(),
        bytes = bytes.len(),
        "kernel programs come from the file that {OBJECT_VARIABLE} names, not from this binary"
    );
    Ok(Cow::Owned(bytes))
}

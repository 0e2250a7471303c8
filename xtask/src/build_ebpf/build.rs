//! Compiles, links, and strips.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use super::{BuildError, toolchain::Toolchain};
use crate::tools;

const PACKAGE: &str = "lastgasp-ebpf";
const BINARY: &str = "lastgasp-probes";
const TARGET: &str = "bpfel-unknown-none";
/// Of the root manifest.
const PROFILE: &str = "bpf";
/// No program reads registers of the interrupted task, so the object is the same
/// for every little-endian architecture, and the choice here has no effect.
const ARCHITECTURE: &str = r#"--cfg=bpf_target_arch="x86_64""#;

/// The object, ready to be embedded.
pub(super) fn build(toolchain: &Toolchain) -> Result<Vec<u8>, BuildError> {
    let workspace = tools::workspace();
    let folder = tools::target().join("ebpf").join("cargo");
    let mut command = tools::cargo();
    command
        .env("RUSTC", &toolchain.rustc.path)
        // The compiler may be a stable one, and `build-std` is not.
        .env("RUSTC_BOOTSTRAP", "1")
        .env("PATH", path_with(&toolchain.linker.path))
        .env("CARGO_ENCODED_RUSTFLAGS", flags(&workspace, toolchain).join("\x1f"))
        .env("CARGO_INCREMENTAL", "0")
        .args(["build", "--package", PACKAGE, "--bin", BINARY, "--features", "programs", "--profile", PROFILE])
        .args(["--locked", "--target", TARGET, "-Zbuild-std=core", "--target-dir"])
        .arg(&folder);
    for name in ["RUSTUP_TOOLCHAIN", "RUSTC_WRAPPER", "RUSTC_WORKSPACE_WRAPPER", "RUSTFLAGS"] {
        command.env_remove(name);
    }
    tools::step("kernel programs", &mut command)?;
    let path = folder.join(TARGET).join(PROFILE).join(BINARY);
    let linked = fs::read(&path).map_err(|source| BuildError::File { path, source })?;
    without_dwarf(&linked)
}

/// The linker is found by its name.
fn path_with(linker: &Path) -> std::ffi::OsString {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = linker.parent().map(Path::to_owned).into_iter().chain(env::split_paths(&path));
    env::join_paths(folders).expect("the folders come from a PATH")
}

fn flags(workspace: &Path, toolchain: &Toolchain) -> Vec<String> {
    let mut flags = vec![ARCHITECTURE.to_owned(), "-Cdebuginfo=2".to_owned(), "-Clink-arg=--btf".to_owned()];
    // BTF names source files. They get names that do not depend on where they are.
    let mut remap = |from: &Path, to: &str| {
        flags.push(format!("--remap-path-prefix={}={to}", from.display()));
        if let Ok(real) = from.canonicalize()
            && real != from
        {
            flags.push(format!("--remap-path-prefix={}={to}", real.display()));
        }
    };
    remap(&cargo_home(), "/cargo");
    // The registry's own folder has a name with a hash of its address.
    let registries = fs::read_dir(cargo_home().join("registry/src")).into_iter().flatten().flatten();
    for registry in registries {
        remap(&registry.path(), "/cargo/registry");
    }
    remap(&toolchain.rustc.source, "/rust");
    remap(workspace, "/lastgasp");
    flags
}

fn cargo_home() -> PathBuf {
    let home = || Path::new(&env::var_os("HOME").unwrap_or_default()).join(".cargo");
    env::var_os("CARGO_HOME").map_or_else(home, PathBuf::from)
}

/// BTF is made from the same debug information as DWARF, but the kernel reads
/// only BTF, and DWARF is nine tenths of the file.
fn without_dwarf(linked: &[u8]) -> Result<Vec<u8>, BuildError> {
    let mut elf = object::build::elf::Builder::read(linked)?;
    for section in elf.sections.iter_mut() {
        let name = section.name.to_string();
        section.delete = name.starts_with(".debug_") || name.starts_with(".rel.debug_");
    }
    elf.delete_orphans();
    // LLVM keeps the names of sections and of symbols in one table, this writer in two.
    let names = elf.sections.add();
    names.name = ".shstrtab".into();
    names.sh_type = object::elf::SHT_STRTAB;
    names.sh_addralign = 1;
    names.data = object::build::elf::SectionData::SectionString;
    elf.set_section_sizes();
    let mut stripped = Vec::new();
    elf.write(&mut stripped)?;
    Ok(stripped)
}

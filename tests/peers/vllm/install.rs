//! What is installed into `target/` first: vLLM, and the model.

use std::path::{Path, PathBuf};

use tokio::process::Command;
use tokio::sync::OnceCell;

/// What is measured.
pub(super) const VERSION: &str = "0.32.0";

/// Where everything is.
#[derive(Debug)]
pub(super) struct Installed {
    /// The virtual environment's Python.
    pub(super) python: PathBuf,
    /// `vllm`.
    pub(super) vllm: PathBuf,
    /// `vllm-rs`.
    pub(super) rust: PathBuf,
    /// The folder of the model.
    pub(super) model: PathBuf,
}

/// Installs what is not there. What takes long says so.
pub(super) async fn installed() -> &'static Installed {
    static INSTALLED: OnceCell<Installed> = OnceCell::const_new();
    INSTALLED.get_or_init(install).await
}

async fn install() -> Installed {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("vllm");
    let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/vllm");
    let run = async |command: &mut Command| {
        assert!(command.status().await.unwrap().success(), "{command:?}");
    };
    run(Command::new("python3").arg(scripts.join("install.py")).arg(&folder)).await;
    let (python, model) = (folder.join("bin/python"), folder.join("tiny"));
    run(Command::new(&python).arg(scripts.join("tiny_model.py")).arg(&model)).await;
    let libraries = std::fs::read_dir(folder.join("lib")).unwrap();
    let rust = libraries.map(|library| library.unwrap().path().join("site-packages/vllm/vllm-rs"));
    let rust = rust.into_iter().find(|path| path.exists()).expect("install.py puts it there");
    Installed { vllm: folder.join("bin/vllm"), python, rust, model }
}

/// The token that begins what the model knows by heart: `<think>` reasoning, `<speak>` words and a tool call.
pub(super) fn starts_with(begin: &str, model: &Path) -> u64 {
    let starts: serde_json::Value = serde_json::from_slice(&std::fs::read(model.join("starts.json")).unwrap()).unwrap();
    starts[begin].as_u64().unwrap()
}

//! LiteLLM reads a stream whose engine is killed: it sees one answer, and no fallback of its own.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use lastgasp_protocol::WorkerState;
use lastgasp_tests::daemon::{Daemon, DaemonConfig};
use lastgasp_tests::discovery::Discovery;
use lastgasp_tests::engine::Engine;
use lastgasp_tests::model::Endpoint;
use lastgasp_tests::nats::Nats;
use lastgasp_tests::reference::Reference;
use lastgasp_tests::router::Router;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;

const PACKAGE: &str = "litellm==1.110.2";

/// A Python that has LiteLLM, in a virtual environment under `target/`.
async fn python() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("litellm");
    let python = folder.join("bin/python");
    let installed = folder.join("installed");
    if !installed.exists() {
        let run = async |command: &mut Command| {
            assert!(command.status().await.unwrap().success(), "{command:?}");
        };
        run(Command::new("python3").args(["-m", "venv"]).arg(&folder)).await;
        run(Command::new(&python).args(["-m", "pip", "install", "--quiet", PACKAGE])).await;
        std::fs::write(installed, "").unwrap();
    }
    python
}

#[tokio::test]
#[ignore = "installs a large Python package; cargo xtask test --peers runs it"]
async fn one_answer_though_its_engine_is_killed() {
    let python = python().await;
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let discovery = Discovery::watch(&nats).await.unwrap();
    let rate = ["--frontend", "rust", "--tokens-per-second", "50"];
    let alpha = Engine::start("alpha", &rate, folder.path()).await.unwrap();
    let beta = Engine::start("beta", &rate, folder.path()).await.unwrap();
    let config = DaemonConfig::new("peers", &nats.url(), "auto", folder.path()).with(&alpha).with(&beta);
    let _daemon = Daemon::start(&config, folder.path()).await.unwrap();
    for worker in ["alpha", "beta"] {
        discovery.listed(worker, WorkerState::Serving).await.unwrap();
    }
    let router = Router::start("router", &nats.url(), 1, folder.path()).await.unwrap();

    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/litellm_reads.py");
    let mut reader = Command::new(python)
        .arg(script)
        .arg(format!("http://{}/v1", router.address))
        // It would ask the internet for prices first.
        .env("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(reader.stdout.take().expect("piped")).lines();
    let (mut text, mut finishes, mut pieces) = (String::new(), Vec::new(), 0);
    while let Some(line) = lines.next_line().await.unwrap() {
        let piece: Value = serde_json::from_str(&line).unwrap();
        text.push_str(piece["text"].as_str().unwrap());
        finishes.extend(piece["finish"].as_str().map(str::to_owned));
        pieces += 1;
        if pieces == 40 {
            let metrics = router.metrics().await.unwrap();
            let serves =
                |name: &str| metrics.contains(&format!("lastgasp_router_in_flight{{worker=\"peers/{name}\"}} 1"));
            assert!(serves("alpha") ^ serves("beta"), "{metrics}");
            if serves("alpha") { &alpha } else { &beta }.signal_core(Signal::SIGKILL);
        }
    }
    assert!(reader.wait().await.unwrap().success());

    let body = json!({
        "model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200, "temperature": 0,
        "ignore_eos": true,
    });
    let reference = Reference::of(Endpoint::Chat, &body, &alpha.dialect()).unwrap();
    assert_eq!(text, reference.text);
    assert_eq!(finishes, ["length"]);
    let moved = router.metrics().await.unwrap();
    assert!(moved.lines().any(|line| line.starts_with("lastgasp_router_migrations_total") && line.ends_with(" 1")));
}

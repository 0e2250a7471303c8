//! What is done about the processes of a worker that is lost.

use std::os::unix::process::ExitStatusExt as _;
use std::time::Duration;

use lastgasp_protocol::Certificate;
use lastgasp_tests::daemon::DaemonConfig;
use lastgasp_tests::process::{GIVE_UP, Identity};
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::scene::Scene;

fn on_lost(what: impl Into<toml::Value>, grace_ms: u64) -> impl FnOnce(DaemonConfig) -> DaemonConfig {
    let what = what.into();
    move |mut config| {
        for worker in &mut config.worker {
            (worker.on_lost, worker.reap_grace_ms) = (what.clone(), grace_ms);
        }
        config
    }
}

fn worker<'a>(status: &'a Value, name: &str) -> &'a Value {
    status["workers"].as_array().unwrap().iter().find(|worker| worker["worker"] == name).unwrap()
}

fn effects(certificate: &Certificate) -> Vec<&str> {
    let effects = certificate.timeline.iter().filter(|moment| moment.kind == "effect");
    effects.map(|moment| moment.what.as_str()).collect()
}

async fn gone(process: Identity) {
    let gone = async {
        while process.is_alive() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(GIVE_UP, gone).await.expect("it lives on");
}

/// The API server is killed, and its engine core holds the GPU (vllm#55510).
async fn orphans(ebpf: &'static str) {
    let arguments = ["--orphan-lifetime", "3600"];
    let mut scene = Scene::configured(ebpf, &arguments, on_lost("reap", 3000)).await;
    let core = scene.engine("alpha").core;

    scene.engine("alpha").signal_root(Signal::SIGKILL);

    let is_listed = |status: &Value| {
        let orphans = worker(status, "alpha")["orphans"].as_array().unwrap();
        orphans.iter().any(|orphan| orphan["tgid"] == core.pid && orphan["title"] == "VLLM::EngineCore")
    };
    scene.daemon.status_when("the orphan", is_listed).await.unwrap();
    assert!(core.is_alive(), "it has its grace");
    gone(core).await;
    let certificate = scene.discovery.certificate("alpha", |_| true).await.unwrap();
    assert!(effects(&certificate).contains(&"reap"), "{certificate:#?}");
    assert!(certificate.orphans.is_empty(), "{certificate:#?}");
    assert!(scene.engine("beta").core.is_alive());
    let metrics = scene.daemon.metrics().await.unwrap();
    assert!(metrics.contains(r#"lastgasp_actions_total{action="reap",outcome="done"} "#), "{metrics}");
}

#[tokio::test]
async fn orphans_are_listed_and_reaped() {
    orphans("required").await;
}

#[tokio::test]
async fn orphans_are_found_without_the_kernels_help() {
    orphans("off").await;
}

/// The parent of `vllm serve --grpc` never ends by itself.
#[tokio::test]
async fn a_root_that_lives_on_is_ended() {
    let arguments = ["--grpc-mode"];
    let mut scene = Scene::configured("required", &arguments, on_lost("terminate-root", 200)).await;

    scene.engine("alpha").signal_core(Signal::SIGKILL);

    let exit = scene.engine("alpha").process.exited().await.unwrap();
    assert_eq!(exit.code(), Some(0), "SIGTERM was enough");
    let certificate = scene.discovery.certificate("alpha", |_| true).await.unwrap();
    let effects = effects(&certificate);
    assert!(effects.contains(&"terminate") && !effects.contains(&"kill"), "{certificate:#?}");
    assert_eq!((scene.discovery.removals("alpha"), scene.discovery.removals("beta")), (1, 0));
    assert!(scene.engine("beta").process.identity.is_alive());
}

/// One that does not even listen to SIGTERM.
#[tokio::test]
async fn a_root_that_does_not_listen_is_killed() {
    let mut scene = Scene::configured("required", &[], on_lost("terminate-root", 200)).await;
    let root = scene.engine("alpha").process.identity;
    // It is stopped, so it reads no signal but SIGKILL.
    scene.engine("alpha").signal_root(Signal::SIGSTOP);
    scene.engine("alpha").signal_core(Signal::SIGKILL);
    gone(root).await;
    let certificate = scene.discovery.certificate("alpha", |_| true).await.unwrap();
    assert!(effects(&certificate).ends_with(&["terminate", "kill"]), "{certificate:#?}");
}

/// One that hangs hears no SIGTERM, and what is below it would keep the GPUs.
#[tokio::test]
async fn a_hung_engine_is_killed_with_all_that_is_below_it() {
    let hung_soon = |mut config: DaemonConfig| {
        config.worker[0].health.hang_window_ms = Some(3000);
        on_lost("kill-tree", 0)(config)
    };
    let mut scene = Scene::configured("required", &[], hung_soon).await;
    let (root, core) = (scene.engine("alpha").process.identity, scene.engine("alpha").core);

    scene.engine("alpha").signal_root(Signal::SIGSTOP);

    let exit = scene.engine("alpha").process.exited().await.unwrap();
    assert_eq!(exit.signal(), Some(Signal::SIGKILL as i32));
    gone(core).await;
    let certificate = scene.discovery.certificate("alpha", |certificate| effects(certificate).contains(&"kill_tree"));
    let certificate = certificate.await.unwrap();
    let killed = |process: Identity| {
        let pid = format!("(pid {}", process.pid);
        certificate.timeline.iter().any(|moment| moment.what == "kill_tree" && moment.detail.contains(&pid))
    };
    assert!(killed(root) && killed(core), "{certificate:#?}");
    assert!(scene.engine("beta").core.is_alive());
}

/// A program of the operator's reads the certificate, and what became of it stands there.
#[tokio::test]
async fn a_command_is_run_with_the_certificate() {
    let written = tempfile::NamedTempFile::new().unwrap();
    let script = format!("cat > {}", written.path().display());
    let command = toml::Value::from(vec!["sh".to_owned(), "-c".to_owned(), script]);
    let table = toml::Table::from_iter([("command".to_owned(), command)]);
    let mut scene = Scene::configured("required", &[], on_lost(table, 0)).await;

    scene.engine("alpha").signal_core(Signal::SIGKILL);

    let certificate = scene.discovery.certificate("alpha", |_| true).await.unwrap();
    assert!(effects(&certificate).contains(&"command"), "{certificate:#?}");
    let read: Certificate = serde_json::from_slice(&std::fs::read(written.path()).unwrap()).unwrap();
    assert_eq!((read.certificate, read.cause), (certificate.certificate, certificate.cause));
}

/// `mode = "observe"` never touches a process.
#[tokio::test]
async fn an_observer_touches_nobody() {
    let observe = |config: DaemonConfig| {
        let mut config = on_lost("reap", 0)(config);
        config.mode = "observe";
        config
    };
    let mut scene = Scene::configured("required", &["--orphan-lifetime", "3600"], observe).await;
    scene.daemon.status_when("alpha serves", |status| worker(status, "alpha")["state"] == "serving").await.unwrap();

    scene.engine("alpha").signal_root(Signal::SIGKILL);

    let observed =
        |event: &Value| event["summary"].as_str().is_some_and(|summary| summary.starts_with("reap observed"));
    scene.daemon.event("what would be done", observed).await.unwrap();
    scene.daemon.event("its certificate", |event| event["event"] == "certificate").await.unwrap();
    assert!(scene.engine("alpha").core.is_alive());
}

//! What `lastgasp doctor` says, and its exit code.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use lastgasp_tests::binaries;
use lastgasp_tests::daemon::{Daemon, DaemonConfig};
use lastgasp_tests::engine::{Declaration, Engine};
use lastgasp_tests::nats::Nats;
use lastgasp_tests::user::User;
use serde_json::Value;
use tokio::process::Command;

use crate::scene::Scene;

struct Said {
    code: i32,
    report: Value,
}

impl Said {
    async fn by(mut command: Command, config: &Path) -> Self {
        let output = command.args(["doctor", "--json", "--config"]).arg(config).output().await.unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        let report = serde_json::from_str(&said).unwrap_or_else(|error| {
            panic!("{error}: {said}{}", String::from_utf8_lossy(&output.stderr));
        });
        Self { code: output.status.code().unwrap(), report }
    }

    async fn by_root(config: &Path) -> Self {
        Self::by(Command::new(binaries::find("lastgasp").unwrap()), config).await
    }

    fn finding(&self, name: &str) -> &Value {
        let findings = self.report["findings"].as_array().unwrap();
        let finding = findings.iter().find(|finding| finding["name"] == name);
        finding.unwrap_or_else(|| panic!("no finding {name:?} in {:#}", self.report))
    }

    fn grade(&self, name: &str) -> &str {
        self.finding(name)["grade"].as_str().unwrap()
    }

    fn detail(&self, name: &str) -> &str {
        self.finding(name)["detail"].as_str().unwrap()
    }
}

fn short_drain(mut config: DaemonConfig) -> DaemonConfig {
    for worker in &mut config.worker {
        worker.drain_window_ms = 5000;
    }
    config
}

#[tokio::test]
async fn all_is_fine_while_daemon_and_engine_run() {
    let scene = Scene::new().await;
    let config = short_drain(scene.config("required").with(&scene.engine));
    let daemon = Daemon::start(&config, scene.daemons.path()).await.unwrap();
    scene.listed().await;
    let said = Said::by_root(&config.write(scene.daemons.path()).unwrap()).await;
    // Processes of this machine that have nothing to do with the test may hold their memory locked.
    let findings = said.report["findings"].as_array().unwrap();
    let bad = findings.iter().filter(|finding| finding["grade"] == "degraded" || finding["grade"] == "broken");
    let (strangers, bad): (Vec<_>, Vec<_>) =
        bad.partition(|finding| finding["detail"].as_str().unwrap().contains("has held its memory locked"));
    assert!(bad.is_empty(), "{bad:#?}");
    assert_eq!(said.code, i32::from(!strangers.is_empty()), "{:#}", said.report);
    for name in ["btf", "program exit", "without CAP_BPF", "pidfd", "server", "jetstream", "lastgasp_workers"] {
        assert_eq!(said.grade(name), "fine", "{:#}", said.finding(name));
    }
    assert!(said.detail("alpha process").contains(&scene.engine.process.identity.pid.to_string()));
    assert!(said.detail("alpha health").contains("serving"));
    let pid = daemon.process.identity.pid.to_string();
    assert!(said.detail("lease of node node-a").contains(&pid), "{:#}", said.report);
    assert!(said.detail("capabilities").contains("given up: CAP_BPF CAP_PERFMON"), "{:#}", said.report);
}

#[tokio::test]
async fn nothing_is_made_in_nats() {
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let config = DaemonConfig::new("node-a", &nats.url(), "auto", folder.path()).write(folder.path()).unwrap();
    let said = Said::by_root(&config).await;
    assert_eq!(said.grade("lastgasp_workers"), "note");
    assert!(said.detail("lastgasp_workers").contains("not there yet"));
    let context = async_nats::jetstream::new(nats.client().await.unwrap());
    assert_eq!(context.query_account().await.unwrap().streams, 0);
}

#[tokio::test]
async fn a_bucket_of_another_shape_does_not_work() {
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let context = async_nats::jetstream::new(nats.client().await.unwrap());
    let old = async_nats::jetstream::kv::Config { bucket: "lastgasp_nodes".into(), ..Default::default() };
    context.create_key_value(old).await.unwrap();
    let config = DaemonConfig::new("node-a", &nats.url(), "auto", folder.path()).write(folder.path()).unwrap();
    let said = Said::by_root(&config).await;
    assert_eq!((said.code, said.grade("lastgasp_nodes")), (2, "broken"), "{:#}", said.report);
    assert!(said.finding("lastgasp_nodes")["fix"].as_str().unwrap().contains("lastgasp_nodes"));
}

#[tokio::test]
async fn without_nats_it_does_not_work() {
    let folder = tempfile::tempdir().unwrap();
    let config = DaemonConfig::new("node-a", "nats://127.0.0.1:1", "auto", folder.path()).write(folder.path());
    let said = Said::by_root(&config.unwrap()).await;
    assert_eq!((said.code, said.grade("server")), (2, "broken"), "{:#}", said.report);
}

#[tokio::test]
async fn anybody_may_ask_and_what_they_may_not_do_is_said() {
    let scene = Scene::new().await;
    let config = short_drain(scene.config("auto").with_pid_of(&scene.engine));
    let user = User::nobody(&[]);
    user.give(scene.daemons.path()).unwrap();
    let file = config.write(scene.daemons.path()).unwrap();
    let said = Said::by(user.command(&binaries::find("lastgasp").unwrap()), &file).await;
    assert_eq!((said.code, said.grade("ebpf")), (1, "degraded"), "{:#}", said.report);
    assert!(said.detail("ebpf").contains("CAP_BPF"));
    assert_eq!((said.grade("CAP_BPF"), said.grade("pidfd")), ("note", "fine"));
    assert_eq!((said.grade("alpha process"), said.grade("alpha health")), ("fine", "fine"));
}

#[tokio::test]
async fn an_engine_that_cannot_be_found_or_does_not_serve_is_degraded() {
    let scene = Scene::new().await;
    let file = short_drain(scene.config("auto").with(&scene.engine)).write(scene.daemons.path()).unwrap();

    scene.engine.control("health?status=not_serving").await.unwrap();
    let said = Said::by_root(&file).await;
    assert_eq!((said.code, said.grade("alpha health")), (1, "degraded"), "{:#}", said.report);

    // Its environment is not for everybody to read.
    let user = User::nobody(&["bpf", "perfmon"]);
    user.give(scene.daemons.path()).unwrap();
    let said = Said::by(user.command(&binaries::find("lastgasp").unwrap()), &file).await;
    assert_eq!((said.code, said.grade("alpha process")), (1, "degraded"), "{:#}", said.report);
    assert!(said.detail("alpha process").contains("CAP_SYS_PTRACE"), "{:#}", said.report);
    let user = User::nobody(&["bpf", "perfmon", "sys_ptrace", "dac_read_search"]);
    let said = Said::by(user.command(&binaries::find("lastgasp").unwrap()), &file).await;
    assert_eq!(said.grade("alpha process"), "fine", "{:#}", said.report);
}

#[tokio::test]
async fn what_may_not_be_ended_is_said_before_it_has_to_be() {
    let scene = Scene::new().await;
    let mut config = short_drain(scene.config("auto").with_pid_of(&scene.engine));
    config.worker[0].on_lost = "reap".into();
    let file = config.write(scene.daemons.path()).unwrap();
    for (capabilities, grade) in [(&["bpf", "perfmon"][..], "degraded"), (&["bpf", "perfmon", "kill"], "fine")] {
        let user = User::nobody(capabilities);
        user.give(scene.daemons.path()).unwrap();
        let said = Said::by(user.command(&binaries::find("lastgasp").unwrap()), &file).await;
        assert_eq!(said.grade("alpha on_lost"), grade, "{:#}", said.report);
    }
    assert!(scene.engine.process.identity.is_alive(), "it was only asked");
}

#[tokio::test]
async fn declarations_are_read_and_those_that_cannot_be_are_said() {
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o777)).unwrap();
    // A user that nobody else has.
    let uid = 3_000_000 + std::process::id();
    let declaration = Declaration::new(uid, "doctored").unwrap();
    let engine = Engine::declare("doctored", &declaration, &[], folder.path()).await.unwrap();
    let config = DaemonConfig::new("node-a", &nats.url(), "auto", folder.path()).declared_by(uid);
    let file = config.write(folder.path()).unwrap();
    let said = Said::by_root(&file).await;
    // Something on this machine may be guarded against root too.
    assert_ne!(said.grade("declarations"), "degraded", "{:#}", said.report);
    let pid = engine.process.identity.pid.to_string();
    assert!(said.detail("doctored process").contains(&pid), "{:#}", said.report);
    assert_eq!(said.grade("doctored health"), "fine", "{:#}", said.report);

    let user = User::nobody(&["sys_ptrace"]);
    user.give(folder.path()).unwrap();
    let said = Said::by(user.command(&binaries::find("lastgasp").unwrap()), &file).await;
    assert_eq!(said.grade("declarations"), "degraded", "{:#}", said.report);
}

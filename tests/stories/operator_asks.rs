//! What an operator learns: of a worker, of a death, and of what was wrong with the question.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;

use lastgasp_tests::binaries;
use lastgasp_tests::daemon::{Daemon, DaemonConfig, Said};
use lastgasp_tests::engine::Engine;
use lastgasp_tests::nats::Nats;
use lastgasp_tests::user::User;
use nix::sys::signal::Signal;
use serde_json::Value;
use tokio::process::Command;

use crate::scene::Scene;

#[tokio::test]
async fn a_death_can_be_read_as_a_story_also_after_a_restart_of_the_daemon() {
    let mut scene = Scene::new(&[]).await;
    assert!(scene.daemon.tell(&["deaths"]).await.unwrap().out.starts_with("no worker of this node has died"));
    scene.engine("alpha").signal_core(Signal::SIGKILL);
    let certificate = scene.daemon.event("the certificate", |event| event["event"] == "certificate").await.unwrap();
    let id = certificate["certificate"].as_str().unwrap();

    let listed = scene.daemon.tell(&["deaths"]).await.unwrap();
    assert!(listed.out.lines().nth(1).is_some_and(|line| line.starts_with(id)), "{listed:?}");
    let story = scene.daemon.tell(&["death", &id[..20]]).await.unwrap();
    assert_eq!(story.code, Some(0), "{story:?}");
    let first = story.out.lines().next().unwrap();
    assert!(first.starts_with("alpha on node-a: VLLM::EngineCore was killed by signal 9 (SIGKILL), by "), "{first}");
    for moment in ["signal delivered", "lost", "signalled", "withdrawn"] {
        assert!(story.out.lines().any(|line| line.contains(moment)), "{moment}: {}", story.out);
    }

    scene.discovery.certificate("alpha", |_| true).await.unwrap();
    scene.kill_daemon().await;
    scene.start_daemon().await;
    let known = loop {
        let deaths = scene.daemon.tell(&["deaths", "--output", "json"]).await.unwrap().json().unwrap();
        if deaths != Value::Array(Vec::new()) {
            break deaths;
        }
        tokio::task::yield_now().await;
    };
    assert_eq!(known[0]["certificate"], id);
    let of_worker = scene.daemon.tell(&["death", "alpha", "--json"]).await.unwrap().json().unwrap();
    assert_eq!(of_worker, known[0]);
}

#[tokio::test]
async fn a_wrong_question_is_answered_with_what_to_do() {
    let scene = Scene::new(&[]).await;
    let said = scene.daemon.tell(&["status", "alhpa"]).await.unwrap();
    assert_eq!(said.code, Some(66), "{said:?}");
    assert_eq!(said.err, "lastgasp: no worker \"alhpa\" on node-a; there are alpha, beta\n");
    let said = scene.daemon.tell(&["drain", "alhpa"]).await.unwrap();
    assert_eq!(said.code, Some(66), "{said:?}");
    assert_eq!(said.err, "lastgasp: no worker \"alhpa\" on this node; there are alpha, beta\n");
    let said = scene.daemon.tell(&["undrain", "alpha"]).await.unwrap();
    assert_eq!(said.code, Some(1), "{said:?}");
    assert_eq!(said.err, "lastgasp: alpha: serving; no drain or withdrawal to take back\n");
    let said = scene.daemon.tell(&["death", "01ZZZ"]).await.unwrap();
    assert_eq!(said.code, Some(66), "{said:?}");
    assert!(said.err.contains("`lastgasp deaths` lists"), "{said:?}");
    let said = scene.daemon.tell(&["drain", "alpha", "--deadline", "soon"]).await.unwrap();
    assert_eq!(said.code, Some(64), "{said:?}");
    assert!(said.err.contains("write 30s, 5m or 1h30m"), "{said:?}");

    let ask = |mut command: Command| {
        command.args(["status", "--socket"]).arg(&scene.daemon.ready.socket);
        Said::by(command)
    };
    std::os::unix::fs::chown(&scene.daemon.ready.socket, Some(0), Some(0)).unwrap();
    std::fs::set_permissions(scene.folder.path(), Permissions::from_mode(0o755)).unwrap();
    let said = ask(User::nobody(&[]).command(&binaries::find("lastgasp").unwrap())).await.unwrap();
    assert_eq!(said.code, Some(77), "{said:?}");
    assert!(said.err.contains("ask as the user that runs the daemon"), "{said:?}");
    let mut elsewhere = Command::new(binaries::find("lastgasp").unwrap());
    elsewhere.args(["drain", "alpha", "--socket", "/no/such/socket"]);
    let said = Said::by(elsewhere).await.unwrap();
    assert_eq!(said.code, Some(69), "{said:?}");
    assert!(said.err.contains("is it running (`lastgasp run`)?"), "{said:?}");
}

#[tokio::test]
async fn one_worker_is_shown_in_full() {
    let mut scene = Scene::new(&[]).await;
    let core = scene.engine("alpha").core.pid;
    let known =
        |status: &Value| status["workers"][0]["processes"][0]["tgid"] == core && status["workers"][0]["revision"] != 0;
    scene.daemon.status_when("its listing, and its engine core", known).await.unwrap();
    let said = scene.daemon.tell(&["status", "alpha"]).await.unwrap();
    assert!(said.out.starts_with("alpha on node-a: serving for "), "{said:?}");
    assert!(said.out.contains(&format!("VLLM::EngineCore (pid {core}), critical\n")), "{said:?}");
    assert!(!said.out.contains('\u{1b}'), "no colours in a pipe: {said:?}");
    let json = scene.daemon.tell(&["status", "alpha", "--output", "json"]).await.unwrap().json().unwrap();
    assert_eq!((json["worker"].as_str(), json["epoch"].as_u64()), (Some("alpha"), Some(1)));
}

#[tokio::test]
async fn an_observing_daemon_takes_no_commands() {
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let engine = Engine::start("alpha", &[], folder.path()).await.unwrap();
    let mut config = DaemonConfig::new("node-a", &nats.url(), "required", folder.path()).with(&engine);
    config.mode = "observe";
    let daemon = Daemon::start(&config, folder.path()).await.unwrap();
    let said = daemon.tell(&["drain", "alpha"]).await.unwrap();
    assert_eq!(said.code, Some(1), "{said:?}");
    assert!(said.err.contains("mode = \"observe\" changes nothing"), "{said:?}");
}

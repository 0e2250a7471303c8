//! Whoever kills an engine chooses its own name, with escapes for a terminal and a line for a log.

use lastgasp_tests::matrix;
use nix::sys::signal::Signal;
use tokio::process::Command;

use crate::scene::Scene;

#[tokio::test]
async fn a_killers_name_reaches_no_terminal() {
    let mut scene = Scene::new(&[]).await;
    let asked = scene.ask_several().await;
    let core = scene.engine("alpha").core.pid;
    // The shell's own kill, so that the name is its own.
    let script = format!("printf '\\033[2J\\r\\nroot' > /proc/$$/comm && kill -{} {core}", Signal::SIGKILL as i32);
    assert!(Command::new("sh").args(["-c", &script]).status().await.unwrap().success());

    let certificate = scene.discovery.certificate("alpha", |c| c.routers_done == 1).await.unwrap();
    let sender = certificate.cause.sender.as_ref().expect("the kernel reported who it was");
    assert!(sender.comm.starts_with("\u{fffd}[2J"), "{sender:?}");
    for asked in asked {
        asked.finish().await;
    }
    let router = scene.router.process.log_tail();
    assert!(router.contains("[2J"), "it was logged: {router}");
    for text in [
        router,
        scene.daemon.process.log_tail(),
        scene.daemon.says("status").await.unwrap(),
        scene.daemon.says("events").await.unwrap(),
    ] {
        assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text:?}");
        assert!(!text.lines().any(|line| line.starts_with("root")), "{text:?}");
    }
    matrix::row(
        "The killer's name is an escape sequence with line breaks",
        "no control character in logs, status or events",
        "none in the logs of daemon and router, nor in status and events",
    );
}

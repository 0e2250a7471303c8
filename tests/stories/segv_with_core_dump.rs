//! The EngineCore crashes and the kernel writes a core file of hundreds of megabytes. Until that is
//! done the process has not exited: its sockets are open, and its pidfd is silent.

use lastgasp_protocol::CauseKind;
use lastgasp_tests::matrix;
use nix::sys::signal::Signal;

use crate::scene::{Scene, only_those_of_are_moved};

const CORE_MB: u64 = 600;

#[tokio::test]
async fn it_is_withdrawn_while_its_core_is_still_being_written() {
    let mut scene = Scene::new(&["--core-mb", &CORE_MB.to_string()]).await;
    let asked = scene.ask_several().await;
    let core = scene.engine("alpha").core;

    scene.engine("alpha").signal_core(Signal::SIGSEGV);

    scene.discovery.removed("alpha").await.unwrap();
    let dumps_still = core.is_alive();
    only_those_of_are_moved("alpha", asked).await;
    let certificate = scene.discovery.certificate("alpha", |_| true).await.unwrap();
    // On a busy machine this story may hear of it late. The daemon's order is in the certificate.
    let place = |what: &str| certificate.timeline.iter().position(|moment| moment.what == what);
    let before = place("withdrawn").is_some_and(|withdrawn| place("process_exit").is_none_or(|exit| withdrawn < exit));
    assert!(dumps_still || before, "withdrawn only after the dump was over: {certificate:#?}");
    assert_eq!(certificate.cause.kind, CauseKind::ProcessCrashed, "{certificate:#?}");
    assert_eq!(certificate.cause.signal, Some(Signal::SIGSEGV as i32));
    assert_eq!(scene.discovery.removals("alpha"), 1);

    // That there was a dump at all.
    let pattern = std::fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap();
    if pattern.trim() == "core" {
        scene.engine("alpha").process.exited().await.unwrap();
        let dumped = std::fs::read_dir(scene.folder.path()).unwrap().flatten().any(|entry| {
            entry.file_name().to_string_lossy().starts_with("core")
                && entry.metadata().is_ok_and(|metadata| metadata.len() > CORE_MB << 20)
        });
        assert!(dumped, "no core file");
    }
    matrix::row(
        "An engine core crashes and its core dump takes long",
        "withdrawn before the dump is over, streams exact",
        "withdrawn once while the dying process was still there",
    );
}

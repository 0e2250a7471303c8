//! Without privilege for eBPF the daemon says so, and does the same job with pidfds.

use nix::sys::signal::Signal;

use crate::scene::{Scene, only_those_of_are_moved};

#[tokio::test]
async fn a_killed_engine_core_is_withdrawn_all_the_same() {
    let mut scene = Scene::with_ebpf("off", &["--frontend", "rust", "--rust-notice-ms", "3600000"]).await;
    assert_eq!(scene.daemon.ready.death_source, "pidfd");
    let status = scene.daemon.status().await.unwrap();
    assert_eq!(status["death_source"], "pidfd", "{status:#}");
    let asked = scene.ask_several().await;

    scene.engine("alpha").signal_core(Signal::SIGKILL);

    only_those_of_are_moved("alpha", asked).await;
    scene.discovery.removed("alpha").await.unwrap();
    scene.discovery.certificate("alpha", |_| true).await.unwrap();
    assert_eq!((scene.discovery.removals("alpha"), scene.discovery.removals("beta")), (1, 0));
}

//! Something is taken away. The daemon is ready all the same, says what it lost and what that
//! costs, and a killed engine is withdrawn.
//!
//! Lockdown cannot be entered here without rebooting to leave it: `tests/guest/lockdown.rs` boots a
//! virtual machine with it.

use std::time::Instant;

use lastgasp_tests::binaries;
use lastgasp_tests::daemon::{Daemon, DaemonConfig};
use lastgasp_tests::process::GIVE_UP;
use lastgasp_tests::user::User;
use nix::sys::signal::Signal;
use tokio::process::Command;

use crate::scene::{Scene, metric};

#[tokio::test]
async fn without_cap_bpf() {
    for capabilities in [&[][..], &["perfmon"]] {
        let scene = Scene::new().await;
        let daemon = scene.daemon_of(&User::nobody(capabilities), scene.config("auto")).await;
        says_so_and_carries_on(&scene, &daemon, "creating a map needs CAP_BPF").await;
    }
}

#[tokio::test]
async fn without_cap_perfmon() {
    let scene = Scene::new().await;
    let daemon = scene.daemon_of(&User::nobody(&["bpf"]), scene.config("auto")).await;
    says_so_and_carries_on(&scene, &daemon, "loading a tracing program needs CAP_PERFMON").await;
}

/// As in a rootless container, or a pod with `hostUsers: false`: it seems to have every capability.
#[tokio::test]
async fn with_capabilities_that_do_not_count() {
    let scene = Scene::new().await;
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user"]).arg(binaries::find("lastgasp").unwrap());
    let config = scene.config("auto").with_pid_of(&scene.engine);
    let daemon = Daemon::start_by(command, &config, scene.daemons.path()).await.unwrap();
    scene.listed().await;
    says_so_and_carries_on(&scene, &daemon, "outside of any user namespace").await;
}

#[tokio::test]
async fn without_btf() {
    let scene = Scene::new().await;
    let nowhere = scene.daemons.path().join("vmlinux");
    let daemon = scene.daemon(scene.config("auto").with_btf(&nowhere)).await;
    says_so_and_carries_on(&scene, &daemon, &format!("cannot read {}", nowhere.display())).await;
}

#[tokio::test]
async fn with_the_btf_of_nothing() {
    let scene = Scene::new().await;
    let file = scene.daemons.path().join("vmlinux");
    std::fs::write(&file, "this is no BTF, though it is long enough to be").unwrap();
    let daemon = scene.daemon(scene.config("auto").with_btf(&file)).await;
    says_so_and_carries_on(&scene, &daemon, "not BTF of this machine").await;
}

async fn says_so_and_carries_on(scene: &Scene, daemon: &Daemon, reason: &str) {
    // Ready, to programs and to the orchestrator.
    assert_eq!(daemon.ready.death_source, "pidfd");
    let readyz = reqwest::get(format!("http://{}/readyz", daemon.ready.metrics)).await.unwrap();
    assert_eq!(readyz.status(), 200);
    // In status,
    let status = daemon.status().await.unwrap();
    assert_eq!(status["death_source"], "pidfd");
    assert!(status["death_source_reason"].as_str().unwrap().contains(reason), "{status:#}");
    let [degradation] = &status["degraded"].as_array().unwrap()[..] else { panic!("{status:#}") };
    assert_eq!(degradation["what"], "ebpf");
    assert!(degradation["cost"].as_str().unwrap().contains("pidfd"), "{degradation:#}");
    assert_ne!(degradation["fix"], "");
    // in the log,
    let log = daemon.process.log_tail();
    assert!(
        log.lines().any(|line| line.contains("WARN") && line.contains("no eBPF") && line.contains(reason)),
        "{log}"
    );
    // and as a metric.
    let metrics = daemon.metrics().await.unwrap();
    assert_eq!(metric(&metrics, "lastgasp_death_source{source=\"pidfd\"}"), 1.0);
    assert_eq!(metric(&metrics, "lastgasp_death_source{source=\"ebpf\"}"), 0.0);

    scene.kill_and_see_it_withdrawn().await;
    // To have less is not to lose something.
    let status = daemon.status().await.unwrap();
    assert_eq!(status["losses"], serde_json::json!([]), "{status:#}");
}

/// The one case in which the operator wanted the daemon to end.
#[tokio::test]
async fn unless_ebpf_is_required() {
    let folder = tempfile::tempdir().unwrap();
    let user = User::nobody(&[]);
    user.give(folder.path()).unwrap();
    let file = DaemonConfig::new("node-a", "nats://127.0.0.1:1", "required", folder.path()).write(folder.path());
    let mut command = user.command(&binaries::find("lastgasp").unwrap());
    let output = command.arg("run").arg("--config").arg(file.unwrap()).output().await.unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("required") && said.contains("CAP_BPF"), "{said}");
}

/// The ring holds some 40 events, and nobody reads it while a hundred happen.
#[tokio::test]
async fn with_a_ring_buffer_that_is_too_small() {
    let scene = Scene::new().await;
    let daemon = scene.daemon(scene.config("required").with_ring_bytes(4096)).await;
    assert_eq!(daemon.ready.death_source, "ebpf");

    assert!(daemon.process.identity.signal(Signal::SIGSTOP));
    for _ in 0..40 {
        scene.engine.compile().await.unwrap();
    }
    scene.engine.signal_core(Signal::SIGKILL);
    // Its first thread may be gone before its last, and it is the last one that tells.
    let threads = format!("/proc/{}/task", scene.engine.core.pid);
    let deadline = Instant::now() + GIVE_UP;
    while scene.engine.core.is_alive() || std::fs::read_dir(&threads).is_ok_and(|threads| threads.count() > 1) {
        assert!(Instant::now() < deadline, "it was killed");
        tokio::task::yield_now().await;
    }
    assert!(daemon.process.identity.signal(Signal::SIGCONT));

    // The kernel's word about that death was lost, the pidfd's was not.
    scene.discovery.removed("alpha").await.unwrap();
    scene.discovery.certificate("alpha", |_| true).await.unwrap();
    assert_eq!(scene.discovery.removals("alpha"), 1);
    let metrics = daemon.metrics().await.unwrap();
    let lost = |kind: &str| metric(&metrics, &format!("lastgasp_losses_total{{hop=\"ring\",kind=\"{kind}\"}}"));
    assert!(lost("exit") >= 1.0 && lost("fork") >= 1.0, "{metrics}");
    assert!(metric(&metrics, "lastgasp_deaths_seen_only_by_pidfd_total") >= 1.0, "{metrics}");
    let status = daemon.status().await.unwrap();
    let losses = status["losses"].as_array().unwrap();
    assert!(losses.iter().any(|loss| loss["hop"] == "ring" && loss["kind"] == "exit"), "{status:#}");
    let log = daemon.process.log_tail();
    assert!(
        log.contains("the ring buffer was full and events are lost: the daemon looks at all process trees again"),
        "{log}"
    );
}

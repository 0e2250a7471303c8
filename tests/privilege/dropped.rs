//! Once the kernel programs are loaded, the daemon gives up what they needed, and they go on
//! working.

use std::collections::BTreeSet;

use caps::{CapSet, Capability};
use lastgasp_protocol::CauseKind;
use lastgasp_tests::daemon::Daemon;
use lastgasp_tests::user::User;
use serde_json::json;

use crate::scene::{Scene, names};

#[tokio::test]
async fn root_keeps_only_what_it_uses() {
    let scene = Scene::new().await;
    let daemon = scene.daemon(scene.config("required")).await;
    let kept = ["CAP_DAC_READ_SEARCH", "CAP_KILL", "CAP_SYS_PTRACE", "CAP_SYSLOG"];
    // No worker's connections are to be severed.
    has_only(&daemon, &kept, &["CAP_BPF", "CAP_PERFMON", "CAP_NET_ADMIN", "CAP_SYS_ADMIN"]).await;
    kernel_events_still_come(&scene).await;
    let status = daemon.status().await.unwrap();
    assert_eq!((&status["losses"], &status["degraded"]), (&json!([]), &json!([])), "{status:#}");
}

#[tokio::test]
async fn another_user_with_two_capabilities_ends_up_with_none() {
    let scene = Scene::new().await;
    let daemon = scene.daemon_of(&User::nobody(&["bpf", "perfmon"]), scene.config("required")).await;
    has_only(&daemon, &[], &["CAP_BPF", "CAP_PERFMON"]).await;
    kernel_events_still_come(&scene).await;
}

/// The full tier: an engine of another user, found by what its environment says.
#[tokio::test]
async fn another_user_may_keep_what_finds_the_engines_of_others() {
    let scene = Scene::new().await;
    let folder = scene.daemons.path();
    let user = User::nobody(&["bpf", "perfmon", "sys_ptrace", "dac_read_search"]);
    let daemon = Daemon::start_as(&user, &scene.config("required").with(&scene.engine), folder).await.unwrap();
    scene.listed().await;
    has_only(&daemon, &["CAP_DAC_READ_SEARCH", "CAP_SYS_PTRACE"], &["CAP_BPF", "CAP_PERFMON"]).await;
    kernel_events_still_come(&scene).await;
}

/// In every thread and every set, and in status. The thread that writes the log needs nothing and has nothing.
async fn has_only(daemon: &Daemon, kept: &[&str], dropped: &[&str]) {
    let pid = daemon.process.identity.pid;
    let expected: BTreeSet<String> = kept.iter().map(|&name| name.to_owned()).collect();
    let mut threads = 0;
    for thread in std::fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
        let thread: i32 = thread.unwrap().file_name().to_string_lossy().parse().unwrap();
        let comm = std::fs::read_to_string(format!("/proc/{pid}/task/{thread}/comm")).unwrap();
        let expected = if comm.trim() == "lastgasp-log" { &BTreeSet::new() } else { &expected };
        let held = |set| -> BTreeSet<String> {
            let held = caps::read(Some(thread), set).unwrap();
            held.iter().map(Capability::to_string).collect()
        };
        assert_eq!(held(CapSet::Effective), *expected);
        assert_eq!(held(CapSet::Permitted), *expected);
        assert_eq!(held(CapSet::Inheritable), BTreeSet::new());
        threads += 1;
    }
    assert!(threads > 1, "the side thread runs");
    let ambient = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    assert!(ambient.contains("CapAmb:\t0000000000000000"), "{ambient}");

    let status = daemon.status().await.unwrap();
    let held: BTreeSet<String> = names(&status["privileges"]["held"]).into_iter().map(str::to_owned).collect();
    assert_eq!(held, expected, "{status:#}");
    assert_eq!(names(&status["privileges"]["dropped"]), dropped, "{status:#}");
}

/// Processes were put into the programs' map after the capabilities were gone, or nobody would
/// know of the signal.
async fn kernel_events_still_come(scene: &Scene) {
    scene.kill_and_see_it_withdrawn().await;
    let certificate = scene.discovery.certificate("alpha", |_| true).await.unwrap();
    assert_eq!(certificate.cause.kind, CauseKind::ProcessKilled, "{certificate:#?}");
    let seen: Vec<&str> = certificate.timeline.iter().map(|moment| moment.what.as_str()).collect();
    assert!(seen.contains(&"signal_delivered") && seen.contains(&"process_exit"), "{seen:?}");
}

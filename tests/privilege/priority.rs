//! `priority = "realtime"`: the main thread runs before all others, or it is said why not.

use lastgasp_tests::daemon::Daemon;
use lastgasp_tests::user::User;
use serde_json::{Value, json};

use crate::scene::{Scene, names};

/// The scheduling policies (field 41 of `stat`) of a daemon's main thread, and of its others.
fn policies(daemon: &Daemon) -> (i32, Vec<i32>) {
    let pid = daemon.process.identity.pid.to_string();
    let (mut main, mut others) = (-1, Vec::new());
    for thread in std::fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
        let thread = thread.unwrap();
        // A blocking thread may just have ended.
        let Ok(stat) = std::fs::read_to_string(thread.path().join("stat")) else { continue };
        let policy = stat.rsplit_once(") ").unwrap().1.split(' ').nth(41 - 3).unwrap().parse().unwrap();
        if thread.file_name().to_string_lossy() == pid { main = policy } else { others.push(policy) }
    }
    (main, others)
}

fn complaints(status: &Value) -> Vec<&str> {
    let mut warnings = names(&status["warnings"]);
    warnings.retain(|warning| warning.starts_with("priority"));
    warnings
}

#[tokio::test]
async fn the_main_thread_is_raised_and_no_other() {
    let scene = Scene::new().await;
    let mut config = scene.config("auto");
    config.priority = "realtime";
    // Raised before it gives up CAP_SYS_NICE with the rest.
    let daemon = scene.daemon_of(&User::nobody(&["sys_nice"]), config).await;
    let (main, others) = policies(&daemon);
    assert_eq!(main, libc::SCHED_RR);
    assert!(!others.is_empty() && others.iter().all(|policy| *policy == libc::SCHED_OTHER), "{others:?}");
    let status = daemon.status().await.unwrap();
    assert_eq!(complaints(&status), Vec::<&str>::new(), "{status:#}");
    assert_eq!(status["privileges"]["held"], json!([]));
    scene.kill_and_see_it_withdrawn().await;
}

#[tokio::test]
async fn without_the_capability_it_says_so_and_carries_on() {
    let scene = Scene::new().await;
    let mut config = scene.config("auto");
    config.priority = "realtime";
    let daemon = scene.daemon_of(&User::nobody(&[]), config).await;
    assert_eq!(policies(&daemon).0, libc::SCHED_OTHER);
    let status = daemon.status().await.unwrap();
    assert!(complaints(&status)[0].contains("CAP_SYS_NICE"), "{status:#}");
    scene.kill_and_see_it_withdrawn().await;
}

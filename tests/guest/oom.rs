//! Three SIGKILLs, and what each certificate says: of a memory cgroup's limit, of the machine's
//! memory, and of somebody who sent it.

use lastgasp_protocol::CauseKind;

use crate::cgroup::Cgroup;
use crate::scene::{Scene, details};

/// The engine core fills 96 MB.
const LARGE: [&str; 2] = ["--core-mb", "96"];

#[tokio::test]
async fn a_memory_cgroup_reaches_its_limit() {
    let cgroup = Cgroup::new("lastgasp-guest-oom");
    let scene = Scene::inside(Some(&cgroup), "required", &LARGE).await;

    // The kernel reclaims what it can and then looks for a victim (memory_max_write,
    // mm/memcontrol.c): the largest.
    cgroup.write("memory.swap.max", "0");
    cgroup.write("memory.max", "80M");

    let certificate = scene.withdrawn(|certificate| !details(certificate, "oom_kill").is_empty()).await;
    assert_eq!(certificate.cause.kind, CauseKind::OomKilled, "{certificate:#?}");
    // Others of the engine may follow, while the memory of the first is being freed.
    let limit = format!(" (pid {}): the memory cgroup {} reached its limit", scene.engine.core.pid, cgroup.path());
    assert!(details(&certificate, "oom_kill")[0].ends_with(&limit), "{certificate:#?}");
}

/// By sysrq, which runs the OOM killer as if the machine's memory were used up.
#[tokio::test]
async fn the_machine_runs_out_of_memory() {
    let scene = Scene::new("required", &LARGE).await;
    let core = scene.engine.core.pid;
    std::fs::write(format!("/proc/{core}/oom_score_adj"), "1000").unwrap();

    std::fs::write("/proc/sysrq-trigger", "f").unwrap();

    let certificate = scene.withdrawn(|certificate| !details(certificate, "oom_kill").is_empty()).await;
    assert_eq!(certificate.cause.kind, CauseKind::OomKilled, "{certificate:#?}");
    let [detail] = details(&certificate, "oom_kill")[..] else { panic!("{certificate:#?}") };
    assert!(detail.ends_with(&format!("(pid {core}): the machine ran out of memory")), "{detail}");
}

#[tokio::test]
async fn somebody_kills_it() {
    let scene = Scene::new("required", &LARGE).await;
    let certificate = scene.a_death_is_seen().await;
    assert_eq!(certificate.cause.kind, CauseKind::ProcessKilled, "{certificate:#?}");
    let sender = certificate.cause.sender.as_ref().expect("the kernel tells who");
    assert_eq!(sender.pid, std::process::id(), "{certificate:#?}");
    assert!(details(&certificate, "oom_kill").is_empty(), "{certificate:#?}");
}

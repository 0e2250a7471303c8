//! `lockdown=confidentiality` on the kernel's command line: no program may read kernel memory. The
//! daemon is up, says what it lost and what that costs, and sees a death by pidfd.

use lastgasp_tests::binaries;
use serde_json::Value;
use tokio::process::Command;

use crate::scene::Scene;

const REASON: &str = "the kernel is locked down for confidentiality";

#[tokio::test]
async fn the_daemon_says_what_it_lost_and_carries_on() {
    let modes = std::fs::read_to_string("/sys/kernel/security/lockdown").unwrap();
    assert!(modes.contains("[confidentiality]"), "the guest was booted without it: {modes}");
    let scene = Scene::new("auto", &[]).await;
    assert_eq!(scene.daemon.ready.death_source, "pidfd");
    let readyz = reqwest::get(format!("http://{}/readyz", scene.daemon.ready.metrics)).await.unwrap();
    assert_eq!(readyz.status(), 200);

    let status = scene.daemon.status().await.unwrap();
    assert!(status["death_source_reason"].as_str().unwrap().contains(REASON), "{status:#}");
    let degraded = status["degraded"].as_array().unwrap();
    let ebpf = degraded.iter().find(|degradation| degradation["what"] == "ebpf").expect("it is said");
    assert!(ebpf["cost"].as_str().unwrap().contains("pidfd"), "{ebpf:#}");
    assert!(ebpf["fix"].as_str().unwrap().contains("lockdown=integrity"), "{ebpf:#}");
    let log = scene.daemon.process.log_tail();
    let warned = |line: &str| line.contains("WARN") && line.contains("no eBPF") && line.contains(REASON);
    assert!(log.lines().any(warned), "{log}");
    assert_eq!(scene.daemon.counted("lastgasp_death_source{source=\"pidfd\"}").await.unwrap(), 1.0);
    assert_eq!(scene.daemon.counted("lastgasp_death_source{source=\"ebpf\"}").await.unwrap(), 0.0);

    let config = scene.config.write(scene.folder.path()).unwrap();
    let mut doctor = Command::new(binaries::find("lastgasp").unwrap());
    let said = doctor.args(["doctor", "--json", "--config"]).arg(config).output().await.unwrap();
    let report: Value = serde_json::from_slice(&said.stdout).unwrap();
    let findings = report["findings"].as_array().unwrap();
    let lockdown = findings.iter().find(|finding| finding["name"] == "lockdown").expect("it is looked at");
    assert_eq!(lockdown["grade"], "degraded", "{lockdown:#}");

    scene.a_death_is_seen().await;
}

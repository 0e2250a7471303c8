//! The systemd unit.

use std::process::Command;

use crate::render::text;

#[test]
#[ignore = "needs systemd-analyze"]
fn systemd_understands_the_unit_and_calls_it_hardened() {
    let folder = tempfile::tempdir().unwrap();
    let unit = folder.path().join("lastgasp.service");
    let binary = lastgasp_tests::binaries::find("lastgasp").unwrap();
    std::fs::write(
        &unit,
        text("deploy/systemd/lastgasp.service").replace("/usr/bin/lastgasp", binary.to_str().unwrap()),
    )
    .unwrap();
    let verify = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&unit).output().unwrap();
    let said = String::from_utf8_lossy(&verify.stderr).into_owned();
    assert!(verify.status.success() && said.is_empty(), "{said}");
    let mut security = Command::new("systemd-analyze");
    // In tenths; 9.6 is a unit that says nothing.
    security.args(["security", "--offline=true", "--no-pager", "--threshold=35"]).arg(&unit);
    let output = security.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

/// The unit and the DaemonSet are of one mind about what the daemon is for.
#[test]
#[ignore = "run with the others of this folder"]
fn the_unit_has_a_watchdog_and_no_capability_that_is_given_to_nobody_else() {
    let unit = text("deploy/systemd/lastgasp.service");
    let line = |key: &str| unit.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_else(|| panic!("{key}"));
    assert_eq!((line("Type="), line("WatchdogSec="), line("NotifyAccess=")), ("notify", "10s", "main"));
    assert_eq!(line("CapabilityBoundingSet="), line("AmbientCapabilities="));
    for capability in line("CapabilityBoundingSet=").split(' ') {
        let known = lastgasp::privileges::USES.iter().any(|one| one.capability.to_string() == capability);
        assert!(known, "{capability}");
    }
}

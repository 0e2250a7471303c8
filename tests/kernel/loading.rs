//! What loads, and what is said when it does not.

use std::{os::unix::process::CommandExt as _, process::Command};

use lastgasp::sensors::ebpf::{EbpfError, LoadOptions, OffReason, Probe, ProbeState, Probes};
use lastgasp_ebpf::EventKind;
use nix::sys::signal::Signal;

use crate::harness::{Kernel, Victim};

#[test]
fn every_probe_is_on() {
    let kernel = Kernel::load();
    for (probe, state) in kernel.probes.states() {
        assert_eq!(*state, ProbeState::On, "{probe}");
    }
}

#[test]
fn a_probe_that_is_off_leaves_the_others_on() {
    let options = LoadOptions { disabled: vec![Probe::SignalDeliver], ..LoadOptions::default() };
    let mut kernel = Kernel::load_with(&options);
    let off = (Probe::SignalDeliver, ProbeState::Off(OffReason::Disabled));
    assert!(kernel.probes.states().contains(&off));
    assert!(!kernel.probes.is_on(Probe::SignalDeliver) && kernel.probes.is_on(Probe::Exit));

    let mut victim = Victim::start(&["exit", "0"]);
    kernel.watch(&victim);
    victim.kill(Signal::SIGKILL);
    victim.wait();
    kernel.wait_for_kind(EventKind::Exit, victim.tgid);
    assert_eq!(kernel.of(EventKind::SignalDeliver, victim.tgid), []);
}

#[test]
fn with_every_probe_off_nothing_is_loaded() {
    let options = LoadOptions { disabled: Probe::ALL.into(), ..LoadOptions::default() };
    match Probes::load(&options) {
        Err(EbpfError::NoProbe(probes)) => assert_eq!(probes.len(), Probe::ALL.len()),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("something was attached"),
    }
}

/// Not a story, but what another user would see: the story runs this test alone, as nobody.
#[test]
#[ignore = "run by without_privilege_the_missing_capability_is_named"]
fn load_as_nobody() {
    match Probes::load(&LoadOptions::default()) {
        Err(error) => println!("\nrefused {}: {error}", error.as_str()),
        Ok(_) => panic!("nobody may load programs"),
    }
}

#[test]
fn without_privilege_the_missing_capability_is_named() {
    const NOBODY: u32 = 65534;
    let mut command = Command::new(std::env::current_exe().expect("procfs is mounted"));
    command.args(["--ignored", "--exact", "loading::load_as_nobody", "--nocapture"]);
    let output = command.uid(NOBODY).gid(NOBODY).output().expect("everybody may run it");
    let said = String::from_utf8_lossy(&output.stdout);
    let refused = said.lines().find(|line| line.starts_with("refused"));
    assert_eq!(refused, Some("refused not_permitted: not permitted: creating a map needs CAP_BPF"), "{said}");
}

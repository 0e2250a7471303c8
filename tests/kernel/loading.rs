//! What loads, and what is said when it does not.

use lastgasp_protocol::ClosedName as _;
use std::process::Command;
use strum::VariantArray as _;

use lastgasp::sensors::ebpf::{EbpfError, KernelProgram, KernelPrograms, LoadOptions, OffReason, ProgramState};
use lastgasp_ebpf::EventKind;
use nix::sys::signal::Signal;

use crate::harness::{Kernel, Victim};

#[test]
fn every_probe_is_on() {
    let kernel = Kernel::load();
    for (program, state) in kernel.programs.states() {
        assert_eq!(*state, ProgramState::On, "{program}");
    }
}

#[test]
fn a_probe_that_is_off_leaves_the_others_on() {
    let options = LoadOptions { disabled: vec![KernelProgram::SignalDeliver], ..LoadOptions::default() };
    let mut kernel = Kernel::load_with(&options);
    let off = (KernelProgram::SignalDeliver, ProgramState::Off(OffReason::Disabled));
    assert!(kernel.programs.states().contains(&off));
    assert!(!kernel.programs.is_on(KernelProgram::SignalDeliver) && kernel.programs.is_on(KernelProgram::Exit));

    let mut victim = Victim::start(&["exit", "0"]);
    kernel.watch(&victim);
    victim.kill(Signal::SIGKILL);
    victim.wait();
    kernel.wait_for_kind(EventKind::Exit, victim.tgid);
    assert_eq!(kernel.of(EventKind::SignalDeliver, victim.tgid), []);
}

#[test]
fn with_every_probe_off_nothing_is_loaded() {
    let options = LoadOptions { disabled: KernelProgram::VARIANTS.into(), ..LoadOptions::default() };
    match KernelPrograms::load(&options) {
        Err(EbpfError::NoProgram(programs)) => assert_eq!(programs.len(), KernelProgram::VARIANTS.len()),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("something was attached"),
    }
}

/// Not a story, but what another user sees: the stories run this test alone, as nobody.
#[test]
#[ignore = "run by the stories about privilege"]
fn load_as_nobody() {
    match KernelPrograms::load(&LoadOptions::default()) {
        Ok((programs, _ring)) => println!("\nloaded {:?}", programs.states().iter().all(|(_, state)| state.is_on())),
        Err(error) => println!("\nrefused {}: {error}", error.as_str()),
    }
}

/// What [`load_as_nobody`] says with these capabilities and no others.
fn nobody_with(capabilities: &str) -> String {
    let test = std::env::current_exe().expect("procfs is mounted");
    let capabilities = |option: &str| format!("--{option}-caps=-all{capabilities}");
    let output = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .args([capabilities("inh"), capabilities("ambient")])
        .arg(test)
        .args(["--ignored", "--exact", "loading::load_as_nobody", "--nocapture"])
        .output()
        .expect("setpriv, of util-linux, is there");
    let said = String::from_utf8_lossy(&output.stdout);
    let line = said.lines().find(|line| line.starts_with("refused") || line.starts_with("loaded"));
    line.map(str::to_owned).unwrap_or_else(|| panic!("{said}{}", String::from_utf8_lossy(&output.stderr)))
}

#[test]
fn two_capabilities_are_enough() {
    assert_eq!(nobody_with(",+bpf,+perfmon"), "loaded true");
}

#[test]
fn the_capability_that_is_missing_is_named() {
    let no_maps = "refused not_permitted: not permitted: creating a map needs CAP_BPF";
    assert_eq!(nobody_with(""), no_maps);
    assert_eq!(nobody_with(",+perfmon"), no_maps);
    assert_eq!(
        nobody_with(",+bpf"),
        "refused not_permitted: not permitted: loading a tracing program needs CAP_PERFMON"
    );
}

//! The sensors: each kernel program is really loaded and attached, and let go again.

use super::{Area, Finding, Verdict};
use crate::config::{EbpfConfig, EbpfMode};
use crate::privileges;
use crate::sensors::ebpf::{LoadOptions, ProbeState, Probes};
use crate::sensors::pidfd::PidFd;
use crate::sensors::proc;

fn new(name: impl Into<String>, verdict: Verdict, detail: impl Into<String>) -> Finding {
    Finding::new(Area::Sensors, name, verdict, detail)
}

pub(super) fn examine(config: Option<&EbpfConfig>) -> Vec<Finding> {
    let enabled = config.map_or(EbpfMode::Auto, |config| config.enabled);
    if enabled == EbpfMode::Off {
        return vec![new("ebpf", Verdict::Note, "switched off by ebpf.enabled; deaths are seen by pidfd, later")];
    }
    let options = config.map_or_else(LoadOptions::default, LoadOptions::of);
    match Probes::load(&options) {
        Err(error) => {
            let required = enabled == EbpfMode::Required;
            let verdict = if required { Verdict::Broken } else { Verdict::Degraded };
            let so = if required { "and ebpf.enabled is \"required\"" } else { "so deaths are seen by pidfd, later" };
            vec![new("ebpf", verdict, format!("{error}; {so}")).fix(error.fix())]
        }
        Ok((mut probes, _ring)) => {
            let mut findings: Vec<_> = probes
                .states()
                .iter()
                .map(|(probe, state)| {
                    let name = format!("probe {probe}");
                    match state {
                        ProbeState::On => new(name, Verdict::Fine, format!("attached to {}", probe.tracepoint())),
                        ProbeState::Off(why) => new(name, Verdict::Degraded, format!("off: {why}; {}", probe.cost())),
                    }
                })
                .collect();
            findings.push(after_loading(&mut probes));
            findings
        }
    }
}

/// Tried in a thread of its own, whose capabilities are its own.
fn after_loading(probes: &mut Probes) -> Finding {
    let reduce = || privileges::reduce(privileges::Needs::default(), || probes.check_access().is_ok());
    let reduced = std::thread::scope(|scope| scope.spawn(reduce).join());
    let name = "without CAP_BPF";
    match reduced {
        Ok(Ok(reduced)) if reduced.held.contains(&caps::Capability::CAP_BPF) => new(
            name,
            Verdict::Note,
            "the daemon keeps it: this kernel asks for CAP_BPF at every change of a map (Linux before 5.19)",
        ),
        Ok(Ok(_)) => new(name, Verdict::Fine, "the programs' maps can be used once it is given up"),
        Ok(Err(error)) => new(name, Verdict::Note, format!("cannot be given up: {error}")),
        Err(_) => new(name, Verdict::Note, "not known"),
    }
}

/// On this very process. Needs a runtime.
pub(super) fn pidfd() -> Finding {
    let Some(own) = proc::identify(std::process::id()) else {
        return new("pidfd", Verdict::Broken, "/proc does not show this process").fix("mount /proc");
    };
    match PidFd::open(own) {
        Ok(_) => new("pidfd", Verdict::Fine, "works; needs no privilege"),
        Err(error) => new("pidfd", Verdict::Broken, error.to_string())
            .fix("use Linux 5.3 or later, and a seccomp profile that knows pidfd_open"),
    }
}

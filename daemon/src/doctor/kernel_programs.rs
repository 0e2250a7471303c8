//! The sensors: each kernel program is really loaded and attached, and let go again.

use super::{Area, Finding, Grade};
use crate::config::{EbpfConfig, EbpfMode};
use crate::privileges;
use crate::sensors::ebpf::{KernelPrograms, LoadOptions, ProgramState};
use crate::sensors::pidfd::PidFd;
use crate::sensors::proc;

fn new(name: impl Into<String>, grade: Grade, detail: impl Into<String>) -> Finding {
    Finding::new(Area::Sensors, name, grade, detail)
}

pub(super) fn examine(config: Option<&EbpfConfig>) -> Vec<Finding> {
    let enabled = config.map_or(EbpfMode::Auto, |config| config.enabled);
    if enabled == EbpfMode::Off {
        return vec![new("ebpf", Grade::Note, "switched off by ebpf.enabled; deaths are seen by pidfd, later")];
    }
    let options = config.map_or_else(LoadOptions::default, LoadOptions::of);
    match KernelPrograms::load(&options) {
        Err(error) => {
            let required = enabled == EbpfMode::Required;
            let grade = if required { Grade::Broken } else { Grade::Degraded };
            let so = if required { "and ebpf.enabled is \"required\"" } else { "so deaths are seen by pidfd, later" };
            vec![new("ebpf", grade, format!("{error}; {so}")).fix(error.fix())]
        }
        Ok((mut programs, _ring)) => {
            let mut findings: Vec<_> = programs
                .states()
                .iter()
                .map(|(program, state)| {
                    let name = format!("program {program}");
                    match state {
                        ProgramState::On => new(name, Grade::Fine, format!("attached to {}", program.tracepoint())),
                        ProgramState::Off(why) => new(name, Grade::Degraded, format!("off: {why}; {}", program.cost())),
                    }
                })
                .collect();
            findings.push(after_loading(&mut programs));
            findings
        }
    }
}

/// Tried in a thread of its own, whose capabilities are its own.
fn after_loading(programs: &mut KernelPrograms) -> Finding {
    let reduce = || privileges::reduce(privileges::Needs::default(), || programs.check_access().is_ok());
    let reduced = std::thread::scope(|scope| scope.spawn(reduce).join());
    let name = "without CAP_BPF";
    match reduced {
        Ok(Ok(reduced)) if reduced.held.contains(&caps::Capability::CAP_BPF) => new(
            name,
            Grade::Note,
            "the daemon keeps it: this kernel asks for CAP_BPF at every change of a map (Linux before 5.19)",
        ),
        Ok(Ok(_)) => new(name, Grade::Fine, "the programs' maps can be used once it is given up"),
        Ok(Err(error)) => new(name, Grade::Note, format!("cannot be given up: {error}")),
        Err(_) => new(name, Grade::Note, "not known"),
    }
}

/// On this very process. Needs a runtime.
pub(super) fn pidfd() -> Finding {
    let Some(own) = proc::identify(std::process::id()) else {
        return new("pidfd", Grade::Broken, "/proc does not show this process").fix("mount /proc");
    };
    match PidFd::open(own) {
        Ok(_) => new("pidfd", Grade::Fine, "works; needs no privilege"),
        Err(error) => new("pidfd", Grade::Broken, error.to_string())
            .fix("use Linux 5.3 or later, and a seccomp profile that knows pidfd_open"),
    }
}

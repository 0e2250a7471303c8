//! What this daemon has to do without, and what that costs.

use crate::effects::troubles::Trouble;
use crate::privileges;
use crate::sensors::ebpf::{EbpfError, ProgramState};
use crate::status::{Degradation, Privileges};

use super::Supervisor;

/// What being without eBPF costs, measured on Linux 6.18.
const WITHOUT_EBPF: &str = "deaths are seen by pidfd: after the memory is torn down and the core is dumped (0.2 s at 6 GiB \
                            resident, 1.5 s with a core of 1 GiB), without who sent the signal";

/// Why there is no eBPF.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NoEbpf {
    /// One line for people.
    pub(super) reason: String,
    /// What to do about it.
    pub(super) fix: &'static str,
    /// Somebody wanted it so.
    pub(super) wanted: bool,
}

impl NoEbpf {
    pub(super) fn switched_off() -> Self {
        let fix = "set ebpf.enabled to \"auto\" to have it back";
        Self { reason: "switched off".to_owned(), fix, wanted: true }
    }

    pub(super) fn broken(reason: String) -> Self {
        Self { reason, fix: "restart lastgasp, and report it with the log", wanted: false }
    }

    pub(super) fn log(&self) {
        let Self { reason, fix, wanted } = self;
        match wanted {
            true => tracing::info!(reason, cost = WITHOUT_EBPF, "no eBPF"),
            false => tracing::warn!(reason, cost = WITHOUT_EBPF, fix, "no eBPF"),
        }
    }
}

impl From<EbpfError> for NoEbpf {
    fn from(error: EbpfError) -> Self {
        Self { reason: error.to_string(), fix: error.fix(), wanted: false }
    }
}

impl Supervisor {
    /// Everything that is worse than it could be.
    pub(super) fn degraded(&self) -> Vec<Degradation> {
        let ebpf = self.no_ebpf.iter().map(|NoEbpf { reason, fix, wanted: _ }| Degradation {
            what: "ebpf".to_owned(),
            reason: reason.clone(),
            cost: WITHOUT_EBPF.to_owned(),
            fix: (*fix).to_owned(),
        });
        let states = self.programs.as_ref().map(|programs| programs.states()).unwrap_or_default();
        let programs = states.iter().filter_map(|(program, state)| match state {
            ProgramState::On => None,
            ProgramState::Off(reason) => Some(Degradation {
                what: format!("program {program}"),
                reason: reason.to_string(),
                cost: program.cost().to_owned(),
                fix: String::new(),
            }),
        });
        let nats = self.troubles.troubles().into_iter().map(|(what, trouble)| {
            let Trouble { fault, detail, cost } = trouble;
            Degradation {
                what: format!("nats {what}"),
                reason: format!("{fault}: {detail}"),
                cost: cost.to_owned(),
                fix: fault.fix().to_owned(),
            }
        });
        ebpf.chain(programs).chain(nats).collect()
    }

    pub(super) fn privileges(&self) -> Privileges {
        let names = |list: &[caps::Capability]| list.iter().map(|one| privileges::name(*one).to_owned()).collect();
        Privileges { held: names(&self.reduced.held), dropped: names(&self.reduced.dropped) }
    }
}

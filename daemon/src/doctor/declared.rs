//! Processes that declare themselves workers.

use lastgasp_protocol::ClosedName as _;
use std::collections::HashSet;

use futures_util::future::join_all;

use super::{Area, Finding, Grade, workers};
use crate::config::Config;
use crate::privileges;
use crate::sensors::kubelet::Pods;
use crate::sensors::proc::declare::{Claim, Declared, Refusal, RefusedClaim, Scanner};
use crate::sensors::proc::{self, find_root};

fn new(name: impl Into<String>, grade: Grade, detail: impl Into<String>) -> Finding {
    Finding::new(Area::Workers, name, grade, detail)
}

pub(super) async fn examine(config: &Config) -> Vec<Finding> {
    if !config.declare.enabled {
        return vec![new("declarations", Grade::Fine, "not looked for: declare.enabled is false")];
    }
    let configured: HashSet<_> =
        config.workers.iter().filter_map(|worker| find_root(&worker.find).ok().flatten()).collect();
    let pods = match &config.declare.kubelet {
        Some(kubelet) => Some(Pods::once(kubelet).await),
        None => None,
    };
    let mut scanner = Scanner::new(&config.declare, pods);
    let claims = match scanner.look(&configured) {
        Ok(claims) => claims,
        Err(error) => return vec![new("declarations", Grade::Broken, format!("/proc cannot be read: {error}"))],
    };
    let mut findings = vec![summary(claims.len(), scanner.hidden(), privileges::may_look_into_others())];
    findings.extend(
        scanner.too_wide().iter().map(|wide| new("declare.cgroups", Grade::Broken, wide.to_string()).fix(wide.fix())),
    );
    findings.extend(join_all(claims.iter().map(claim)).await.into_iter().flatten());
    findings
}

/// `permitted`: what may not be read is guarded by something else than capabilities.
fn summary(found: usize, hidden: usize, permitted: bool) -> Finding {
    let detail = format!("looked for; {found} found");
    let but = || format!("{detail}; the environment of {hidden} processes may not be read");
    match (hidden, permitted) {
        (0, _) => new("declarations", Grade::Fine, detail),
        (_, true) => new("declarations", Grade::Note, format!("{}, whatever the capabilities", but())),
        (_, false) => {
            new("declarations", Grade::Degraded, but()).fix("give lastgasp CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH")
        }
    }
}

async fn claim(Claim { name, info, verdict, .. }: &Claim) -> Vec<Finding> {
    let tgid = info.id.tgid;
    match verdict {
        Ok(Declared { worker: config, place, .. }) => {
            let title = proc::comm(tgid).unwrap_or_default();
            let mut findings =
                vec![new(format!("{name} process"), Grade::Fine, format!("pid {tgid} ({title}) declares itself"))];
            findings.extend(workers::of_process(config, Some(tgid), place.namespace.clone()).await);
            findings
        }
        Err(RefusedClaim { refusal, detail, .. }) => {
            let detail = format!("pid {tgid} declares itself; refused ({}): {detail}", refusal.as_str());
            // Who may not is a decision of the configuration, and no fault.
            let grade = if *refusal == Refusal::NotAllowed { Grade::Note } else { Grade::Degraded };
            vec![new(format!("{name} process"), grade, detail)]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_that_cannot_be_looked_into_are_said() {
        assert_eq!(summary(2, 0, false).grade, Grade::Fine);
        // A security module guards it.
        assert_eq!(summary(2, 1, true).grade, Grade::Note);
        let hidden = summary(0, 3, false);
        assert_eq!(hidden.grade, Grade::Degraded);
        assert!(hidden.fix.unwrap().contains("CAP_DAC_READ_SEARCH"));
    }
}

//! What this process may do.

use super::{Area, Finding, Grade};
use crate::privileges::{self, Span, USES};

pub(super) fn examine() -> Vec<Finding> {
    let user = format!("uid {}", nix::unistd::geteuid());
    let mut findings = vec![Finding::new(Area::Privileges, "user", Grade::Fine, user)];
    if privileges::in_user_namespace() {
        let detail = "lastgasp runs in a user namespace: capabilities count for what belongs to it, not for eBPF, nor for \
                      processes outside";
        let fix = "run lastgasp in the host's user namespace: hostUsers: true in Kubernetes, no rootless container";
        findings.push(Finding::new(Area::Privileges, "user namespace", Grade::Note, detail).fix(fix));
    }
    findings.extend(USES.iter().map(|used| {
        let name = privileges::name(used.capability);
        match (privileges::holds(used.capability), used.span) {
            (true, Span::Loading) => {
                Finding::new(Area::Privileges, name, Grade::Fine, "held; given up once the programs are loaded")
            }
            (true, Span::Severing) => {
                Finding::new(Area::Privileges, name, Grade::Fine, "held; given up unless connections are to be severed")
            }
            (true, Span::Entering) => Finding::new(
                Area::Privileges,
                name,
                Grade::Fine,
                "held; given up unless connections are to be severed or workers declare themselves",
            ),
            (true, Span::Running) => Finding::new(Area::Privileges, name, Grade::Fine, "held"),
            // Whether that matters is for the sensors and the workers to say: a node whose engines run
            // as the daemon's own user needs none of them.
            (false, _) => Finding::new(Area::Privileges, name, Grade::Note, format!("not held; {}", used.without)),
        }
    }));
    findings
}

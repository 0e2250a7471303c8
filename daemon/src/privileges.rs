//! Capabilities: what each is good for, and giving up those that are not needed any more.
//!
//! Which capability is needed for what was measured, see `docs/privileges.md`; the measurements
//! are tests (`tests/privilege`). Capabilities belong to threads (capabilities(7)), so they are
//! given up while there is only one.

use caps::{CapSet, Capability, CapsHashSet};

/// How long a capability is of use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Span {
    /// While the kernel programs are loaded.
    Loading,
    /// As long as the daemon runs.
    Running,
    /// As long as the daemon runs, if it is to destroy connections.
    Severing,
    /// As long as the daemon runs, if it is to enter other network namespaces: to destroy connections, or to
    /// ask the health of workers that declare themselves.
    Entering,
}

/// What the configuration asks for beside what every daemon does.
#[derive(Debug, Clone, Copy, Default)]
pub struct Needs {
    /// Connections are destroyed.
    pub severing: bool,
    /// Workers may declare themselves.
    pub declarations: bool,
}

impl Needs {
    const fn keeps(self, span: Span) -> bool {
        match span {
            Span::Loading => false,
            Span::Running => true,
            Span::Severing => self.severing,
            Span::Entering => self.severing || self.declarations,
        }
    }
}

/// A capability that the daemon makes use of.
#[derive(Debug, Clone, Copy)]
pub struct Use {
    /// Which.
    pub capability: Capability,
    /// How long.
    pub span: Span,
    /// What is worse without it.
    pub without: &'static str,
}

/// Every capability that is of use. All others are given up at the start.
pub const USES: [Use; 8] = [
    Use {
        capability: Capability::CAP_BPF,
        span: Span::Loading,
        without: "no eBPF: deaths are seen by pidfd, later and without who sent the signal",
    },
    Use {
        capability: Capability::CAP_PERFMON,
        span: Span::Loading,
        without: "no eBPF: deaths are seen by pidfd, later and without who sent the signal",
    },
    Use {
        capability: Capability::CAP_SYS_PTRACE,
        span: Span::Running,
        without: "of other users' engines: not found by LASTGASP_WORKER or by port, their network namespace is not \
                  known, exit statuses only from Linux 6.15 on",
    },
    Use {
        capability: Capability::CAP_DAC_READ_SEARCH,
        span: Span::Running,
        without: "of other users' engines: not found by LASTGASP_WORKER or by port; nor by a pid file that only they may \
                  read",
    },
    Use { capability: Capability::CAP_KILL, span: Span::Running, without: "processes of other users cannot be ended" },
    Use {
        capability: Capability::CAP_SYSLOG,
        span: Span::Running,
        without: "/dev/kmsg, where drivers report GPU faults, is not readable",
    },
    Use {
        capability: Capability::CAP_NET_ADMIN,
        span: Span::Severing,
        without: "connections cannot be destroyed, which sever asks for",
    },
    Use {
        capability: Capability::CAP_SYS_ADMIN,
        span: Span::Entering,
        without: "other network namespaces cannot be entered: neither to destroy connections there, which sever asks for, \
                  nor to ask the health of declared workers, nor to see how the host routes their endpoints",
    },
];

/// The capability's name, as `CAP_BPF`.
#[must_use]
pub const fn name(capability: Capability) -> &'static str {
    match capability {
        Capability::CAP_BPF => "CAP_BPF",
        Capability::CAP_PERFMON => "CAP_PERFMON",
        Capability::CAP_SYS_PTRACE => "CAP_SYS_PTRACE",
        Capability::CAP_DAC_READ_SEARCH => "CAP_DAC_READ_SEARCH",
        Capability::CAP_KILL => "CAP_KILL",
        Capability::CAP_SYSLOG => "CAP_SYSLOG",
        Capability::CAP_NET_ADMIN => "CAP_NET_ADMIN",
        Capability::CAP_SYS_ADMIN => "CAP_SYS_ADMIN",
        _ => "another capability",
    }
}

/// Whether this thread has it, in effect.
#[must_use]
pub fn holds(capability: Capability) -> bool {
    caps::has_cap(None, CapSet::Effective, capability).unwrap_or(false)
}

/// Whether other users' processes may be looked into: their environment, listeners and namespaces.
#[must_use]
pub fn may_look_into_others() -> bool {
    holds(Capability::CAP_SYS_PTRACE) && holds(Capability::CAP_DAC_READ_SEARCH)
}

/// Whether this process is in a user namespace of its own, where capabilities count for what belongs
/// to that namespace only: bpf(2), say, asks for them in the initial one (`bpf_capable`).
#[must_use]
pub fn in_user_namespace() -> bool {
    std::fs::read_to_string("/proc/self/uid_map").is_ok_and(|map| !is_initial(&map))
}

/// The initial namespace maps every number to itself (user_namespaces(7)).
fn is_initial(uid_map: &str) -> bool {
    uid_map.split_whitespace().eq(["0", "0", "4294967295"])
}

/// What this thread has in effect, by number.
#[must_use]
pub fn effective() -> Vec<Capability> {
    sorted(caps::read(None, CapSet::Effective).unwrap_or_default())
}

fn sorted(set: CapsHashSet) -> Vec<Capability> {
    let mut list: Vec<_> = set.into_iter().collect();
    list.sort_by_key(|capability| capability.index());
    list
}

/// What became of this process's capabilities.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reduced {
    /// Those that are still held.
    pub held: Vec<Capability>,
    /// Those of [`USES`] that were given up. What was never of any use is not listed.
    pub dropped: Vec<Capability>,
}

/// Gives up, in this thread, every capability but those of [`Span::Running`] and those that are needed.
///
/// Must run after the programs are loaded and before there is another thread. `maps_work` says
/// whether the programs' maps can still be used: kernels before 5.19 refuse that without `CAP_BPF`
/// (`kernel.unprivileged_bpf_disabled`; Linux c8644cd0efe7). It is asked once `CAP_BPF` is out of
/// effect and can still be taken back; then it is kept.
///
/// # Errors
/// The kernel refuses, which it never does for less than one has.
pub fn reduce(needs: Needs, maps_work: impl FnOnce() -> bool) -> Result<Reduced, caps::errors::CapsError> {
    let before = caps::read(None, CapSet::Permitted)?;
    let used = USES.iter().filter(|used| needs.keeps(used.span));
    let mut keep: CapsHashSet =
        used.map(|used| used.capability).filter(|capability| before.contains(capability)).collect();
    caps::clear(None, CapSet::Ambient)?;
    caps::set(None, CapSet::Effective, &keep)?;
    if before.contains(&Capability::CAP_BPF) && !maps_work() {
        tracing::info!(
            "the daemon keeps CAP_BPF: this kernel asks for it at every change of a map (Linux before 5.19)"
        );
        keep.insert(Capability::CAP_BPF);
    }
    caps::set(None, CapSet::Effective, &keep)?;
    caps::set(None, CapSet::Permitted, &keep)?;
    caps::set(None, CapSet::Inheritable, &CapsHashSet::new())?;
    let dropped = USES.iter().map(|used| used.capability);
    let dropped = dropped.filter(|capability| before.contains(capability) && !keep.contains(capability)).collect();
    Ok(Reduced { held: sorted(keep), dropped })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_capability_of_use_has_its_name() {
        for used in USES {
            assert_eq!(name(used.capability), used.capability.to_string());
        }
        assert_eq!(name(Capability::CAP_SYS_ADMIN), Capability::CAP_SYS_ADMIN.to_string());
    }

    #[test]
    fn only_the_initial_namespace_maps_everything_to_itself() {
        assert!(is_initial("         0          0 4294967295\n"));
        // Rootless, and as the kubelet maps a pod with hostUsers: false.
        assert!(!is_initial("         0       1000          1\n"));
        assert!(!is_initial("         0     131072      65536\n"));
    }

    /// Capabilities are the thread's, so this leaves other tests alone.
    #[test]
    fn what_is_only_for_loading_is_gone_afterwards_for_good() {
        std::thread::spawn(|| {
            let before = effective();
            let reduced = reduce(Needs::default(), || true).expect("less is always permitted");
            assert_eq!(effective(), reduced.held);
            assert_eq!(sorted(caps::read(None, CapSet::Permitted).unwrap()), reduced.held);
            for gone in [Capability::CAP_BPF, Capability::CAP_PERFMON, Capability::CAP_SYS_ADMIN] {
                assert!(!holds(gone) && caps::raise(None, CapSet::Effective, gone).is_err(), "{gone}");
            }
            if before.contains(&Capability::CAP_BPF) {
                assert!(reduced.dropped.contains(&Capability::CAP_BPF));
            }
        })
        .join()
        .unwrap();
    }

    #[test]
    fn where_the_maps_need_it_the_capability_stays() {
        std::thread::spawn(|| {
            let had = holds(Capability::CAP_BPF);
            let reduced = reduce(Needs::default(), || false).expect("less is always permitted");
            assert_eq!(holds(Capability::CAP_BPF), had);
            assert_eq!(reduced.held.contains(&Capability::CAP_BPF), had);
            assert!(!holds(Capability::CAP_PERFMON));
        })
        .join()
        .unwrap();
    }
}

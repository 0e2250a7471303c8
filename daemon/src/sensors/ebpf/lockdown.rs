//! How far the kernel is locked down (kernel_lockdown(7)).

use lastgasp_protocol::ClosedName as _;
use std::fmt;

use serde::Serialize;

/// Where the kernel says it, if securityfs is mounted; in a container it usually is not.
const LOCKDOWN: &str = "/sys/kernel/security/lockdown";

/// How far the kernel is locked down.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, strum::IntoStaticStr, strum::VariantNames)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Lockdown {
    /// Not at all, or this kernel does not have it.
    None,
    /// Root may not change the kernel. Tracing programs work.
    Integrity,
    /// Root may not read the kernel's memory either, and tracing programs have to.
    Confidentiality,
    /// Nobody says: there is no such file here.
    Unknown,
}

impl Lockdown {
    /// What this kernel says now.
    #[must_use]
    pub fn read() -> Self {
        Self::parse(std::fs::read_to_string(LOCKDOWN).ok().as_deref())
    }

    /// From the file's content, which lists all modes with the present one in brackets
    /// (`lockdown_read`, security/lockdown/lockdown.c).
    #[must_use]
    pub fn parse(modes: Option<&str>) -> Self {
        let Some(modes) = modes else { return Self::Unknown };
        match modes.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map(|(mode, _)| mode) {
            Some("none") => Self::None,
            Some("integrity") => Self::Integrity,
            Some("confidentiality") => Self::Confidentiality,
            _ => Self::Unknown,
        }
    }
}

impl fmt::Display for Lockdown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Whether the verifier refused because of lockdown. It does not say so: the helper that reads
/// kernel memory is simply not offered (`bpf_tracing_func_proto`, kernel/trace/bpf_trace.c), and
/// the complaint is about the helper (tetragon#5507, talos#8535).
pub(super) fn explains(verifier: &str) -> bool {
    ["cannot use helper bpf_probe_read", "unknown func bpf_probe_read"].iter().any(|said| verifier.contains(said))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mode_in_brackets_is_the_present_one() {
        for (text, mode) in [
            (Some("[none] integrity confidentiality\n"), Lockdown::None),
            (Some("none [integrity] confidentiality\n"), Lockdown::Integrity),
            (Some("none integrity [confidentiality]\n"), Lockdown::Confidentiality),
            (Some("none integrity confidentiality\n"), Lockdown::Unknown),
            (Some(""), Lockdown::Unknown),
            (None, Lockdown::Unknown),
        ] {
            assert_eq!(Lockdown::parse(text), mode, "{text:?}");
        }
    }

    #[test]
    fn a_withheld_helper_is_lockdown_and_another_complaint_is_not() {
        // Linux 6.8 and later, and before.
        assert!(explains(
            "7: (85) call bpf_probe_read_kernel#113 | program of this type cannot use helper bpf_probe_read_kernel#113"
        ));
        assert!(explains("unknown func bpf_probe_read_kernel#113"));
        assert!(!explains("R1 invalid mem access 'scalar'"));
        assert!(!explains("call bpf_probe_read_kernel#113 | R3 !read_ok"));
    }
}

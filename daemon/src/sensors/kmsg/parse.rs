//! One record of the kernel's log.

use crate::core::GpuPolicy;
use crate::sensors::gpus::PciAddress;

use super::xids;

/// Whose records count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Facilities {
    /// The kernel's own.
    Kernel,
    /// Also those that processes wrote. For tests, which cannot write any others.
    Any,
}

/// What the OOM killer ran out of (`enum oom_constraint`, include/linux/oom.h).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OomScope {
    /// The whole machine's memory.
    Global,
    /// This memory cgroup's limit.
    Cgroup(String),
    /// The memory of some NUMA nodes: a cpuset, a memory policy.
    Nodes,
}

impl std::fmt::Display for OomScope {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Global => f.write_str("the machine ran out of memory"),
            Self::Cgroup(path) => write!(f, "the memory cgroup {path} reached its limit"),
            Self::Nodes => f.write_str("the NUMA nodes that it may use ran out of memory"),
        }
    }
}

/// What a record says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fact {
    /// A GPU fault.
    GpuFault {
        /// As `xid 79 (GPU has fallen off the bus) PCI:0000:3b:00`.
        fault: String,
        /// What follows if it is a worker's.
        policy: GpuPolicy,
        /// The process, if the record names it. In the initial PID namespace.
        pid: Option<u32>,
        /// The GPU, if the record names it.
        gpu: Option<PciAddress>,
    },
    /// The OOM killer chose a task.
    OomKill {
        /// The task: a thread's id.
        tid: u32,
        /// What there was not enough of.
        scope: OomScope,
    },
}

/// Reads a record, as `6,1278,2385527168,-;text` with further lines that begin with a blank. `None` for
/// those that say nothing of interest, which is nearly all of them.
#[must_use]
pub fn parse(record: &str, facilities: Facilities) -> Option<Fact> {
    let (prefix, rest) = record.split_once(';')?;
    let priority: u32 = prefix.split(',').next()?.parse().ok()?;
    // The level is in the low three bits (syslog(3)).
    if priority >> 3 != 0 && facilities == Facilities::Kernel {
        return None;
    }
    let text = rest.lines().next()?;
    nvidia(text).or_else(|| amd(text)).or_else(|| oom(text))
}

/// `NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python3, GPU has fallen off the bus.`
/// `pid='<unknown>'` or `pid=0` where the driver does not know, and no pid at all from old drivers;
/// `PCI:0000:3b:00 GPU-I:05` for a slice of a GPU.
fn nvidia(text: &str) -> Option<Fact> {
    let (device, rest) = text.strip_prefix("NVRM: Xid (")?.split_once("): ")?;
    let mut fields = rest.split(", ");
    let xid: u32 = fields.next()?.trim().parse().ok()?;
    // The pid comes before the name, which its process chose.
    let pid = fields.next().and_then(|field| field.trim().strip_prefix("pid=")?.parse().ok()).filter(|pid| *pid != 0);
    let gpu = device.strip_prefix("PCI:").and_then(|address| PciAddress::parse(address.split(' ').next()?));
    let title = xids::title(xid);
    let title = if title.is_empty() { String::new() } else { format!(" ({title})") };
    Some(Fact::GpuFault { fault: format!("xid {xid}{title} {device}"), policy: xids::policy(xid), pid, gpu })
}

/// `amdgpu 0000:03:00.0: amdgpu: GPU reset begin!`, and the lines that name a process:
/// `… Process information: process python3 pid 1234 thread python3 pid 1234`,
/// `… page fault (src_id:0 … for process python3 pid 1234 thread …`.
fn amd(text: &str) -> Option<Fact> {
    if !text.contains("amdgpu") {
        return None;
    }
    let gpu = text.split_once("amdgpu ").and_then(|(_, rest)| PciAddress::parse(rest.split(": ").next()?));
    let fault = |fault: &str, pid| Fact::GpuFault { fault: fault.to_owned(), policy: GpuPolicy::Probe, pid, gpu };
    if text.contains("GPU reset begin") {
        return Some(fault("amdgpu reset", None));
    }
    let (what, process) = [("amdgpu timeout", "Process information: process "), ("amdgpu page fault", "for process ")]
        .into_iter()
        .find_map(|(what, before)| Some((what, text.split_once(before)?.1)))?;
    let pid = process.split_once(" pid ")?.1.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok();
    Some(fault(what, pid))
}

/// `oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/pod,
/// task_memcg=/pod/x,task=python3,pid=1234,uid=0` (`dump_oom_victim`, mm/oom_kill.c).
fn oom(text: &str) -> Option<Fact> {
    let rest = text.strip_prefix("oom-kill:constraint=")?;
    // From the end: the task's name, which it chose itself, comes before.
    let (before, after) = rest.rsplit_once(",pid=")?;
    let tid = after.split(',').next()?.parse().ok()?;
    let scope = match before.split(',').next()? {
        "CONSTRAINT_NONE" => OomScope::Global,
        "CONSTRAINT_MEMCG" => {
            let path = before.split_once(",oom_memcg=").map_or("", |(_, path)| path);
            OomScope::Cgroup(path.split(',').next().unwrap_or_default().to_owned())
        }
        _ => OomScope::Nodes,
    };
    Some(Fact::OomKill { tid, scope })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(text: &str) -> Option<Fact> {
        parse(&format!("4,1278,2385527168,-;{text}\n SUBSYSTEM=pci\n"), Facilities::Kernel)
    }

    fn gpu(text: &str) -> (String, GpuPolicy, Option<u32>) {
        match kernel(text) {
            Some(Fact::GpuFault { fault, policy, pid, .. }) => (fault, policy, pid),
            other => panic!("{text}: {other:?}"),
        }
    }

    fn device(text: &str) -> Option<String> {
        match kernel(text) {
            Some(Fact::GpuFault { gpu, .. }) => gpu.map(|gpu| gpu.to_string()),
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn the_gpu_is_read_where_a_record_names_it() {
        let fallen = "79, GPU has fallen off the bus.";
        assert_eq!(device(&format!("NVRM: Xid (PCI:0000:3B:00): {fallen}")).as_deref(), Some("0000:3b:00.0"));
        assert_eq!(device(&format!("NVRM: Xid (PCI:0000:3b:00 GPU-I:05): {fallen}")).as_deref(), Some("0000:3b:00.0"));
        assert_eq!(device(&format!("NVRM: Xid (0000:3b:00): {fallen}")), None);
        let amd = "amdgpu 0000:03:00.0: amdgpu: GPU reset begin!";
        assert_eq!(device(amd).as_deref(), Some("0000:03:00.0"));
        let nameless =
            "[drm:amdgpu_job_timedout [amdgpu]] *ERROR* Process information: process python3 pid 1234 thread x";
        assert_eq!(device(nameless), None);
    }

    #[test]
    fn an_xid_is_read_with_its_process() {
        let line = "NVRM: Xid (PCI:0000:3b:00): 79, pid=4242, name=VLLM::EngineCor, GPU has fallen off the bus.";
        let fault = "xid 79 (GPU has fallen off the bus) PCI:0000:3b:00".to_owned();
        assert_eq!(gpu(line), (fault, GpuPolicy::Lost, Some(4242)));
        let line =
            "NVRM: Xid (PCI:0000:65:00): 31, pid=77, name=python3, Ch 00000008, intr 00000000. MMU Fault: ENGINE";
        assert_eq!((gpu(line).1, gpu(line).2), (GpuPolicy::Probe, Some(77)));
    }

    #[test]
    fn an_xid_without_a_process_is_nobodys() {
        for line in [
            "NVRM: Xid (PCI:0000:3b:00): 48, pid='<unknown>', name=<unknown>, An uncorrectable double bit error",
            "NVRM: Xid (PCI:0000:3b:00): 48, An uncorrectable double bit error, pid=5",
            "NVRM: Xid (PCI:0000:3b:00): 48",
            "NVRM: Xid (PCI:0000:3b:00): 48, pid=0, name=, An uncorrectable double bit error",
        ] {
            assert_eq!((gpu(line).1, gpu(line).2), (GpuPolicy::Lost, None), "{line}");
        }
    }

    #[test]
    fn a_name_that_looks_like_a_pid_is_not_taken_for_one() {
        let line = "NVRM: Xid (PCI:0000:3b:00): 13, pid=7, name=x, pid=8, Graphics Exception";
        assert_eq!(gpu(line).2, Some(7));
        let line = "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),task=x,pid=8,pid=9,uid=0";
        assert_eq!(kernel(line), Some(Fact::OomKill { tid: 9, scope: OomScope::Global }));
    }

    #[test]
    fn amdgpu_tells_of_resets_and_of_the_processes_behind_them() {
        assert_eq!(gpu("amdgpu 0000:03:00.0: amdgpu: GPU reset begin!").2, None);
        let line = "[drm:amdgpu_job_timedout [amdgpu]] *ERROR* Process information: process python3 pid 1234 thread python3 pid 1240";
        assert_eq!(gpu(line), ("amdgpu timeout".to_owned(), GpuPolicy::Probe, Some(1234)));
        let line = "amdgpu 0000:03:00.0: amdgpu: [gfxhub0] retry page fault (src_id:0 ring:0 vmid:8 pasid:32769, for process VLLM::Worker pid 99 thread x pid 99)";
        assert_eq!(gpu(line), ("amdgpu page fault".to_owned(), GpuPolicy::Probe, Some(99)));
        assert_eq!(kernel("amdgpu 0000:03:00.0: amdgpu: ring comp_1.0.0 uses VM inv eng 1"), None);
    }

    #[test]
    fn the_oom_killer_says_what_it_ran_out_of() {
        let line = "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/pod,task_memcg=/pod/x,task=python3,pid=1234,uid=0";
        assert_eq!(kernel(line), Some(Fact::OomKill { tid: 1234, scope: OomScope::Cgroup("/pod".to_owned()) }));
        let line = "oom-kill:constraint=CONSTRAINT_CPUSET,nodemask=0,task=a,pid=1,uid=0";
        assert_eq!(kernel(line), Some(Fact::OomKill { tid: 1, scope: OomScope::Nodes }));
    }

    #[test]
    fn what_processes_write_into_the_log_does_not_count() {
        let written = "12,1,2,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=x, a lie";
        assert_eq!(parse(written, Facilities::Kernel), None);
        assert!(parse(written, Facilities::Any).is_some());
    }

    #[test]
    fn anything_else_is_passed_over() {
        for record in [
            "",
            ";",
            "x;y",
            "6,1,2,-;",
            "6,1,2,-;usb 1-1: new device",
            "6,1,2,-;NVRM: Xid (PCI:1",
            "6,1,2,-;NVRM: Xid (a): b",
        ] {
            assert_eq!(parse(record, Facilities::Any), None, "{record}");
        }
    }
}

//! The kernel: which, whether it describes its types, and what restrains it.

use std::fs;
use std::path::Path;

use super::{Area, Finding, Grade};
use crate::config::EbpfConfig;
use crate::sensors::ebpf::btf::Btf;
use crate::sensors::ebpf::{KERNEL_BTF, Lockdown};

pub(super) fn examine(ebpf: Option<&EbpfConfig>) -> Vec<Finding> {
    let btf = ebpf.map_or(Path::new(KERNEL_BTF), |ebpf| &ebpf.btf);
    vec![release(), types(btf), lockdown(Lockdown::read()), modules()]
}

fn new(name: &str, grade: Grade, detail: impl Into<String>) -> Finding {
    Finding::new(Area::Kernel, name, grade, detail)
}

fn release() -> Finding {
    let read = |what: &str| fs::read_to_string(format!("/proc/sys/kernel/{what}")).unwrap_or_default();
    let release = read("osrelease");
    new("release", Grade::Fine, format!("{} {} {}", read("ostype").trim(), release.trim(), std::env::consts::ARCH))
}

fn types(path: &Path) -> Finding {
    let without = "no kernel program can be loaded";
    let fix = "use a kernel with CONFIG_DEBUG_INFO_BTF, or name a file with its BTF in ebpf.btf";
    let place = path.display();
    match fs::read(path) {
        Err(error) => new("btf", Grade::Degraded, format!("{place}: {error}; {without}")).fix(fix),
        Ok(bytes) => match Btf::parse(bytes) {
            Err(error) => new("btf", Grade::Degraded, format!("{place}: {error}; {without}")).fix(fix),
            Ok(btf) => new("btf", Grade::Fine, format!("{place}, {} types", btf.len())),
        },
    }
}

fn lockdown(lockdown: Lockdown) -> Finding {
    match lockdown {
        Lockdown::None => new("lockdown", Grade::Fine, "none"),
        Lockdown::Integrity => new("lockdown", Grade::Fine, "integrity, which lets tracing programs be"),
        Lockdown::Confidentiality => {
            let detail = "confidentiality: programs may not read the kernel's memory, so there is no eBPF";
            new("lockdown", Grade::Degraded, detail).fix("boot with lockdown=integrity, or do with pidfd")
        }
        Lockdown::Unknown => new("lockdown", Grade::Note, "not known: no /sys/kernel/security/lockdown here"),
    }
}

fn modules() -> Finding {
    match fs::read_to_string("/sys/kernel/security/lsm") {
        Ok(active) => new("security modules", Grade::Fine, active.trim().replace(',', ", ")),
        Err(_) => new("security modules", Grade::Note, "not known: no /sys/kernel/security/lsm here"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_confidentiality_costs_something() {
        for (mode, grade) in [
            (Lockdown::None, Grade::Fine),
            (Lockdown::Integrity, Grade::Fine),
            (Lockdown::Confidentiality, Grade::Degraded),
            (Lockdown::Unknown, Grade::Note),
        ] {
            assert_eq!(lockdown(mode).grade, grade, "{mode}");
        }
    }

    #[test]
    fn types_that_are_not_described_are_said_with_the_way_out() {
        let missing = types(Path::new("/nowhere/vmlinux"));
        assert_eq!(missing.grade, Grade::Degraded);
        assert!(missing.detail.contains("/nowhere/vmlinux"), "{missing:?}");
        assert!(missing.fix.unwrap().contains("ebpf.btf"));
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "not BTF").unwrap();
        assert_eq!(types(file.path()).grade, Grade::Degraded);
    }
}

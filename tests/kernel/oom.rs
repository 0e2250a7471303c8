//! The OOM killer.

use std::path::{Path, PathBuf};

use lastgasp::sensors::kmsg::{Facilities, Fact, Kmsg, LogEntry, OomScope};
use lastgasp_ebpf::{EventFlags, EventKind};
use nix::sys::signal::Signal;

use crate::harness::{Kernel, SLOT, Victim, until};

/// A memory cgroup of this test's own, removed with it.
struct MemoryCgroup(PathBuf);

impl MemoryCgroup {
    /// `None` where the memory controller is not to be had.
    fn new(bytes: u64) -> Option<Self> {
        let name = format!("lastgasp-oom-{}", std::process::id());
        let v1 = (Path::new("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.swappiness", "0");
        let v2 = (Path::new("/sys/fs/cgroup"), "memory.max", "memory.swap.max", "0");
        for (root, limit, swap, no_swap) in [v1, v2] {
            let _ = std::fs::write(root.join("cgroup.subtree_control"), "+memory");
            let folder = root.join(&name);
            if std::fs::create_dir(&folder).is_err() {
                continue;
            }
            let cgroup = Self(folder);
            if std::fs::write(cgroup.0.join(limit), bytes.to_string()).is_ok() {
                let _ = std::fs::write(cgroup.0.join(swap), no_swap);
                return Some(cgroup);
            }
        }
        None
    }
}

impl Drop for MemoryCgroup {
    fn drop(&mut self) {
        // The last process may be leaving it still.
        until("the cgroup is empty", || std::fs::remove_dir(&self.0).is_ok().then_some(()));
    }
}

#[test]
fn a_process_killed_for_memory_is_named() {
    let Some(cgroup) = MemoryCgroup::new(32 << 20) else {
        lastgasp_tests::skip!("no memory cgroup can be made");
    };
    let mut kernel = Kernel::load();
    let log = Kmsg::open(Facilities::Kernel).expect("root may read it");
    let mut victim = Victim::start(&["allocate", cgroup.0.to_str().expect("plain letters")]);
    kernel.watch(&victim);
    victim.go();
    assert_eq!(victim.wait_raw(), Signal::SIGKILL as u32);
    let [marked] = kernel.of(EventKind::MarkVictim, victim.tgid)[..] else { panic!("one mark: {:#?}", kernel.seen()) };
    assert_eq!((marked.slot, marked.start_ticks()), (SLOT, victim.start_ticks));
    let exit = kernel.wait_for_kind(EventKind::Exit, victim.tgid);
    assert!(marked.at < exit.at);

    // Who sent the SIGKILL, and what there was not enough of.
    let sent = kernel.wait_for_kind(EventKind::SignalGenerate, victim.tgid);
    assert!(sent.flags.contains(EventFlags::FROM_KERNEL));
    let mut scope = None;
    kernel.follow(log, |entry| {
        match entry {
            LogEntry::Fact(Fact::OomKill { tid, scope: one }) if tid == victim.tgid => scope = Some(one),
            _ => {}
        }
        scope.is_none()
    });
    let Some(OomScope::Cgroup(path)) = scope else { panic!("{scope:?}") };
    assert!(cgroup.0.ends_with(path.trim_start_matches('/')), "{path}");
}

//! The kernel's log, with lines that this test writes into it: only the test takes them for the
//! kernel's.

use lastgasp::core::GpuPolicy;
use lastgasp::sensors::gpus::PciAddress;
use lastgasp::sensors::kmsg::{Facilities, Fact, KMSG, Kmsg, LogEntry};

fn write(line: &str) {
    // With its end, or the next one might be taken for a part of it.
    std::fs::write(KMSG, format!("{line}\n")).expect("root may write to the kernel's log");
}

/// A pid for the lines of one test: its own thread's. All tests write to the same log at the same time, and
/// no other task of this machine has this number.
fn own_pid() -> u32 {
    nix::unistd::gettid().as_raw().cast_unsigned()
}

/// The first entry that names this process.
fn entry_of(pid: u32, facilities: Facilities, lines: &[String]) -> LogEntry {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let log = Kmsg::open(facilities).expect("root may read it");
        for line in lines {
            write(line);
        }
        let mut first = None;
        let followed = log.follow(|entry| {
            let is_it = matches!(&entry, LogEntry::Fact(Fact::GpuFault { pid: named, .. }) if *named == Some(pid));
            if is_it {
                first = Some(entry);
            }
            !is_it
        });
        let followed = tokio::time::timeout(std::time::Duration::from_secs(60), followed);
        followed.await.expect("it is reported").expect("the log can be read");
        first.expect("the loop ended with it")
    })
}

#[test]
fn an_xid_is_read_from_the_log_and_what_was_logged_before_is_not() {
    let pid = own_pid();
    write(&format!("<4>NVRM: Xid (PCI:0000:3b:00): 48, pid={pid}, name=before, too early"));
    let lines = [
        "<6>usb 1-1: nothing of interest".to_owned(),
        format!("<4>NVRM: Xid (PCI:0000:3b:00): 79, pid={pid}, name=kernel, GPU has fallen off the bus."),
    ];
    let entry = entry_of(pid, Facilities::Any, &lines);
    let fault = "xid 79 (GPU has fallen off the bus) PCI:0000:3b:00".to_owned();
    let gpu = PciAddress::parse("0000:3b:00.0");
    assert_eq!(entry, LogEntry::Fact(Fact::GpuFault { fault, policy: GpuPolicy::Lost, pid: Some(pid), gpu }));
}

/// Whatever facility a process asks for, the kernel does not let it be its own.
#[test]
fn nobody_can_speak_for_the_kernel() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let pid = own_pid();
    let own = runtime.block_on(async {
        let any = Kmsg::open(Facilities::Any).expect("root may read it");
        let kernel = Kmsg::open(Facilities::Kernel).expect("root may read it");
        write(&format!("<0>NVRM: Xid (PCI:0000:00:01): 95, pid={pid}, name=x, a lie"));
        let is_it =
            |entry: &LogEntry| matches!(entry, LogEntry::Fact(Fact::GpuFault { pid: named, .. }) if *named == Some(pid));
        // Once the one that believes everything has reported it, the other has passed it over.
        tokio::select! {
            biased;
            believed = kernel.follow(|entry| !is_it(&entry)) => { believed.expect("readable"); true }
            entry = any.follow(|entry| !is_it(&entry)) => { entry.expect("readable"); false }
        }
    });
    assert!(!own, "a process's line was taken for the kernel's");
}

//! Many processes at once, watched and unwatched.

use std::collections::HashMap;

use lastgasp::sensors::ebpf::{KernelProgram, LoadOptions};
use lastgasp_ebpf::EventKind;
use nix::sys::signal::{Signal, killpg};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::Pid;

use crate::harness::{Kernel, SLOT, Victim, start_ticks, until};

/// A node full of workers dies in one moment, while unrelated processes come and go as fast as the
/// machine can make them.
#[test]
fn five_hundred_and_twelve_die_at_once_amid_a_storm() {
    const PROCESSES: usize = 512;
    let mut kernel = Kernel::load();
    let sleepers = Victim::start(&["sleepers", &PROCESSES.to_string()]);
    let pids: Vec<u32> = sleepers.said.split(' ').map(|pid| pid.parse().expect("a pid")).collect();
    assert_eq!(pids.len(), PROCESSES);
    let mut watched = HashMap::new();
    for pid in &pids {
        let ticks = start_ticks(*pid).expect("it sleeps");
        kernel.programs.watch(*pid, SLOT, ticks).expect("there is room");
        watched.insert(*pid, ticks);
    }
    let mut storm = Victim::start(&["storm", "4"]);
    let begin = std::time::Instant::now();
    // It blows for a while before, …
    until("a second is over", || (begin.elapsed().as_millis() > 1000).then_some(()));
    killpg(Pid::from_raw(pids[0] as i32), Signal::SIGKILL).expect("they are there");
    let mut exits: HashMap<u32, usize> = HashMap::new();
    let all = until("all of them are dead", || {
        let dead = kernel.seen().iter().filter(|event| event.kind() == Some(EventKind::Exit)).count();
        (dead >= PROCESSES).then_some(dead)
    });
    // … and goes on after.
    until("another second is over", || (begin.elapsed().as_millis() > 2000).then_some(()));
    storm.go();
    let storm_exits = storm.read_number("exits ");
    let rate = f64::from(storm_exits) / begin.elapsed().as_secs_f64();
    storm.wait();

    for event in kernel.seen().iter().filter(|event| event.kind() == Some(EventKind::Exit)) {
        assert_eq!(watched.get(&event.tgid), Some(&event.start_ticks()), "{event:?} is nobody's");
        *exits.entry(event.tgid).or_default() += 1;
    }
    assert_eq!((all, exits.len()), (PROCESSES, PROCESSES), "none missed");
    assert!(exits.values().all(|count| *count == 1), "none twice");
    let others = kernel.seen().iter().filter(|event| !watched.contains_key(&event.tgid)).count();
    assert_eq!(others, 0, "the storm is silent");
    let dropped = kernel.programs.dropped().expect("permitted");
    assert!(dropped.iter().all(|(_, count)| *count == 0), "{dropped:?}");
    assert_eq!(kernel.programs.watched_processes().count(), 0, "an exit ends the watch");
    eprintln!("{PROCESSES} deaths among {rate:.0} unrelated exits a second");
}

/// A pid that is used again while the watch on its first owner is still there.
#[test]
fn a_pid_that_is_used_again_is_another_process() {
    // The pid that was given last; the next one is tried first (CONFIG_CHECKPOINT_RESTORE).
    const LAST_PID: &str = "/proc/sys/kernel/ns_last_pid";
    if !std::path::Path::new(LAST_PID).exists() {
        lastgasp_tests::skip!("this kernel has no {LAST_PID}");
    }
    // Without this program nothing ends the watch.
    let options = LoadOptions { disabled: vec![KernelProgram::Exit], ..LoadOptions::default() };
    let mut kernel = Kernel::load_with(&options);
    let mut first = Victim::start(&["threads", "1"]);
    kernel.watch(&first);
    first.kill(Signal::SIGKILL);
    first.wait();
    let seen = kernel.seen().len();
    assert!(kernel.programs.watched(first.tgid).is_some());

    // Start times differ by hundredths of a second.
    until("the clock has ticked", || {
        let now = clock_gettime(ClockId::CLOCK_BOOTTIME).expect("every system has this clock");
        let now = now.tv_sec() as u64 * 1_000_000_000 + now.tv_nsec() as u64;
        (lastgasp_ebpf::start_ticks(now) > first.start_ticks).then_some(())
    });
    // Somebody else may be faster.
    let mut second = until("the pid is used again", || {
        std::fs::write(LAST_PID, (first.tgid - 1).to_string()).expect("root may");
        let next = Victim::start(&["threads", "1"]);
        (next.tgid == first.tgid).then_some(next)
    });
    assert_ne!(second.start_ticks, first.start_ticks);
    second.kill(Signal::SIGTERM);
    second.wait();
    assert_eq!(kernel.seen().len(), seen, "its signals are not its predecessor's");
}

//! What does not fit into the ring is counted.

use lastgasp::sensors::ebpf::{KernelProgram, LoadOptions};
use lastgasp_ebpf::EventKind;
use strum::VariantArray as _;

use crate::harness::{Kernel, Victim};

#[test]
fn received_and_dropped_are_all_there_were() {
    const CHILDREN: u64 = 200;
    let disabled = KernelProgram::VARIANTS.iter().copied().filter(|program| *program != KernelProgram::Fork).collect();
    // One page, the smallest ring there is: room for about 30 events.
    let options = LoadOptions { disabled, ring_bytes: Some(4096), ..LoadOptions::default() };
    let mut kernel = Kernel::load_with(&options);
    let mut victim = Victim::start(&["fork-many", &CHILDREN.to_string()]);
    kernel.watch(&victim);
    victim.go();
    assert_eq!(victim.read(), "done");

    let dropped = |kernel: &Kernel| kernel.programs.dropped().expect("permitted");
    let lost: u64 = dropped(&kernel).iter().map(|(_, count)| count).sum();
    let lost_forks = dropped(&kernel)[EventKind::Fork as usize];
    assert_eq!(lost_forks, (EventKind::Fork, lost), "only this program is on");
    assert!(lost > 0, "nobody read while {CHILDREN} events came");
    assert_eq!(kernel.seen().len() as u64 + lost, CHILDREN);

    // Once there is room, nothing more is lost.
    kernel.programs.unwatch(victim.tgid, victim.start_ticks).expect("permitted");
    let mut another = Victim::start(&["fork"]);
    kernel.watch(&another);
    another.go();
    let child = another.read_number("child ");
    kernel.wait_for_kind(EventKind::Fork, child);
    assert_eq!(dropped(&kernel).map(|(_, count)| count).iter().sum::<u64>(), lost);
}

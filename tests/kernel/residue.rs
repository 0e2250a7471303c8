//! Nothing stays in the kernel when the process that loaded it is gone.

use std::collections::BTreeSet;
use std::process::Command;

use lastgasp_tests::kernel_objects::{held_by, loaded};
use nix::sys::signal::Signal;

use crate::harness::{Kernel, Victim, until};

/// Not a story, but the process that one is about: this binary runs itself with this test alone.
#[test]
#[ignore = "run by a_killed_loader_leaves_nothing_behind"]
fn loader() {
    let kernel = Kernel::load();
    println!("\nready");
    std::io::stdin().read_line(&mut String::new()).expect("the story holds the other end");
    drop(kernel);
}

#[test]
fn a_killed_loader_leaves_nothing_behind() {
    let mut command = Command::new(std::env::current_exe().expect("procfs is mounted"));
    let mut loader = Victim::start_by(&mut command, &["--ignored", "--exact", "residue::loader", "--nocapture"]);
    let held = held_by(loader.tgid).expect("root may look");
    // Ten programs with a link each, eight maps and the globals.
    assert_eq!(held.each_ref().map(BTreeSet::len), [10, 9, 10]);
    for (held, loaded) in held.iter().zip(loaded()) {
        assert!(held.is_subset(&loaded), "{held:?} in {loaded:?}");
    }

    loader.kill(Signal::SIGKILL);
    loader.wait();
    // The kernel frees them in the background.
    until("nothing of it is left in the kernel", || {
        held.iter().zip(loaded()).all(|(held, loaded)| held.is_disjoint(&loaded)).then_some(())
    });
}

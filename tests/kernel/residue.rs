//! Nothing stays in the kernel when the process that loaded it is gone.

use std::{collections::BTreeSet, process::Command};

use aya::{
    maps::loaded_maps,
    programs::{loaded_links, loaded_programs},
};
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

/// The ids of one sort of kernel object that a process holds open.
fn held(tgid: u32, key: &str) -> BTreeSet<u32> {
    let descriptors = std::fs::read_dir(format!("/proc/{tgid}/fdinfo")).expect("root may look");
    descriptors
        .filter_map(|descriptor| std::fs::read_to_string(descriptor.ok()?.path()).ok())
        .filter_map(|info| info.lines().find_map(|line| line.strip_prefix(key)?.trim().parse().ok()))
        .collect()
}

fn loaded() -> [BTreeSet<u32>; 3] {
    let programs = loaded_programs().filter_map(|program| Some(program.ok()?.id())).collect();
    let maps = loaded_maps().filter_map(|map| Some(map.ok()?.id())).collect();
    let links = loaded_links().filter_map(|link| Some(link.ok()?.id())).collect();
    [programs, maps, links]
}

#[test]
fn a_killed_loader_leaves_nothing_behind() {
    let mut command = Command::new(std::env::current_exe().expect("procfs is mounted"));
    let mut loader = Victim::start_by(&mut command, &["--ignored", "--exact", "residue::loader", "--nocapture"]);
    let held = ["prog_id:", "map_id:", "link_id:"].map(|key| held(loader.tgid, key));
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

//! Programs, maps and links of eBPF: what is in the kernel, and what of it a process holds open.

use std::collections::BTreeSet;
use std::io;

use aya::maps::loaded_maps;
use aya::programs::{loaded_links, loaded_programs};

/// Ids of programs, of maps and of links.
pub type Ids = [BTreeSet<u32>; 3];

/// What a process holds open (`bpf_prog_show_fdinfo` and its like in kernel/bpf/syscall.c).
///
/// # Errors
///
/// There is no such process, or the test may not look into it.
pub fn held_by(pid: u32) -> io::Result<Ids> {
    let descriptors: Vec<String> = std::fs::read_dir(format!("/proc/{pid}/fdinfo"))?
        .filter_map(|descriptor| std::fs::read_to_string(descriptor.ok()?.path()).ok())
        .collect();
    let ids = |key| descriptors.iter().filter_map(move |info| id(info, key)).collect();
    Ok(["prog_id:", "map_id:", "link_id:"].map(ids))
}

fn id(info: &str, key: &str) -> Option<u32> {
    info.lines().find_map(|line| line.strip_prefix(key)?.trim().parse().ok())
}

/// What is in the kernel, whoever holds it.
#[must_use]
pub fn loaded() -> Ids {
    let programs = loaded_programs().filter_map(|program| Some(program.ok()?.id())).collect();
    let maps = loaded_maps().filter_map(|map| Some(map.ok()?.id())).collect();
    let links = loaded_links().filter_map(|link| Some(link.ok()?.id())).collect();
    [programs, maps, links]
}

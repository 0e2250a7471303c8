//! What follows from an Xid, NVIDIA's number of a GPU fault ("Xid Errors" in NVIDIA's documentation
//! for GPU deployment and management).

use crate::core::GpuPolicy::{self, Lost, Note, Probe};

/// By number. What is not listed is noted.
const XIDS: [(u32, GpuPolicy, &str); 21] = [
    (13, Probe, "graphics engine exception: a fault of the program, or of the GPU"),
    (31, Probe, "MMU fault: a fault of the program, or of the GPU"),
    (43, Probe, "the GPU stopped processing"),
    // It follows every killed process.
    (45, Note, "preemptive cleanup of a channel"),
    (48, Lost, "double bit ECC error"),
    (61, Probe, "internal micro-controller breakpoint"),
    (62, Lost, "internal micro-controller halt"),
    (63, Note, "row remapping or page retirement recorded"),
    (64, Lost, "row remapping or page retirement failed"),
    (68, Probe, "video processor exception"),
    (69, Probe, "graphics engine class error"),
    (74, Probe, "NVLink error"),
    (79, Lost, "GPU has fallen off the bus"),
    (92, Note, "high rate of single bit ECC errors"),
    (94, Lost, "contained memory error: its process does not survive"),
    (95, Lost, "uncontained memory error"),
    (109, Probe, "context switch timeout"),
    (119, Lost, "GSP RPC timeout"),
    (120, Lost, "GSP error"),
    (140, Lost, "unrecovered ECC error"),
    (154, Note, "recovery action changed"),
];

/// What is to be done about an Xid of a worker's process.
#[must_use]
pub fn policy(xid: u32) -> GpuPolicy {
    XIDS.iter().find(|(number, ..)| *number == xid).map_or(Note, |(_, policy, _)| *policy)
}

/// What it is called; empty for one that is not listed.
pub(super) fn title(xid: u32) -> &'static str {
    XIDS.iter().find(|(number, ..)| *number == xid).map_or("", |(.., title)| title)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_order_and_unlisted_numbers_are_noted() {
        assert!(XIDS.is_sorted_by(|(a, ..), (b, ..)| a < b));
        for (xid, expected) in [(48, Lost), (79, Lost), (94, Lost), (95, Lost), (31, Probe), (45, Note), (9999, Note)] {
            assert_eq!(policy(xid), expected, "xid {xid}");
        }
    }
}

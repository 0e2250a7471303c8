//! The BTF of kernels that nobody here runs, and what a C compiler says of the same structs.
//!
//! recorded/README.md says where both come from.

use lastgasp_ebpf::names::global;

use super::{super::btf::LookupError, *};

/// Kernel versions, and their BTF.
const KERNELS: [(&str, &[u8]); 7] = [
    ("5.10", include_bytes!("recorded/5.10.btf")),
    ("6.1", include_bytes!("recorded/6.1.btf")),
    ("6.6", include_bytes!("recorded/6.6.btf")),
    ("6.12", include_bytes!("recorded/6.12.btf")),
    ("6.18", include_bytes!("recorded/6.18.btf")),
    ("7.2", include_bytes!("recorded/7.2.btf")),
    ("6.1 on arm64", include_bytes!("recorded/6.1-arm64.btf")),
];

/// `offsetof` of each field, by kernel in the order of [`KERNELS`].
#[rustfmt::skip]
const OFFSETS: [(&str, [u32; 7]); 25] = [
    //                                 5.10   6.1   6.6  6.12  6.18   7.2 arm64
    (global::TASK_TGID,              [2236, 2420, 1316, 2436, 1268, 2812, 1356]),
    (global::TASK_PID,               [2232, 2416, 1312, 2432, 1264, 2808, 1352]),
    (global::TASK_FLAGS,             [  36,   44,   44,   44,   44,   44,   44]),
    (global::TASK_COMM,              [2736, 2976, 1864, 2976, 1752, 3344, 1912]),
    (global::TASK_GROUP_LEADER,      [2296, 2480, 1368, 2496, 1328, 2872, 1416]),
    (global::TASK_START_BOOTTIME,    [2544, 2784, 1672, 2784, 1560, 3160, 1720]),
    (global::TASK_EXIT_CODE,         [2136, 2312, 1212, 2332, 1164, 2708, 1248]),
    (global::TASK_SIGNAL,            [2832, 3072, 1960, 3072, 1848, 3448, 2008]),
    (global::SIGNAL_FLAGS,           [ 116,  116,  116,  116,  116,  116,  116]),
    (global::SIGNAL_GROUP_EXIT_CODE, [  96,   96,   96,   96,   96,   96,   96]),
    (global::SIGACTION_HANDLER,      [   0,    0,    0,    0,    0,    0,    0]),
    (global::INET_SPORT,             [ 784,  804,  766,  798,  814,  830,  804]),
    (global::SOCK_NET,               [  48,   48,   48,   48,   48,   48,   48]),
    (global::NET_INUM,               [ 144,  144,  136,  136,  176,  280,  144]),
    (global::SIGINFO_CODE,           [   8,    8,    8,    8,    8,    8,    8]),
    (global::SOCK_FAMILY,            [  16,   16,   16,   16,   16,   16,   16]),
    // In unnamed structs inside of unnamed unions, as are skc_dport and skc_daddr.
    (global::SOCK_NUM,               [  14,   14,   14,   14,   14,   14,   14]),
    (global::SOCK_DPORT,             [  12,   12,   12,   12,   12,   12,   12]),
    (global::SOCK_DADDR,             [   0,    0,    0,    0,    0,    0,    0]),
    (global::SOCK_V6_DADDR,          [  56,   56,   56,   56,   56,   56,   56]),
    (global::SKB_HEAD,               [ 192,  200,  192,  200,  192,  200,  200]),
    (global::SKB_TRANSPORT,          [ 178,  182,  174,  182,  178,  182,  182]),
    (global::SKB_NETWORK,            [ 180,  184,  176,  184,  180,  184,  184]),
    (global::SKB_DEV,                [  16,   16,   16,   16,   16,   16,   16]),
    (global::DEV_NET,                [1264, 1272, 1072,  280,  264,  264, 1280]),
];

/// What the tracepoints' prototypes say, likewise.
#[rustfmt::skip]
const VARIANTS: [(&str, [u32; 7]); 3] = [
    //                             5.10 6.1 6.6 6.12 6.18 7.2 arm64
    (global::EXIT_HAS_GROUP_DEAD, [0,   0,  0,  0,   1,   1,   0]),
    // Ported back to the others, of which 6.6 is a development tree.
    (global::OOM_HAS_TASK,        [1,   1,  0,  1,   1,   1,   1]),
    (global::RESET_HAS_REASON,    [0,   0,  0,  1,   1,   1,   0]),
];

fn parse(bytes: &[u8]) -> Btf {
    Btf::parse(bytes.to_vec()).expect("it was recorded whole")
}

#[test]
fn every_probe_fits_and_every_offset_is_the_compilers() {
    for (index, (kernel, bytes)) in KERNELS.into_iter().enumerate() {
        let mut plan = Plan::new(&parse(bytes), &LoadOptions::default());
        for (program, state) in &plan.programs {
            assert_eq!(*state, Ok(()), "{kernel}: {program}");
        }
        for (global, values) in OFFSETS.into_iter().chain(VARIANTS) {
            assert_eq!(plan.globals.remove(global), Some(values[index]), "{kernel}: {global}");
        }
        // Read only where the tracepoint does not say it.
        let live = (plan.globals.remove(global::SIGNAL_LIVE), VARIANTS[0].1[index]);
        assert!(matches!(live, (Some(4), 0) | (None, 1)), "{kernel}: {live:?}");
        assert!(plan.globals.is_empty(), "{kernel}: nothing is known of {:?}", plan.globals);
    }
}

#[test]
fn reasons_of_a_reset_have_the_numbers_of_their_kernel() {
    let reason = |kernel| {
        let (_, bytes) = KERNELS.into_iter().find(|(name, _)| *name == kernel).expect("it is recorded");
        let reasons = Plan::new(&parse(bytes), &LoadOptions::default()).reset_reasons;
        reasons.into_iter().find(|(_, name)| name == "tcp_abort_on_memory").map(|(number, _)| number)
    };
    assert_eq!(reason("6.6"), None, "it gives none");
    assert!(reason("6.12").is_some() && reason("7.2").is_some());
}

/// As in a kernel in which it is called otherwise: nothing is guessed, and who needs it says so.
#[test]
fn a_member_that_is_missing_is_named() {
    for (kernel, bytes) in KERNELS {
        let mut bytes = bytes.to_vec();
        let name = b"\0inet_sport\0";
        let at = bytes.windows(name.len()).position(|window| window == name).expect("it has a name");
        bytes[at + 1..][..4].copy_from_slice(b"isk_");

        let btf = parse(&bytes);
        let missing = LookupError::NoField { owner: "inet_sock".to_owned(), field: "inet_sport".to_owned() };
        assert_eq!(btf.field("inet_sock", &["inet_sport"]), Err(missing.clone()), "{kernel}");
        let plan = Plan::new(&btf, &LoadOptions::default());
        let off = OffReason::NoField { detail: missing.to_string() };
        assert_eq!(off.to_string(), "struct inet_sock has no field inet_sport in this kernel");
        for (program, state) in plan.programs {
            let needs_it = matches!(
                program,
                KernelProgram::ListenerClosed | KernelProgram::TcpResetSent | KernelProgram::TcpResetReceived
            );
            assert_eq!(state, if needs_it { Err(off.clone()) } else { Ok(()) }, "{kernel}: {program}");
        }
        assert!(!plan.globals.contains_key(global::INET_SPORT), "{kernel}");
    }
}

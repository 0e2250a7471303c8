//! Which fields each program reads, and where they lie in the running kernel.
//!
//! A field that is missing, or has another size than the program reads, switches
//! off the programs that need it. It is never taken to be at offset zero.

use std::collections::BTreeMap;

use lastgasp_ebpf::{COMM_BYTES, names::global};
use strum::VariantArray as _;

use super::{
    btf::{Argument, Btf},
    loader::LoadOptions,
    program::{KernelProgram, OffReason},
};

/// A field that a program reads, and the global that tells the program where it is.
#[derive(Debug, Eq, PartialEq)]
struct Need {
    global: &'static str,
    owner: &'static str,
    path: &'static [&'static str],
    bytes: u32,
}

const fn need(global: &'static str, owner: &'static str, path: &'static [&'static str], bytes: u32) -> Need {
    Need { global, owner, path, bytes }
}

const TASK_TGID: Need = need(global::TASK_TGID, "task_struct", &["tgid"], 4);
const TASK_PID: Need = need(global::TASK_PID, "task_struct", &["pid"], 4);
const TASK_FLAGS: Need = need(global::TASK_FLAGS, "task_struct", &["flags"], 4);
const TASK_COMM: Need = need(global::TASK_COMM, "task_struct", &["comm"], COMM_BYTES as u32);
const TASK_GROUP_LEADER: Need = need(global::TASK_GROUP_LEADER, "task_struct", &["group_leader"], 8);
const TASK_START_BOOTTIME: Need = need(global::TASK_START_BOOTTIME, "task_struct", &["start_boottime"], 8);
const TASK_EXIT_CODE: Need = need(global::TASK_EXIT_CODE, "task_struct", &["exit_code"], 4);
const TASK_SIGNAL: Need = need(global::TASK_SIGNAL, "task_struct", &["signal"], 8);
const SIGNAL_LIVE: Need = need(global::SIGNAL_LIVE, "signal_struct", &["live", "counter"], 4);
const SIGNAL_FLAGS: Need = need(global::SIGNAL_FLAGS, "signal_struct", &["flags"], 4);
const SIGNAL_GROUP_EXIT_CODE: Need = need(global::SIGNAL_GROUP_EXIT_CODE, "signal_struct", &["group_exit_code"], 4);
const SIGACTION_HANDLER: Need = need(global::SIGACTION_HANDLER, "k_sigaction", &["sa", "sa_handler"], 8);
const INET_SPORT: Need = need(global::INET_SPORT, "inet_sock", &["inet_sport"], 2);
const SOCK_NET: Need = need(global::SOCK_NET, "sock", &["__sk_common", "skc_net", "net"], 8);
const NET_INUM: Need = need(global::NET_INUM, "net", &["ns", "inum"], 4);

const SIGINFO_CODE: Need = need(global::SIGINFO_CODE, "kernel_siginfo", &["si_code"], 4);
const SOCK_FAMILY: Need = need(global::SOCK_FAMILY, "sock", &["__sk_common", "skc_family"], 2);
const SOCK_NUM: Need = need(global::SOCK_NUM, "sock", &["__sk_common", "skc_num"], 2);
const SOCK_DPORT: Need = need(global::SOCK_DPORT, "sock", &["__sk_common", "skc_dport"], 2);
const SOCK_DADDR: Need = need(global::SOCK_DADDR, "sock", &["__sk_common", "skc_daddr"], 4);
const SOCK_V6_DADDR: Need = need(global::SOCK_V6_DADDR, "sock", &["__sk_common", "skc_v6_daddr"], 16);
const SKB_HEAD: Need = need(global::SKB_HEAD, "sk_buff", &["head"], 8);
const SKB_TRANSPORT: Need = need(global::SKB_TRANSPORT, "sk_buff", &["transport_header"], 2);
const SKB_NETWORK: Need = need(global::SKB_NETWORK, "sk_buff", &["network_header"], 2);
const SKB_DEV: Need = need(global::SKB_DEV, "sk_buff", &["dev"], 8);
const DEV_NET: Need = need(global::DEV_NET, "net_device", &["nd_net", "net"], 8);

/// What every program reads to identify a process.
const IDENTITY: &[Need] = &[TASK_GROUP_LEADER, TASK_START_BOOTTIME, TASK_COMM];

/// A tracepoint's variant in this kernel.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Variant {
    /// There is only one.
    Only,
    /// `sched_process_exit` with `group_dead`, Linux 6.16 and later.
    ExitGroupDead,
    /// `sched_process_exit` with the task alone.
    ExitTask,
    /// `mark_victim` with a task.
    OomTask,
    /// `mark_victim` with a thread id.
    OomThreadId,
    /// `tcp_send_reset` with the reason, Linux 6.11 and later.
    ResetReason,
    /// `tcp_send_reset` with socket and packet alone.
    ResetPlain,
}

impl Variant {
    /// From the prototype, never from a version: distributions port these changes back.
    fn of(program: KernelProgram, arguments: &[Argument]) -> Result<Self, OffReason> {
        use Argument::{Pointer, Scalar};
        let known = match (program, arguments) {
            (KernelProgram::Exit, [Pointer]) => Self::ExitTask,
            (KernelProgram::Exit, [Pointer, Scalar]) => Self::ExitGroupDead,
            (KernelProgram::MarkVictim, [Scalar]) => Self::OomThreadId,
            (KernelProgram::MarkVictim, [Pointer, ..]) => Self::OomTask,
            (KernelProgram::TcpResetSent, [Pointer, Pointer]) => Self::ResetPlain,
            (KernelProgram::TcpResetSent, [Pointer, Pointer, Scalar]) => Self::ResetReason,
            (KernelProgram::SignalDeliver, [Scalar, Pointer, Pointer])
            | (KernelProgram::Fork, [Pointer, Pointer])
            | (KernelProgram::Exec, [Pointer, Scalar, Pointer])
            | (KernelProgram::Rename, [Pointer, Pointer])
            | (KernelProgram::ListenerClosed, [Pointer, Scalar, Scalar])
            | (KernelProgram::SignalGenerate, [Scalar, Pointer, Pointer, Scalar, Scalar])
            | (KernelProgram::TcpResetReceived, [Pointer]) => Self::Only,
            _ => return Err(OffReason::UnknownPrototype { arguments: arguments.len() }),
        };
        Ok(known)
    }

    /// The global that tells the program, and its value.
    fn global(self) -> Option<(&'static str, u32)> {
        match self {
            Self::Only => None,
            Self::ExitGroupDead => Some((global::EXIT_HAS_GROUP_DEAD, 1)),
            Self::ExitTask => Some((global::EXIT_HAS_GROUP_DEAD, 0)),
            Self::OomTask => Some((global::OOM_HAS_TASK, 1)),
            Self::OomThreadId => Some((global::OOM_HAS_TASK, 0)),
            Self::ResetReason => Some((global::RESET_HAS_REASON, 1)),
            Self::ResetPlain => Some((global::RESET_HAS_REASON, 0)),
        }
    }
}

/// What a program reads beside what identifies a process.
fn needs(program: KernelProgram, variant: Variant) -> &'static [Need] {
    match program {
        // The scalar says it; `live` is read where there is none.
        KernelProgram::Exit if variant == Variant::ExitGroupDead => {
            &[TASK_SIGNAL, TASK_EXIT_CODE, SIGNAL_FLAGS, SIGNAL_GROUP_EXIT_CODE]
        }
        KernelProgram::Exit => &[TASK_SIGNAL, TASK_EXIT_CODE, SIGNAL_FLAGS, SIGNAL_GROUP_EXIT_CODE, SIGNAL_LIVE],
        KernelProgram::SignalDeliver => &[TASK_SIGNAL, SIGNAL_FLAGS, SIGNAL_GROUP_EXIT_CODE, SIGACTION_HANDLER],
        KernelProgram::Fork => &[TASK_TGID],
        KernelProgram::Exec | KernelProgram::Rename => &[],
        KernelProgram::MarkVictim => &[TASK_TGID, TASK_PID],
        KernelProgram::ListenerClosed => &[TASK_FLAGS, INET_SPORT, SOCK_NET, NET_INUM],
        KernelProgram::SignalGenerate => &[TASK_TGID, TASK_SIGNAL, SIGNAL_FLAGS, SIGINFO_CODE],
        KernelProgram::TcpResetSent => &[
            INET_SPORT,
            SOCK_NET,
            NET_INUM,
            SOCK_FAMILY,
            SOCK_NUM,
            SOCK_DPORT,
            SOCK_DADDR,
            SOCK_V6_DADDR,
            SKB_HEAD,
            SKB_TRANSPORT,
            SKB_NETWORK,
            SKB_DEV,
            DEV_NET,
        ],
        KernelProgram::TcpResetReceived => {
            &[INET_SPORT, SOCK_NET, NET_INUM, SOCK_FAMILY, SOCK_NUM, SOCK_DPORT, SOCK_DADDR, SOCK_V6_DADDR]
        }
    }
}

/// What to tell the programs, and which of them fit this kernel.
#[derive(Debug)]
pub struct Plan {
    /// Globals to set. Those that no fitting program reads keep a value that is no offset.
    pub globals: BTreeMap<&'static str, u32>,
    /// For each program, whether it fits.
    pub programs: Vec<(KernelProgram, Result<(), OffReason>)>,
    /// The names of this kernel's reasons for a TCP reset, by number; they differ between kernels.
    pub reset_reasons: BTreeMap<u32, String>,
}

impl Plan {
    /// Looks up everything in the kernel's BTF.
    #[must_use]
    pub fn new(btf: &Btf, options: &LoadOptions) -> Self {
        let mut globals = BTreeMap::new();
        let mut fit = |program| {
            if options.disabled.contains(&program) {
                return Err(OffReason::Disabled);
            }
            let mut found = BTreeMap::new();
            let variant = match Variant::of(program, &btf.tracepoint(program.tracepoint())?)? {
                Variant::ExitGroupDead if options.ignore_group_dead => Variant::ExitTask,
                variant => variant,
            };
            found.extend(variant.global());
            let identity = match program {
                // They run in whoever is interrupted.
                KernelProgram::TcpResetSent | KernelProgram::TcpResetReceived => &[],
                _ => IDENTITY,
            };
            for need in identity.iter().chain(needs(program, variant)) {
                if !globals.contains_key(need.global) {
                    found.insert(need.global, offset(btf, need)?);
                }
            }
            globals.append(&mut found);
            Ok(())
        };
        let programs = KernelProgram::VARIANTS.iter().map(|program| (*program, fit(*program))).collect();
        let reset_reasons =
            btf.enumerators("sk_rst_reason").into_iter().map(|(name, number)| (number, plain_reason(&name)));
        Self { globals, programs, reset_reasons: reset_reasons.collect() }
    }
}

/// `SK_RST_REASON_TCP_ABORT_ON_CLOSE` as `tcp_abort_on_close`.
fn plain_reason(name: &str) -> String {
    name.strip_prefix("SK_RST_REASON_").unwrap_or(name).to_ascii_lowercase()
}

fn offset(btf: &Btf, need: &Need) -> Result<u32, OffReason> {
    let field = btf.field(need.owner, need.path)?;
    if field.size != need.bytes {
        return Err(OffReason::FieldSize {
            field: format!("{}.{}", need.owner, need.path.join(".")),
            found: field.size,
            expected: need.bytes,
        });
    }
    Ok(field.offset)
}

#[cfg(test)]
mod recorded;
#[cfg(test)]
#[expect(unreachable_pub, reason = "it is a public module of the crate that it lies in")]
#[path = "../../../../tests/src/skipped.rs"]
mod skipped;

#[cfg(test)]
mod tests {
    use super::{super::btf::synthetic::Builder, *};

    /// A kernel in miniature, from which a test can take something away.
    struct Kernel {
        b: Builder,
        int: u32,
        pointer: u32,
        task_fields: Vec<&'static str>,
        start_boottime_bytes: u32,
        exit_arguments: usize,
        oom_has_task: bool,
        reset_arguments: usize,
    }

    impl Kernel {
        fn new() -> Self {
            let mut b = Builder::new();
            let int = b.int("int", 4);
            let pointer = b.pointer(0);
            Self {
                b,
                int,
                pointer,
                task_fields: vec!["tgid", "pid", "flags", "exit_code"],
                start_boottime_bytes: 8,
                exit_arguments: 2,
                oom_has_task: true,
                reset_arguments: 3,
            }
        }

        fn plan(mut self) -> Plan {
            let (int, pointer) = (self.int, self.pointer);
            let b = &mut self.b;
            let start = b.int("u64", self.start_boottime_bytes);
            let byte = b.int("char", 1);
            let comm = b.array(byte, 16);
            let short = b.int("short", 2);
            let mut task = vec![
                ("group_leader", pointer, 0),
                ("signal", pointer, 8),
                ("start_boottime", start, 16),
                ("comm", comm, 24),
            ];
            let mut at = 40;
            for field in &self.task_fields {
                task.push((field, int, at));
                at += 4;
            }
            b.structure("task_struct", 96, &task);
            let atomic = b.structure("", 4, &[("counter", int, 0)]);
            let atomic = b.typedef("atomic_t", atomic);
            b.structure("signal_struct", 16, &[("live", atomic, 4), ("group_exit_code", int, 8), ("flags", int, 12)]);
            let sigaction = b.structure("sigaction", 8, &[("sa_handler", pointer, 0)]);
            b.structure("k_sigaction", 8, &[("sa", sigaction, 0)]);
            b.structure("inet_sock", 16, &[("inet_sport", short, 12)]);
            let net = b.structure("", 8, &[("net", pointer, 0)]);
            let net = b.typedef("possible_net_t", net);
            let address = b.array(byte, 16);
            let common = [
                ("skc_net", net, 8),
                ("skc_family", short, 16),
                ("skc_num", short, 20),
                ("skc_dport", short, 22),
                ("skc_daddr", int, 24),
                ("skc_v6_daddr", address, 28),
            ];
            let common = b.structure("sock_common", 48, &common);
            b.structure("sock", 48, &[("__sk_common", common, 0)]);
            let packet = [
                ("head", pointer, 0),
                ("dev", pointer, 8),
                ("transport_header", short, 16),
                ("network_header", short, 18),
            ];
            b.structure("sk_buff", 24, &packet);
            b.structure("net_device", 16, &[("nd_net", net, 8)]);
            b.structure("kernel_siginfo", 16, &[("si_signo", int, 0), ("si_errno", int, 4), ("si_code", int, 8)]);
            let ns = b.structure("ns_common", 8, &[("inum", int, 4)]);
            b.structure("net", 16, &[("ns", ns, 8)]);

            b.tracepoint("sched_process_exit", &[pointer, int, int][..self.exit_arguments]);
            b.tracepoint("signal_deliver", &[int, pointer, pointer]);
            b.tracepoint("sched_process_fork", &[pointer, pointer]);
            b.tracepoint("sched_process_exec", &[pointer, int, pointer]);
            b.tracepoint("task_rename", &[pointer, pointer]);
            let victim = if self.oom_has_task { vec![pointer, int] } else { vec![int] };
            b.tracepoint("mark_victim", &victim);
            b.tracepoint("inet_sock_set_state", &[pointer, int, int]);
            b.tracepoint("signal_generate", &[int, pointer, pointer, int, int]);
            let reason = b.enumeration("sk_rst_reason", &[("SK_RST_REASON_NO_SOCKET", 1)]);
            b.tracepoint("tcp_send_reset", &[pointer, pointer, reason][..self.reset_arguments]);
            b.tracepoint("tcp_receive_reset", &[pointer]);
            let btf = Btf::parse(self.b.finish()).expect("the builder writes BTF");
            Plan::new(&btf, &LoadOptions::default())
        }
    }

    fn state(plan: &Plan, program: KernelProgram) -> &Result<(), OffReason> {
        &plan.programs.iter().find(|(p, _)| *p == program).expect("every program is planned").1
    }

    #[test]
    fn a_kernel_that_has_everything_has_every_probe() {
        let plan = Kernel::new().plan();
        for (program, state) in &plan.programs {
            assert_eq!(*state, Ok(()), "{program}");
        }
        assert_eq!(plan.globals[global::TASK_TGID], 40);
        assert_eq!(plan.globals[global::SOCK_NET], 8);
        assert_eq!(plan.globals[global::NET_INUM], 12);
        assert_eq!(plan.globals[global::EXIT_HAS_GROUP_DEAD], 1);
        assert_eq!(plan.globals[global::OOM_HAS_TASK], 1);
        assert_eq!(plan.globals[global::RESET_HAS_REASON], 1);
        assert_eq!(plan.globals[global::SIGINFO_CODE], 8);
        assert_eq!(plan.reset_reasons[&1], "no_socket");
        // Nobody reads it here.
        assert!(!plan.globals.contains_key(global::SIGNAL_LIVE));
    }

    #[test]
    fn an_older_kernel_has_the_older_variants() {
        let plan = Kernel { exit_arguments: 1, oom_has_task: false, reset_arguments: 2, ..Kernel::new() }.plan();
        assert_eq!(plan.globals[global::EXIT_HAS_GROUP_DEAD], 0);
        assert_eq!(plan.globals[global::SIGNAL_LIVE], 4);
        assert_eq!(plan.globals[global::OOM_HAS_TASK], 0);
        assert_eq!(plan.globals[global::RESET_HAS_REASON], 0);
    }

    #[test]
    fn a_missing_field_switches_off_those_who_read_it() {
        let kernel = Kernel::new();
        let task_fields = vec!["pid", "flags", "exit_code"];
        let plan = Kernel { task_fields, ..kernel }.plan();
        let detail = "struct task_struct has no field tgid in this kernel".to_owned();
        let off = Err(OffReason::NoField { detail });
        for program in [KernelProgram::Fork, KernelProgram::MarkVictim, KernelProgram::SignalGenerate] {
            assert_eq!(*state(&plan, program), off, "{program}");
        }
        for program in [
            KernelProgram::Exit,
            KernelProgram::SignalDeliver,
            KernelProgram::Exec,
            KernelProgram::ListenerClosed,
            KernelProgram::TcpResetSent,
        ] {
            assert_eq!(*state(&plan, program), Ok(()), "{program}");
        }
        assert!(!plan.globals.contains_key(global::TASK_TGID));
    }

    #[test]
    fn a_field_of_another_size_is_not_read() {
        let plan = Kernel { start_boottime_bytes: 4, ..Kernel::new() }.plan();
        let off = OffReason::FieldSize { field: "task_struct.start_boottime".to_owned(), found: 4, expected: 8 };
        assert_eq!(*state(&plan, KernelProgram::Exit), Err(off));
    }

    #[test]
    fn a_prototype_that_nobody_knows_is_not_guessed() {
        let plan = Kernel { exit_arguments: 3, ..Kernel::new() }.plan();
        let off = Err(OffReason::UnknownPrototype { arguments: 3 });
        assert_eq!(*state(&plan, KernelProgram::Exit), off);
        assert!(!plan.globals.contains_key(global::EXIT_HAS_GROUP_DEAD));
    }

    #[test]
    fn a_probe_that_is_switched_off_says_so() {
        let btf = Btf::parse(Builder::new().finish()).expect("empty BTF");
        let plan = Plan::new(&btf, &LoadOptions { disabled: vec![KernelProgram::Rename], ..LoadOptions::default() });
        assert_eq!(*state(&plan, KernelProgram::Rename), Err(OffReason::Disabled));
        assert_eq!(*state(&plan, KernelProgram::Exit), Err(OffReason::NoTracepoint));
    }

    /// On the kernel that runs the tests. What it says about variants is checked
    /// against the kernel itself by the stories in `tests/kernel`.
    #[test]
    fn this_kernel_has_every_probe() {
        let path = super::super::KERNEL_BTF;
        let Ok(bytes) = std::fs::read(path) else {
            skipped::here(&format!("this kernel has no {path}"));
            return;
        };
        let begin = std::time::Instant::now();
        let btf = Btf::parse(bytes).expect("the kernel's own BTF");
        let parsed = begin.elapsed();
        let plan = Plan::new(&btf, &LoadOptions::default());
        eprintln!(
            "{} types parsed in {parsed:?}, resolved in {:?}: {:?}",
            btf.len(),
            begin.elapsed() - parsed,
            plan.globals
        );
        for (program, state) in &plan.programs {
            assert_eq!(*state, Ok(()), "{program}");
        }
    }
}

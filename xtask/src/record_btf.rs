//! `cargo xtask record-btf`: from a kernel's BTF, the little that the daemon's offset resolver reads.
//!
//! What a pointer points to is left out, and large structs inside of those that are asked for. All
//! members keep their names, offsets and order, so that the resolver has to find its own among them.
//! The format: Documentation/bpf/btf.rst of Linux.

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use thiserror::Error;

/// Record a kernel's BTF for the tests of the offset resolver.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask record-btf /sys/kernel/btf/vmlinux 6.18.btf    this machine's kernel
  objcopy --dump-section .BTF=whole.btf vmlinux /dev/null    an uncompressed one's, into whole.btf

daemon/src/sensors/ebpf/offsets/recorded/README.md says where the recordings come from.
Exit status: 0 recorded, 1 the file is no BTF, or lacks something.")]
pub(crate) struct Arguments {
    /// A kernel's BTF, raw.
    from: PathBuf,
    /// The file to write.
    to: PathBuf,
}

/// The structs whose fields the daemon looks up (daemon/src/sensors/ebpf/offsets.rs).
const STRUCTS: [&str; 9] = [
    "task_struct",
    "signal_struct",
    "k_sigaction",
    "kernel_siginfo",
    "inet_sock",
    "sock",
    "net",
    "sk_buff",
    "net_device",
];

/// Its tracepoints.
const TRACEPOINTS: [&str; 10] = [
    "sched_process_exit",
    "signal_deliver",
    "sched_process_fork",
    "sched_process_exec",
    "task_rename",
    "mark_victim",
    "inet_sock_set_state",
    "signal_generate",
    "tcp_send_reset",
    "tcp_receive_reset",
];

/// Which only newer kernels have.
const ENUM: &str = "sk_rst_reason";

/// Named structs and unions inside of others are kept up to this size in bytes.
const LARGE: u32 = 256;

const HEADER: usize = 24;
const PTR: u32 = 2;
const ARRAY: u32 = 3;
const STRUCT: u32 = 4;
const UNION: u32 = 5;
const ENUMERATION: u32 = 6;
const TYPEDEF: u32 = 8;
const FUNC_PROTO: u32 = 13;

/// Why nothing was recorded.
#[derive(Debug, Error)]
enum RecordError {
    #[error("{path}: {source}")]
    File { path: PathBuf, source: std::io::Error },
    #[error("{0} is not raw BTF of this machine's byte order")]
    NotBtf(PathBuf),
    #[error("it has no {0}: not the BTF of a whole kernel?")]
    Lacks(String),
}

pub(crate) fn main(arguments: &Arguments) -> ExitCode {
    match record(arguments) {
        Ok((before, after)) => {
            eprintln!("{}: {after} of {before} bytes", arguments.to.display());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("cargo xtask record-btf: {error}");
            ExitCode::FAILURE
        }
    }
}

fn record(arguments: &Arguments) -> Result<(usize, usize), RecordError> {
    let Arguments { from, to } = arguments;
    let whole = fs::read(from).map_err(|source| RecordError::File { path: from.clone(), source })?;
    let kernel = Kernel::parse(&whole).ok_or_else(|| RecordError::NotBtf(from.clone()))?;
    let mut recording = Recording::new(&kernel);
    let structs = STRUCTS.map(|name| (STRUCT, name.to_owned()));
    let tracepoints = TRACEPOINTS.map(|name| (TYPEDEF, format!("btf_trace_{name}")));
    for (kind, name) in structs.into_iter().chain(tracepoints) {
        let id = kernel.named(kind, &name).ok_or(RecordError::Lacks(name))?;
        recording.keep(id);
    }
    if let Some(id) = kernel.named(ENUMERATION, ENUM) {
        recording.keep(id);
    }
    let recorded = recording.finish();
    fs::write(to, &recorded).map_err(|source| RecordError::File { path: to.clone(), source })?;
    Ok((whole.len(), recorded.len()))
}

/// The whole BTF.
struct Kernel<'a> {
    strings: &'a [u8],
    /// Each type, its fixed part and what follows; number 1 is the first.
    types: Vec<&'a [u8]>,
}

impl<'a> Kernel<'a> {
    fn parse(bytes: &'a [u8]) -> Option<Self> {
        if bytes.get(..2)? != 0xeb9f_u16.to_ne_bytes() {
            return None;
        }
        let body = bytes.get(word(bytes, 4)? as usize..)?;
        let section = |at| {
            let (offset, length) = (word(bytes, at)? as usize, word(bytes, at + 4)? as usize);
            body.get(offset..offset.checked_add(length)?)
        };
        let (mut rest, strings) = (section(8)?, section(16)?);
        let mut types = Vec::new();
        while !rest.is_empty() {
            let info = word(rest, 4)?;
            let count = (info & 0xffff) as usize;
            let tail = match info >> 24 & 0x1f {
                // INT, VAR, DECL_TAG
                1 | 14 | 17 => 4,
                ARRAY => 12,
                // DATASEC and ENUM64 too
                STRUCT | UNION | 15 | 19 => count * 12,
                ENUMERATION | FUNC_PROTO => count * 8,
                PTR | 7..=12 | 16 | 18 => 0,
                _ => return None,
            };
            let (ty, after) = rest.split_at_checked(12 + tail)?;
            types.push(ty);
            rest = after;
        }
        Some(Self { strings, types })
    }

    fn name(&self, offset: u32) -> &'a [u8] {
        let rest = self.strings.get(offset as usize..).unwrap_or_default();
        rest.split(|byte| *byte == 0).next().unwrap_or_default()
    }

    fn named(&self, kind: u32, name: &str) -> Option<u32> {
        let is = |ty: &&[u8]| Ty::of(ty).kind == kind && self.name(Ty::of(ty).name) == name.as_bytes();
        self.types.iter().position(is).map(|index| index as u32 + 1)
    }

    fn bytes(&self, id: u32) -> Option<&'a [u8]> {
        self.types.get((id as usize).checked_sub(1)?).copied()
    }
}

/// The fixed part of a type.
struct Ty {
    name: u32,
    kind: u32,
    size_or_type: u32,
}

impl Ty {
    fn of(bytes: &[u8]) -> Self {
        let word = |at| word(bytes, at).unwrap_or_default();
        Self { name: word(0), kind: word(4) >> 24 & 0x1f, size_or_type: word(8) }
    }
}

/// What is kept.
struct Recording<'a> {
    kernel: &'a Kernel<'a>,
    /// New numbers of the types by their old ones.
    ids: HashMap<u32, u32>,
    types: Vec<Vec<u8>>,
    strings: Vec<u8>,
    offsets: HashMap<&'a [u8], u32>,
}

impl<'a> Recording<'a> {
    fn new(kernel: &'a Kernel<'a>) -> Self {
        Self { kernel, ids: HashMap::new(), types: Vec::new(), strings: vec![0], offsets: HashMap::new() }
    }

    /// Keeps a type and what it consists of; its new number.
    fn keep(&mut self, id: u32) -> u32 {
        let Some(bytes) = self.kernel.bytes(id) else { return 0 };
        if let Some(known) = self.ids.get(&id) {
            return *known;
        }
        self.types.push(Vec::new());
        let new = self.types.len() as u32;
        self.ids.insert(id, new);
        let mut ty = bytes.to_vec();
        let Ty { name, kind, size_or_type } = Ty::of(bytes);
        set(&mut ty, 0, self.string(name));
        match kind {
            PTR => {
                // A tracepoint is a pointer to its prototype.
                let prototype = self.kernel.bytes(size_or_type).is_some_and(|to| Ty::of(to).kind == FUNC_PROTO);
                let to = if prototype { self.keep(size_or_type) } else { 0 };
                set(&mut ty, 8, to);
            }
            ARRAY => {
                for at in [12, 16] {
                    let part = self.keep(word(&ty, at).unwrap_or_default());
                    set(&mut ty, at, part);
                }
            }
            STRUCT | UNION => {
                for at in (12..ty.len()).step_by(12) {
                    let name = word(&ty, at).unwrap_or_default();
                    let part = word(&ty, at + 4).unwrap_or_default();
                    let part = if name != 0 && self.is_large(part) { 0 } else { self.keep(part) };
                    let name = self.string(name);
                    set(&mut ty, at, name);
                    set(&mut ty, at + 4, part);
                }
            }
            ENUMERATION | FUNC_PROTO => {
                for at in (12..ty.len()).step_by(8) {
                    let name = self.string(word(&ty, at).unwrap_or_default());
                    set(&mut ty, at, name);
                    if kind == FUNC_PROTO {
                        let argument = self.keep(word(&ty, at + 4).unwrap_or_default());
                        set(&mut ty, at + 4, argument);
                    }
                }
                if kind == FUNC_PROTO {
                    set(&mut ty, 8, 0);
                }
            }
            // ENUM64
            19 => {
                for at in (12..ty.len()).step_by(12) {
                    let name = self.string(word(&ty, at).unwrap_or_default());
                    set(&mut ty, at, name);
                }
            }
            // Typedefs and qualifiers
            8..=11 | 18 => {
                let to = self.keep(size_or_type);
                set(&mut ty, 8, to);
            }
            _ => {}
        }
        self.types[new as usize - 1] = ty;
        new
    }

    fn is_large(&self, mut id: u32) -> bool {
        while let Some(ty) = self.kernel.bytes(id).map(Ty::of) {
            match ty.kind {
                8..=11 | 18 => id = ty.size_or_type,
                STRUCT | UNION => return ty.size_or_type > LARGE,
                _ => return false,
            }
        }
        false
    }

    fn string(&mut self, offset: u32) -> u32 {
        let string = self.kernel.name(offset);
        if string.is_empty() {
            return 0;
        }
        *self.offsets.entry(string).or_insert_with(|| {
            let at = self.strings.len() as u32;
            self.strings.extend_from_slice(string);
            self.strings.push(0);
            at
        })
    }

    fn finish(self) -> Vec<u8> {
        let types = self.types.concat();
        let mut bytes = Vec::new();
        bytes.extend(0xeb9f_u16.to_ne_bytes());
        bytes.extend([1, 0]);
        for word in [HEADER as u32, 0, types.len() as u32, types.len() as u32, self.strings.len() as u32] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.extend(types);
        bytes.extend(self.strings);
        bytes
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let word = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_ne_bytes(word.try_into().ok()?))
}

fn set(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_ne_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `struct net { int *a; struct big b; }` and a `struct big` of 300 bytes.
    fn whole() -> Vec<u8> {
        let strings = b"\0int\0net\0a\0b\0big\0";
        let kind = |kind: u32, count: u32| kind << 24 | count;
        let types: Vec<u32> = [
            vec![1, kind(1, 0), 4, 32],
            vec![13, kind(STRUCT, 0), 300],
            vec![0, kind(PTR, 0), 1],
            vec![5, kind(STRUCT, 2), 308, 9, 3, 0, 11, 2, 64],
        ]
        .concat();
        let mut bytes = [&0xeb9f_u16.to_ne_bytes()[..], &[1, 0]].concat();
        let length = types.len() as u32 * 4;
        bytes.extend([24, 0, length, length, strings.len() as u32].into_iter().chain(types).flat_map(u32::to_ne_bytes));
        bytes.extend(strings);
        bytes
    }

    #[test]
    fn members_are_kept_and_what_is_large_or_pointed_to_is_not() {
        let whole = whole();
        let kernel = Kernel::parse(&whole).expect("it is BTF");
        let mut recording = Recording::new(&kernel);
        recording.keep(kernel.named(STRUCT, "net").expect("it is there"));
        let recorded = recording.finish();
        let kept = Kernel::parse(&recorded).expect("it is BTF too");
        assert_eq!(kept.types.len(), 2, "the struct and the pointer");
        let net = kept.bytes(kept.named(STRUCT, "net").expect("it was kept")).expect("it is there");
        let words: Vec<u32> = (8..36).step_by(4).filter_map(|at| word(net, at)).collect();
        let [size, a, pointer, 0, b, void, 64] = words[..] else { panic!("{words:?}") };
        assert_eq!((size, kept.name(a), kept.name(b), void), (308, &b"a"[..], &b"b"[..], 0));
        assert_eq!(Ty::of(kept.bytes(pointer).expect("it is there")).size_or_type, 0);
    }

    #[test]
    fn what_is_no_btf_is_refused() {
        assert!(Kernel::parse(b"\x7fELF and so on, for long enough to be something").is_none());
        assert!(Kernel::parse(&whole()[..60]).is_none());
    }
}

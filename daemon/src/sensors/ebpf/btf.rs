//! A reader of the BPF Type Format, just large enough to ask where a field lies
//! and which arguments a tracepoint has.
//!
//! The format: Documentation/bpf/btf.rst and include/uapi/linux/btf.h of Linux.
//! Every access is bounds-checked: bytes that are no BTF give an error, never a
//! panic and never an endless walk.

use thiserror::Error;

/// Why bytes are no BTF that this reader understands.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
pub enum BtfError {
    /// The bytes end before what they announce.
    #[error("the BTF ends within {within}")]
    Truncated {
        /// What was being read.
        within: &'static str,
    },
    /// The first two bytes are not 0xeb9f in this machine's byte order.
    #[error("not BTF of this machine: magic {magic:#06x}, expected 0xeb9f")]
    Magic {
        /// What they are.
        magic: u16,
    },
    /// There is only version 1 so far.
    #[error("BTF version {version} is unknown, expected 1")]
    Version {
        /// The version in the header.
        version: u8,
    },
    /// A type whose length is not known, so that nothing after it can be found.
    #[error("BTF type {id} has the unknown kind {kind}")]
    Kind {
        /// The type's number.
        id: u32,
        /// Its kind.
        kind: u32,
    },
}

/// Why a field or a prototype could not be found.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
pub enum LookupError {
    /// No struct of that name.
    #[error("the running kernel has no struct {name}")]
    NoStruct {
        /// The struct.
        name: String,
    },
    /// The struct has no such member, not even in an unnamed member.
    #[error("struct {owner} has no field {field} in this kernel")]
    NoField {
        /// The struct that the search began in.
        owner: String,
        /// The member that is missing.
        field: String,
    },
    /// The member is a bit field, which has no address.
    #[error("{owner}.{field} is a bit field in this kernel")]
    BitField {
        /// The struct.
        owner: String,
        /// The member.
        field: String,
    },
    /// The kernel has no such tracepoint.
    #[error("the running kernel has no tracepoint {tracepoint}")]
    NoTracepoint {
        /// The tracepoint.
        tracepoint: String,
    },
    /// Types refer to each other in a way that no compiler makes.
    #[error("the BTF of {name} does not make sense")]
    Nonsense {
        /// Where the walk began.
        name: String,
    },
}

/// Where a field lies and how large it is, in bytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Field {
    /// From the start of the outermost struct.
    pub offset: u32,
    /// Size of the field.
    pub size: u32,
}

/// What a tracepoint's argument is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Argument {
    /// A pointer.
    Pointer,
    /// A number.
    Scalar,
}

const MAGIC: u16 = 0xeb9f;
const HEADER: usize = 24;
const TYPE: usize = 12;

const KIND_INT: u32 = 1;
const KIND_PTR: u32 = 2;
const KIND_ARRAY: u32 = 3;
const KIND_STRUCT: u32 = 4;
const KIND_UNION: u32 = 5;
const KIND_ENUM: u32 = 6;
const KIND_FWD: u32 = 7;
const KIND_TYPEDEF: u32 = 8;
const KIND_VOLATILE: u32 = 9;
const KIND_CONST: u32 = 10;
const KIND_RESTRICT: u32 = 11;
const KIND_FUNC: u32 = 12;
const KIND_FUNC_PROTO: u32 = 13;
const KIND_VAR: u32 = 14;
const KIND_DATASEC: u32 = 15;
const KIND_FLOAT: u32 = 16;
const KIND_DECL_TAG: u32 = 17;
const KIND_TYPE_TAG: u32 = 18;
const KIND_ENUM64: u32 = 19;

/// How many types one question may look at. The deepest real one takes some
/// hundreds; types that contain each other would take for ever.
const STEPS: u32 = 100_000;

/// How deep unnamed members may be nested; the kernel has three.
const DEPTH: u32 = 32;

/// Parsed BTF.
pub struct Btf {
    bytes: Vec<u8>,
    /// Where the strings are in `bytes`.
    strings: std::ops::Range<usize>,
    /// Where each type begins in `bytes`; type number 1 is the first.
    types: Vec<u32>,
}

/// The fixed part of a type.
#[derive(Clone, Copy)]
struct Type {
    at: usize,
    name: u32,
    info: u32,
    size_or_type: u32,
}

impl Type {
    fn kind(self) -> u32 {
        self.info >> 24 & 0x1f
    }

    fn count(self) -> usize {
        (self.info & 0xffff) as usize
    }

    /// Whether member offsets carry the size of a bit field in their upper byte.
    fn kind_flag(self) -> bool {
        self.info >> 31 == 1
    }

    /// Bytes after the fixed part; `None` for an unknown kind.
    fn tail(self) -> Option<usize> {
        Some(match self.kind() {
            KIND_INT | KIND_VAR | KIND_DECL_TAG => 4,
            KIND_ARRAY => 12,
            KIND_STRUCT | KIND_UNION | KIND_DATASEC | KIND_ENUM64 => self.count() * 12,
            KIND_ENUM | KIND_FUNC_PROTO => self.count() * 8,
            KIND_PTR | KIND_FWD | KIND_TYPEDEF | KIND_VOLATILE | KIND_CONST | KIND_RESTRICT | KIND_FUNC
            | KIND_FLOAT | KIND_TYPE_TAG => 0,
            _ => return None,
        })
    }
}

impl Btf {
    /// Finds where each type begins.
    ///
    /// # Errors
    ///
    /// The bytes are not BTF of this machine's byte order, or are cut short.
    pub fn parse(bytes: Vec<u8>) -> Result<Self, BtfError> {
        let header = BtfError::Truncated { within: "the header" };
        let word = |at| word(&bytes, at).ok_or(header.clone());
        let magic = bytes.get(..2).map(|m| u16::from_ne_bytes([m[0], m[1]]));
        let magic = magic.ok_or(header.clone())?;
        if magic != MAGIC {
            return Err(BtfError::Magic { magic });
        }
        let version = *bytes.get(2).ok_or(header.clone())?;
        if version != 1 {
            return Err(BtfError::Version { version });
        }
        let body = word(4)? as usize;
        if body < HEADER {
            return Err(header);
        }
        let section = |offset: u32, length: u32, within| {
            let begin = body.checked_add(offset as usize);
            let range = begin.and_then(|begin| Some(begin..begin.checked_add(length as usize)?));
            range
                .filter(|range| range.end <= bytes.len() && u32::try_from(range.end).is_ok())
                .ok_or(BtfError::Truncated { within })
        };
        let types_section = section(word(8)?, word(12)?, "its types")?;
        let strings = section(word(16)?, word(20)?, "its strings")?;

        let mut types = Vec::with_capacity(types_section.len() / 40);
        let mut at = types_section.start;
        while at < types_section.end {
            let id = types.len() as u32 + 1;
            let truncated = BtfError::Truncated { within: "a type" };
            let ty = type_at(&bytes, at).ok_or(truncated.clone())?;
            let tail = ty.tail().ok_or(BtfError::Kind { id, kind: ty.kind() })?;
            let next = at + TYPE + tail;
            if next > types_section.end {
                return Err(truncated);
            }
            types.push(at as u32);
            at = next;
        }
        Ok(Self { bytes, strings, types })
    }

    /// How many types there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.types.len()
    }

    /// Whether there are no types.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.types.is_empty()
    }

    /// Where the field lies that C would write as `struct owner`, then `.` and each of `path`.
    /// Unnamed structs and unions on the way are looked into, as C does.
    ///
    /// # Errors
    ///
    /// The struct or one of the members does not exist, or has no address.
    pub fn field(&self, owner: &str, path: &[&str]) -> Result<Field, LookupError> {
        let nonsense = || LookupError::Nonsense { name: owner.to_owned() };
        let mut steps = STEPS;
        let mut inside =
            self.named(KIND_STRUCT, owner).ok_or_else(|| LookupError::NoStruct { name: owner.to_owned() })?;
        let mut bits = 0u32;
        let mut last = None;
        for field in path {
            let found = self.member(inside, field, DEPTH, &mut steps).map_err(|OutOfSteps| nonsense())?;
            let member =
                found.ok_or_else(|| LookupError::NoField { owner: owner.to_owned(), field: path.join(".") })?;
            if member.bit_field || member.bits % 8 != 0 {
                return Err(LookupError::BitField { owner: owner.to_owned(), field: path.join(".") });
            }
            bits = bits.checked_add(member.bits).ok_or_else(nonsense)?;
            last = Some(member.ty);
            // The next member, if any, is looked for in this one. A scalar has none.
            if let Some(ty) = self.resolve(member.ty) {
                inside = ty;
            }
        }
        let size = last.and_then(|ty| self.size(ty, DEPTH)).ok_or_else(nonsense)?;
        Ok(Field { offset: bits / 8, size })
    }

    /// The arguments of a raw tracepoint, from the typedef `btf_trace_<name>` that
    /// the kernel makes for it (include/trace/bpf_probe.h), without its leading
    /// `void *`.
    ///
    /// # Errors
    ///
    /// The kernel has no such tracepoint.
    pub fn tracepoint(&self, name: &str) -> Result<Vec<Argument>, LookupError> {
        let missing = || LookupError::NoTracepoint { tracepoint: name.to_owned() };
        let typedef = self.named(KIND_TYPEDEF, &format!("btf_trace_{name}")).ok_or_else(missing)?;
        let pointer = self.resolve(typedef.size_or_type).ok_or_else(missing)?;
        if pointer.kind() != KIND_PTR {
            return Err(missing());
        }
        let prototype = self.resolve(pointer.size_or_type).ok_or_else(missing)?;
        if prototype.kind() != KIND_FUNC_PROTO || prototype.count() == 0 {
            return Err(missing());
        }
        let argument = |index| {
            let ty = word(&self.bytes, prototype.at + TYPE + index * 8 + 4)?;
            let kind = self.resolve(ty)?.kind();
            Some(if kind == KIND_PTR { Argument::Pointer } else { Argument::Scalar })
        };
        (1..prototype.count()).map(argument).collect::<Option<_>>().ok_or_else(missing)
    }

    /// The names and values of an enum of at most four bytes; none if there is no such enum.
    #[must_use]
    pub fn enumerators(&self, name: &str) -> Vec<(String, u32)> {
        let Some(ty) = self.named(KIND_ENUM, name) else { return Vec::new() };
        let value = |index: usize| {
            let at = ty.at + TYPE + index * 8;
            Some((self.string(word(&self.bytes, at)?)?, word(&self.bytes, at + 4)?))
        };
        (0..ty.count()).filter_map(value).collect()
    }

    fn string(&self, offset: u32) -> Option<String> {
        let strings = self.bytes.get(self.strings.clone())?.get(offset as usize..)?;
        let end = strings.iter().position(|byte| *byte == 0)?;
        Some(String::from_utf8_lossy(&strings[..end]).into_owned())
    }

    /// The first type of that kind and name.
    fn named(&self, kind: u32, name: &str) -> Option<Type> {
        self.types
            .iter()
            .filter_map(|at| type_at(&self.bytes, *at as usize))
            .find(|ty| ty.kind() == kind && self.has_name(ty.name, name))
    }

    fn by_id(&self, id: u32) -> Option<Type> {
        let index = (id as usize).checked_sub(1)?;
        type_at(&self.bytes, *self.types.get(index)? as usize)
    }

    /// The type without typedefs and qualifiers; `None` for void.
    fn resolve(&self, mut id: u32) -> Option<Type> {
        for _ in 0..DEPTH {
            let ty = self.by_id(id)?;
            match ty.kind() {
                KIND_TYPEDEF | KIND_VOLATILE | KIND_CONST | KIND_RESTRICT | KIND_TYPE_TAG => {
                    id = ty.size_or_type;
                }
                _ => return Some(ty),
            }
        }
        None
    }

    fn size(&self, id: u32, depth: u32) -> Option<u32> {
        let ty = self.resolve(id)?;
        match ty.kind() {
            KIND_INT | KIND_ENUM | KIND_ENUM64 | KIND_FLOAT | KIND_STRUCT | KIND_UNION => Some(ty.size_or_type),
            KIND_PTR => Some(size_of::<usize>() as u32),
            KIND_ARRAY => {
                let element = word(&self.bytes, ty.at + TYPE)?;
                let count = word(&self.bytes, ty.at + TYPE + 8)?;
                self.size(element, depth.checked_sub(1)?)?.checked_mul(count)
            }
            _ => None,
        }
    }

    fn member(&self, owner: Type, name: &str, depth: u32, steps: &mut u32) -> Result<Option<Member>, OutOfSteps> {
        if owner.kind() != KIND_STRUCT && owner.kind() != KIND_UNION {
            return Ok(None);
        }
        let depth = depth.checked_sub(1).ok_or(OutOfSteps)?;
        for index in 0..owner.count() {
            *steps = steps.checked_sub(1).ok_or(OutOfSteps)?;
            let at = owner.at + TYPE + index * 12;
            let (Some(name_at), Some(ty), Some(offset)) =
                (word(&self.bytes, at), word(&self.bytes, at + 4), word(&self.bytes, at + 8))
            else {
                return Ok(None);
            };
            let (bits, bit_field) =
                if owner.kind_flag() { (offset & 0x00ff_ffff, offset >> 24 != 0) } else { (offset, false) };
            if name_at == 0 {
                let Some(unnamed) = self.resolve(ty) else { continue };
                if let Some(inner) = self.member(unnamed, name, depth, steps)? {
                    let bits = bits.checked_add(inner.bits).ok_or(OutOfSteps)?;
                    return Ok(Some(Member { bits, ..inner }));
                }
            } else if self.has_name(name_at, name) {
                return Ok(Some(Member { ty, bits, bit_field }));
            }
        }
        Ok(None)
    }

    fn has_name(&self, offset: u32, name: &str) -> bool {
        let strings = &self.bytes[self.strings.clone()];
        strings
            .get(offset as usize..)
            .is_some_and(|rest| rest.starts_with(name.as_bytes()) && rest.get(name.len()) == Some(&0))
    }
}

struct Member {
    ty: u32,
    bits: u32,
    bit_field: bool,
}

struct OutOfSteps;

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let word = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_ne_bytes(word.try_into().ok()?))
}

fn type_at(bytes: &[u8], at: usize) -> Option<Type> {
    let fixed: &[u8; TYPE] = bytes.get(at..at.checked_add(TYPE)?)?.try_into().ok()?;
    let [a, b, c, d, e, f, g, h, i, j, k, l] = *fixed;
    Some(Type {
        at,
        name: u32::from_ne_bytes([a, b, c, d]),
        info: u32::from_ne_bytes([e, f, g, h]),
        size_or_type: u32::from_ne_bytes([i, j, k, l]),
    })
}

#[cfg(test)]
pub(super) mod synthetic;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{synthetic::Builder, *};

    fn field(offset: u32, size: u32) -> Result<Field, LookupError> {
        Ok(Field { offset, size })
    }

    /// ```c
    /// struct pair { int a; int b; };
    /// struct outer { int first; union { struct { int deep; }; long wide; }; const struct pair typed; char name[16]; int flag : 1; };
    /// ```
    fn sample() -> Btf {
        let mut b = Builder::new();
        let int = b.int("int", 4);
        let long = b.int("long", 8);
        let byte = b.int("char", 1);
        let name = b.array(byte, 16);
        let pair = b.structure("pair", 8, &[("a", int, 0), ("b", int, 4)]);
        let constant = b.constant(pair);
        let alias = b.typedef("pair_t", constant);
        let deep = b.structure("", 4, &[("deep", int, 0)]);
        let either = b.union("", 8, &[("", deep, 0), ("wide", long, 0)]);
        b.bit_structure(
            "outer",
            48,
            &[
                ("first", int, 0, 0),
                ("", either, 8 * 8, 0),
                ("typed", alias, 16 * 8, 0),
                ("name", name, 24 * 8, 0),
                ("flag", int, 40 * 8, 1),
                ("word", int, 44 * 8, 0),
            ],
        );
        Btf::parse(b.finish()).expect("the builder writes BTF")
    }

    #[test]
    fn a_field_is_found_at_its_byte() {
        let btf = sample();
        assert_eq!(btf.field("outer", &["first"]), field(0, 4));
        assert_eq!(btf.field("outer", &["name"]), field(24, 16));
        assert_eq!(btf.field("outer", &["word"]), field(44, 4));
    }

    #[test]
    fn unnamed_members_are_looked_into() {
        let btf = sample();
        assert_eq!(btf.field("outer", &["wide"]), field(8, 8));
        assert_eq!(btf.field("outer", &["deep"]), field(8, 4));
    }

    #[test]
    fn a_path_leads_through_typedefs_and_qualifiers() {
        assert_eq!(sample().field("outer", &["typed", "b"]), field(20, 4));
    }

    #[test]
    fn what_is_not_there_has_no_offset() {
        let btf = sample();
        let no_field = |field: &str| Err(LookupError::NoField { owner: "outer".to_owned(), field: field.to_owned() });
        assert_eq!(btf.field("outer", &["gone"]), no_field("gone"));
        assert_eq!(btf.field("outer", &["first", "inside_an_int"]), no_field("first.inside_an_int"));
        assert_eq!(btf.field("outer", &["fir"]), no_field("fir"));
        assert_eq!(btf.field("nowhere", &["first"]), Err(LookupError::NoStruct { name: "nowhere".to_owned() }));
        assert_eq!(
            btf.field("outer", &["flag"]),
            Err(LookupError::BitField { owner: "outer".to_owned(), field: "flag".to_owned() })
        );
    }

    #[test]
    fn a_tracepoint_tells_its_arguments() {
        let mut b = Builder::new();
        let int = b.int("int", 4);
        let task = b.structure("task_struct", 4, &[("pid", int, 0)]);
        let task = b.pointer(task);
        let flag = b.typedef("bool", int);
        b.tracepoint("sched_process_exit", &[task, flag]);
        b.typedef("btf_trace_not_a_function", int);
        let btf = Btf::parse(b.finish()).expect("the builder writes BTF");
        assert_eq!(btf.tracepoint("sched_process_exit"), Ok(vec![Argument::Pointer, Argument::Scalar]));
        for name in ["not_a_function", "never_was"] {
            let tracepoint = name.to_owned();
            assert_eq!(btf.tracepoint(name), Err(LookupError::NoTracepoint { tracepoint }));
        }
    }

    #[test]
    fn a_struct_that_contains_itself_is_no_endless_walk() {
        let mut b = Builder::new();
        // Types 1 and 2 are unnamed members of each other.
        b.structure("loop", 8, &[("", 2, 0), ("", 2, 0)]);
        b.structure("", 8, &[("", 1, 0), ("", 1, 0)]);
        // And a typedef of itself.
        b.typedef("self", 3);
        b.structure("uses", 8, &[("it", 3, 0)]);
        let btf = Btf::parse(b.finish()).expect("the builder writes BTF");
        let nonsense = |name: &str| Err(LookupError::Nonsense { name: name.to_owned() });
        assert_eq!(btf.field("loop", &["x"]), nonsense("loop"));
        assert_eq!(btf.field("uses", &["it"]), nonsense("uses"));
    }

    #[test]
    fn bytes_that_are_no_btf_are_refused_by_name() {
        let refused = |bytes: &[u8]| Btf::parse(bytes.to_vec()).err();
        let header = Some(BtfError::Truncated { within: "the header" });
        assert_eq!(refused(b""), header);
        assert_eq!(refused(&MAGIC.to_ne_bytes()), header);
        assert_eq!(refused(&MAGIC.swap_bytes().to_ne_bytes()), Some(BtfError::Magic { magic: MAGIC.swap_bytes() }));
        let whole = {
            let mut b = Builder::new();
            b.int("int", 4);
            b.finish()
        };
        assert!(Btf::parse(whole.clone()).is_ok());
        for end in 2..whole.len() {
            assert!(matches!(refused(&whole[..end]), Some(BtfError::Truncated { .. })), "{end}");
        }
        let mut version = whole.clone();
        version[2] = 9;
        assert_eq!(refused(&version), Some(BtfError::Version { version: 9 }));
        let mut kind = whole;
        kind[HEADER + 4..HEADER + 8].copy_from_slice(&(31u32 << 24).to_ne_bytes());
        assert_eq!(refused(&kind), Some(BtfError::Kind { id: 1, kind: 31 }));
    }

    proptest! {
        /// Whatever a byte is turned into, an answer comes back.
        #[test]
        fn damaged_btf_never_panics(damage in prop::collection::vec((any::<usize>(), any::<u8>()), 1..8)) {
            let mut bytes = sample().bytes;
            for (at, byte) in damage {
                let at = at % bytes.len();
                bytes[at] = byte;
            }
            if let Ok(btf) = Btf::parse(bytes) {
                for path in [["first"].as_slice(), &["deep"], &["typed", "b"], &["name"]] {
                    let _ = btf.field("outer", path);
                }
                let _ = btf.tracepoint("anything");
            }
        }
    }
}

//! Writes small BTF for tests.

use super::{
    KIND_ARRAY, KIND_CONST, KIND_ENUM, KIND_FUNC_PROTO, KIND_INT, KIND_PTR, KIND_STRUCT, KIND_TYPEDEF, KIND_UNION,
    MAGIC,
};

/// Collects types; each method returns the number of the type that it wrote.
pub(crate) struct Builder {
    types: Vec<u32>,
    strings: Vec<u8>,
    count: u32,
}

impl Builder {
    pub(crate) fn new() -> Self {
        Self { types: Vec::new(), strings: vec![0], count: 0 }
    }

    pub(crate) fn int(&mut self, name: &str, size: u32) -> u32 {
        let name = self.string(name);
        self.push(name, KIND_INT << 24, size, &[size * 8])
    }

    pub(crate) fn pointer(&mut self, to: u32) -> u32 {
        self.push(0, KIND_PTR << 24, to, &[])
    }

    pub(crate) fn constant(&mut self, of: u32) -> u32 {
        self.push(0, KIND_CONST << 24, of, &[])
    }

    pub(crate) fn array(&mut self, of: u32, count: u32) -> u32 {
        self.push(0, KIND_ARRAY << 24, 0, &[of, of, count])
    }

    pub(crate) fn typedef(&mut self, name: &str, of: u32) -> u32 {
        let name = self.string(name);
        self.push(name, KIND_TYPEDEF << 24, of, &[])
    }

    /// An enum of four bytes.
    pub(crate) fn enumeration(&mut self, name: &str, values: &[(&str, u32)]) -> u32 {
        let tail: Vec<u32> = values.iter().flat_map(|(name, value)| [self.string(name), *value]).collect();
        let name = self.string(name);
        self.push(name, KIND_ENUM << 24 | values.len() as u32, 4, &tail)
    }

    /// Members as (name, type, offset in bytes).
    pub(crate) fn structure(&mut self, name: &str, size: u32, members: &[(&str, u32, u32)]) -> u32 {
        self.composite(KIND_STRUCT, name, size, members)
    }

    pub(crate) fn union(&mut self, name: &str, size: u32, members: &[(&str, u32, u32)]) -> u32 {
        self.composite(KIND_UNION, name, size, members)
    }

    /// Members as (name, type, offset in bits, bits of the bit field or zero).
    pub(crate) fn bit_structure(&mut self, name: &str, size: u32, members: &[(&str, u32, u32, u32)]) -> u32 {
        let tail: Vec<u32> =
            members.iter().flat_map(|(name, ty, offset, bits)| [self.string(name), *ty, offset | bits << 24]).collect();
        let name = self.string(name);
        self.push(name, 1 << 31 | KIND_STRUCT << 24 | members.len() as u32, size, &tail)
    }

    /// The typedef `btf_trace_<name>` of a tracepoint with these arguments.
    pub(crate) fn tracepoint(&mut self, name: &str, arguments: &[u32]) {
        let data = self.pointer(0);
        let tail: Vec<u32> = [data].iter().chain(arguments).flat_map(|ty| [0, *ty]).collect();
        let count = tail.len() as u32 / 2;
        let prototype = self.push(0, KIND_FUNC_PROTO << 24 | count, 0, &tail);
        let pointer = self.pointer(prototype);
        self.typedef(&format!("btf_trace_{name}"), pointer);
    }

    pub(crate) fn finish(self) -> Vec<u8> {
        let types = self.types.len() as u32 * 4;
        let mut bytes = MAGIC.to_ne_bytes().to_vec();
        bytes.extend([1, 0]);
        for word in [24, 0, types, types, self.strings.len() as u32] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.extend(self.types.iter().flat_map(|word| word.to_ne_bytes()));
        bytes.extend(self.strings);
        bytes
    }

    fn composite(&mut self, kind: u32, name: &str, size: u32, members: &[(&str, u32, u32)]) -> u32 {
        let tail: Vec<u32> =
            members.iter().flat_map(|(name, ty, offset)| [self.string(name), *ty, offset * 8]).collect();
        let name = self.string(name);
        self.push(name, kind << 24 | members.len() as u32, size, &tail)
    }

    fn push(&mut self, name: u32, info: u32, size_or_type: u32, tail: &[u32]) -> u32 {
        self.types.extend([name, info, size_or_type]);
        self.types.extend(tail);
        self.count += 1;
        self.count
    }

    fn string(&mut self, string: &str) -> u32 {
        if string.is_empty() {
            return 0;
        }
        let at = self.strings.len() as u32;
        self.strings.extend(string.as_bytes());
        self.strings.push(0);
        at
    }
}

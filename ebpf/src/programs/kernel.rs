//! Reading kernel memory at offsets that the loader resolved.

use aya_ebpf::{Global, helpers::bpf_probe_read_kernel};

/// Byte offset of a field in this kernel. A program whose offsets are not all
/// resolved is never loaded; the value here is one that cannot be mistaken for
/// an offset if it were.
pub(super) type Offset = Global<u32>;

/// An [`Offset`] that the loader has to set.
pub(super) const fn unresolved() -> Offset {
    Global::new(u32::MAX)
}

/// Which variant of a tracepoint this kernel has: 0 or 1.
pub(super) type Variant = Global<u32>;

/// A kernel address that came from the kernel itself. It is never dereferenced,
/// only handed to a helper that survives any address.
#[derive(Clone, Copy, Eq, PartialEq)]
pub(super) struct Address(pub(super) u64);

impl Address {
    /// The field at `offset`; `None` if the address cannot be read.
    #[inline(always)]
    pub(super) fn read<T>(self, offset: &Offset) -> Option<T> {
        let field = self.0.wrapping_add(u64::from(offset.load()));
        // SAFETY: the helper checks the address and fails instead of faulting;
        // every `T` here is an integer or an array of them.
        unsafe { bpf_probe_read_kernel(field as *const T) }.ok()
    }

    /// The pointer stored at `offset`; `None` if it cannot be read or is null.
    #[inline(always)]
    pub(super) fn follow(self, offset: &Offset) -> Option<Self> {
        let pointer = self.read::<u64>(offset)?;
        (pointer != 0).then_some(Self(pointer))
    }
}

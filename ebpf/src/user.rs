//! What user space needs to hand these types to the kernel.

use crate::{ListenerKey, Watched};

// SAFETY: `repr(C)`, integers only, no padding (asserted where it is declared),
// so any bytes are a value and every byte of a value is initialised.
unsafe impl aya::Pod for Watched {}
// SAFETY: as for `Watched`.
unsafe impl aya::Pod for ListenerKey {}

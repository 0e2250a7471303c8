//! The one place where tokio has to be promised something.
#![expect(unsafe_code, reason = "tokio cannot see that a ring buffer owns its descriptor")]

use std::io;

use aya::maps::{MapData, RingBuf};
use tokio::io::{Interest, unix::AsyncFd};

/// Registers the ring with the current runtime.
pub(super) fn register(ring: RingBuf<MapData>) -> io::Result<AsyncFd<RingBuf<MapData>>> {
    // SAFETY: the map inside the ring owns the descriptor, returns the same one
    // each time, and closes it only when it is dropped, with the `AsyncFd`.
    let registered = unsafe { AsyncFd::register_with_interest(ring, Interest::READABLE) };
    registered.map_err(|error| error.into_parts().1)
}

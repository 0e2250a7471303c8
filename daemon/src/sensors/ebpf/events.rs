//! The ring buffer as a stream of events.

use std::{io, path::Path};

use aya::maps::{HashMap, MapData, RingBuf};
use lastgasp_ebpf::{Event, EventFlags, EventKind, Watched};
use tokio::io::{Interest, unix::AsyncFd};

use super::poll::register;

/// The ring buffer before a runtime polls it: loading needs privileges that are
/// better dropped before there are other threads.
pub struct Ring {
    pub(super) ring: RingBuf<MapData>,
    pub(super) watched: HashMap<MapData, u32, Watched>,
}

/// What one [`Events::drain`] found.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Drained {
    /// Events handed on.
    pub events: usize,
    /// Records that are no event of a kind that this build knows. Anything but
    /// zero means that object and daemon do not belong together.
    pub undecodable: usize,
    /// There may be more.
    pub more: bool,
}

/// The events of the kernel programs, in the order in which they happened.
pub struct Events {
    ring: AsyncFd<RingBuf<MapData>>,
    watched: HashMap<MapData, u32, Watched>,
}

impl Events {
    /// Registers the ring with the current runtime.
    ///
    /// # Errors
    ///
    /// The runtime cannot poll it.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime with I/O enabled, as [`AsyncFd::register`] does.
    pub fn new(ring: Ring) -> io::Result<Self> {
        let Ring { ring, watched } = ring;
        Ok(Self { ring: register(ring)?, watched })
    }

    /// Waits until there is something to [`drain`](Self::drain). Cancel-safe.
    ///
    /// # Errors
    ///
    /// The runtime is shutting down.
    pub async fn readable(&self) -> io::Result<()> {
        // The readiness stays until `drain` has emptied the ring.
        self.ring.readable().await.map(|mut guard| guard.retain_ready())
    }

    /// Hands events in the ring to `each`, `most` at the most: whoever fills the ring in a loop holds up nothing else.
    ///
    /// `each` gets a copy: an item left in the ring holds up all that follow. It
    /// is safe, and cheap, to call this by a timer too.
    pub fn drain(&mut self, most: usize, mut each: impl FnMut(&Event)) -> Drained {
        let Self { ring, watched } = self;
        let mut drained = Drained::default();
        // Empties first and clears the readiness then; a wake-up in between stays. Where more is left, the readiness
        // stays too.
        let _cleared: io::Result<()> = ring.try_io_mut(Interest::READABLE, |ring| {
            take(ring, watched, most, &mut drained, &mut each);
            if drained.more { Ok(()) } else { Err(io::ErrorKind::WouldBlock.into()) }
        });
        // For the timer, which comes without readiness.
        if !drained.more {
            take(ring.get_mut(), watched, most, &mut drained, &mut each);
        }
        drained
    }
}

fn take(
    ring: &mut RingBuf<MapData>,
    watched: &HashMap<MapData, u32, Watched>,
    most: usize,
    drained: &mut Drained,
    each: &mut impl FnMut(&Event),
) {
    for _ in 0..most {
        // The item is dropped, and its room given back, before anybody acts on the event.
        let event = match ring.next() {
            Some(item) => Event::from_bytes(&item),
            None => return,
        };
        match event.map(|event| (event.kind(), event)) {
            None | Some((None, _)) => drained.undecodable += 1,
            Some((Some(kind), event)) => {
                let event = match kind {
                    EventKind::MarkVictim => whose(event, watched),
                    _ => Some(event),
                };
                if let Some(event) = event {
                    drained.events += 1;
                    each(&event);
                }
            }
        }
    }
    drained.more = true;
}

/// Older kernels tell only the OOM victim's thread id. Its process, while it is
/// there, is in procfs; `None` if nobody watches it.
fn whose(event: Event, watched: &HashMap<MapData, u32, Watched>) -> Option<Event> {
    if !event.flags.contains(EventFlags::TGID_UNKNOWN) {
        return Some(event);
    }
    let tgid = tgid_of(Path::new("/proc"), event.tid)?;
    let Watched { start_ticks, slot, signals_only: _ } = watched.get(&tgid, 0).ok()?;
    Some(Event { tgid, slot, start_boottime: start_ticks * lastgasp_ebpf::NANOS_PER_TICK, ..event })
}

fn tgid_of(proc: &Path, tid: u32) -> Option<u32> {
    let status = std::fs::read_to_string(proc.join(tid.to_string()).join("status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("Tgid:"))?;
    line.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_leads_to_its_process() {
        let (tid, tgid) = std::thread::spawn(|| (nix::unistd::gettid(), std::process::id()))
            .join()
            .expect("the thread only asks for its id");
        assert_ne!(tid.as_raw() as u32, tgid);
        // The thread above is gone; this test's own is not the leader either.
        let here = nix::unistd::gettid().as_raw() as u32;
        assert_eq!(tgid_of(Path::new("/proc"), here), Some(tgid));
        assert_eq!(tgid_of(Path::new("/nowhere"), here), None);
    }
}

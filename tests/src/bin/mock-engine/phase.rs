//! What the API server is doing to its streams.

use tokio::sync::watch;

/// The phases of an API server; later ones are not left for earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// Normal work.
    Serving,
    /// SIGTERM came: running streams finish, new requests get nothing.
    Draining,
    /// Every stream ends with `finish_reason: "abort"`.
    Aborting,
    /// The engine is known to be dead: error event, `[DONE]`, `/health` 503.
    Failed,
    /// Connections are closed without a word.
    Cut,
    /// Nothing is answered, nothing is closed.
    Silent,
}

/// Announces phases and counts the requests that are being answered.
#[derive(Debug)]
pub(crate) struct Phases {
    phase: watch::Sender<Phase>,
    in_flight: watch::Sender<usize>,
}

impl Phases {
    pub(crate) fn new() -> Self {
        Self { phase: watch::Sender::new(Phase::Serving), in_flight: watch::Sender::new(0) }
    }

    pub(crate) fn now(&self) -> Phase {
        *self.phase.borrow()
    }

    pub(crate) fn enter(&self, phase: Phase) {
        tracing::info!(?phase, "enters");
        self.phase.send_replace(phase);
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<Phase> {
        self.phase.subscribe()
    }

    /// Counts a request in until the guard is dropped.
    pub(crate) fn request(&self) -> InFlight {
        self.in_flight.send_modify(|count| *count += 1);
        InFlight(self.in_flight.clone())
    }

    pub(crate) fn in_flight(&self) -> usize {
        *self.in_flight.borrow()
    }

    /// Returns when no request is being answered.
    pub(crate) async fn idle(&self) {
        let _ = self.in_flight.subscribe().wait_for(|count| *count == 0).await;
    }
}

/// See [`Phases::request`].
#[derive(Debug)]
pub(crate) struct InFlight(watch::Sender<usize>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

//! Finding a worker that takes a request.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::http::{Method, StatusCode};
use lastgasp_protocol::Mode;
use tokio::sync::watch;

use super::reason::{Leaving, Seen};
use super::{CONNECT_TIMEOUT, Inbound, Proxy};
use crate::workers::{Fate, Listing, Ticket};

/// A worker's answer that has begun.
#[derive(Debug)]
pub struct Upstream {
    /// The place reserved there.
    pub ticket: Ticket,
    /// What becomes of that worker.
    pub fate: watch::Receiver<Fate>,
    /// The answer, its body yet to come.
    pub response: reqwest::Response,
}

/// One worker did not take a request.
#[derive(Debug)]
pub enum Declined {
    /// It could not be reached, or was left: it never had the request, or still lives.
    Unreachable(String),
    /// It had the request, or may have, and was lost before it answered. The request may be why.
    Lost(Leaving, String),
    /// It answered with a status that is its own fault, or says "not now".
    Status(reqwest::Response),
}

/// Whether another worker may do better.
#[must_use]
pub fn is_workers_fault(status: StatusCode) -> bool {
    status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS || status == StatusCode::REQUEST_TIMEOUT
}

impl Proxy {
    /// Sends to the worker of `ticket`, and gives up at once when that has a fate that `leaves` it.
    ///
    /// # Errors
    /// It did not take it.
    pub async fn send(
        &self,
        ticket: Ticket,
        inbound: &Inbound,
        method: Method,
        path: &str,
        body: Bytes,
        leaves: fn(&Fate) -> bool,
    ) -> Result<Upstream, (Ticket, Declined)> {
        let listing = Arc::clone(ticket.listing());
        let mut fate = listing.fate();
        let url = format!("{}{path}", listing.endpoint);
        if leaves(&fate.borrow()) {
            return Err((ticket, Declined::Unreachable("the worker was lost".into())));
        }
        let request = self.client.request(method, url).headers(inbound.headers.clone()).body(body);
        let sent = tokio::select! {
            biased;
            decided = fate.wait_for(leaves) => {
                let declined = match decided.as_deref() {
                    Ok(Fate::Move(Mode::Lost, why)) => Declined::Lost(Leaving::Signalled(*why), "signalled".into()),
                    _ => Declined::Unreachable("the worker was left".into()),
                };
                return Err((ticket, declined));
            }
            sent = request.send() => sent,
            leaving = self.silent(&listing) => {
                return Err((ticket, Declined::Lost(leaving, "silent, and not there when asked".into())));
            }
        };
        match sent {
            Ok(response) if is_workers_fault(response.status()) => {
                listing.breaker().failed(Instant::now());
                Err((ticket, Declined::Status(response)))
            }
            Ok(response) => {
                listing.breaker().succeeded();
                Ok(Upstream { ticket, fate, response })
            }
            Err(error) => {
                listing.breaker().failed(Instant::now());
                let text = chain(&error);
                let never_sent = error.is_connect() || error.is_builder();
                let lost = |text| Declined::Lost(Leaving::Seen(Seen::ConnectionBroken), text);
                Err((ticket, if never_sent { Declined::Unreachable(text) } else { lost(text) }))
            }
        }
    }

    /// Whether one that has looked for a worker since `began` is to give up, after one that could not be
    /// reached. Those that refuse take no time; one that does not answer at all takes [`CONNECT_TIMEOUT`].
    pub(crate) fn sought_long_enough(&self, began: tokio::time::Instant) -> bool {
        began.elapsed() >= self.config.wait_for_worker.max(CONNECT_TIMEOUT)
    }

    /// How long a worker may be silent before it is looked into.
    pub(crate) fn patience(&self) -> Duration {
        self.config.stall_timeout.unwrap_or(SILENCE).min(SILENCE)
    }

    /// Waits, while a worker says nothing, until there is a reason to leave it.
    pub(crate) async fn silent(&self, listing: &Arc<Listing>) -> Leaving {
        let since = tokio::time::Instant::now();
        loop {
            tokio::time::sleep(self.patience()).await;
            if let Some(leaving) = self.look_into(listing, since.elapsed()).await {
                return leaving;
            }
        }
    }

    /// Asks a worker that has been `silent` for so long whether it is there, if its node's lease lapsed;
    /// after `--stall-timeout`, whether it is well. If it is not, it is to be left.
    pub(crate) async fn look_into(&self, listing: &Arc<Listing>, silent: Duration) -> Option<Leaving> {
        let stalled = self.config.stall_timeout.is_some_and(|timeout| silent >= timeout);
        if !stalled && !self.workers.is_lapsed(listing) {
            return None;
        }
        let probe = self.client.get(format!("{}/health", listing.endpoint)).timeout(PROBE).send();
        let answers = probe.await.is_ok_and(|response| !stalled || response.status().is_success());
        (!answers).then_some(if stalled { Leaving::Seen(Seen::Stalled) } else { Leaving::Seen(Seen::LeaseLapsed) })
    }

    /// Reserves a place at a worker that was not tried, and waits for one to appear until `deadline`.
    pub async fn reserve(
        &self,
        model: &str,
        tried: &mut Tried,
        stream: bool,
        deadline: tokio::time::Instant,
    ) -> Option<Ticket> {
        let mut changes = self.workers.changes();
        let mut again = tokio::time::Instant::now() + PAUSE;
        loop {
            changes.borrow_and_update();
            let Tried { failed, unreachable, before } = tried;
            let now = [failed.as_slice(), unreachable.as_slice()].concat();
            let all = [now.as_slice(), before.as_slice()].concat();
            for excluded in [&all, &now] {
                if let Some(ticket) = self.workers.choose(model, excluded, stream) {
                    return Some(ticket);
                }
            }
            tokio::select! {
                changed = changes.changed() => changed.ok()?,
                () = tokio::time::sleep_until(deadline) => return None,
                () = tokio::time::sleep_until(again), if !unreachable.is_empty() => {
                    unreachable.clear();
                    again = tokio::time::Instant::now() + PAUSE;
                }
            }
        }
    }
}

/// A worker of a node whose lease lapsed is looked into after so much silence.
const SILENCE: Duration = Duration::from_secs(2);
/// Longest wait for the answer to a probe.
const PROBE: Duration = Duration::from_secs(1);
/// Before a worker that could not be reached is tried again, where there is no other.
const PAUSE: Duration = Duration::from_millis(500);

/// Workers that failed a request.
#[derive(Debug, Clone, Default)]
pub struct Tried {
    /// They had the request, and lost it: not asked again.
    pub failed: Vec<Arc<Listing>>,
    /// They did not accept a connection: asked again after a pause, if there is nobody else.
    pub unreachable: Vec<Arc<Listing>>,
    /// They served a part of it, and are asked again only if there is nobody else.
    pub before: Vec<Arc<Listing>>,
}

/// An error with what it was caused by: reqwest's own text says only "error sending request".
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

//! Finding a worker that takes a request.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::http::{Method, StatusCode};
use tokio::sync::watch;

use super::{Inbound, Proxy};
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
    /// It could not be reached, or is gone.
    Unreachable(String),
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
        let request = self.client.request(method, url).headers(inbound.headers.clone()).body(body);
        let mut sending = std::pin::pin!(request.send());
        let stall = self.config.stall_timeout;
        let sent = loop {
            let lost = async { _ = fate.wait_for(leaves).await };
            tokio::select! {
                biased;
                () = lost => return Err((ticket, Declined::Unreachable("the worker was lost".into()))),
                sent = &mut sending => break sent,
                () = tokio::time::sleep(stall.unwrap_or_default()), if stall.is_some() => {}
            }
            if !self.answers(&listing, true).await {
                return Err((ticket, Declined::Unreachable("it is silent and not well".into())));
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
                Err((ticket, Declined::Unreachable(chain(&error))))
            }
        }
    }

    /// Asks a silent worker whether it is there, and for a stalled one, whether it is well.
    pub(crate) async fn answers(&self, listing: &Listing, must_be_well: bool) -> bool {
        let probe = self.client.get(format!("{}/health", listing.endpoint)).timeout(PROBE).send();
        probe.await.is_ok_and(|response| !must_be_well || response.status().is_success())
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

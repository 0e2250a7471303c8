//! What is wrong with NATS at present: shown in the log when it begins and ends, and in metrics for
//! as long as it lasts.

use lastgasp_protocol::ClosedName as _;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use lastgasp_protocol::kv::{Fault, OLDEST_SERVER};
use strum::VariantArray as _;
use tracing::{debug, info, warn};

use crate::proxy::Proxy;

/// All that is wrong, by what it was met at, as `connection` or a bucket's name. Cloning is cheap.
#[derive(Debug, Clone)]
pub(super) struct Troubles {
    proxy: Arc<Proxy>,
    known: Arc<Mutex<HashMap<&'static str, Fault>>>,
}

impl Troubles {
    pub(super) fn new(proxy: Arc<Proxy>) -> Self {
        Self { proxy, known: Arc::default() }
    }

    /// Something is wrong with `what`. Said in the log once for each kind.
    pub(super) fn bad(&self, what: &'static str, fault: Fault, detail: impl std::fmt::Display) {
        let before = self.change(what, Some(fault));
        if before == Some(fault) {
            debug!(what, fault = fault.as_str(), %detail, "fault of NATS has another detail");
        } else {
            warn!(what, fault = fault.as_str(), %detail, fix = fault.fix(), "fault of NATS: the router serves with the workers known last");
        }
    }

    /// Nothing is wrong with `what`, or not any more.
    pub(super) fn good(&self, what: &'static str) {
        if let Some(fault) = self.change(what, None) {
            info!(what, was = fault.as_str(), "fault of NATS is over");
        }
    }

    /// Whether this server can do what the contract needs.
    pub(super) fn is_new_enough(&self, client: &async_nats::Client) -> bool {
        let (major, minor) = OLDEST_SERVER;
        let new_enough = client.is_server_compatible(i64::from(major), i64::from(minor), 0);
        if new_enough {
            self.good("server");
        } else {
            let version = client.server_info().version;
            self.bad("server", Fault::OldServer, format!("version {version} has no per-message TTL"));
        }
        new_enough
    }

    fn change(&self, what: &'static str, fault: Option<Fault>) -> Option<Fault> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let before = match fault {
            Some(fault) => known.insert(what, fault),
            None => known.remove(what),
        };
        for fault in Fault::VARIANTS {
            let now = known.values().any(|known| known == fault);
            self.proxy.metrics.nats_faults.with_label_values(&[fault.as_str()]).set(i64::from(now));
        }
        before
    }
}

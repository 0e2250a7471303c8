//! What is wrong with NATS at present: shown in the log when it begins and ends, and in status and
//! metrics for as long as it lasts.

use lastgasp_protocol::ClosedName as _;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use lastgasp_protocol::kv::Fault;

/// What is worse while workers cannot be listed or withdrawn.
pub const NOTHING_WRITTEN: &str =
    "the daemon lists and withdraws nothing until this is mended, and then makes up for it";

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trouble {
    /// Of which kind.
    pub fault: Fault,
    /// What NATS says.
    pub detail: String,
    /// What is worse for it.
    pub cost: &'static str,
}

/// All that is wrong, by what it was met at, as `connection` or `bucket lastgasp_workers`. Cloning
/// is cheap.
#[derive(Debug, Clone, Default)]
pub struct Troubles {
    troubles: Arc<Mutex<BTreeMap<String, Trouble>>>,
}

impl Troubles {
    /// Something is wrong with `what`. Said in the log once for each kind.
    pub fn bad(&self, what: &str, fault: Fault, detail: String, cost: &'static str) {
        let trouble = Trouble { fault, detail, cost };
        let mut troubles = self.lock();
        let known = troubles.get(what);
        if known.is_none_or(|known| known.fault != fault) {
            let Trouble { fault, detail, cost } = &trouble;
            tracing::warn!(what, fault = fault.as_str(), detail, cost, fix = fault.fix(), "fault of NATS");
        } else if known != Some(&trouble) {
            tracing::debug!(what, fault = fault.as_str(), detail = trouble.detail, "fault of NATS has another detail");
        }
        troubles.insert(what.to_owned(), trouble);
    }

    /// Nothing is wrong with `what`, or not any more.
    pub fn good(&self, what: &str) {
        if let Some(trouble) = self.lock().remove(what) {
            tracing::info!(what, was = trouble.fault.as_str(), "fault of NATS is over");
        }
    }

    /// Everything that is wrong now.
    #[must_use]
    pub fn troubles(&self) -> Vec<(String, Trouble)> {
        self.lock().iter().map(|(what, trouble)| (what.clone(), trouble.clone())).collect()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Trouble>> {
        self.troubles.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_thing_is_well_or_has_the_trouble_said_last() {
        let troubles = Troubles::default();
        troubles.bad("connection", Fault::Unreachable, "IO error".into(), NOTHING_WRITTEN);
        troubles.bad("connection", Fault::LoginRefused, "authorization violation".into(), NOTHING_WRITTEN);
        troubles.bad("lease", Fault::NoAnswer, "timed out".into(), "");
        troubles.good("lease");
        troubles.good("never bad");
        let [(what, trouble)] = &troubles.troubles()[..] else { panic!("one is left") };
        assert_eq!((what.as_str(), trouble.fault), ("connection", Fault::LoginRefused));
    }
}

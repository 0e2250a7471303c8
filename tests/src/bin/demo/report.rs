//! What the demo found, as JSON.

use serde::Serialize;

use crate::kill::Kill;

/// One distribution, in microseconds.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Distribution {
    pub(crate) n: usize,
    pub(crate) p50: i64,
    pub(crate) p99: i64,
    pub(crate) max: i64,
}

impl Distribution {
    fn of(values: impl Iterator<Item = i64>) -> Option<Self> {
        let mut values: Vec<_> = values.collect();
        values.sort_unstable();
        let at = |percent: usize| values.get(((values.len() * percent).div_ceil(100)).saturating_sub(1)).copied();
        Some(Self { n: values.len(), p50: at(50)?, p99: at(99)?, max: at(100)? })
    }
}

/// The result of one run. Times are microseconds since just before `kill()`; for several kills the
/// medians, with the distributions beside them.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) death_source: String,
    pub(crate) kills: usize,
    pub(crate) tokens_expected: usize,
    pub(crate) tokens_received: usize,
    pub(crate) missing: usize,
    pub(crate) repeated: usize,
    pub(crate) streams_whole: usize,
    pub(crate) cause: String,
    pub(crate) kill_to_evidence_us: Option<i64>,
    pub(crate) kill_to_withdrawn_us: Option<i64>,
    pub(crate) kill_to_router_acted_us: Option<i64>,
    pub(crate) kill_to_next_token_us: Option<i64>,
    pub(crate) distributions: Distributions,
}

/// Over all kills of the run.
#[derive(Debug, Serialize)]
pub(crate) struct Distributions {
    pub(crate) kill_to_evidence_us: Option<Distribution>,
    pub(crate) kill_to_decision_us: Option<Distribution>,
    pub(crate) kill_to_signalled_us: Option<Distribution>,
    pub(crate) kill_to_withdrawn_us: Option<Distribution>,
    pub(crate) kill_to_router_received_us: Option<Distribution>,
    pub(crate) kill_to_router_acted_us: Option<Distribution>,
    pub(crate) kill_to_next_token_us: Option<Distribution>,
    pub(crate) kill_to_pidfd_us: Option<Distribution>,
}

impl Report {
    pub(crate) fn of(death_source: &str, kills: &[Kill]) -> Self {
        let moment = |what: &'static str| Distribution::of(kills.iter().filter_map(move |kill| kill.moment(what)));
        let distributions = Distributions {
            kill_to_evidence_us: Distribution::of(kills.iter().filter_map(Kill::to_evidence_us)),
            kill_to_decision_us: moment("lost"),
            kill_to_signalled_us: moment("signalled"),
            kill_to_withdrawn_us: moment("withdrawn"),
            kill_to_router_received_us: moment("router_received"),
            kill_to_router_acted_us: Distribution::of(kills.iter().filter_map(|kill| kill.to_router_acted_us)),
            kill_to_next_token_us: Distribution::of(kills.iter().filter_map(|kill| kill.to_next_token_us)),
            kill_to_pidfd_us: moment("process_gone"),
        };
        let median = |distribution: Option<Distribution>| distribution.map(|distribution| distribution.p50);
        let sum = |count: fn(&Kill) -> usize| kills.iter().map(count).sum();
        Self {
            death_source: death_source.to_owned(),
            kills: kills.len(),
            tokens_expected: sum(|kill| kill.expected),
            tokens_received: sum(|kill| kill.received),
            missing: sum(|kill| kill.missing),
            repeated: sum(|kill| kill.repeated),
            streams_whole: kills.iter().filter(|kill| kill.whole).count(),
            cause: kills.first().map(|kill| kill.certificate.cause.to_string()).unwrap_or_default(),
            kill_to_evidence_us: median(distributions.kill_to_evidence_us),
            kill_to_withdrawn_us: median(distributions.kill_to_withdrawn_us),
            kill_to_router_acted_us: median(distributions.kill_to_router_acted_us),
            kill_to_next_token_us: median(distributions.kill_to_next_token_us),
            distributions,
        }
    }

    /// No stream differs from the one that nothing interrupts.
    pub(crate) fn is_exact(&self) -> bool {
        self.missing == 0 && self.repeated == 0 && self.streams_whole == self.kills
    }
}

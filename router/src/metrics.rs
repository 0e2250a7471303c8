//! What is counted, under the names that dashboards use.

use lastgasp_protocol::ClosedName as _;
use std::sync::Mutex;

use lastgasp_process::catalogue::{Catalogue, Family, Label};
use lastgasp_protocol::ContractError;
use lastgasp_protocol::kv::Fault;
use prometheus::{Histogram, IntCounter, IntCounterVec, IntGaugeVec};

use crate::continuation::{Broken, Exactness, Unmovable};
use crate::proxy::reason::{Seen, Unable};
use crate::workers::{SignalResult, Why, Workers};

/// Seconds; a move takes a round trip and a prefill.
const GAPS: [f64; 14] = [0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0];

/// A worker that may have new work.
const SERVING: &str = "serving";

/// All of the router's metrics.
#[derive(Debug)]
pub struct Metrics {
    all: Catalogue,
    /// Streams moved, by reason and exactness.
    pub migrations: IntCounterVec,
    /// Streams that could not be moved, by reason.
    pub migrations_failed: IntCounterVec,
    /// Requests sent elsewhere before anything was produced, by reason.
    pub retries: IntCounterVec,
    /// From the loss to the first chunk of the next worker.
    pub gap: Histogram,
    /// From the request to the first chunk.
    pub first_token: Histogram,
    /// Requests by path and status.
    pub requests: IntCounterVec,
    /// Requests refused since too many bytes of bodies were held.
    pub bodies_refused: IntCounter,
    /// Signals by what was made of each worker they name, or why they were not read.
    pub signals: IntCounterVec,
    /// Records and leases that were not read, by reason.
    pub records_refused: IntCounterVec,
    /// 1 for what is wrong with NATS, 0 for what is not, by fault.
    pub nats_faults: IntGaugeVec,
    log_lines_lost: IntCounter,
    in_flight: IntGaugeVec,
    serving: IntGaugeVec,
    /// Held while the gauges are filled and read: several may scrape at once.
    scrape: Mutex<()>,
}

impl Default for Metrics {
    fn default() -> Self {
        let all = Catalogue::new("lastgasp_router");
        let left = || Label::closed::<Why>("reason").or::<Broken>().or::<Seen>();
        let metrics = Self {
            migrations: all.counters(
                "migrations_total",
                "Streams continued on another worker.",
                [left(), Label::closed::<Exactness>("exactness")],
            ),
            migrations_failed: all.counters(
                "migrations_failed_total",
                "Streams that ended with an error because they could not be continued.",
                [Label::closed::<Unable>("reason").or::<Unmovable>()],
            ),
            retries: all.counters(
                "retries_total",
                "Requests sent to another worker before anything was produced.",
                [left()],
            ),
            gap: all.histogram(
                "migration_gap_seconds",
                "Time in seconds from the loss of a worker to the first chunk of the next one.",
                &GAPS,
            ),
            first_token: all.histogram(
                "first_chunk_seconds",
                "Time in seconds from a request to its first chunk.",
                &GAPS,
            ),
            requests: all.counters(
                "requests_total",
                "Requests by path and status.",
                [Label::open("path", "a path that is known, else `other`"), Label::open("status", "the HTTP status")],
            ),
            bodies_refused: all
                .counter("bodies_refused_total", "Requests refused because the bodies held fill --max-bodies."),
            signals: all.counters(
                "signals_total",
                "Workers named in migration signals, by result, and signals that the router refused.",
                [Label::closed::<SignalResult>("result").or::<ContractError>()],
            ),
            records_refused: all.counters(
                "records_refused_total",
                "Worker records and node leases that the router refused.",
                [Label::closed::<ContractError>("reason")],
            ),
            nats_faults: all.gauges(
                "nats_faults",
                "1 for a fault of NATS that lasts.",
                [Label::closed::<Fault>("fault")],
            ),
            log_lines_lost: all.counter(
                "log_lines_lost_total",
                "Lines of the log that the router dropped because nothing reads its standard error fast enough, or \
                 could not write.",
            ),
            in_flight: all.gauges("in_flight", "Requests under way.", [Label::open("worker", "`node/worker`")]),
            serving: all.gauges("workers", "Workers that may have new work.", [Label::words("state", &[SERVING])]),
            all,
            scrape: Mutex::default(),
        };
        // What alerts watch for its first increase has to be there before it.
        for reason in [Unable::NoWorker, Unable::RefusedByWorker, Unable::RetriesExhausted, Unable::LimitReached] {
            metrics.migrations_failed.with_label_values(&[reason.as_str()]).reset();
        }
        metrics
    }
}

impl Metrics {
    /// Every metric, also those that have no value yet.
    #[must_use]
    pub fn families(&self) -> Vec<Family> {
        self.all.families()
    }

    /// The exposition format.
    #[must_use]
    pub fn render(&self, workers: &Workers) -> String {
        let scrape = self.scrape.lock().expect("nothing panics in a scrape");
        self.in_flight.reset();
        for listing in workers.all() {
            let gauge = self.in_flight.with_label_values(&[listing.key.to_string().as_str()]);
            gauge.set(i64::try_from(listing.in_flight()).unwrap_or(i64::MAX));
        }
        let more = lastgasp_process::log::lost().saturating_sub(self.log_lines_lost.get());
        self.log_lines_lost.inc_by(more);
        let serving = i64::try_from(workers.serving()).unwrap_or(i64::MAX);
        self.serving.with_label_values(&[SERVING]).set(serving);
        let text = self.all.text();
        drop(scrape);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workers::tests::record;

    #[test]
    fn whoever_scrapes_at_the_same_time_reads_the_same() {
        const WORKERS: usize = 50;
        let (workers, _arrivals) = Workers::new();
        for at in 0..WORKERS {
            workers.put(&record(&format!("w{at}"), "1", 1), 1);
        }
        let _tickets: Vec<_> = (0..WORKERS)
            .scan(Vec::new(), |taken, _| {
                let ticket = workers.choose("m", taken, false)?;
                taken.push(std::sync::Arc::clone(ticket.listing()));
                Some(ticket)
            })
            .collect();
        let metrics = Metrics::default();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        let text = metrics.render(&workers);
                        let lines = text.lines().filter(|line| line.starts_with("lastgasp_router_in_flight{"));
                        assert_eq!(lines.clone().count(), WORKERS);
                        assert!(lines.clone().all(|line| line.ends_with(" 1")), "{text}");
                    }
                });
            }
        });
    }
}

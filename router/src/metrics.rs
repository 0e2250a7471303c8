//! What is counted, under the names that dashboards use.

use std::sync::Mutex;

use prometheus::core::Collector;
use prometheus::{
    Encoder, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGaugeVec, Opts, Registry, TextEncoder,
};

use crate::proxy::reason::MoveFailure;
use crate::workers::Workers;

/// Seconds; a move takes a round trip and a prefill.
const GAPS: [f64; 14] = [0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0];

/// All of the router's metrics.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
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

/// What a metric is, whether it has a value or not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Family {
    /// Its full name.
    pub name: String,
    /// What it says, in a sentence.
    pub help: String,
    /// `counter`, `gauge` or `histogram`.
    pub kind: &'static str,
    /// The names of its labels.
    pub labels: Vec<String>,
}

impl Default for Metrics {
    fn default() -> Self {
        let registry = Registry::new();
        let counter = |name: &str, help: &str, labels: &[&str]| {
            let counter = IntCounterVec::new(Opts::new(name, help), labels).expect("a valid name");
            registry.register(Box::new(counter.clone())).expect("a name of its own");
            counter
        };
        let gauge = |name: &str, help: &str, labels: &[&str]| {
            let gauge = IntGaugeVec::new(Opts::new(name, help), labels).expect("a valid name");
            registry.register(Box::new(gauge.clone())).expect("a name of its own");
            gauge
        };
        let plain = |name: &str, help: &str| {
            let counter = IntCounter::new(name, help).expect("a valid name");
            registry.register(Box::new(counter.clone())).expect("a name of its own");
            counter
        };
        let histogram = |name: &str, help: &str| {
            let options = HistogramOpts::new(name, help).buckets(GAPS.to_vec());
            let histogram = Histogram::with_opts(options).expect("a valid name");
            registry.register(Box::new(histogram.clone())).expect("a name of its own");
            histogram
        };
        let metrics = Self {
            migrations: counter(
                "lastgasp_router_migrations_total",
                "Streams continued on another worker",
                &["reason", "exactness"],
            ),
            migrations_failed: counter(
                "lastgasp_router_migrations_failed_total",
                "Streams that ended with an error because they could not be continued",
                &["reason"],
            ),
            retries: counter(
                "lastgasp_router_retries_total",
                "Requests sent to another worker before anything was produced",
                &["reason"],
            ),
            gap: histogram(
                "lastgasp_router_migration_gap_seconds",
                "Time in seconds from the loss of a worker to the first chunk of the next one",
            ),
            first_token: histogram(
                "lastgasp_router_first_chunk_seconds",
                "Time in seconds from a request to its first chunk",
            ),
            requests: counter("lastgasp_router_requests_total", "Requests by path and status", &["path", "status"]),
            bodies_refused: plain(
                "lastgasp_router_bodies_refused_total",
                "Requests refused because the bodies held fill --max-bodies",
            ),
            signals: counter(
                "lastgasp_router_signals_total",
                "Workers named in migration signals, by result, and signals that the router refused",
                &["result"],
            ),
            records_refused: counter(
                "lastgasp_router_records_refused_total",
                "Worker records and node leases that the router refused",
                &["reason"],
            ),
            nats_faults: gauge("lastgasp_router_nats_faults", "1 for a fault of NATS that lasts", &["fault"]),
            log_lines_lost: plain(
                "lastgasp_router_log_lines_lost_total",
                "Lines of the log that the router dropped because nothing reads its standard error fast enough, or \
                 could not write",
            ),
            in_flight: gauge("lastgasp_router_in_flight", "Requests under way", &["worker"]),
            serving: gauge("lastgasp_router_workers", "Workers that may have new work", &["state"]),
            registry,
            scrape: Mutex::default(),
        };
        // What alerts watch for its first increase has to be there before it.
        for failure in [
            MoveFailure::NoWorker,
            MoveFailure::RefusedByWorker,
            MoveFailure::RetriesExhausted,
            MoveFailure::LimitReached,
        ] {
            metrics.migrations_failed.with_label_values(&[failure.as_str()]).reset();
        }
        metrics
    }
}

impl Metrics {
    /// Every metric, also those that have no value yet.
    #[must_use]
    pub fn families(&self) -> Vec<Family> {
        let Self {
            registry: _,
            migrations,
            migrations_failed,
            retries,
            gap,
            first_token,
            requests,
            bodies_refused,
            signals,
            records_refused,
            nats_faults,
            log_lines_lost,
            in_flight,
            serving,
            scrape: _,
        } = self;
        let all: [(&'static str, &dyn Collector); 13] = [
            ("counter", migrations),
            ("counter", migrations_failed),
            ("counter", retries),
            ("histogram", gap),
            ("histogram", first_token),
            ("counter", requests),
            ("counter", bodies_refused),
            ("counter", signals),
            ("counter", records_refused),
            ("gauge", nats_faults),
            ("counter", log_lines_lost),
            ("gauge", in_flight),
            ("gauge", serving),
        ];
        let family = |kind, desc: &prometheus::core::Desc| Family {
            name: desc.fq_name.clone(),
            help: format!("{}.", desc.help),
            kind,
            labels: desc.variable_labels.clone(),
        };
        all.iter().flat_map(|(kind, metric)| metric.desc().into_iter().map(|desc| family(*kind, desc))).collect()
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
        self.serving.with_label_values(&["serving"]).set(serving);
        let families = self.registry.gather();
        drop(scrape);
        let mut out = Vec::new();
        TextEncoder::new().encode(&families, &mut out).expect("memory does not fail");
        String::from_utf8(out).expect("the format is UTF-8")
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

//! What is counted, under the names that dashboards use.

use prometheus::{Encoder, Histogram, HistogramOpts, IntCounterVec, IntGaugeVec, Opts, Registry, TextEncoder};

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
    /// Signals by what was made of each worker they name, or why they were not read.
    pub signals: IntCounterVec,
    /// Records and leases that were not read, by reason.
    pub records_refused: IntCounterVec,
    in_flight: IntGaugeVec,
    serving: IntGaugeVec,
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
        let histogram = |name: &str, help: &str| {
            let options = HistogramOpts::new(name, help).buckets(GAPS.to_vec());
            let histogram = Histogram::with_opts(options).expect("a valid name");
            registry.register(Box::new(histogram.clone())).expect("a name of its own");
            histogram
        };
        Self {
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
                "From the loss of a worker to the first chunk of the next one",
            ),
            first_token: histogram("lastgasp_router_first_chunk_seconds", "From a request to its first chunk"),
            requests: counter("lastgasp_router_requests_total", "Requests by path and status", &["path", "status"]),
            signals: counter(
                "lastgasp_router_signals_total",
                "Workers named in migration signals by what was made of it, and signals that were not read",
                &["result"],
            ),
            records_refused: counter(
                "lastgasp_router_records_refused_total",
                "Worker records and node leases that were not read",
                &["reason"],
            ),
            in_flight: gauge("lastgasp_router_in_flight", "Requests under way", &["worker"]),
            serving: gauge("lastgasp_router_workers", "Workers that may have new work", &["state"]),
            registry,
        }
    }
}

impl Metrics {
    /// The exposition format.
    #[must_use]
    pub fn render(&self, workers: &Workers) -> String {
        self.in_flight.reset();
        for listing in workers.all() {
            let gauge = self.in_flight.with_label_values(&[listing.key.to_string().as_str()]);
            gauge.add(i64::try_from(listing.in_flight()).unwrap_or(i64::MAX));
        }
        let serving = i64::try_from(workers.serving()).unwrap_or(i64::MAX);
        self.serving.with_label_values(&["serving"]).set(serving);
        let mut out = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut out).expect("memory does not fail");
        String::from_utf8(out).expect("the format is UTF-8")
    }
}

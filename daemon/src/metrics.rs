//! Prometheus metrics. Labels are the closed names that logs, JSON and certificates use too.

use std::sync::{Arc, Mutex, PoisonError};

use lastgasp_protocol::CauseKind;
use lastgasp_protocol::kv::Fault;
use prometheus::proto::MetricType;
use prometheus::{
    GaugeVec, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder,
};

use crate::core::HeldBack;
use crate::losses::Loss;
use crate::status::LossStatus;

/// Every state of a worker, as in `lastgasp_worker_state`.
pub const WORKER_STATES: [&str; 6] = ["starting", "serving", "unready", "draining", "left", "lost"];

/// What may see processes die, as in `lastgasp_death_source`.
pub const DEATH_SOURCES: [&str; 2] = ["ebpf", "pidfd"];

/// From what the kernel needs at best to what a lost NATS costs, in seconds.
const LATENCY: [f64; 16] =
    [50e-6, 100e-6, 200e-6, 300e-6, 500e-6, 750e-6, 1e-3, 2e-3, 3e-3, 5e-3, 10e-3, 50e-3, 0.1, 0.5, 2.0, 10.0];

/// All metrics of the daemon. Cloning is cheap and counts into the same.
#[derive(Debug, Clone)]
pub struct Metrics {
    registry: Catalogue,
    /// Pieces of evidence, by `kind`.
    pub evidence: IntCounterVec,
    /// Information lost on its way, by `hop` and `kind`.
    pub losses: IntCounterVec,
    /// Workers found lost or left, by `cause`.
    pub deaths: IntCounterVec,
    /// Withdrawals from discovery, by `cause` and `outcome`.
    pub withdrawals: IntCounterVec,
    /// Migration signals, by `action`.
    pub signals: IntCounterVec,
    /// Answers of routers, by `phase`.
    pub router_answers: IntCounterVec,
    /// Things said to people, by `kind`.
    pub warnings: IntCounterVec,
    /// Tries to deliver notifications, by `sink` and `outcome`: `delivered`, `retried`, `refused`, `given_up`.
    pub notifications: IntCounterVec,
    /// What was published for Infera, by `kind`: `end`, `stand_in`, `cancel`.
    pub infera_frames: IntCounterVec,
    /// What became of records in Infera's etcd, by `outcome`: `deleted`, `drained`, `restored`,
    /// `absent`, `changed`, `failed`.
    pub infera_records: IntCounterVec,
    /// What became of a worker's records in Dynamo's discovery, by `outcome`: `deleted`, `restored`,
    /// `absent`, `changed`, `lapsed`, `failed`.
    pub dynamo_records: IntCounterVec,
    /// Instances in Dynamo that a worker is known to be, by `worker`.
    pub dynamo_instances: IntGaugeVec,
    /// Reply inboxes that are remembered, by `worker`.
    pub infera_remembered: IntGaugeVec,
    /// What was done about the processes of lost workers, by `action` and `outcome`.
    pub actions: IntCounterVec,
    /// Workers that declared themselves, by `outcome`: `accepted`, or why not.
    pub declarations: IntCounterVec,
    /// How long a worker has been over while processes of it are still there, by `worker`, in
    /// seconds; 0 while none are.
    pub lost_alive_seconds: GaugeVec,
    /// Processes whose command line and environment are not read, since they hold their memory locked.
    pub stuck_processes: IntGauge,
    /// 1 for the state that a worker is in, 0 for the others, by `worker` and `state`.
    pub worker_state: IntGaugeVec,
    /// From the first evidence of a death to the acknowledged withdrawal, in seconds.
    pub evidence_to_withdrawn: Histogram,
    /// From the first evidence of a death to the published signal, in seconds.
    pub evidence_to_signalled: Histogram,
    /// Deaths that the pidfd reported and the kernel programs did not, although they were on.
    pub deaths_seen_only_by_pidfd: IntCounter,
    /// 1 for a kernel program that is attached, by `program`.
    pub kernel_program_attached: IntGaugeVec,
    /// 1 for what sees processes die, 0 for the other, by `source`.
    pub death_source: IntGaugeVec,
    /// 1 while NATS is connected.
    pub nats_connected: IntGauge,
    /// 1 for what is wrong with NATS, 0 for what is not, by `fault`.
    pub nats_faults: IntGaugeVec,
}

/// A counter, as the status page shows it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Counter {
    /// Name without `lastgasp_` and `_total`.
    pub name: String,
    /// Values of its labels.
    pub labels: String,
    /// How often.
    pub value: u64,
}

impl Metrics {
    /// All at zero.
    #[must_use]
    pub fn new() -> Self {
        let registry = Catalogue::default();
        let metrics = Self {
            evidence: counters(&registry, "evidence_total", "Pieces of evidence.", &["kind"]),
            losses: counters(
                &registry,
                "losses_total",
                "Pieces of information lost on their way, by hop and kind.",
                &["hop", "kind"],
            ),
            deaths: counters(&registry, "deaths_total", "Workers found lost or left.", &["cause"]),
            withdrawals: counters(&registry, "withdrawals_total", "Withdrawals from discovery.", &["cause", "outcome"]),
            signals: counters(&registry, "signals_total", "Migration signals published.", &["action"]),
            router_answers: counters(&registry, "router_answers_total", "Answers of routers to signals.", &["phase"]),
            warnings: counters(
                &registry,
                "warnings_total",
                "Warnings for people: a verdict held back, a worker held down, a GPU fault, a record tried again.",
                &["kind"],
            ),
            notifications: counters(
                &registry,
                "notifications_total",
                "Tries to deliver notifications to the sinks of [[notify]].",
                &["sink", "outcome"],
            ),
            infera_frames: counters(
                &registry,
                "infera_frames_total",
                "Frames published for Infera's routers.",
                &["kind"],
            ),
            infera_records: counters(
                &registry,
                "infera_records_total",
                "Changes of records in Infera's etcd, by outcome.",
                &["outcome"],
            ),
            dynamo_records: counters(
                &registry,
                "dynamo_records_total",
                "Changes of workers' records in Dynamo's discovery, by outcome.",
                &["outcome"],
            ),
            dynamo_instances: gauges(
                &registry,
                "dynamo_instances",
                "Instances in Dynamo that the daemon knows a worker to be.",
                &["worker"],
            ),
            infera_remembered: gauges(
                &registry,
                "infera_remembered_requests",
                "Requests to a worker of Infera that may be open.",
                &["worker"],
            ),
            actions: counters(
                &registry,
                "actions_total",
                "Actions on processes of lost workers.",
                &["action", "outcome"],
            ),
            declarations: counters(
                &registry,
                "declarations_total",
                "Workers that declared themselves: accepted, or why not.",
                &["outcome"],
            ),
            lost_alive_seconds: registered(
                &registry,
                GaugeVec::new(
                    options("lost_alive_seconds", "Time in seconds that processes of a worker have outlived it."),
                    &["worker"],
                ),
            ),
            stuck_processes: registered(
                &registry,
                IntGauge::with_opts(options(
                    "stuck_processes",
                    "Processes that hold their memory locked, so that their command line and environment are not read.",
                )),
            ),
            worker_state: gauges(&registry, "worker_state", "1 for the state a worker is in.", &["worker", "state"]),
            evidence_to_withdrawn: latency(
                &registry,
                "evidence_to_withdrawn_seconds",
                "Time in seconds from the first evidence of a death to the acknowledged withdrawal.",
            ),
            evidence_to_signalled: latency(
                &registry,
                "evidence_to_signalled_seconds",
                "Time in seconds from the first evidence of a death to the published signal.",
            ),
            deaths_seen_only_by_pidfd: registered(
                &registry,
                IntCounter::with_opts(options(
                    "deaths_seen_only_by_pidfd_total",
                    "Deaths that the kernel programs missed.",
                )),
            ),
            kernel_program_attached: gauges(
                &registry,
                "kernel_program_attached",
                "1 for a kernel program that is attached.",
                &["program"],
            ),
            death_source: gauges(
                &registry,
                "death_source",
                "1 for what sees processes die, 0 for the other.",
                &["source"],
            ),
            nats_connected: registered(
                &registry,
                IntGauge::with_opts(options("nats_connected", "1 while NATS is connected.")),
            ),
            nats_faults: gauges(&registry, "nats_faults", "1 for a fault of NATS that lasts.", &["fault"]),
            registry,
        };
        let build = gauges(&metrics.registry, "build_info", "Always 1.", &["version"]);
        build.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        // What alerts watch for its first increase has to be there before it.
        for loss in Loss::all() {
            metrics.lose(loss, 0);
        }
        metrics.set_nats_faults(&[]);
        for kind in HeldBack::ALL.map(HeldBack::as_str).into_iter().chain(["held_down"]) {
            metrics.warnings.with_label_values(&[kind]).reset();
        }
        for cause in CauseKind::ALL {
            metrics.deaths.with_label_values(&[cause.as_str()]).reset();
        }
        for action in ["drain", "move"] {
            metrics.signals.with_label_values(&[action]).reset();
        }
        for phase in ["received", "done"] {
            metrics.router_answers.with_label_values(&[phase]).reset();
        }
        metrics
    }

    /// Everything in the text format of Prometheus, version 0.0.4.
    #[must_use]
    pub fn text(&self) -> String {
        TextEncoder::new()
            .encode_to_string(&self.registry.registry.gather())
            .expect("every metric has a name and a value")
    }

    /// Says which faults NATS has now.
    pub fn set_nats_faults(&self, faults: &[Fault]) {
        for fault in Fault::ALL {
            self.nats_faults.with_label_values(&[fault.as_str()]).set(i64::from(faults.contains(&fault)));
        }
    }

    /// Puts a worker into one of [`WORKER_STATES`] and out of the others.
    pub fn set_worker_state(&self, worker: &str, state: &str) {
        for name in WORKER_STATES {
            self.worker_state.with_label_values(&[worker, name]).set(i64::from(name == state));
        }
    }

    /// Drops the gauges of a worker that will not be heard of again.
    pub fn forget_worker(&self, worker: &str) {
        for state in WORKER_STATES {
            // An error says that it was not there.
            let _ = self.worker_state.remove_label_values(&[worker, state]);
        }
        let _ = self.lost_alive_seconds.remove_label_values(&[worker]);
    }

    /// Says which of [`DEATH_SOURCES`] sees processes die.
    pub fn set_death_source(&self, source: &str) {
        for name in DEATH_SOURCES {
            self.death_source.with_label_values(&[name]).set(i64::from(name == source));
        }
    }

    /// Counts information that was lost.
    pub fn lose(&self, loss: Loss, count: u64) {
        self.losses.with_label_values(&[loss.hop(), loss.kind()]).inc_by(count);
    }

    /// Every metric, also those that have no value yet, in the order in which they are defined.
    #[must_use]
    pub fn families(&self) -> Vec<Family> {
        self.registry.families.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Every counter above zero but losses, which the status has, for the status page.
    #[must_use]
    pub fn counters(&self) -> Vec<Counter> {
        let mut counters = Vec::new();
        for family in self.registry.registry.gather() {
            let name = family.name().trim_start_matches("lastgasp_").trim_end_matches("_total").to_owned();
            if family.get_field_type() != prometheus::proto::MetricType::COUNTER || name == "losses" {
                continue;
            }
            for metric in family.get_metric() {
                let labels = metric.get_label().iter().map(|pair| pair.value()).collect::<Vec<_>>().join(", ");
                #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a counter of events")]
                let value = metric.get_counter().get_value() as u64;
                if value > 0 {
                    counters.push(Counter { name: name.clone(), labels, value });
                }
            }
        }
        counters
    }

    /// All that was lost so far, for the status.
    #[must_use]
    pub fn losses(&self) -> Vec<LossStatus> {
        use prometheus::core::Collector;
        let label = |metric: &prometheus::proto::Metric, name: &str| {
            let pair = metric.get_label().iter().find(|pair| pair.name() == name);
            pair.map(|pair| pair.value().to_owned()).unwrap_or_default()
        };
        let mut losses: Vec<LossStatus> = self
            .losses
            .collect()
            .iter()
            .flat_map(|family| family.get_metric())
            .map(|metric| LossStatus {
                hop: label(metric, "hop"),
                kind: label(metric, "kind"),
                #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a counter of events")]
                count: metric.get_counter().get_value() as u64,
            })
            .filter(|loss| loss.count > 0)
            .collect();
        losses.sort_by(|a, b| (&a.hop, &a.kind).cmp(&(&b.hop, &b.kind)));
        losses
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
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

/// The registry, and what is in it: it does not tell of metrics without a value.
#[derive(Debug, Clone, Default)]
struct Catalogue {
    registry: Registry,
    families: Arc<Mutex<Vec<Family>>>,
}

fn options(name: &str, help: &str) -> Opts {
    Opts::new(name, help).namespace("lastgasp")
}

/// Names are fixed and each is registered once, so this fails for the first test or never.
fn registered<T: prometheus::core::Collector + Clone + 'static>(
    registry: &Catalogue,
    metric: prometheus::Result<T>,
) -> T {
    let metric = metric.expect("names of metrics are valid");
    registry.registry.register(Box::new(metric.clone())).expect("names of metrics differ");
    let kind = match metric.collect().first().map(prometheus::proto::MetricFamily::get_field_type) {
        Some(MetricType::GAUGE) => "gauge",
        Some(MetricType::HISTOGRAM) => "histogram",
        _ => "counter",
    };
    let families = metric.desc().into_iter().map(|desc| Family {
        name: desc.fq_name.clone(),
        help: desc.help.clone(),
        kind,
        labels: desc.variable_labels.clone(),
    });
    registry.families.lock().unwrap_or_else(PoisonError::into_inner).extend(families);
    metric
}

fn counters(registry: &Catalogue, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
    registered(registry, IntCounterVec::new(options(name, help), labels))
}

fn gauges(registry: &Catalogue, name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
    registered(registry, IntGaugeVec::new(options(name, help), labels))
}

fn latency(registry: &Catalogue, name: &str, help: &str) -> Histogram {
    let options = HistogramOpts::from(options(name, help)).buckets(LATENCY.to_vec());
    registered(registry, Histogram::with_opts(options))
}

#[cfg(test)]
mod tests {
    use lastgasp_ebpf::EventKind;

    use super::*;

    #[test]
    fn a_worker_is_in_one_state_at_a_time() {
        let metrics = Metrics::new();
        metrics.set_worker_state("vllm-0", "serving");
        metrics.set_worker_state("vllm-0", "lost");
        let text = metrics.text();
        assert!(text.contains(r#"lastgasp_worker_state{state="lost",worker="vllm-0"} 1"#), "{text}");
        assert!(text.contains(r#"lastgasp_worker_state{state="serving",worker="vllm-0"} 0"#), "{text}");
    }

    #[test]
    fn what_was_lost_can_be_read_back() {
        let metrics = Metrics::new();
        metrics.lose(Loss::Ring(EventKind::Exit), 2);
        metrics.lose(Loss::Ring(EventKind::Exit), 1);
        metrics.lose(Loss::Answer, 0);
        let lost = LossStatus { hop: "ring".into(), kind: "exit".into(), count: 3 };
        assert_eq!(metrics.losses(), [lost]);
    }

    #[test]
    fn what_has_no_labels_is_there_from_the_start() {
        let text = Metrics::new().text();
        for name in ["nats_connected 0", "deaths_seen_only_by_pidfd_total 0", "evidence_to_withdrawn_seconds_count 0"] {
            assert!(text.contains(&format!("lastgasp_{name}")), "{name}: {text}");
        }
    }

    /// Prometheus sees no increase in a counter that begins with its first one.
    #[test]
    fn every_loss_is_there_from_the_start_at_zero() {
        let metrics = Metrics::new();
        let text = metrics.text();
        for loss in Loss::all() {
            let series = format!("lastgasp_losses_total{{hop=\"{}\",kind=\"{}\"}} 0", loss.hop(), loss.kind());
            assert!(text.contains(&series), "{series}: {text}");
        }
        assert_eq!(metrics.losses(), []);
    }

    #[test]
    fn metrics_are_known_before_there_are_values() {
        let metrics = Metrics::new();
        assert!(!metrics.text().contains("lastgasp_withdrawals_total"));
        let families = metrics.families();
        let withdrawals =
            families.iter().find(|family| family.name == "lastgasp_withdrawals_total").expect("it is defined");
        assert_eq!((withdrawals.kind, withdrawals.labels.join(",")), ("counter", "cause,outcome".to_owned()));
    }
}

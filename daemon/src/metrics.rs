//! Prometheus metrics. Labels are the closed names that logs, JSON and certificates use too.

use lastgasp_process::catalogue::{Catalogue, Family, Label};
use lastgasp_protocol::ClosedName as _;
use lastgasp_protocol::kv::Fault;
use lastgasp_protocol::{Action, CauseKind, Phase};
use prometheus::{GaugeVec, Histogram, IntCounter, IntCounterVec, IntGauge, IntGaugeVec};
use strum::VariantArray as _;

use crate::core::{HeldBack, Kind, State};
use crate::effects::actions::{Act, ActionOutcome};
use crate::losses::Loss;
use crate::notify::dynamo::stores::StoreChange;
use crate::notify::infera::FrameKind;
use crate::notify::infera::etcd::EtcdChange;
use crate::notify::{Delivery, FAILED};
use crate::sensors::ebpf::KernelProgram;
use crate::sensors::proc::declare::Refusal;
use crate::status::LossStatus;

/// What a person should know, beside verdicts that are held back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr, strum::VariantNames, strum::VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum Warning {
    /// A worker stays unlisted although it is well again, since it was lost too often.
    HeldDown,
    /// A GPU has a fault that ends no worker by itself.
    GpuFault,
    /// A record could not be written, and is tried again.
    RecordRetried,
}

/// What a withdrawal found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum Withdrawal {
    /// The record, which is gone now.
    Deleted,
    /// No record of that life.
    WasAbsent,
}

/// What sees processes die.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr, strum::VariantNames, strum::VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum DeathSource {
    /// Programs in the kernel.
    Ebpf,
    /// A descriptor of each process.
    Pidfd,
}

/// Evidence about a life that was over.
pub const OUTDATED: &str = "outdated";
/// A withdrawal whose cause this daemon has not seen.
pub const UNKNOWN_CAUSE: &str = "unknown";
/// A declaration that counts.
pub const ACCEPTED: &str = "accepted";
/// The label of most gauges.
const WORKER: Label = Label::open("worker", "its name");

/// From what the kernel needs at best to what a lost NATS costs, in seconds.
const LATENCY: [f64; 16] =
    [50e-6, 100e-6, 200e-6, 300e-6, 500e-6, 750e-6, 1e-3, 2e-3, 3e-3, 5e-3, 10e-3, 50e-3, 0.1, 0.5, 2.0, 10.0];

/// All metrics of the daemon. Cloning is cheap and counts into the same.
#[derive(Debug, Clone)]
pub struct Metrics {
    all: Catalogue,
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
        let all = Catalogue::new("lastgasp");
        let metrics = Self {
            evidence: all.counters(
                "evidence_total",
                "Pieces of evidence.",
                [Label::closed::<Kind>("kind").or_words(&[OUTDATED])],
            ),
            losses: all.counters(
                "losses_total",
                "Pieces of information lost on their way, by hop and kind.",
                ["hop", "kind"].map(|name| Label::open(name, "see [losses](#losses)")),
            ),
            deaths: all.counters("deaths_total", "Workers found lost or left.", [Label::closed::<CauseKind>("cause")]),
            withdrawals: all.counters(
                "withdrawals_total",
                "Withdrawals from discovery.",
                [
                    Label::closed::<CauseKind>("cause").or_words(&[UNKNOWN_CAUSE]),
                    Label::closed::<Withdrawal>("outcome"),
                ],
            ),
            signals: all.counters("signals_total", "Migration signals published.", [Label::closed::<Action>("action")]),
            router_answers: all.counters(
                "router_answers_total",
                "Answers of routers to signals.",
                [Label::closed::<Phase>("phase")],
            ),
            warnings: all.counters(
                "warnings_total",
                "Warnings for people: a verdict held back, a worker held down, a GPU fault, a record tried again.",
                [Label::closed::<HeldBack>("kind").or::<Warning>()],
            ),
            notifications: all.counters(
                "notifications_total",
                "Tries to deliver notifications to the sinks of [[notify]].",
                [Label::open("sink", "the name in `[[notify]]`"), Label::closed::<Delivery>("outcome")],
            ),
            infera_frames: all.counters(
                "infera_frames_total",
                "Frames published for Infera's routers.",
                [Label::closed::<FrameKind>("kind")],
            ),
            infera_records: all.counters(
                "infera_records_total",
                "Changes of records in Infera's etcd, by outcome.",
                [Label::closed::<EtcdChange>("outcome").or_words(&[FAILED])],
            ),
            dynamo_records: all.counters(
                "dynamo_records_total",
                "Changes of workers' records in Dynamo's discovery, by outcome.",
                [Label::closed::<StoreChange>("outcome").or_words(&[FAILED])],
            ),
            dynamo_instances: all.gauges(
                "dynamo_instances",
                "Instances in Dynamo that the daemon knows a worker to be.",
                [WORKER],
            ),
            infera_remembered: all.gauges(
                "infera_remembered_requests",
                "Requests to a worker of Infera that may be open.",
                [WORKER],
            ),
            actions: all.counters(
                "actions_total",
                "Actions on processes of lost workers.",
                [Label::closed::<Act>("action"), Label::closed::<ActionOutcome>("outcome")],
            ),
            declarations: all.counters(
                "declarations_total",
                "Workers that declared themselves: accepted, or why not.",
                [Label::closed::<Refusal>("outcome").or_words(&[ACCEPTED])],
            ),
            lost_alive_seconds: all.fractions(
                "lost_alive_seconds",
                "Time in seconds that processes of a worker have outlived it.",
                [WORKER],
            ),
            stuck_processes: all.gauge(
                "stuck_processes",
                "Processes that hold their memory locked, so that their command line and environment are not read.",
            ),
            worker_state: all.gauges(
                "worker_state",
                "1 for the state a worker is in.",
                [WORKER, Label::closed::<State>("state")],
            ),
            evidence_to_withdrawn: all.histogram(
                "evidence_to_withdrawn_seconds",
                "Time in seconds from the first evidence of a death to the acknowledged withdrawal.",
                &LATENCY,
            ),
            evidence_to_signalled: all.histogram(
                "evidence_to_signalled_seconds",
                "Time in seconds from the first evidence of a death to the published signal.",
                &LATENCY,
            ),
            deaths_seen_only_by_pidfd: all
                .counter("deaths_seen_only_by_pidfd_total", "Deaths that the kernel programs missed."),
            kernel_program_attached: all.gauges(
                "kernel_program_attached",
                "1 for a kernel program that is attached.",
                [Label::closed::<KernelProgram>("program")],
            ),
            death_source: all.gauges(
                "death_source",
                "1 for what sees processes die, 0 for the other.",
                [Label::closed::<DeathSource>("source")],
            ),
            nats_connected: all.gauge("nats_connected", "1 while NATS is connected."),
            nats_faults: all.gauges(
                "nats_faults",
                "1 for a fault of NATS that lasts.",
                [Label::closed::<Fault>("fault")],
            ),
            all,
        };
        let version = Label::open("version", "as `lastgasp --version` says it");
        let build = metrics.all.gauges("build_info", "Always 1.", [version]);
        build.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        // What alerts watch for its first increase has to be there before it.
        for loss in Loss::all() {
            metrics.lose(loss, 0);
        }
        metrics.set_nats_faults(&[]);
        let held_back = HeldBack::VARIANTS.iter().map(HeldBack::as_str);
        for kind in held_back.chain(Warning::VARIANTS.iter().map(Warning::as_str)) {
            metrics.warnings.with_label_values(&[kind]).reset();
        }
        for cause in CauseKind::VARIANTS {
            metrics.deaths.with_label_values(&[cause.as_str()]).reset();
        }
        for action in Action::VARIANTS {
            metrics.signals.with_label_values(&[action.as_str()]).reset();
        }
        for phase in Phase::VARIANTS {
            metrics.router_answers.with_label_values(&[phase.as_str()]).reset();
        }
        metrics
    }

    /// Everything in the text format of Prometheus, version 0.0.4.
    #[must_use]
    pub fn text(&self) -> String {
        self.all.text()
    }

    /// Says which faults NATS has now.
    pub fn set_nats_faults(&self, faults: &[Fault]) {
        for fault in Fault::VARIANTS {
            self.nats_faults.with_label_values(&[fault.as_str()]).set(i64::from(faults.contains(fault)));
        }
    }

    /// Puts a worker into one state and out of the others.
    pub fn set_worker_state(&self, worker: &str, state: State) {
        let state = state.as_str();
        for name in State::VARIANTS.iter().map(State::as_str) {
            self.worker_state.with_label_values(&[worker, name]).set(i64::from(name == state));
        }
    }

    /// Drops the gauges of a worker that will not be heard of again.
    pub fn forget_worker(&self, worker: &str) {
        for state in State::VARIANTS.iter().map(State::as_str) {
            // An error says that it was not there.
            let _ = self.worker_state.remove_label_values(&[worker, state]);
        }
        let _ = self.lost_alive_seconds.remove_label_values(&[worker]);
    }

    /// Says what sees processes die.
    pub fn set_death_source(&self, source: DeathSource) {
        for other in DeathSource::VARIANTS {
            self.death_source.with_label_values(&[other.as_str()]).set(i64::from(*other == source));
        }
    }

    /// Counts information that was lost.
    pub fn lose(&self, loss: Loss, count: u64) {
        self.losses.with_label_values(&[loss.hop(), loss.kind()]).inc_by(count);
    }

    /// Every metric, also those that have no value yet, in the order in which they are defined.
    #[must_use]
    pub fn families(&self) -> Vec<Family> {
        self.all.families()
    }

    /// Every counter above zero but losses, which the status has, for the status page.
    #[must_use]
    pub fn counters(&self) -> Vec<Counter> {
        let mut counters = Vec::new();
        for family in self.all.gather() {
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

#[cfg(test)]
mod tests {
    use lastgasp_ebpf::EventKind;

    use super::*;

    #[test]
    fn a_worker_is_in_one_state_at_a_time() {
        let metrics = Metrics::new();
        metrics.set_worker_state("vllm-0", State::Serving);
        metrics.set_worker_state("vllm-0", State::Lost);
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
        assert_eq!(
            (withdrawals.kind, withdrawals.labels.iter().map(|label| label.name).collect::<Vec<_>>().join(",")),
            ("counter", "cause,outcome".to_owned())
        );
    }
}

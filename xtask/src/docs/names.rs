//! The closed names that logs, metrics, JSON and certificates share, read from the enums that define
//! them: a name, and the first line that the source says of it.

use std::collections::BTreeSet;
use std::fs;

use lastgasp::losses::Loss;

use super::page::Page;
use super::series::Series;
use crate::tools;

/// An enum of closed names.
pub(super) struct Closed {
    /// Its heading.
    pub(super) title: &'static str,
    /// Where they are met.
    pub(super) met: &'static str,
    /// Where it is defined, and as what.
    pub(super) source: (&'static str, &'static str),
}

const fn closed(title: &'static str, file: &'static str, name: &'static str, met: &'static str) -> Closed {
    Closed { title, met, source: (file, name) }
}

/// All of them, in the order of the reference.
pub(super) static CLOSED: [Closed; 26] = [
    closed("Causes", "protocol/src/reason.rs", "CauseKind", "`cause.kind` of signals and certificates."),
    closed("Evidence", "daemon/src/core/evidence.rs", "Kind", "`what` of a certificate's moments of kind `evidence`."),
    closed("States", "daemon/src/core/effect.rs", "State", "`state` in `lastgasp status`."),
    closed("States of a record", "protocol/src/record.rs", "WorkerState", "`state` of a record in `lastgasp_workers`."),
    closed("Actions of a signal", "protocol/src/signal.rs", "Action", "`action` of a migration signal."),
    closed("Modes of a move", "protocol/src/signal.rs", "Mode", "`mode` of a migration signal."),
    closed("Answers of a router", "protocol/src/signal.rs", "Phase", "`phase` of an answer."),
    closed("Verdicts held back", "daemon/src/core/effect.rs", "HeldBack", "An event, and the alert on it."),
    closed(
        "Notifications",
        "daemon/src/notify/mod.rs",
        "NotificationKind",
        "`events` of `[[notify]]`, and what each notification says.",
    ),
    closed("Faults of NATS", "protocol/src/kv/fault.rs", "Fault", "`lastgasp status`, each with what to do."),
    closed("Acts", "daemon/src/effects/actions.rs", "Act", "What `on_lost` did about processes."),
    closed("Outcomes of acts", "daemon/src/effects/actions.rs", "ActionOutcome", "What came of it."),
    closed(
        "Refused declarations",
        "daemon/src/sensors/proc/declare.rs",
        "Refusal",
        "An event; see [declared workers](declared-workers.md).",
    ),
    closed(
        "Kernel programs",
        "daemon/src/sensors/ebpf/program.rs",
        "KernelProgram",
        "`lastgasp status`, one line each.",
    ),
    closed(
        "Why a kernel program is off",
        "daemon/src/sensors/ebpf/program.rs",
        "OffReason",
        "`reason` in `lastgasp status --json`.",
    ),
    closed(
        "Refused messages",
        "protocol/src/bounds.rs",
        "ContractError",
        "A record, signal or answer that is not read.",
    ),
    closed("What a signal did", "router/src/workers/mod.rs", "SignalResult", "For each worker that a signal names."),
    closed("Why streams leave a worker", "router/src/proxy/reason.rs", "Leaving", "What the router saw."),
    closed("What NATS said", "router/src/workers/listing.rs", "Why", "Likewise, where NATS said it."),
    closed(
        "How a worker broke off",
        "router/src/continuation/stream/mod.rs",
        "Broken",
        "Likewise, where its bytes said it.",
    ),
    closed(
        "Why a stream ends with an error",
        "router/src/proxy/reason.rs",
        "MoveFailure",
        "`error.code` of the event that the client gets.",
    ),
    closed(
        "Unmovable streams",
        "router/src/continuation/unmovable.rs",
        "Unmovable",
        "Likewise; the stream's nature forbids it.",
    ),
    closed(
        "Exactness of a move",
        "router/src/continuation/resend.rs",
        "Exactness",
        "The router's log line of each stream.",
    ),
    closed("Lockdown", "daemon/src/sensors/ebpf/lockdown.rs", "Lockdown", "`lastgasp doctor`."),
    closed(
        "What an alert's GPU fault does",
        "daemon/src/core/evidence.rs",
        "GpuPolicy",
        "Decided by the fault's number.",
    ),
    closed("Outcomes of `doctor`", "daemon/src/doctor/mod.rs", "Grade", "`grade` of `lastgasp doctor --json`."),
];

/// Names of a closed enum with what its source says of them.
pub(super) fn variants(closed: &Closed) -> Vec<(String, String)> {
    let (file, name) = closed.source;
    let source = fs::read_to_string(tools::workspace().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
    let variants = parse(&source, name);
    assert!(variants.len() > 1, "{file}: no enum {name} with names");
    variants
}

fn parse(source: &str, name: &str) -> Vec<(String, String)> {
    let body = between(source, &format!("pub enum {name} {{\n"), "\n}").unwrap_or_default();
    let implementation = between(source, &format!("\nimpl {name} {{\n"), "\n}\n");
    let names = ["fn as_str", "fn name", "fn label"];
    let arms = names.iter().find_map(|function| between(implementation?, function, "\n    }"));
    let mut variants = Vec::new();
    let mut said: Vec<&str> = Vec::new();
    for line in body.lines() {
        if let Some(text) = line.strip_prefix("    /// ") {
            said.push(text);
        } else if let Some(rest) = line.strip_prefix("    ").filter(|rest| rest.starts_with(char::is_uppercase)) {
            let variant = rest.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
            let wire = match arms {
                Some(arms) => literal(arms, variant),
                None => Some(snake_case(variant)),
            };
            // A variant that carries another list has no name of its own.
            variants.extend(wire.map(|wire| (wire, sentence(&said.join(" ")))));
            said.clear();
        }
    }
    variants
}

/// Up to the end of the first sentence.
fn sentence(text: &str) -> String {
    let end = text.find(". ").map_or(text.len(), |at| at + 1);
    // A link within rustdoc leads nowhere from a page.
    text[..end].replace("[`", "`").replace("`]", "`").replace('|', "\\|")
}

fn literal(arms: &str, variant: &str) -> Option<String> {
    let arm = arms.lines().find_map(|line| {
        let rest = line.trim_start().strip_prefix("Self::")?.strip_prefix(variant)?;
        if rest.starts_with(char::is_alphanumeric) { None } else { rest.split_once("=> ") }
    });
    let (_, value) = arm?;
    Some(value.strip_prefix('"')?.split('"').next()?.to_owned())
}

fn between<'a>(text: &'a str, begin: &str, end: &str) -> Option<&'a str> {
    let from = text.find(begin)? + begin.len();
    let to = text[from..].find(end)?;
    Some(&text[from..from + to])
}

fn snake_case(name: &str) -> String {
    let mut snake = String::new();
    for c in name.chars() {
        if c.is_uppercase() && !snake.is_empty() {
            snake.push('_');
        }
        snake.extend(c.to_lowercase());
    }
    snake
}

/// Every way of losing information: hop, kind, and what the source says of it.
pub(super) fn losses() -> Vec<(&'static str, &'static str, String)> {
    let source = fs::read_to_string(tools::workspace().join("daemon/src/losses.rs")).expect("losses.rs");
    let said = |loss: Loss| {
        let name = format!("{loss:?}");
        let variant = name.split('(').next().unwrap_or(&name).to_owned();
        let body = between(&source, "pub enum Loss {\n", "\n}").expect("the enum");
        let lines: Vec<&str> = body.lines().collect();
        let at = lines.iter().position(|line| {
            line.trim_start().strip_prefix(variant.as_str()).is_some_and(|rest| rest.starts_with([',', '(']))
        });
        let at = at.unwrap_or_else(|| panic!("{variant} in losses.rs"));
        let begin = lines[..at].iter().rposition(|line| !line.trim_start().starts_with("///")).map_or(0, |at| at + 1);
        let text: Vec<&str> =
            lines[begin..at].iter().map(|line| line.trim_start().trim_start_matches("/// ")).collect();
        sentence(&text.join(" "))
    };
    Loss::all().map(|loss| (loss.hop(), loss.kind(), said(loss))).collect()
}

/// What a label may say.
pub(super) struct Label {
    metric: &'static str,
    label: &'static str,
    /// Titles in [`CLOSED`].
    pub(super) lists: &'static [&'static str],
    /// Values besides.
    pub(super) more: &'static [&'static str],
    /// Where anything else may stand: what.
    pub(super) open: &'static str,
}

const fn label(
    metric: &'static str,
    label: &'static str,
    lists: &'static [&'static str],
    more: &'static [&'static str],
    open: &'static str,
) -> Label {
    Label { metric, label, lists, more, open }
}

const LEFT: &[&str] = &["Why streams leave a worker", "What NATS said", "How a worker broke off"];
const WORKER: &str = "its name";

/// All labels of all metrics.
static LABELS: [Label; 36] = [
    label("lastgasp_evidence_total", "kind", &["Evidence"], &["outdated"], ""),
    label("lastgasp_losses_total", "hop", &[], &[], "see [losses](#losses)"),
    label("lastgasp_losses_total", "kind", &[], &[], "see [losses](#losses)"),
    label("lastgasp_deaths_total", "cause", &["Causes"], &[], ""),
    label("lastgasp_withdrawals_total", "cause", &["Causes"], &["unknown"], ""),
    label("lastgasp_withdrawals_total", "outcome", &[], &["deleted", "was_absent"], ""),
    label("lastgasp_signals_total", "action", &["Actions of a signal"], &[], ""),
    label("lastgasp_router_answers_total", "phase", &["Answers of a router"], &[], ""),
    label("lastgasp_warnings_total", "kind", &["Verdicts held back"], &["gpu_fault", "record_retried"], ""),
    label("lastgasp_notifications_total", "sink", &[], &[], "the name in `[[notify]]`"),
    label("lastgasp_notifications_total", "outcome", &[], &["delivered", "retried", "refused", "given_up"], ""),
    label("lastgasp_infera_frames_total", "kind", &[], &["end", "stand_in", "cancel"], ""),
    label(
        "lastgasp_infera_records_total",
        "outcome",
        &[],
        &["deleted", "drained", "restored", "absent", "changed", "failed"],
        "",
    ),
    label("lastgasp_infera_remembered_requests", "worker", &[], &[], WORKER),
    label(
        "lastgasp_dynamo_records_total",
        "outcome",
        &[],
        &["deleted", "restored", "absent", "changed", "lapsed", "failed"],
        "",
    ),
    label("lastgasp_dynamo_instances", "worker", &[], &[], WORKER),
    label("lastgasp_actions_total", "action", &["Acts"], &[], ""),
    label("lastgasp_actions_total", "outcome", &["Outcomes of acts"], &[], ""),
    label("lastgasp_declarations_total", "outcome", &["Refused declarations"], &["accepted"], ""),
    label("lastgasp_lost_alive_seconds", "worker", &[], &[], WORKER),
    label("lastgasp_worker_state", "worker", &[], &[], WORKER),
    label("lastgasp_worker_state", "state", &["States"], &[], ""),
    label("lastgasp_kernel_program_attached", "program", &["Kernel programs"], &[], ""),
    label("lastgasp_death_source", "source", &[], &lastgasp::metrics::DEATH_SOURCES, ""),
    label("lastgasp_nats_faults", "fault", &["Faults of NATS"], &[], ""),
    label("lastgasp_build_info", "version", &[], &[], "as `lastgasp --version` says it"),
    label("lastgasp_router_migrations_total", "reason", LEFT, &[], ""),
    label("lastgasp_router_migrations_total", "exactness", &["Exactness of a move"], &[], ""),
    label(
        "lastgasp_router_migrations_failed_total",
        "reason",
        &["Why a stream ends with an error", "Unmovable streams"],
        &[],
        "",
    ),
    label("lastgasp_router_retries_total", "reason", LEFT, &[], ""),
    label("lastgasp_router_requests_total", "path", &[], &[], "a path that is known, else `other`"),
    label("lastgasp_router_requests_total", "status", &[], &[], "the HTTP status"),
    label("lastgasp_router_signals_total", "result", &["What a signal did", "Refused messages"], &[], ""),
    label("lastgasp_router_records_refused_total", "reason", &["Refused messages"], &[], ""),
    label("lastgasp_router_nats_faults", "fault", &["Faults of NATS"], &[], ""),
    label("lastgasp_router_in_flight", "worker", &[], &[], "`node/worker`"),
];

impl Label {
    pub(super) fn of(metric: &str, name: &str) -> &'static Self {
        static WORKERS: Label = label("lastgasp_router_workers", "state", &[], &["serving"], "");
        if (metric, name) == (WORKERS.metric, WORKERS.label) {
            return &WORKERS;
        }
        let found = LABELS.iter().find(|label| (label.metric, label.label) == (metric, name));
        found.unwrap_or_else(|| panic!("say in xtask/src/docs/names.rs what {name} of {metric} may be"))
    }

    /// Every value, unless it is open.
    pub(super) fn values(&self) -> Option<BTreeSet<String>> {
        if !self.open.is_empty() {
            return None;
        }
        let lists = self.lists.iter().map(|title| {
            CLOSED.iter().find(|closed| closed.title == *title).unwrap_or_else(|| panic!("no list {title}"))
        });
        let named = lists.flat_map(|closed| variants(closed).into_iter().map(|(name, _)| name));
        Some(named.chain(self.more.iter().map(|name| (*name).to_owned())).collect())
    }
}

#[test]
fn every_label_that_is_explained_exists() {
    let series = Series::exported();
    for Label { metric, label, .. } in &LABELS {
        assert!(
            series.iter().any(|series| series.name == *metric && series.labels.contains(&(*label).to_owned())),
            "{metric} {label}"
        );
    }
}

/// A cause that is added to the enum must be counted from zero too.
#[test]
fn every_cause_is_among_all() {
    let causes = CLOSED.iter().find(|closed| closed.title == "Causes").expect("a list");
    let named: Vec<String> = variants(causes).into_iter().map(|(name, _)| name).collect();
    assert_eq!(named, lastgasp_protocol::CauseKind::ALL.map(|cause| cause.as_str().to_owned()));
}

#[test]
fn the_ladder_has_every_kind_of_evidence() {
    let page = Page::read("docs/how-it-works.md");
    let said: Vec<&str> = page.spans().into_iter().map(|(_, span)| span).collect();
    let evidence = CLOSED.iter().find(|closed| closed.title == "Evidence").expect("a list");
    for (name, _) in variants(evidence) {
        assert!(said.contains(&name.as_str()), "docs/how-it-works.md does not say what {name} means");
    }
}

#[test]
fn names_are_read_from_source() {
    let source = "\
/// A.
pub enum Kind {
    /// The first. And more.
    One,
    /// Of [`Two`],
    /// on two lines.
    TwoThree {
        /// A field.
        field: u8,
    },
    /// Another list.
    Rest(Other),
}

impl Kind {
    pub const fn title(self) -> &'static str {
        match self {
            Self::One => \"wrong\",
        }
    }

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::One => \"one\",
            Self::TwoThree { .. } => \"two_three\",
            Self::Rest(rest) => rest.as_str(),
        }
    }
}
";
    let expected = [("one", "The first."), ("two_three", "Of `Two`, on two lines.")];
    assert_eq!(parse(source, "Kind"), expected.map(|(name, said)| (name.to_owned(), said.to_owned())));
    assert_eq!(snake_case("NoTracepoint"), "no_tracepoint");
}

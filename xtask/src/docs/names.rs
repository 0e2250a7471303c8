//! The closed names that logs, metrics, JSON and certificates share: the names that the enums derive, and the first
//! sentence that the source says of each.

use std::fs;
use std::sync::LazyLock;

use lastgasp::losses::Loss;
use lastgasp_process::catalogue::List;
use strum::VariantNames;

use super::page::Page;
use super::series::Series;
use crate::tools;

/// An enum of closed names.
pub(super) struct Closed {
    /// Its heading.
    pub(super) title: &'static str,
    /// Where they are met.
    pub(super) met: &'static str,
    /// Where it is defined.
    pub(super) file: &'static str,
    /// Its names.
    pub(super) list: List,
}

fn closed<T: VariantNames>(title: &'static str, file: &'static str, met: &'static str) -> Closed {
    Closed { title, met, file, list: List::of::<T>() }
}

/// All of them, in the order of the reference.
pub(super) static CLOSED: LazyLock<Vec<Closed>> = LazyLock::new(|| {
    vec![
        closed::<lastgasp_protocol::CauseKind>(
            "Causes",
            "protocol/src/reason.rs",
            "`cause.kind` of signals and certificates.",
        ),
        closed::<lastgasp::core::Kind>(
            "Evidence",
            "daemon/src/core/evidence.rs",
            "`what` of a certificate's moments of kind `evidence`.",
        ),
        closed::<lastgasp::core::State>("States", "daemon/src/core/effect.rs", "`state` in `lastgasp status`."),
        closed::<lastgasp_protocol::WorkerState>(
            "States of a record",
            "protocol/src/record.rs",
            "`state` of a record in `lastgasp_workers`.",
        ),
        closed::<lastgasp_protocol::Action>(
            "Actions of a signal",
            "protocol/src/signal.rs",
            "`action` of a migration signal.",
        ),
        closed::<lastgasp_protocol::Mode>("Modes of a move", "protocol/src/signal.rs", "`mode` of a migration signal."),
        closed::<lastgasp_protocol::Phase>("Answers of a router", "protocol/src/signal.rs", "`phase` of an answer."),
        closed::<lastgasp::core::HeldBack>(
            "Verdicts held back",
            "daemon/src/core/effect.rs",
            "An event, and the alert on it.",
        ),
        closed::<lastgasp::notify::NotificationKind>(
            "Notifications",
            "daemon/src/notify/mod.rs",
            "`events` of `[[notify]]`, and what each notification says.",
        ),
        closed::<lastgasp_protocol::kv::Fault>(
            "Faults of NATS",
            "protocol/src/kv/fault.rs",
            "`lastgasp status`, each with what to do.",
        ),
        closed::<lastgasp::effects::actions::Act>(
            "Acts",
            "daemon/src/effects/actions.rs",
            "What `on_lost` did about processes.",
        ),
        closed::<lastgasp::effects::actions::ActionOutcome>(
            "Outcomes of acts",
            "daemon/src/effects/actions.rs",
            "What came of it.",
        ),
        closed::<lastgasp::sensors::proc::declare::Refusal>(
            "Refused declarations",
            "daemon/src/sensors/proc/declare.rs",
            "An event; see [declared workers](declared-workers.md).",
        ),
        closed::<lastgasp::sensors::ebpf::KernelProgram>(
            "Kernel programs",
            "daemon/src/sensors/ebpf/program.rs",
            "`lastgasp status`, one line each.",
        ),
        closed::<lastgasp::sensors::ebpf::OffReason>(
            "Why a kernel program is off",
            "daemon/src/sensors/ebpf/program.rs",
            "`reason` in `lastgasp status --json`.",
        ),
        closed::<lastgasp_protocol::ContractError>(
            "Refused messages",
            "protocol/src/bounds.rs",
            "A record, signal or answer that is not read.",
        ),
        closed::<lastgasp_router::workers::SignalResult>(
            "What a signal did",
            "router/src/workers/mod.rs",
            "For each worker that a signal names.",
        ),
        closed::<lastgasp_router::proxy::reason::Seen>(
            "Why streams leave a worker",
            "router/src/proxy/reason.rs",
            "What the router itself saw.",
        ),
        closed::<lastgasp_router::workers::Why>(
            "What NATS said",
            "router/src/workers/listing.rs",
            "Likewise, where NATS said it.",
        ),
        closed::<lastgasp_router::continuation::Broken>(
            "How a worker broke off",
            "router/src/continuation/stream/mod.rs",
            "Likewise, where its bytes said it.",
        ),
        closed::<lastgasp_router::proxy::reason::Unable>(
            "Why a stream ends with an error",
            "router/src/proxy/reason.rs",
            "`error.code` of the event that the client gets.",
        ),
        closed::<lastgasp_router::continuation::Unmovable>(
            "Unmovable streams",
            "router/src/continuation/unmovable.rs",
            "Likewise; the stream's nature forbids it.",
        ),
        closed::<lastgasp_router::continuation::Exactness>(
            "Exactness of a move",
            "router/src/continuation/resend.rs",
            "The router's log line of each stream.",
        ),
        closed::<lastgasp::sensors::ebpf::Lockdown>(
            "Lockdown",
            "daemon/src/sensors/ebpf/lockdown.rs",
            "`lastgasp doctor`.",
        ),
        closed::<lastgasp::core::GpuPolicy>(
            "What an alert's GPU fault does",
            "daemon/src/core/evidence.rs",
            "Decided by the fault's number.",
        ),
        closed::<lastgasp::doctor::Grade>(
            "Outcomes of `doctor`",
            "daemon/src/doctor/mod.rs",
            "`grade` of `lastgasp doctor --json`.",
        ),
    ]
});

/// Names of a closed enum with what its source says of them.
pub(super) fn variants(closed: &Closed) -> Vec<(&'static str, String)> {
    let Closed { file, list, .. } = closed;
    let source = fs::read_to_string(tools::workspace().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
    let name = list.of.rsplit("::").next().unwrap_or(list.of);
    let said = said(&source, name);
    assert_eq!(said.len(), list.names.len(), "{file}: variants of {name}");
    list.names.iter().copied().zip(said).collect()
}

/// What the source says of each variant of an enum, in their order.
fn said(source: &str, name: &str) -> Vec<String> {
    let body = between(source, &format!(" enum {name} {{\n"), "\n}").unwrap_or_default();
    let mut variants = Vec::new();
    let mut said: Vec<&str> = Vec::new();
    for line in body.lines() {
        if let Some(text) = line.strip_prefix("    /// ") {
            said.push(text);
        } else if line.strip_prefix("    ").is_some_and(|rest| rest.starts_with(char::is_uppercase)) {
            variants.push(sentence(&said.join(" ")));
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

fn between<'a>(text: &'a str, begin: &str, end: &str) -> Option<&'a str> {
    let from = text.find(begin)? + begin.len();
    let to = text[from..].find(end)?;
    Some(&text[from..from + to])
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

/// Where the page has the names of this list.
pub(super) fn heading(list: &List) -> Option<&'static str> {
    CLOSED.iter().find(|closed| closed.list == *list).map(|closed| closed.title)
}

#[test]
fn the_ladder_has_every_kind_of_evidence() {
    let page = Page::read("docs/how-it-works.md");
    let said: Vec<&str> = page.spans().into_iter().map(|(_, span)| span).collect();
    let evidence = CLOSED.iter().find(|closed| closed.title == "Evidence").expect("a list");
    for name in evidence.list.names {
        assert!(said.contains(name), "docs/how-it-works.md does not say what {name} means");
    }
}

#[test]
fn every_label_says_something() {
    for Series { name, labels, .. } in Series::exported() {
        for label in labels {
            let is_open = !label.open.is_empty();
            assert!(is_open != label.lists.iter().any(|list| !list.names.is_empty()), "{} of {name}", label.name);
        }
    }
}

#[test]
fn what_is_said_of_variants_is_read_from_source() {
    let source = "\
/// A.
#[derive(Debug)]
pub enum Kind {
    /// The first. And more.
    One,
    /// Of [`Two`],
    /// on two lines.
    #[strum(serialize = \"two\")]
    TwoThree {
        /// A field.
        field: u8,
    },
}
";
    assert_eq!(said(source, "Kind"), ["The first.", "Of `Two`, on two lines."]);
}

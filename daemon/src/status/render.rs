//! Status and events as a person reads them, and as JSON.

use std::fmt::Write as _;

use jiff::Timestamp;
use serde_json::{Map, Value};

use super::{ContainerStatus, Degradation, Event, NodeStatus, ProcessStatus, WorkerStatus};

/// The present, as every time in a status is written: RFC 3339 in UTC, to the millisecond.
#[must_use]
pub(crate) fn now() -> String {
    time(Timestamp::now())
}

/// A time as every time in a status is written.
#[must_use]
pub(crate) fn time(at: Timestamp) -> String {
    format!("{at:.3}")
}

/// Colours, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// For files and pipes, and where `NO_COLOR` is set (no-color.org).
    Plain,
    /// For terminals.
    Coloured,
}

/// SGR parameters (ECMA-48, 8.3.117).
pub(crate) const BOLD: &str = "1";
pub(crate) const RED: &str = "31";
pub(crate) const GREEN: &str = "32";
pub(crate) const YELLOW: &str = "33";
pub(crate) const DIM: &str = "2";

impl Style {
    pub(crate) fn paint(self, colour: &str, text: &str) -> String {
        match self {
            Self::Plain => text.to_owned(),
            Self::Coloured => format!("\u{1b}[{colour}m{text}\u{1b}[0m"),
        }
    }
}

fn state_colour(state: &str) -> &'static str {
    match state {
        "serving" => GREEN,
        "lost" => RED,
        "starting" | "left" => DIM,
        _ => YELLOW,
    }
}

/// The table of `lastgasp status`.
#[must_use]
pub(crate) fn status(status: &NodeStatus, now: Timestamp, style: Style) -> String {
    let mut out = head(status, now, style);
    if status.workers.is_empty() {
        out.push_str("\nno workers are configured\n");
    } else {
        out.push('\n');
        out.push_str(&workers(&status.workers, now, style));
    }
    let mut section = |title: &str, lines: Vec<String>| {
        if !lines.is_empty() {
            let _ = write!(out, "\n{}\n", style.paint(BOLD, title));
            for line in lines {
                let _ = writeln!(out, "  {line}");
            }
        }
    };
    let degraded = status.degraded.iter().map(|Degradation { what, reason, cost, fix }| {
        let fix = if fix.is_empty() { String::new() } else { format!("; to do: {fix}") };
        clean(&format!("{what}: {reason}; so {cost}{fix}"))
    });
    section("doing without", degraded.collect());
    let lost = status.losses.iter().map(|loss| clean(&format!("{} at {}: {}", loss.kind, loss.hop, loss.count)));
    section("information lost", lost.collect());
    section("look at", status.warnings.iter().map(|warning| clean(warning)).collect());
    out
}

fn head(status: &NodeStatus, now: Timestamp, style: Style) -> String {
    let NodeStatus {
        node,
        mode,
        version,
        death_source,
        death_source_reason,
        nats,
        nats_url,
        lease,
        started_at,
        ready,
        ..
    } = status;
    let because = if death_source_reason.is_empty() { String::new() } else { format!(" ({death_source_reason})") };
    let nats_colour = if nats == "connected" { GREEN } else { RED };
    let source_colour = if death_source == "ebpf" { GREEN } else { YELLOW };
    let mut out = String::new();
    let _ = writeln!(
        out,
        "{}  lastgasp {}  up {}  mode {}{}",
        style.paint(BOLD, &clean(node)),
        clean(version),
        ago(started_at, now),
        style.paint(if mode == "enforce" { GREEN } else { YELLOW }, mode),
        if *ready { "" } else { "  not ready yet" },
    );
    let _ = writeln!(
        out,
        "death source {}{}  nats {} {}  lease {}  routers {}",
        style.paint(source_colour, &clean(death_source)),
        clean(&because),
        style.paint(nats_colour, &clean(nats)),
        clean(nats_url),
        clean(if lease.is_empty() { "-" } else { lease }),
        status.routers.len(),
    );
    out
}

fn workers(workers: &[WorkerStatus], now: Timestamp, style: Style) -> String {
    let title = |text: &str| (text.to_owned(), BOLD);
    let mut rows = vec![
        ["WORKER", "STATE", "FOR", "ENGINE", "ROOT", "CRITICAL", "EPOCH", "REVISION", "HEALTH", "LAST EVIDENCE"]
            .map(title)
            .to_vec(),
    ];
    for worker in workers {
        let plain = |text: String| (if text.is_empty() { "-".to_owned() } else { clean(&text) }, "");
        let root = worker.root.as_ref().map(|root| root.tgid.to_string()).unwrap_or_default();
        let number = |number: u64| if number == 0 { String::new() } else { number.to_string() };
        let evidence = match worker.last_evidence.as_str() {
            "" => String::new(),
            kind => format!("{kind} {} ago", ago(&worker.last_evidence_at, now)),
        };
        rows.push(vec![
            plain(worker.worker.clone()),
            (clean(&worker.state), state_colour(&worker.state)),
            plain(ago(&worker.since, now)),
            plain(worker.engine.clone()),
            plain(root),
            plain(critical(&worker.processes)),
            plain(number(worker.epoch)),
            plain(number(worker.revision)),
            plain(worker.health.clone()),
            plain(evidence),
        ]);
    }
    let mut out = table(&rows, style);
    for worker in workers.iter().filter(|worker| !worker.reason.is_empty()) {
        let _ = writeln!(out, "{}: {}: {}", clean(&worker.worker), clean(&worker.state), clean(&worker.reason));
    }
    for worker in workers {
        for line in details(worker) {
            let _ = writeln!(out, "{}: {}", clean(&worker.worker), clean(&line));
        }
    }
    out
}

/// One worker in full, as `lastgasp status WORKER` shows it.
#[must_use]
pub(crate) fn worker(node: &str, worker: &WorkerStatus, now: Timestamp, style: Style) -> String {
    let WorkerStatus {
        worker: name,
        engine,
        state,
        since,
        reason,
        incarnation,
        epoch,
        revision,
        endpoint,
        models,
        root,
        processes,
        health,
        last_evidence,
        last_evidence_at,
        container: _,
        orphans: _,
        source,
    } = worker;
    let mut out = format!(
        "{} on {}: {} for {}\n",
        style.paint(BOLD, &clean(name)),
        clean(node),
        style.paint(state_colour(state), &clean(state)),
        ago(since, now)
    );
    let mut line = |title: &str, text: String| {
        if !text.is_empty() {
            let _ = writeln!(out, "  {}{}", style.paint(DIM, &format!("{title:<15}")), clean(&text));
        }
    };
    line("reason", reason.clone());
    line("endpoint", endpoint.clone());
    line("engine", engine.clone());
    line("models", models.join(", "));
    let record = if *revision == 0 { "none".to_owned() } else { format!("revision {revision}, epoch {epoch}") };
    line("record", record);
    line("life", incarnation.clone());
    line("health", health.clone());
    if !last_evidence.is_empty() {
        line("last evidence", format!("{last_evidence}, {} ago", ago(last_evidence_at, now)));
    }
    for (process, what) in root.iter().map(|root| (root, "root")).chain(processes.iter().map(|one| (one, "critical"))) {
        let ended = if process.alive { "" } else { ", ended" };
        line("process", format!("{} (pid {}), {what}{ended}", process.title, process.tgid));
    }
    for text in details(worker) {
        line("", text);
    }
    line("known by its", source.clone());
    out
}

/// What not every worker has.
fn details(worker: &WorkerStatus) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(container) = worker.container.as_ref().filter(|container| !container.container_id.is_empty()) {
        let ContainerStatus { pod_uid, container_id, runtime, .. } = container;
        let pod = if pod_uid.is_empty() { String::new() } else { format!("pod {pod_uid}, ") };
        let short: String = container_id.chars().take(12).collect();
        lines.push(format!("in {pod}container {short} {runtime}").trim_end().to_owned());
    }
    if !worker.orphans.is_empty() {
        let orphans = worker.orphans.iter().map(|orphan| format!("{} (pid {})", orphan.title, orphan.tgid));
        lines.push(format!("still alive: {}", orphans.collect::<Vec<_>>().join(", ")));
    }
    lines
}

/// `2/3`: two of three critical descendants live.
fn critical(processes: &[ProcessStatus]) -> String {
    let critical: Vec<&ProcessStatus> = processes.iter().filter(|process| process.critical).collect();
    let alive = critical.iter().filter(|process| process.alive).count();
    if critical.is_empty() { String::new() } else { format!("{alive}/{}", critical.len()) }
}

/// Columns as wide as their widest cell, two blanks between.
pub(crate) fn table(rows: &[Vec<(String, &str)>], style: Style) -> String {
    let columns = rows.first().map_or(0, Vec::len);
    let widths: Vec<usize> =
        (0..columns).map(|column| rows.iter().map(|row| row[column].0.chars().count()).max().unwrap_or(0)).collect();
    let mut out = String::new();
    for row in rows {
        for (column, (text, colour)) in row.iter().enumerate() {
            out.push_str(&if colour.is_empty() { text.clone() } else { style.paint(colour, text) });
            if column + 1 < columns {
                out.push_str(&" ".repeat(widths[column] - text.chars().count() + 2));
            }
        }
        out.push('\n');
    }
    out
}

/// One line of `lastgasp events`.
#[must_use]
pub(crate) fn event(event: &Event, style: Style) -> String {
    let Event { at, kind, worker, summary, certificate_json: _ } = event;
    let colour = match kind.as_str() {
        "certificate" => RED,
        "note" => YELLOW,
        _ => BOLD,
    };
    let worker = if worker.is_empty() { "-" } else { worker };
    format!(
        "{}  {}  {}  {}",
        style.paint(DIM, &clean(at)),
        style.paint(colour, &format!("{kind:<11}")),
        clean(worker),
        clean(summary)
    )
}

/// One line of `lastgasp events --json`: a certificate with all its own fields, or what happened.
#[must_use]
pub(crate) fn event_json(event: &Event) -> String {
    let Event { at, kind, worker, summary, certificate_json } = event;
    let mut object = Map::new();
    object.insert("event".to_owned(), Value::from(kind.as_str()));
    if let Some(Ok(Value::Object(certificate))) = certificate_json.as_deref().map(serde_json::from_str) {
        object.extend(certificate);
    } else {
        object.insert("at".to_owned(), Value::from(at.as_str()));
        object.insert("worker".to_owned(), Value::from(worker.as_str()));
        object.insert("summary".to_owned(), Value::from(summary.as_str()));
    }
    Value::Object(object).to_string()
}

/// Time since an RFC 3339 time, in its two largest units; `-` if that is none.
pub(crate) fn ago(since: &str, now: Timestamp) -> String {
    let Ok(since) = since.parse::<Timestamp>() else { return "-".to_owned() };
    let seconds = now.duration_since(since).as_secs().max(0);
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m{}s", seconds % 60),
        (0, _, _) => format!("{hours}h{minutes}m"),
        _ => format!("{days}d{hours}h"),
    }
}

/// Titles are what processes call themselves: a control character in one must not reach a terminal.
pub(crate) fn clean(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::super::{LossStatus, ProgramStatus};
    use super::*;

    fn at(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    fn node() -> NodeStatus {
        let process = |tgid, title: &str, alive| ProcessStatus { tgid, title: title.into(), critical: true, alive };
        NodeStatus {
            node: "gpu-a".into(),
            mode: "enforce".into(),
            version: "0.1.0".into(),
            death_source: "ebpf".into(),
            nats: "connected".into(),
            nats_url: "nats://127.0.0.1:4222".into(),
            lease: "held".into(),
            started_at: "2026-11-29T17:00:00.000Z".into(),
            ready: true,
            workers: vec![
                WorkerStatus {
                    worker: "vllm-0".into(),
                    engine: "vllm".into(),
                    state: "serving".into(),
                    since: "2026-11-29T17:00:10.000Z".into(),
                    epoch: 1,
                    revision: 42,
                    root: Some(process(4242, "vllm", true)),
                    processes: vec![process(4300, "VLLM::EngineCore", true)],
                    health: "watch serving".into(),
                    last_evidence: "serving".into(),
                    last_evidence_at: "2026-11-29T17:00:10.000Z".into(),
                    container: Some(ContainerStatus {
                        cgroup_path: "/kubepods".into(),
                        pod_uid: "8f3a2c51-7f0e-4c3b-9d34-0a1b2c3d4e5f".into(),
                        container_id: "3e5c0f6c1d2b4a59".into(),
                        runtime: "containerd".into(),
                        ..ContainerStatus::default()
                    }),
                    ..WorkerStatus::default()
                },
                WorkerStatus {
                    worker: "sglang-0".into(),
                    engine: "sglang".into(),
                    state: "lost".into(),
                    since: "2026-11-29T18:01:00.000Z".into(),
                    reason: "process_killed sglang::scheduler_TP0 by signal 9".into(),
                    processes: vec![process(5000, "sglang::scheduler_TP0", false)],
                    orphans: vec![process(5001, "sglang::scheduler_TP1", true)],
                    ..WorkerStatus::default()
                },
            ],
            kernel_programs: vec![
                ProgramStatus { name: "sched_process_exit".into(), on: true, reason: String::new() },
                ProgramStatus { name: "mark_victim".into(), on: false, reason: "no uid field".into() },
            ],
            degraded: vec![Degradation {
                what: "program mark_victim".into(),
                reason: "no uid field".into(),
                cost: "an OOM kill looks like any other SIGKILL".into(),
                fix: String::new(),
            }],
            losses: vec![LossStatus { hop: "ring".into(), kind: "process_exit".into(), count: 3 }],
            warnings: vec!["LASTGASP_NATS_ULR: is not a setting".into()],
            ..NodeStatus::default()
        }
    }

    #[test]
    fn a_person_sees_a_table() {
        assert_eq!(
            status(&node(), at("2026-11-29T18:02:03Z"), Style::Plain),
            "\
gpu-a  lastgasp 0.1.0  up 1h2m  mode enforce
death source ebpf  nats connected nats://127.0.0.1:4222  lease held  routers 0

WORKER    STATE    FOR   ENGINE  ROOT  CRITICAL  EPOCH  REVISION  HEALTH         LAST EVIDENCE
vllm-0    serving  1h1m  vllm    4242  1/1       1      42        watch serving  serving 1h1m ago
sglang-0  lost     1m3s  sglang  -     0/1       -      -         -              -
sglang-0: lost: process_killed sglang::scheduler_TP0 by signal 9
vllm-0: in pod 8f3a2c51-7f0e-4c3b-9d34-0a1b2c3d4e5f, container 3e5c0f6c1d2b containerd
sglang-0: still alive: sglang::scheduler_TP1 (pid 5001)

doing without
  program mark_victim: no uid field; so an OOM kill looks like any other SIGKILL

information lost
  process_exit at ring: 3

look at
  LASTGASP_NATS_ULR: is not a setting
"
        );
    }

    #[test]
    fn one_worker_is_shown_in_full() {
        let node = node();
        assert_eq!(
            worker("gpu-a", &node.workers[0], at("2026-11-29T18:02:03Z"), Style::Plain),
            "\
vllm-0 on gpu-a: serving for 1h1m
  engine         vllm
  record         revision 42, epoch 1
  health         watch serving
  last evidence  serving, 1h1m ago
  process        vllm (pid 4242), root
  process        VLLM::EngineCore (pid 4300), critical
                 in pod 8f3a2c51-7f0e-4c3b-9d34-0a1b2c3d4e5f, container 3e5c0f6c1d2b containerd
"
        );
    }

    #[test]
    fn colours_change_nothing_but_colours() {
        let coloured = status(&node(), at("2026-11-29T18:02:03Z"), Style::Coloured);
        let mut plain = String::new();
        for part in coloured.split('\u{1b}') {
            plain.push_str(part.strip_prefix('[').and_then(|rest| rest.split_once('m')).map_or(part, |(_, text)| text));
        }
        assert_ne!(coloured, plain);
        assert_eq!(plain, status(&node(), at("2026-11-29T18:02:03Z"), Style::Plain));
    }

    #[test]
    fn a_process_cannot_write_to_the_terminal() {
        let mut node = node();
        node.workers[1].reason = "process_exited \u{1b}]0;owned\u{7}".into();
        assert!(!status(&node, at("2026-11-29T18:02:03Z"), Style::Plain).contains(['\u{1b}', '\u{7}']));
    }

    #[test]
    fn the_json_has_the_names_that_scripts_rely_on() {
        let json = serde_json::to_value(node()).unwrap();
        assert_eq!(json["node"], "gpu-a");
        assert_eq!(json["death_source"], "ebpf");
        assert_eq!(json["nats"], "connected");
        assert_eq!(json["workers"][0]["worker"], "vllm-0");
        assert_eq!(json["workers"][0]["state"], "serving");
        assert_eq!(json["workers"][0]["revision"], 42);
        assert_eq!(json["workers"][0]["root"]["tgid"], 4242);
        assert_eq!(json["workers"][0]["processes"][0]["title"], "VLLM::EngineCore");
        assert_eq!(json["workers"][1]["root"], Value::Null);
        assert_eq!(json["kernel_programs"][1]["on"], false);
    }

    #[test]
    fn a_certificate_is_printed_with_its_own_fields() {
        let certificate = Event {
            at: "2026-11-29T18:00:00.000Z".into(),
            kind: "certificate".into(),
            worker: "vllm-0".into(),
            summary: "lost".into(),
            certificate_json: Some(r#"{"schema":1,"certificate":"01K","worker":"vllm-0"}"#.into()),
        };
        assert_eq!(
            event_json(&certificate),
            r#"{"event":"certificate","schema":1,"certificate":"01K","worker":"vllm-0"}"#
        );
        let state = Event { kind: "state".into(), certificate_json: None, ..certificate };
        assert_eq!(
            event_json(&state),
            r#"{"event":"state","at":"2026-11-29T18:00:00.000Z","worker":"vllm-0","summary":"lost"}"#
        );
        assert_eq!(event(&state, Style::Plain), "2026-11-29T18:00:00.000Z  state        vllm-0  lost");
    }
}

//! Deaths as a person reads them: a table of them, and one as a story with its time line.

use std::fmt::Write as _;

use jiff::Timestamp;
use lastgasp_protocol::{Cause, CauseKind, Certificate, Moment};
use nix::sys::signal::Signal;

use super::render::{BOLD, DIM, GREEN, RED, Style, YELLOW, ago, clean, table};

/// Candidates that are named when it is not clear which certificate is meant.
const CANDIDATES: usize = 8;

/// The certificate that is meant is not there, or not the only one.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NoSuchDeath {
    /// There is none.
    #[error(
        "no death certificate begins with {wanted:?}, and no worker of that name has died; `lastgasp deaths` lists those that are known"
    )]
    Unknown {
        /// What was asked for.
        wanted: String,
    },
    /// There are several.
    #[error("{wanted:?} is the beginning of {count} certificates: {}; give more of the id", .candidates.join(", "))]
    Ambiguous {
        /// What was asked for.
        wanted: String,
        /// How many fit.
        count: usize,
        /// The newest of them.
        candidates: Vec<String>,
    },
}

/// Finds a certificate by the beginning of its id, or a worker's last one by the worker's name.
///
/// # Errors
/// See [`NoSuchDeath`].
pub(crate) fn find<'a>(deaths: &'a [Certificate], wanted: &str) -> Result<&'a Certificate, NoSuchDeath> {
    let beginning = wanted.to_ascii_uppercase();
    let fit: Vec<&Certificate> =
        deaths.iter().filter(|death| !wanted.is_empty() && death.certificate.starts_with(&beginning)).collect();
    match fit[..] {
        [one] => Ok(one),
        [] => {
            let of_worker = deaths.iter().rev().find(|death| death.worker.as_str() == wanted);
            of_worker.ok_or_else(|| NoSuchDeath::Unknown { wanted: wanted.to_owned() })
        }
        _ => Err(NoSuchDeath::Ambiguous {
            wanted: wanted.to_owned(),
            count: fit.len(),
            candidates: fit.iter().rev().take(CANDIDATES).map(|death| death.certificate.clone()).collect(),
        }),
    }
}

/// When the record was gone, in microseconds after the first moment.
fn withdrawn_after(death: &Certificate) -> Option<i64> {
    death.timeline.iter().find(|moment| moment.what == "withdrawn").map(|moment| moment.at_us)
}

/// The table of `lastgasp deaths`, newest first.
#[must_use]
pub(crate) fn deaths(deaths: &[Certificate], now: Timestamp, style: Style) -> String {
    if deaths.is_empty() {
        return "no worker of this node has died, as far as the daemon and its NATS server remember\n".to_owned();
    }
    let titles = ["CERTIFICATE", "WHEN", "WORKER", "WITHDRAWN AFTER", "STREAMS MOVED", "CAUSE"];
    let mut rows = vec![titles.map(|title| (title.to_owned(), BOLD)).to_vec()];
    for death in deaths.iter().rev() {
        let withdrawn = match withdrawn_after(death) {
            _ if death.observed_only => "observed only".to_owned(),
            Some(after) => micros(after),
            None => "-".to_owned(),
        };
        let streams = format!("{} of {}", death.streams.moved, death.streams.streams);
        let unmoved = death.streams.moved < death.streams.streams;
        rows.push(vec![
            (clean(&death.certificate), ""),
            (format!("{} ago", ago(&death.at.to_string(), now)), ""),
            (clean(death.worker.as_str()), ""),
            (withdrawn, ""),
            (streams, if unmoved { YELLOW } else { "" }),
            (clean(&death.cause.to_string()), ""),
        ]);
    }
    table(&rows, style)
}

/// One death, as a story.
#[must_use]
pub(crate) fn death(death: &Certificate, now: Timestamp, style: Style) -> String {
    let Certificate {
        schema: _,
        certificate,
        node,
        worker,
        incarnation,
        epoch,
        at,
        at_monotonic_ns: _,
        cause,
        observed_only,
        timeline,
        routers_received,
        routers_done,
        streams,
        container,
        orphans,
    } = death;
    let mut out = format!("{}\n", style.paint(BOLD, &clean(&format!("{worker} on {node}: {}", in_words(cause)))));
    let mut line = |title: &str, text: String| {
        let _ = writeln!(out, "  {}{}", style.paint(DIM, &format!("{title:<13}")), clean(&text));
    };
    line("certificate", certificate.clone());
    line("when", format!("{at:.3}, {} ago", ago(&at.to_string(), now)));
    line("life", format!("{incarnation}, listed for the {} time", ordinal(*epoch)));
    if let Some(container) = container {
        let part = |what: &str, value: &Option<String>| value.as_ref().map(|value| format!("{what} {value}"));
        let parts = [part("pod", &container.pod_uid), part("container", &container.container_id)];
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        line("where", if parts.is_empty() { container.cgroup_path.clone() } else { parts.join(", ") });
    }
    if *observed_only {
        line("observed", "mode = \"observe\": nothing was changed".to_owned());
    } else {
        let after = withdrawn_after(death).map_or_else(|| "not yet, when this was written".to_owned(), micros);
        line("withdrawn", format!("after {after}").replace("after not", "not"));
        line("routers", format!("{routers_received} heard of it, {routers_done} said that they were done"));
    }
    let lastgasp_protocol::Counts { streams, moved, unmovable, failed } = streams;
    line("streams", format!("{streams}: {moved} moved, {unmovable} could not be moved, {failed} failed"));
    if !orphans.is_empty() {
        let orphans: Vec<String> =
            orphans.iter().map(|orphan| format!("{} (pid {})", orphan.title, orphan.pid)).collect();
        line("left behind", orphans.join(", "));
    }
    out.push('\n');
    out.push_str(&time_line(timeline, style));
    out
}

/// Every moment with its distance from the first, and what kind of thing it was.
fn time_line(timeline: &[Moment], style: Style) -> String {
    let rows: Vec<Vec<(String, &str)>> = timeline
        .iter()
        .map(|Moment { at_us, kind, what, detail }| {
            let (mark, colour) = match kind.as_str() {
                "evidence" => ("seen", YELLOW),
                "decision" => ("decided", RED),
                _ => ("done", GREEN),
            };
            let offset = format!("{:>11}", micros(*at_us));
            vec![(offset, DIM), (mark.to_owned(), colour), (clean(&what.replace('_', " ")), BOLD), (clean(detail), "")]
        })
        .collect();
    table(&rows, style)
}

/// A cause as a sentence without its full stop.
#[must_use]
pub(crate) fn in_words(cause: &Cause) -> String {
    let Cause { kind, signal, exit_status, process, sender, reason } = cause;
    let who = process.as_deref().unwrap_or("a critical process");
    let by_signal = signal.map(|signal| format!(" by signal {signal}{}", signal_name(signal))).unwrap_or_default();
    let mut text = match kind {
        CauseKind::ProcessKilled => format!("{who} was killed{by_signal}"),
        CauseKind::ProcessCrashed => format!("{who} crashed{by_signal}"),
        CauseKind::ProcessExited => match exit_status {
            Some(status) => format!("{who} exited with status {status}"),
            None => format!("{who} exited"),
        },
        CauseKind::OomKilled => format!("the kernel ran out of memory and killed {who}"),
        CauseKind::ProcessGone => format!("{who} was found gone; no source saw how it ended"),
        CauseKind::Replaced => format!("{who} runs another program now"),
        CauseKind::GpuFault => format!("{who} had a GPU fault that it does not survive"),
        CauseKind::ListenerClosed => "a task that was ending closed the serving port".to_owned(),
        CauseKind::ConnectionRefused => {
            "the health address refused connections, and no socket listened there".to_owned()
        }
        CauseKind::NotServing => "the liveness service said NOT_SERVING".to_owned(),
        CauseKind::NotReady => "the readiness service said NOT_SERVING".to_owned(),
        CauseKind::Hung => "health checks went unanswered over the hang window".to_owned(),
        CauseKind::Terminated => format!("the engine was asked to leave{by_signal}"),
        CauseKind::Commanded => "a command took the worker out of service".to_owned(),
    };
    if let Some(sender) = sender {
        let _ = write!(text, ", by {sender}");
    }
    if let Some(reason) = reason {
        let _ = write!(text, ": {reason}");
    }
    text
}

fn signal_name(signal: i32) -> String {
    Signal::try_from(signal).map(|signal| format!(" ({signal})")).unwrap_or_default()
}

fn ordinal(number: u64) -> String {
    let suffix = match (number % 10, number % 100) {
        (1, rest) if rest != 11 => "st",
        (2, rest) if rest != 12 => "nd",
        (3, rest) if rest != 13 => "rd",
        _ => "th",
    };
    format!("{number}{suffix}")
}

/// Microseconds in the unit that a person would choose.
#[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
pub(crate) fn micros(micros: i64) -> String {
    match micros {
        ..1000 => format!("{micros} µs"),
        1000..1_000_000 => format!("{:.2} ms", micros as f64 / 1e3),
        _ => format!("{:.2} s", micros as f64 / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use lastgasp_protocol::{Counts, Incarnation, Name, Orphan, SCHEMA, Sender};

    use super::*;

    fn certificate(id: &str, worker: &str) -> Certificate {
        let moment = |at_us, kind: &str, what: &str, detail: &str| Moment {
            at_us,
            kind: kind.into(),
            what: what.into(),
            detail: detail.into(),
        };
        Certificate {
            schema: SCHEMA,
            certificate: id.into(),
            node: Name::new("gpu-a").unwrap(),
            worker: Name::new(worker).unwrap(),
            incarnation: Incarnation::new("5f0c1d2e-4711-883412").unwrap(),
            epoch: 2,
            at: "2026-11-29T17:00:00.123Z".parse().unwrap(),
            at_monotonic_ns: 1,
            cause: Cause {
                signal: Some(9),
                process: Some("VLLM::EngineCore".into()),
                sender: Some(Sender { pid: 4242, comm: "kill".into(), cgroup: None }),
                ..Cause::of(CauseKind::ProcessKilled)
            },
            observed_only: false,
            timeline: vec![
                moment(0, "evidence", "signal_delivered", "VLLM::EngineCore (pid 4300) signal 9"),
                moment(31, "decision", "lost", "process_killed"),
                moment(208, "effect", "signalled", "move"),
                moment(1190, "effect", "withdrawn", "revision 43"),
                moment(2_500_000, "effect", "router_done", "router-1: 12 streams, 11 moved"),
            ],
            routers_received: 1,
            routers_done: 1,
            streams: Counts { streams: 12, moved: 11, unmovable: 1, failed: 0 },
            container: None,
            orphans: vec![Orphan { pid: 4310, title: "VLLM::Worker".into() }],
        }
    }

    fn now() -> Timestamp {
        "2026-11-29T17:03:00Z".parse().unwrap()
    }

    #[test]
    fn a_death_is_a_story() {
        assert_eq!(
            death(&certificate("01KABC", "vllm-0"), now(), Style::Plain),
            "\
vllm-0 on gpu-a: VLLM::EngineCore was killed by signal 9 (SIGKILL), by kill (pid 4242)
  certificate  01KABC
  when         2026-11-29T17:00:00.123Z, 2m59s ago
  life         5f0c1d2e-4711-883412, listed for the 2nd time
  withdrawn    after 1.19 ms
  routers      1 heard of it, 1 said that they were done
  streams      12: 11 moved, 1 could not be moved, 0 failed
  left behind  VLLM::Worker (pid 4310)

       0 µs  seen     signal delivered  VLLM::EngineCore (pid 4300) signal 9
      31 µs  decided  lost              process_killed
     208 µs  done     signalled         move
    1.19 ms  done     withdrawn         revision 43
     2.50 s  done     router done       router-1: 12 streams, 11 moved
"
        );
    }

    #[test]
    fn deaths_are_a_table_with_the_newest_first() {
        let known = [certificate("01KABC", "vllm-0"), certificate("01KABD", "sglang-0")];
        assert_eq!(
            deaths(&known, now(), Style::Plain),
            "\
CERTIFICATE  WHEN       WORKER    WITHDRAWN AFTER  STREAMS MOVED  CAUSE
01KABD       2m59s ago  sglang-0  1.19 ms          11 of 12       process_killed VLLM::EngineCore by signal 9 from kill (pid 4242)
01KABC       2m59s ago  vllm-0    1.19 ms          11 of 12       process_killed VLLM::EngineCore by signal 9 from kill (pid 4242)
"
        );
        assert!(deaths(&[], now(), Style::Plain).starts_with("no worker of this node has died"));
    }

    #[test]
    fn a_certificate_is_found_by_the_beginning_of_its_id_or_by_its_worker() {
        let known = [certificate("01KABC", "vllm-0"), certificate("01KABD", "vllm-0"), certificate("01KXYZ", "b")];
        assert_eq!(find(&known, "01kx").unwrap().certificate, "01KXYZ");
        assert_eq!(find(&known, "vllm-0").unwrap().certificate, "01KABD", "the last one of the worker");
        assert_eq!(
            find(&known, "01KAB").unwrap_err().to_string(),
            "\"01KAB\" is the beginning of 2 certificates: 01KABD, 01KABC; give more of the id"
        );
        assert!(matches!(find(&known, "01Z"), Err(NoSuchDeath::Unknown { .. })));
        assert!(matches!(find(&known, ""), Err(NoSuchDeath::Unknown { .. })));
    }

    #[test]
    fn every_cause_can_be_said_in_words() {
        let exited = Cause { exit_status: Some(3), ..Cause::of(CauseKind::ProcessExited) };
        assert_eq!(in_words(&exited), "a critical process exited with status 3");
        let commanded = Cause { reason: Some("garbled answers".into()), ..Cause::of(CauseKind::Commanded) };
        assert_eq!(in_words(&commanded), "a command took the worker out of service: garbled answers");
    }

    #[test]
    fn a_process_cannot_write_to_the_terminal() {
        let mut certificate = certificate("01K", "w");
        certificate.timeline[0].detail = "\u{1b}]0;owned\u{7}".into();
        certificate.cause.process = Some("\u{1b}[2J".into());
        for text in [death(&certificate, now(), Style::Plain), deaths(&[certificate], now(), Style::Plain)] {
            assert!(!text.contains(['\u{1b}', '\u{7}']), "{text:?}");
        }
    }
}

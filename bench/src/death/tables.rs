//! What was found, as tables and pictures.

use lastgasp_tests::distribution::Unit;

use super::{Death, Hops, LEASE, Situation, Watcher};
use crate::report::{Plot, Row, Section};

/// Everybody, in the order of the tables.
const WATCHERS: [Watcher; 7] =
    [Watcher::Ebpf, Watcher::Former, Watcher::Realtime, Watcher::Pidfd, Watcher::Watch, Watcher::Poll, Watcher::Lease];

/// One hop, and where it is noted.
type Hop = (&'static str, fn(&Hops) -> Option<f64>);

/// In the order in which they happen.
const HOPS: [Hop; 6] = [
    ("first evidence", |hops| hops.evidence),
    ("signal to routers published", |hops| hops.signalled),
    ("record gone, seen by a watcher", |hops| hops.seen),
    ("record gone, acknowledged", |hops| hops.gone),
    ("router has acted, the reader sees it", |hops| hops.acted),
    ("next token at the reader", |hops| hops.next_token),
];

fn row(labels: [&str; 3], deaths: &[Death], watcher: Watcher, hop: fn(&Hops) -> Option<f64>) -> Option<Row> {
    let of = deaths.iter().filter(|death| death.watcher == watcher);
    Row::of(labels, Unit::Microseconds, of.filter_map(|death| hop(&death.hops)))
}

pub(super) fn sections(found: &[(Situation, Vec<Death>)]) -> Vec<Section> {
    vec![safety(found), hops(found)]
}

fn safety(found: &[(Situation, Vec<Death>)]) -> Section {
    let mut rows = Vec::new();
    let mut plots = Vec::new();
    for (situation, deaths) in found {
        let own: Vec<Row> = WATCHERS
            .into_iter()
            .filter_map(|watcher| row([situation.name, watcher.name(), ""], deaths, watcher, |hops| hops.gone))
            .map(|mut row| {
                row.labels.pop();
                row
            })
            .collect();
        let ours = own.iter().find(|row| row.labels[1] == Watcher::Ebpf.name()).cloned();
        plots.push(Plot::cumulative(
            situation.slug,
            &format!("From the kill until the record is gone: {}", situation.name),
            ("time since the kill", true),
            own.iter().map(|row| (row.labels[1].clone(), row)),
        ));
        rows.extend(
            own.into_iter().map(
                |row| {
                    if row.labels[1] == Watcher::Ebpf.name() { row } else { row.against(ours.as_ref()) }
                },
            ),
        );
    }
    Section {
        title: "How long a dead worker is still offered".to_owned(),
        about: format!(
            "From just before `kill()` until the deletion of the worker's record is acknowledged by nats-server; of the \
             lease, until a watcher sees that it ended. The lease is renewed every third of its {} s, the poll is at a \
             random point of its second, and the first failure counts. Deaths that take seconds each are fewer: see n. \
             The mock engine's frontend behaves as vLLM's Rust frontend was measured to: when its EngineCore is gone, it \
             says so after 3.6 s.",
            LEASE.as_secs()
        ),
        labels: ["what dies", "noticed by"].map(str::to_owned).to_vec(),
        compared_with: Some("p50 : lastgasp, eBPF".to_owned()),
        rows,
        plots,
    }
}

fn hops(found: &[(Situation, Vec<Death>)]) -> Section {
    let mut rows = Vec::new();
    for (situation, deaths) in found {
        for watcher in &WATCHERS[..5] {
            for (name, hop) in HOPS {
                rows.extend(row([situation.name, watcher.name(), name], deaths, *watcher, hop));
            }
        }
    }
    Section {
        title: "Hop by hop".to_owned(),
        about: "Microseconds from just before `kill()`. A reader has a stream through lastgasp-router on the worker that \
                is killed, and another worker has the same model. Where the whole worker dies its connections break too, \
                which the router sees by itself: only there can it act before the record is gone."
            .to_owned(),
        labels: ["what dies", "noticed by", "until"].map(str::to_owned).to_vec(),
        compared_with: None,
        rows,
        plots: Vec::new(),
    }
}

//! What the daemon tells its sinks, as tests of one sink alone have to say it.

use lastgasp::notify::{BridgeReport, Lost, Notification, NotificationKind};
use lastgasp_protocol::{Cause, CauseKind, Incarnation, Name, SCHEMA};
use lastgasp_tests::process::GIVE_UP;
use tokio::sync::mpsc;

pub(crate) fn name(name: &str) -> Name {
    Name::new(name).unwrap()
}

fn life() -> Incarnation {
    Incarnation::new("a-1-2").unwrap()
}

/// These workers are lost for one cause.
pub(crate) fn lost(workers: &[&str], kind: CauseKind) -> Vec<Lost> {
    let lost = |worker: &&str| Lost { worker: name(worker), incarnation: life(), cause: Some(Cause::of(kind)) };
    workers.iter().map(lost).collect()
}

/// A record of the worker stands.
pub(crate) fn listed(worker: &str, event: NotificationKind, epoch: u64) -> Notification {
    Notification {
        schema: SCHEMA,
        event,
        at: jiff::Timestamp::now(),
        node: name("gpu-a"),
        worker: name(worker),
        endpoint: String::new(),
        models: Vec::new(),
        incarnation: life(),
        epoch,
        cause: None,
        certificate: None,
    }
}

/// What a sink says next that it has done.
pub(crate) async fn done(reports: &mut mpsc::UnboundedReceiver<BridgeReport>) -> String {
    tokio::time::timeout(GIVE_UP, reports.recv()).await.expect("a report").expect("the sink runs").detail
}

use lastgasp_protocol::{Cause, CauseKind, SCHEMA};

use super::*;

/// A worker of the node `n` that serves the model `m`.
pub(crate) fn record(worker: &str, incarnation: &str, epoch: u64) -> WorkerRecord {
    let json = format!(
        r#"{{"schema":1,"node":"n","worker":"{worker}","incarnation":"{incarnation}","epoch":{epoch},"models":["m"],"endpoint":"http://h:1/"}}"#
    );
    WorkerRecord::parse(&format!("n.{worker}"), json.as_bytes()).unwrap()
}

fn signal(action: Action, mode: Mode, workers: &[(&str, &str, u64)]) -> MigrateSignal {
    MigrateSignal {
        schema: SCHEMA,
        node: Name::new("n").unwrap(),
        action,
        mode: (action == Action::Move).then_some(mode),
        certificate: "01K".into(),
        workers: workers
            .iter()
            .map(|(worker, incarnation, epoch)| WorkerRef {
                worker: Name::new(*worker).unwrap(),
                incarnation: Incarnation::new(*incarnation).unwrap(),
                epoch: *epoch,
                revision: 0,
            })
            .collect(),
        cause: Cause::of(CauseKind::ProcessKilled),
    }
}

fn workers(records: &[(&str, &str, u64)]) -> Arc<Workers> {
    let (workers, _) = Workers::new();
    for (at, (worker, incarnation, epoch)) in records.iter().enumerate() {
        workers.put(&record(worker, incarnation, *epoch), at as u64 + 1);
    }
    workers
}

fn chosen(workers: &Workers) -> Option<String> {
    workers.choose("m", &[], true).map(|ticket| ticket.listing().key.worker.to_string())
}

#[test]
fn the_one_with_fewer_requests_is_chosen() {
    let workers = workers(&[("a", "1", 1), ("b", "1", 1)]);
    let first = workers.choose("m", &[], true).unwrap();
    for _ in 0..20 {
        assert_ne!(workers.choose("m", &[], true).unwrap().listing().key, first.listing().key);
    }
    assert!(workers.choose("another", &[], true).is_none());
}

#[test]
fn among_many_that_may_not_be_chosen_the_one_that_may_is_found() {
    let names: Vec<String> = (0..200).map(|number| format!("w{number}")).collect();
    let records: Vec<_> = names.iter().map(|name| (name.as_str(), "1", 1)).collect();
    let workers = workers(&records);
    workers.signal(&signal(Action::Move, Mode::Lost, &records[1..]));
    for _ in 0..20 {
        assert_eq!(chosen(&workers).as_deref(), Some("w0"));
    }
}

#[test]
fn of_many_none_is_left_without_work() {
    let names: Vec<String> = (0..50).map(|number| format!("w{number}")).collect();
    let workers = workers(&names.iter().map(|name| (name.as_str(), "1", 1)).collect::<Vec<_>>());
    let tickets: Vec<Ticket> = (0..5000).filter_map(|_| workers.choose("m", &[], true)).collect();
    let loads: Vec<u64> = workers.view().iter().map(|view| view.in_flight).collect();
    assert_eq!(tickets.len(), 5000);
    // Of two at random the one with less to do: all have 100, give or take a few.
    assert!(loads.iter().all(|load| (80..=120).contains(load)), "{loads:?}");
}

#[test]
fn a_lost_signal_excludes_all_it_names_before_any_stream_wakes() {
    let workers = workers(&[("a", "1", 1), ("b", "1", 1), ("c", "1", 1)]);
    workers.signal(&signal(Action::Move, Mode::Lost, &[("a", "1", 1), ("b", "1", 1)]));
    for _ in 0..20 {
        assert_eq!(chosen(&workers).as_deref(), Some("c"));
    }
}

#[test]
fn a_signal_is_acted_on_once_and_only_escalates() {
    let workers = workers(&[("a", "1", 1)]);
    let ticket = workers.choose("m", &[], true).unwrap();
    let fate = ticket.listing().fate();
    let heard = |action, mode| workers.signal(&signal(action, mode, &[("a", "1", 1)])).1;
    assert_eq!(heard(Action::Drain, Mode::Lost), [SignalResult::Applied]);
    assert_eq!(*fate.borrow(), Fate::Stay);
    assert_eq!(heard(Action::Move, Mode::Handover), [SignalResult::Applied]);
    assert_eq!(heard(Action::Move, Mode::Handover), [SignalResult::Repeated]);
    assert_eq!(heard(Action::Drain, Mode::Handover), [SignalResult::Repeated]);
    assert_eq!(heard(Action::Move, Mode::Lost), [SignalResult::Applied]);
    assert_eq!(*fate.borrow(), Fate::Move(Mode::Lost, Why::Signal));
    assert_eq!(chosen(&workers), None);
}

#[test]
fn late_words_about_a_predecessor_do_not_touch_its_successor() {
    let workers = workers(&[("a", "1", 1), ("a", "2", 1)]);
    assert_eq!(workers.signal(&signal(Action::Move, Mode::Lost, &[("a", "1", 1)])).1, [SignalResult::OtherIncarnation]);
    workers.deleted("n.a", 1);
    assert_eq!(chosen(&workers).as_deref(), Some("a"));
    workers.put(&record("a", "2", 2), 5);
    assert_eq!(workers.signal(&signal(Action::Move, Mode::Lost, &[("a", "2", 1)])).1, [SignalResult::Stale]);
    assert_eq!(chosen(&workers).as_deref(), Some("a"));
}

#[test]
fn a_successor_says_that_the_one_before_is_gone() {
    let workers = workers(&[("a", "1", 1)]);
    let ticket = workers.choose("m", &[], true).unwrap();
    workers.put(&record("a", "2", 1), 2);
    assert_eq!(*ticket.listing().fate().borrow(), Fate::Move(Mode::Lost, Why::Superseded));
    assert_ne!(workers.choose("m", &[], true).unwrap().listing().incarnation, ticket.listing().incarnation);
}

#[test]
fn a_record_that_comes_after_the_signal_about_it_gets_no_work() {
    let (workers, _arrivals) = Workers::new();
    workers.signal(&signal(Action::Move, Mode::Lost, &[("a", "1", 1)]));
    workers.put(&record("a", "1", 1), 1);
    assert_eq!(chosen(&workers), None);
    workers.put(&record("a", "1", 2), 2);
    assert_eq!(chosen(&workers).as_deref(), Some("a"));
}

#[test]
fn what_is_absent_without_a_word_gets_no_work_and_keeps_its_streams() {
    let workers = workers(&[("a", "1", 1)]);
    let ticket = workers.choose("m", &[], true).unwrap();
    workers.listed(&HashSet::new());
    assert_eq!(chosen(&workers), None);
    assert_eq!(*ticket.listing().fate().borrow(), Fate::Stay);
    workers.put(&record("a", "1", 1), 9);
    assert_eq!(chosen(&workers).as_deref(), Some("a"));
}

#[test]
fn what_was_withdrawn_is_forgotten_with_its_tombstone() {
    let workers = workers(&[("a", "1", 1), ("b", "1", 1), ("c", "1", 1)]);
    let ticket = workers.choose("m", &[], true).unwrap();
    let busy = ticket.listing().key.worker.to_string();
    for (worker, revision) in [("a", 4), ("b", 5)] {
        workers.deleted(&format!("n.{worker}"), revision);
    }
    workers.signal(&signal(Action::Move, Mode::Lost, &[("c", "1", 1)]));
    for worker in ["a", "b", "c"] {
        assert!(!workers.expired(&format!("n.{worker}")), "no record of a living worker expired");
    }
    let left: Vec<String> = workers.view().into_iter().map(|view| view.worker).collect();
    assert_eq!(left, [format!("n/{busy}")], "it has a stream yet");
}

#[test]
fn a_record_that_expires_gets_no_work_and_is_kept() {
    let workers = workers(&[("a", "1", 1)]);
    assert!(workers.expired("n.a"));
    assert_eq!(chosen(&workers), None);
    assert_eq!(workers.view().len(), 1);
}

#[test]
fn what_went_without_a_word_is_forgotten_after_a_day() {
    let workers = workers(&[("a", "1", 1), ("b", "1", 1), ("c", "1", 1)]);
    let now = Instant::now();
    assert!(workers.expired_at("n.a", now));
    workers.expired_at("n.b", now + FORGOTTEN);
    let left: Vec<String> = workers.view().into_iter().map(|view| view.worker).collect();
    assert_eq!(left, ["n/b", "n/c"]);
}

fn draining(worker: &str, incarnation: &str, epoch: u64, deadline: i64) -> WorkerRecord {
    let deadline = Some(Timestamp::from_second(deadline).unwrap());
    WorkerRecord { state: WorkerState::Draining, deadline, ..record(worker, incarnation, epoch) }
}

#[test]
fn a_drain_that_nobody_ends_is_over_at_its_deadline() {
    let workers = workers(&[("a", "1", 1)]);
    let ticket = workers.choose("m", &[], true).unwrap();
    let fate = ticket.listing().fate();
    let record = draining("a", "1", 1, 100);
    workers.overdue("n.a", &record);
    assert_eq!(*fate.borrow(), Fate::Stay, "it serves");
    workers.put(&record, 2);
    assert_eq!(chosen(&workers), None);
    workers.overdue("n.a", &draining("a", "1", 2, 100));
    assert_eq!(*fate.borrow(), Fate::Stay, "another listing was meant");
    workers.put(&draining("a", "1", 1, 200), 3);
    workers.overdue("n.a", &record);
    assert_eq!(*fate.borrow(), Fate::Stay, "it was given more time");
    workers.overdue("n.a", &draining("a", "1", 1, 200));
    assert_eq!(*fate.borrow(), Fate::Move(Mode::Handover, Why::Deadline));
}

#[test]
fn a_worker_that_serves_again_after_an_overdue_drain_takes_streams() {
    let workers = workers(&[("a", "1", 1)]);
    let before = workers.choose("m", &[], true).unwrap();
    let record_of_drain = draining("a", "1", 1, 100);
    workers.put(&record_of_drain, 2);
    workers.overdue("n.a", &record_of_drain);
    workers.put(&record("a", "1", 1), 3);
    let after = workers.choose("m", &[], true).unwrap();
    assert_eq!(*after.listing().fate().borrow(), Fate::Stay);
    assert_eq!(*before.listing().fate().borrow(), Fate::Move(Mode::Handover, Why::Deadline));
}

#[test]
fn a_drain_that_is_repeated_after_its_worker_serves_again_is_stale() {
    let workers = workers(&[("a", "1", 1)]);
    let mut drain = signal(Action::Drain, Mode::Handover, &[("a", "1", 1)]);
    drain.workers[0].revision = 1;
    assert_eq!(workers.signal(&drain).1, [SignalResult::Applied]);
    assert_eq!(chosen(&workers), None);
    workers.put(&draining("a", "1", 1, 100), 2);
    workers.put(&record("a", "1", 1), 3);
    assert_eq!(workers.signal(&drain).1, [SignalResult::Stale]);
    assert_eq!(chosen(&workers).as_deref(), Some("a"));
}

#[test]
fn an_old_deletion_is_not_taken_for_a_new_one() {
    let workers = workers(&[("a", "1", 1)]);
    workers.put(&record("a", "1", 1), 8);
    workers.deleted("n.a", 7);
    assert_eq!(chosen(&workers).as_deref(), Some("a"));
    workers.deleted("n.a", 9);
    assert_eq!(chosen(&workers), None);
}

#[tokio::test]
async fn the_account_is_closed_when_every_stream_is_dealt_with() {
    let workers = workers(&[("a", "1", 1)]);
    let mut tickets: Vec<Ticket> = (0..4).map(|_| workers.choose("m", &[], true).unwrap()).collect();
    let listing = Arc::clone(tickets[0].listing());
    // Its connection broke a moment before the signal came.
    tickets[0].settle(RequestOutcome::Moved);
    workers.signal(&signal(Action::Move, Mode::Lost, &[("a", "1", 1)]));
    let settled = tokio::spawn(async move { listing.settled().await });
    tickets[1].settle(RequestOutcome::Unmovable);
    tickets[2].settle(RequestOutcome::Failed);
    assert!(!settled.is_finished());
    drop(tickets);
    let counts = settled.await.unwrap();
    assert_eq!((counts.streams, counts.moved, counts.unmovable, counts.failed), (4, 1, 1, 1));
}

#[test]
fn a_record_that_is_written_again_is_listed_again_unless_a_signal_ended_it() {
    let workers = workers(&[("a", "1", 0)]);
    workers.deleted("n.a", 2);
    assert_eq!(chosen(&workers), None);
    workers.put(&record("a", "1", 0), 3);
    assert_eq!(chosen(&workers).as_deref(), Some("a"));
    workers.signal(&signal(Action::Move, Mode::Lost, &[("a", "1", 0)]));
    workers.put(&record("a", "1", 0), 4);
    assert_eq!(chosen(&workers), None);
}

#[test]
fn a_bucket_that_was_made_again_counts_from_one() {
    let (workers, _) = Workers::new();
    workers.put(&record("a", "1", 1), 500);
    workers.relisting();
    workers.put(&record("a", "2", 1), 1);
    assert_eq!(workers.choose("m", &[], true).unwrap().listing().incarnation.as_str(), "2");
}

//! Stories about servers, given to the machine as outcomes.

use super::*;
use crate::core::HealthRole::{Liveness, Readiness};

const LIVE: Kind = Kind::Serving { role: Liveness };
const DEAD: Kind = Kind::NotServing { role: Liveness };
const READY: Kind = Kind::Serving { role: Readiness };
const UNREADY: Kind = Kind::NotServing { role: Readiness };

fn machine(services: &[(&str, HealthRole)]) -> Machine {
    Machine::grpc("http://engine", &services.iter().map(service).collect::<Vec<_>>(), false)
}

fn service((name, role): &(&str, HealthRole)) -> Service {
    Service { name: (*name).to_owned(), role: *role }
}

fn whole_server() -> Machine {
    machine(&[("", Liveness)])
}

/// A machine that has seen SERVING on its Watch.
fn serving() -> Machine {
    let mut machine = whole_server();
    assert_eq!(machine.watch_said(0, Answer::Serving).report, [LIVE]);
    machine
}

/// One round of Check in which every service has the same outcome.
fn check(machine: &mut Machine, outcome: ProbeOutcome) -> Step {
    let round = machine.round();
    let outcomes = round.services().map(|_| outcome.clone()).collect();
    machine.answered(&round, outcomes, false)
}

const fn says(answer: Answer) -> ProbeOutcome {
    ProbeOutcome::Answered(answer)
}

const NOTHING: [Kind; 0] = [];

/// Two rounds with the same outcome, of which only the second says anything.
fn check_twice(machine: &mut Machine, outcome: ProbeOutcome) -> Step {
    assert_eq!(check(machine, outcome.clone()), Step::default());
    check(machine, outcome)
}

#[test]
fn what_stays_is_said_once() {
    let mut machine = serving();
    assert_eq!(machine.watch_said(0, Answer::Serving).report, NOTHING);
    assert_eq!(check(&mut machine, says(Answer::Serving)).report, NOTHING);
    assert_eq!(machine.watch_said(0, Answer::NotServing).report, [DEAD]);
    assert_eq!(check(&mut machine, says(Answer::NotServing)).report, NOTHING);
    assert_eq!(machine.watch_said(0, Answer::Serving).report, [LIVE]);
}

#[test]
fn a_watch_that_ends_after_one_message_is_polled_and_no_failure() {
    let mut machine = serving();
    let step = machine.watch_ended(0, End::Clean, Duration::from_millis(2));
    assert_eq!(step, Step { ask: Ask::Quietly, ..Step::default() });
    assert_eq!(machine.to_string(), "polling Check (watch-once server): serving");
    for _ in 0..3 {
        assert_eq!(check(&mut machine, says(Answer::Serving)), Step::default());
    }
    assert_eq!(check(&mut machine, says(Answer::NotServing)).report, [DEAD]);
}

#[test]
fn a_watch_that_ends_after_changes_is_broken_and_dialled_again() {
    let mut machine = serving();
    assert_eq!(machine.watch_said(0, Answer::NotServing).report, [DEAD]);
    let step = machine.watch_ended(0, End::Clean, SETTLED);
    assert_eq!(step, Step { report: vec![Kind::WatchBroken], watch: vec![(0, 0)], ask: Ask::Aloud, look: false });
    // The server takes its services down while it drains: it still does not serve.
    let gone = machine.watch_ended(0, End::NoSuchService, Duration::ZERO);
    assert_eq!(gone, Step { ask: Ask::Quietly, ..Step::default() });
    assert_eq!(check(&mut machine, says(Answer::NoSuchService)), Step::default());
    assert_eq!(machine.to_string(), "watch connecting: withdrawn by its server");
}

#[test]
fn a_service_that_was_serving_and_is_forgotten_does_not_serve() {
    let mut machine = serving();
    machine.watch_ended(0, End::Clean, SETTLED);
    let step = check(&mut machine, says(Answer::NoSuchService));
    assert_eq!(step, Step { report: vec![DEAD], ..Step::default() });
    assert!(!machine.is_misconfigured());
}

#[test]
fn a_broken_watch_is_evidence_once_and_waits_longer_each_time() {
    let mut machine = serving();
    for attempts in 1..4 {
        let step = machine.watch_ended(0, End::Broken, Duration::ZERO);
        assert_eq!(step.watch, [(0, attempts)]);
        let first = attempts == 1;
        assert_eq!(step.report, if first { vec![Kind::WatchBroken] } else { Vec::new() });
        assert_eq!(step.ask, if first { Ask::Aloud } else { Ask::No });
    }
    assert_eq!(machine.to_string(), "watch connecting: serving");
    // The engine is still there, and what it says has not changed.
    assert_eq!(machine.watch_said(0, Answer::Serving).report, NOTHING);
    assert_eq!(machine.watch_ended(0, End::Broken, SETTLED).watch, [(0, 0)]);
}

#[test]
fn an_engine_that_loads_may_refuse_and_be_silent() {
    let mut machine = whole_server();
    assert_eq!(check(&mut machine, ProbeOutcome::Refused { listening: false }), Step::default());
    assert_eq!(machine.to_string(), "watch connecting: starting; probe refused");
    assert_eq!(check(&mut machine, ProbeOutcome::Unanswered), Step::default());
    assert_eq!(machine.watch_ended(0, End::Broken, Duration::ZERO).report, NOTHING);
    assert_eq!(check(&mut machine, says(Answer::NotServing)), Step::default());
    assert_eq!(machine.watch_said(0, Answer::NotServing).report, NOTHING);
    assert_eq!(machine.watch_ended(0, End::Broken, Duration::ZERO).report, NOTHING);
    assert_eq!(check_twice(&mut machine, says(Answer::Serving)).report, [LIVE]);
}

#[test]
fn an_engine_that_served_under_an_earlier_daemon_is_not_taken_to_be_loading() {
    let mut machine = Machine::grpc("http://engine", &[service(&("", Liveness))], true);
    assert_eq!(check(&mut machine, ProbeOutcome::Unanswered).report, [Kind::ProbeUnanswered]);
    assert_eq!(check(&mut machine, says(Answer::NotServing)).report, [Kind::ProbeAnswered]);
    assert_eq!(check(&mut machine, says(Answer::NotServing)).report, [DEAD]);
    // A name spelt wrong is still not a death.
    let mut machine = Machine::grpc("http://engine", &[service(&("nope", Liveness))], true);
    assert_eq!(check(&mut machine, says(Answer::NoSuchService)).report, NOTHING);
    assert!(machine.is_misconfigured());
}

#[test]
fn every_unanswered_probe_counts_and_the_first_answer_ends_them() {
    let mut machine = serving();
    for _ in 0..3 {
        assert_eq!(check(&mut machine, ProbeOutcome::Unanswered).report, [Kind::ProbeUnanswered]);
    }
    assert_eq!(machine.to_string(), "watch serving; probe unanswered");
    assert_eq!(check(&mut machine, says(Answer::Serving)).report, [Kind::ProbeAnswered]);
    assert_eq!(check(&mut machine, says(Answer::Serving)).report, NOTHING);
    let refused = ProbeOutcome::Refused { listening: true };
    assert_eq!(check(&mut machine, refused).report, [Kind::ProbeRefused { listening: true }]);
    assert_eq!(check(&mut machine, says(Answer::Serving)).report, [Kind::ProbeAnswered]);
}

#[test]
fn a_probe_that_was_asked_for_is_answered_aloud() {
    let mut machine = serving();
    let round = machine.round();
    assert_eq!(machine.answered(&round, vec![says(Answer::Serving)], true).report, [Kind::ProbeAnswered]);
}

#[test]
fn an_error_is_an_answer_but_no_verdict() {
    let mut machine = serving();
    let error = Answer::Other("Internal: no such loop".to_owned());
    assert_eq!(check(&mut machine, says(error)), Step::default());
    assert_eq!(machine.to_string(), "watch serving, answers \"Internal: no such loop\"");
    assert_eq!(check(&mut machine, says(Answer::Undecided)), Step::default());
    assert_eq!(check(&mut machine, says(Answer::Unimplemented)), Step::default());
    assert!(!machine.is_over());
}

#[test]
fn a_check_that_was_asked_before_the_watch_spoke_is_older() {
    let mut machine = serving();
    let round = machine.round();
    assert_eq!(machine.watch_said(0, Answer::NotServing).report, [DEAD]);
    assert_eq!(machine.answered(&round, vec![says(Answer::Serving)], false).report, NOTHING);
}

#[test]
fn a_check_that_overtakes_the_watch_is_not_taken_back_by_it() {
    let mut machine = whole_server();
    // Both see SERVING, then NOT_SERVING; the Watch's messages are slower.
    assert_eq!(check(&mut machine, says(Answer::Serving)), Step::default());
    assert_eq!(check(&mut machine, says(Answer::NotServing)), Step::default());
    assert_eq!(machine.watch_said(0, Answer::Serving).report, [LIVE]);
    assert_eq!(check(&mut machine, says(Answer::NotServing)), Step::default());
    assert_eq!(machine.watch_said(0, Answer::NotServing).report, [DEAD]);
}

#[test]
fn a_watch_that_has_gone_silent_is_overruled_by_two_checks() {
    let mut machine = serving();
    assert_eq!(check_twice(&mut machine, says(Answer::NotServing)).report, [DEAD]);
    assert_eq!(check_twice(&mut machine, says(Answer::Serving)).report, [LIVE]);
}

#[test]
fn no_watch_and_no_check_is_no_health_service() {
    let mut machine = whole_server();
    assert_eq!(machine.watch_ended(0, End::Unimplemented, Duration::ZERO).ask, Ask::Quietly);
    assert!(!machine.is_over());
    assert_eq!(check(&mut machine, says(Answer::Unimplemented)), Step::default());
    assert!(machine.is_over());
    assert_eq!(machine.to_string(), "no health service at http://engine");
    assert_eq!(machine.round().services().count(), 0);
}

#[test]
fn a_server_without_watch_is_polled() {
    let mut machine = whole_server();
    machine.watch_ended(0, End::Unimplemented, Duration::ZERO);
    assert_eq!(check(&mut machine, says(Answer::Serving)).report, [LIVE]);
    assert_eq!(machine.to_string(), "polling Check (server without Watch): serving");
}

#[test]
fn an_unknown_name_is_complained_about_and_forgiven_when_it_appears() {
    let mut machine = machine(&[("nope", Liveness)]);
    assert_eq!(machine.watch_ended(0, End::NoSuchService, Duration::ZERO).ask, Ask::Quietly);
    let step = check(&mut machine, says(Answer::NoSuchService));
    assert_eq!(step, Step { look: true, ..Step::default() });
    assert!(!check(&mut machine, says(Answer::NoSuchService)).look, "looked for once");
    machine.knows(vec![String::new(), "vllm.Inference".to_owned()]);
    assert_eq!(
        machine.to_string(),
        "configuration: no service \"nope\" at http://engine, which knows \"\", \"vllm.Inference\""
    );
    // It was registered late.
    let step = check(&mut machine, says(Answer::Serving));
    assert_eq!(step, Step { report: vec![LIVE], watch: vec![(0, 0)], ..Step::default() });
    assert!(!machine.is_misconfigured());
}

#[test]
fn a_python_server_tells_an_unknown_name_on_its_watch() {
    let mut machine = machine(&[("nope", Liveness)]);
    assert!(machine.watch_said(0, Answer::NoSuchService).look);
    machine.watch_ended(0, End::Clean, Duration::ZERO);
    assert_eq!(check(&mut machine, says(Answer::NoSuchService)), Step::default());
    assert!(machine.is_misconfigured());
}

#[test]
fn readiness_comes_and_goes_while_liveness_stays() {
    let mut machine = machine(&[("", Liveness), ("vllm.Inference", Readiness)]);
    assert_eq!(machine.watch_said(1, Answer::NotServing).report, NOTHING, "it is starting");
    assert_eq!(machine.watch_said(0, Answer::Serving).report, [LIVE, UNREADY], "it was started asleep");
    assert_eq!(machine.watch_said(1, Answer::Serving).report, [READY]);
    assert_eq!(machine.watch_said(1, Answer::NotServing).report, [UNREADY]);
    assert_eq!(machine.to_string(), "\"\": watch serving, \"vllm.Inference\": watch not serving");
}

#[test]
fn one_service_of_a_role_that_denies_is_enough() {
    let mut machine = machine(&[("a", Liveness), ("b", Liveness)]);
    assert_eq!(machine.watch_said(0, Answer::Serving).report, [LIVE]);
    assert_eq!(machine.watch_said(1, Answer::Serving).report, NOTHING);
    assert_eq!(machine.watch_said(0, Answer::NotServing).report, [DEAD]);
    assert_eq!(machine.watch_said(1, Answer::NotServing).report, NOTHING);
    assert_eq!(machine.watch_said(0, Answer::Serving).report, NOTHING);
    assert_eq!(machine.watch_said(1, Answer::Serving).report, [LIVE]);
}

#[test]
fn a_slow_readiness_service_is_not_a_hang() {
    let mut machine = machine(&[("", Liveness), ("slow", Readiness)]);
    machine.watch_said(0, Answer::Serving);
    let round = machine.round();
    let step = machine.answered(&round, vec![says(Answer::Serving), ProbeOutcome::Unanswered], false);
    assert_eq!(step, Step::default());
}

#[test]
fn http_is_polled_and_404_is_no_verdict() {
    let mut machine = Machine::http("http://engine/health", false);
    assert_eq!(check(&mut machine, says(Answer::NotServing)).report, NOTHING, "503 while loading");
    assert_eq!(check(&mut machine, says(Answer::Other("404 Not Found".to_owned()))), Step::default());
    assert_eq!(machine.to_string(), "polling HTTP: not serving, answers \"404 Not Found\"");
    assert_eq!(check(&mut machine, says(Answer::Serving)).report, [LIVE]);
    assert_eq!(check(&mut machine, says(Answer::NotServing)).report, [DEAD]);
}

/// Whatever a server does: SERVING and NOT_SERVING of a role alternate, and begin with SERVING.
mod any_order {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Move {
        Said(Answer),
        Ended(End),
        Checked(ProbeOutcome),
    }

    fn answer() -> impl Strategy<Value = Answer> {
        prop::sample::select(vec![
            Answer::Serving,
            Answer::NotServing,
            Answer::Undecided,
            Answer::NoSuchService,
            Answer::Unimplemented,
            Answer::Other("Internal".to_owned()),
        ])
    }

    fn any_move() -> impl Strategy<Value = Move> {
        prop_oneof![
            answer().prop_map(Move::Said),
            prop::sample::select(vec![End::Clean, End::NoSuchService, End::Unimplemented, End::Broken])
                .prop_map(Move::Ended),
            answer().prop_map(|answer| Move::Checked(says(answer))),
            Just(Move::Checked(ProbeOutcome::Unanswered)),
            any::<bool>().prop_map(|listening| Move::Checked(ProbeOutcome::Refused { listening })),
        ]
    }

    proptest! {
        #[test]
        fn reports_alternate_and_soft_kinds_wait_for_serving(moves in prop::collection::vec(any_move(), 0..40)) {
            let mut machine = whole_server();
            let mut open = true;
            let mut serving = None;
            for one in moves {
                let step = match one {
                    Move::Said(answer) if open => machine.watch_said(0, answer),
                    Move::Ended(end) if open => {
                        open = false;
                        machine.watch_ended(0, end, Duration::ZERO)
                    }
                    Move::Checked(outcome) if !machine.is_over() => check(&mut machine, outcome),
                    _ => continue,
                };
                prop_assert!(step.watch.len() <= usize::from(!open), "never two Watches of one service");
                open |= !step.watch.is_empty();
                for kind in step.report {
                    match kind {
                        Kind::Serving { .. } => prop_assert_ne!(serving.replace(true), Some(true)),
                        Kind::NotServing { .. } => prop_assert_eq!(serving.replace(false), Some(true)),
                        _ => prop_assert!(serving.is_some(), "{kind:?} before the first SERVING"),
                    }
                }
            }
        }
    }
}

/// A daemon that has no descriptor left cannot ask. The engine has nothing to do with it.
#[test]
fn a_question_that_could_not_be_asked_says_nothing() {
    let mut machine = serving();
    for _ in 0..10 {
        assert_eq!(check(&mut machine, ProbeOutcome::NotAsked).report, NOTHING);
    }
    assert!(machine.to_string().contains("cannot be asked"), "{machine}");
    assert_eq!(check(&mut machine, says(Answer::Serving)).report, [Kind::ProbeAnswered]);
}

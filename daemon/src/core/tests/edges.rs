//! The edges between states, one by one.

use super::*;

#[test]
fn a_worker_that_becomes_known_later_lives_like_any_other_until_it_is_forgotten() {
    let late = WorkerId(7);
    let mut node = Node::of(Vec::new());
    node.core.add_worker(late, policy());
    let serve = |core: &mut Core, root: ProcessId| {
        core.evidence(&Evidence { worker: late, root, kind: SERVING, at: Nanos(2) }, Nanos(2))
    };
    node.core.found(late, root(1), incarnation(1), Nanos(1));
    assert_eq!(seen(&serve(&mut node.core, root(1))), [Seen::Listed(WorkerState::Serving, 1)]);
    // Another policy does not end its life.
    node.core.add_worker(late, WorkerPolicy { has_liveness: false, ..policy() });
    assert_eq!(node.core.state(late), Some(State::Serving));
    node.core.forget_worker(late);
    assert_eq!(node.core.state(late), None);
    assert_eq!(serve(&mut node.core, root(1)), []);
    assert_eq!(node.core.found(late, root(2), incarnation(2), Nanos(3)), []);
}

#[test]
fn a_death_while_loading_is_lost_without_a_record_or_a_signal() {
    let mut node = Node::of(vec![policy()]);
    node.found();
    assert_eq!(seen(&node.hears(killed(engine_core()))), []);
    assert_eq!(node.state(), State::Lost);
}

/// As the acknowledgement of a record is that comes when the worker is lost already.
#[test]
fn a_listing_is_present_until_its_end_and_a_life_until_the_next() {
    let mut node = Node::serving();
    let is_present = |node: &Node, life, epoch| node.core.is_present(W, &incarnation(life), epoch);
    assert!(is_present(&node, 0, Some(1)) && !is_present(&node, 0, Some(2)) && !is_present(&node, 1, None));
    node.hears(killed(engine_core()));
    assert!(is_present(&node, 0, None) && !is_present(&node, 0, Some(1)));
    node.life = 1;
    node.found();
    assert!(is_present(&node, 1, None) && !is_present(&node, 0, None));
}

#[test]
fn before_the_first_serving_nothing_but_a_death_counts() {
    let mut node = Node::of(vec![policy()]);
    node.found();
    for kind in [
        NOT_SERVING,
        Kind::WatchBroken,
        Kind::ProbeUnanswered,
        Kind::ProbeRefused { listening: false },
        Kind::ProbeRefused { listening: false },
        Kind::ListenerClosed { exiting: false },
        Kind::Terminating { signal: 15 },
    ] {
        assert_eq!(node.after(HANG).hears(kind), []);
    }
    assert_eq!(node.state(), State::Starting);
}

#[test]
fn readiness_makes_unready_and_serving_again() {
    let mut node = Node::serving();
    let not_ready = Kind::NotServing { role: HealthRole::Readiness };
    assert_eq!(seen(&node.hears(not_ready)), [Seen::Listed(WorkerState::Unready, 1)]);
    let ready = Kind::Serving { role: HealthRole::Readiness };
    assert_eq!(seen(&node.hears(ready)), [Seen::Listed(WorkerState::Serving, 1)]);
}

#[test]
fn a_drain_that_is_taken_back_lists_the_same_epoch() {
    let mut node = Node::serving();
    node.hears(NOT_SERVING);
    assert_eq!(seen(&node.hears(SERVING)), [Seen::Listed(WorkerState::Serving, 1)]);
    // The window's timer may still come: it means nothing any more.
    assert_eq!(seen(&node.after(WINDOW).fires(Timer::DrainWindow)), []);
}

#[test]
fn sigterm_drains_and_good_health_does_not_undo_it() {
    let mut node = Node::serving();
    let effects = node.hears(Kind::Terminating { signal: 15 });
    assert_eq!(seen(&effects), [Seen::Listed(WorkerState::Draining, 1), Seen::Drain(1)]);
    assert_eq!(seen(&node.hears(SERVING)), []);
    assert_eq!(seen(&node.after(WINDOW).fires(Timer::DrainWindow)), [Seen::Withdrawn(1), Seen::Handover(1)]);
    assert_eq!(seen(&node.after(HOLD_DOWN * 9).hears(SERVING)), []);
}

#[test]
fn an_orderly_exit_while_draining_is_left_a_crash_is_lost() {
    for (exit, state) in [
        (Exit::Status(0), State::Left),
        (Exit::Signal { signal: 15, core: false }, State::Left),
        (Exit::Status(1), State::Lost),
        (Exit::Signal { signal: 11, core: true }, State::Lost),
    ] {
        let mut node = Node::serving();
        node.hears(Kind::Terminating { signal: 15 });
        let effects = node.hears(Kind::ProcessExit { process: root_process(0), exit });
        assert_eq!(seen(&effects), [Seen::Withdrawn(1), Seen::Lost(1)], "{exit:?}");
        assert_eq!(node.state(), state, "{exit:?}");
    }
}

#[test]
fn two_refusals_where_nobody_listens_are_a_verdict() {
    let mut node = Node::serving();
    assert_eq!(node.hears(Kind::ProbeRefused { listening: false }), [Effect::Probe(W)]);
    assert_eq!(seen(&node.hears(Kind::ProbeRefused { listening: false })), [Seen::Withdrawn(1), Seen::Lost(1)]);
}

#[test]
fn a_hang_that_ends_comes_back_under_a_higher_epoch_after_the_hold_down() {
    let mut node = Node::serving();
    for _ in 0..3 {
        node.after(HANG).hears(Kind::ProbeUnanswered);
    }
    assert_eq!(node.state(), State::Lost);
    let effects = node.after(Duration::from_secs(1)).hears(Kind::ProbeAnswered);
    let [Effect::Arm { timer: Timer::HoldDown, .. }, Effect::HeldDown { losses: 1, .. }] = effects[..] else {
        panic!("{effects:?}")
    };
    assert_eq!(node.hears(Kind::ProbeAnswered).len(), 1, "said once");
    assert_eq!(seen(&node.after(HOLD_DOWN).fires(Timer::HoldDown)), [Seen::Listed(WorkerState::Serving, 2)]);
}

#[test]
fn an_engine_child_that_its_root_starts_again_brings_the_worker_back() {
    let mut node = Node::serving();
    node.hears(killed(engine_core()));
    // For seconds after the death the frontend still says SERVING. That proves nothing.
    assert_eq!(seen(&node.after(HOLD_DOWN * 2).hears(SERVING)), []);
    let again = Process { tgid: 501, ..engine_core() };
    assert_eq!(seen(&node.hears(Kind::CriticalSeen { process: again })), [Seen::Listed(WorkerState::Serving, 2)]);
}

#[test]
fn a_flapping_life_is_held_down_longer_every_time() {
    let mut node = Node::serving();
    let mut waited = Vec::new();
    for _ in 0..8 {
        for _ in 0..3 {
            node.after(Duration::from_secs(30)).hears(Kind::ProbeUnanswered);
        }
        assert_eq!(node.state(), State::Lost);
        let lost = node.now;
        let effects = node.hears(Kind::ProbeAnswered);
        let [Effect::Arm { at, .. }, Effect::HeldDown { .. }] = effects[..] else { panic!("{effects:?}") };
        waited.push(at.since(lost).as_secs() / HOLD_DOWN.as_secs());
        node.now = at;
        node.fires(Timer::HoldDown);
        assert_eq!(node.state(), State::Serving);
    }
    assert_eq!(waited, [1, 2, 4, 8, 16, 32, 32, 32]);
}

#[test]
fn a_fatal_signal_that_kills_nobody_is_taken_back() {
    let mut node = Node::serving();
    let effects = node.hears(Kind::SignalDelivered { process: engine_core(), signal: 11 });
    assert_eq!(seen(&effects), [Seen::Withdrawn(1), Seen::Lost(1)]);
    assert!(effects.iter().any(|effect| matches!(effect, Effect::Arm { timer: Timer::Recheck, .. })));
    let recheck = node.after(Duration::from_secs(5)).fires(Timer::Recheck);
    assert_eq!(recheck, [Effect::Recheck { worker: W, root: root(0), process: engine_core() }]);
    node.after(HOLD_DOWN);
    let effects = node.hears(Kind::StillAlive { process: engine_core() });
    assert_eq!(seen(&effects), [Seen::Listed(WorkerState::Serving, 2)]);
}

#[test]
fn the_true_signal_of_a_group_exit_is_learnt_from_the_exit() {
    let mut node = Node::serving();
    node.hears(Kind::SignalDelivered { process: root_process(0), signal: 9 });
    let exit = Exit::Signal { signal: 15, core: false };
    let effects = node.hears(Kind::ProcessExit { process: root_process(0), exit });
    let [Effect::Refined { cause, .. }] = &effects[..] else { panic!("{effects:?}") };
    assert_eq!(cause.signal, Some(15));
    // And an OOM kill differs from other kills, whichever comes first.
    let mut node = Node::serving();
    node.hears(killed(engine_core()));
    let effects = node.hears(Kind::OomVictim { process: engine_core() });
    let [Effect::Arm { .. } | Effect::Refined { .. }, ..] = &effects[..] else { panic!("{effects:?}") };
    assert!(effects.iter().any(
        |effect| matches!(effect, Effect::Refined { cause, .. } if cause.kind == lastgasp_protocol::CauseKind::OomKilled)
    ));
}

#[test]
fn another_root_means_that_the_former_life_is_over() {
    let mut node = Node::serving();
    node.life = 1;
    let effects = node.found();
    assert_eq!(seen(&effects), [Seen::Withdrawn(1), Seen::Lost(1)]);
    assert_eq!(node.state(), State::Starting);
    assert_eq!(seen(&node.hears(SERVING)), [Seen::Listed(WorkerState::Serving, 1)]);
}

#[test]
fn when_most_probes_fail_at_once_it_is_about_us() {
    let mut node = Node::of(vec![policy(), policy(), policy()]);
    for id in 0..3 {
        node.core.found(WorkerId(id), root(id), incarnation(id), node.now);
        node.hears_of(WorkerId(id), id, SERVING);
    }
    let mut held = 0;
    for _ in 0..6 {
        node.after(HANG);
        for id in 0..3 {
            for effect in node.hears_of(WorkerId(id), id, Kind::ProbeUnanswered) {
                held += usize::from(matches!(effect, Effect::Held { reason: HeldBack::AboutUs, .. }));
                assert!(!matches!(effect, Effect::Withdraw(_)));
            }
        }
    }
    assert!(held > 0, "it is said loudly");
    // Two answer again: then the third is its own fault.
    node.hears_of(WorkerId(0), 0, Kind::ProbeAnswered);
    node.hears_of(WorkerId(1), 1, Kind::ProbeAnswered);
    assert_eq!(seen(&node.hears_of(WorkerId(2), 2, Kind::ProbeUnanswered)), [Seen::Withdrawn(1), Seen::Lost(1)]);
}

#[test]
fn withdrawals_without_process_evidence_are_limited_certain_deaths_are_not() {
    let mut node = Node::of(vec![policy(); 6]);
    for id in 0..6 {
        node.core.found(WorkerId(id), root(id), incarnation(id), node.now);
        node.hears_of(WorkerId(id), id, SERVING);
    }
    let refused = Kind::ProbeRefused { listening: false };
    let mut withdrawn = 0;
    for id in 0..5 {
        node.hears_of(WorkerId(id), id, refused.clone());
        let effects = node.hears_of(WorkerId(id), id, refused.clone());
        withdrawn += usize::from(seen(&effects).contains(&Seen::Withdrawn(1)));
    }
    assert_eq!(withdrawn, 2);
    assert_eq!(seen(&node.hears_of(WorkerId(5), 5, killed(root_process(5)))), [Seen::Withdrawn(1), Seen::Lost(1)]);
    // A minute later there is room again, and what was held back need not be said twice.
    node.after(Duration::from_secs(60));
    for id in [2, 3] {
        let effects = node.core.fire(WorkerId(id), Timer::Held, node.now);
        assert_eq!(seen(&effects), [Seen::Withdrawn(1), Seen::Lost(1)]);
    }
    // Unless the worker was well meanwhile.
    node.hears_of(WorkerId(4), 4, Kind::ProbeAnswered);
    assert_eq!(seen(&node.core.fire(WorkerId(4), Timer::Held, node.now)), []);
}

#[test]
fn a_worker_that_registers_itself_serves_when_its_record_is_proven() {
    let mut node = Node::of(vec![WorkerPolicy { registers_itself: true, ..policy() }]);
    node.found();
    assert_eq!(node.hears(SERVING), []);
    let own = Incarnation::new("what-it-likes").unwrap();
    assert_eq!(seen(&node.core.adopted(W, root(0), own.clone(), 7)), []);
    assert_eq!(node.state(), State::Serving);
    let effects = node.hears(killed(root_process(0)));
    assert_eq!(seen(&effects), [Seen::Withdrawn(7), Seen::Lost(7)]);
    assert!(matches!(&effects[0], Effect::Withdraw(listing) if listing.incarnation == own));
}

//! Cases from real reports: what happened in an engine's process tree or health server, and
//! what must be made of it. Sources in the names.

use super::*;

#[test]
fn engine_core_exits_and_the_root_lives_on_vllm_39863() {
    let mut node = Node::serving();
    let effects = node.hears(killed(engine_core()));
    assert_eq!(seen(&effects), [Seen::Withdrawn(1), Seen::Lost(1)]);
    let cause = effects.iter().find_map(|effect| match effect {
        Effect::Signal { cause, .. } => Some(cause.to_string()),
        _ => None,
    });
    assert_eq!(cause.as_deref(), Some("process_killed VLLM::EngineCore by signal 9"));
    // 949 ms later the root exits with 0, as measured. That changes nothing.
    let late = Kind::ProcessExit { process: root_process(0), exit: Exit::Status(0) };
    assert_eq!(node.after(Duration::from_millis(949)).hears(late), []);
    assert_eq!(node.state(), State::Lost);
}

#[test]
fn a_critical_child_that_exits_with_zero_is_a_loss_triton_8604() {
    let mut node = Node::serving();
    let exit = Kind::ProcessExit { process: engine_core(), exit: Exit::Status(0) };
    assert_eq!(seen(&node.hears(exit)), [Seen::Withdrawn(1), Seen::Lost(1)]);
}

#[test]
fn the_api_server_is_killed_and_its_orphans_live_vllm_55510() {
    let mut node = Node::serving();
    assert_eq!(seen(&node.hears(killed(root_process(0)))), [Seen::Withdrawn(1), Seen::Lost(1)]);
    // The orphan is well, and so may its health be: the worker does not come back without its root.
    node.after(HOLD_DOWN * 3);
    assert_eq!(seen(&node.hears(SERVING)), []);
    assert_eq!(seen(&node.fires(Timer::HoldDown)), []);
}

#[test]
fn one_slow_answer_under_load_is_no_death_sglang_22511() {
    let mut node = Node::serving();
    assert_eq!(node.hears(Kind::ProbeUnanswered), []);
    assert_eq!(seen(&node.after(Duration::from_secs(1)).hears(Kind::ProbeAnswered)), []);
    for _ in 0..20 {
        assert_eq!(seen(&node.after(Duration::from_secs(60)).hears(Kind::ProbeUnanswered)), []);
        assert_eq!(seen(&node.hears(Kind::ProbeAnswered)), []);
    }
    assert_eq!(node.state(), State::Serving);
}

#[test]
fn a_half_open_connection_is_suspected_probed_and_then_lost_golem_3748() {
    let mut node = Node::serving();
    assert_eq!(node.hears(Kind::WatchBroken), [Effect::Probe(W)]);
    assert_eq!(seen(&node.hears(Kind::ProbeUnanswered)), []);
    assert_eq!(seen(&node.after(HANG / 2).hears(Kind::ProbeUnanswered)), []);
    assert_eq!(seen(&node.after(HANG / 2).hears(Kind::ProbeUnanswered)), [Seen::Withdrawn(1), Seen::Lost(1)]);
}

#[test]
fn not_serving_then_closed_drains_and_cuts_nothing_vllm_rs() {
    let mut node = Node::serving();
    assert_eq!(seen(&node.hears(NOT_SERVING)), [Seen::Listed(WorkerState::Draining, 1), Seen::Drain(1)]);
    // The health service and the listener close in milliseconds, and it goes on streaming.
    assert_eq!(seen(&node.hears(Kind::WatchBroken)), []);
    assert_eq!(seen(&node.hears(Kind::ProbeRefused { listening: false })), []);
    assert_eq!(seen(&node.hears(Kind::ProbeRefused { listening: false })), []);
    assert_eq!(seen(&node.hears(Kind::ListenerClosed { exiting: true })), []);
    assert_eq!(node.state(), State::Draining);
    assert_eq!(seen(&node.after(WINDOW).fires(Timer::DrainWindow)), [Seen::Withdrawn(1), Seen::Handover(1)]);
    // 14 s later its last stream is done, and it exits.
    let exit = Kind::ProcessExit { process: root_process(0), exit: Exit::Status(0) };
    assert_eq!(seen(&node.after(Duration::from_secs(9)).hears(exit)), [Seen::Lost(1)]);
    assert_eq!(node.state(), State::Left);
}

#[test]
fn without_a_health_service_the_listener_begins_and_processes_decide() {
    let mut node = Node::of(vec![WorkerPolicy { has_liveness: false, ..policy() }]);
    node.found();
    assert_eq!(seen(&node.hears(Kind::Listening)), [Seen::Listed(WorkerState::Serving, 1)]);
    assert_eq!(seen(&node.hears(killed(root_process(0)))), [Seen::Withdrawn(1), Seen::Lost(1)]);
}

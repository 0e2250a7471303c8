//! What the kernel tells beside deaths, and what follows from it.

use lastgasp_protocol::{Cause, CauseKind, Sender};

use super::*;

/// Sent by `kill`, and nothing has begun to end.
pub(super) fn sent(to: Addressee, signal: i32) -> Kind {
    let sender = Sender { pid: 4242, comm: "kill".to_owned(), cgroup: None };
    Kind::SignalSent { to, signal, sender, ending: signal == 9 }
}

pub(super) fn reset() -> Kind {
    let peer = "192.0.2.7:40000".parse().expect("an address");
    Kind::TcpReset { direction: Direction::Received, reason: None, peer, count: 1000 }
}

fn causes(effects: &[Effect]) -> Vec<&Cause> {
    effects
        .iter()
        .filter_map(|effect| match effect {
            Effect::Signal { cause, .. } | Effect::Refined { cause, .. } => Some(cause),
            _ => None,
        })
        .collect()
}

fn sender(cause: &Cause) -> Option<&str> {
    cause.sender.as_ref().map(|sender| sender.comm.as_str())
}

#[test]
fn the_sender_of_a_signal_is_part_of_the_cause() {
    let mut node = Node::serving();
    assert_eq!(node.hears(sent(Addressee::Process(engine_core()), 9)), [], "not a death yet");
    let effects = node.hears(Kind::SignalDelivered { process: engine_core(), signal: 9 });
    let [cause] = causes(&effects)[..] else { panic!("{effects:#?}") };
    assert_eq!((cause.kind, sender(cause)), (CauseKind::ProcessKilled, Some("kill")));
}

#[test]
fn a_sender_that_is_known_later_completes_the_cause() {
    let mut node = Node::serving();
    node.hears(Kind::SignalDelivered { process: engine_core(), signal: 9 });
    let effects = node.hears(sent(Addressee::Process(engine_core()), 9));
    assert_eq!(seen(&effects), [], "nothing new for routers");
    let [cause] = causes(&effects)[..] else { panic!("{effects:#?}") };
    assert_eq!((cause.kind, sender(cause)), (CauseKind::ProcessKilled, Some("kill")));
}

#[test]
fn the_sender_of_another_signal_or_to_another_process_explains_nothing() {
    let mut node = Node::serving();
    node.hears(sent(Addressee::Process(root_process(0)), 9));
    node.hears(sent(Addressee::Process(engine_core()), 19));
    let effects = node.hears(Kind::SignalDelivered { process: engine_core(), signal: 9 });
    assert_eq!(causes(&effects).into_iter().map(sender).collect::<Vec<_>>(), [None]);
}

#[test]
fn sigterm_to_the_root_or_its_supervisor_drains() {
    for to in [Addressee::Process(root_process(0)), Addressee::Supervisor { tgid: 50 }] {
        let mut node = Node::serving();
        let effects = node.hears(sent(to, 15));
        assert_eq!(seen(&effects), [Seen::Listed(WorkerState::Draining, 1), Seen::Drain(1)]);
        assert_eq!(causes(&effects).into_iter().map(sender).collect::<Vec<_>>(), [Some("kill")]);
        assert_eq!(seen(&node.hears(SERVING)), [], "good health does not take it back");
    }
}

#[test]
fn an_engine_whose_supervisor_kept_sigterm_to_itself_comes_back_after_the_hold_down() {
    let mut node = Node::serving();
    node.hears(sent(Addressee::Supervisor { tgid: 50 }, 15));
    let effects = node.after(WINDOW).fires(Timer::DrainWindow);
    assert_eq!(seen(&effects), [Seen::Withdrawn(1), Seen::Handover(1)]);
    assert_eq!(seen(&node.after(HOLD_DOWN).fires(Timer::HoldDown)), [Seen::Listed(WorkerState::Serving, 2)]);
}

#[test]
fn ctrl_c_at_the_shell_that_started_the_engine_says_nothing() {
    let mut node = Node::serving();
    assert_eq!(seen(&node.hears(sent(Addressee::Supervisor { tgid: 50 }, 2))), []);
    assert_eq!(node.state(), State::Serving);
}

#[test]
fn sigterm_to_the_engine_core_is_only_noted() {
    let mut node = Node::serving();
    assert_eq!(node.hears(sent(Addressee::Process(engine_core()), 15)), []);
}

#[test]
fn sigterm_that_nothing_handles_is_a_death_and_no_drain() {
    let mut node = Node::serving();
    let sender = Sender::kernel();
    let to = Addressee::Process(root_process(0));
    assert_eq!(node.hears(Kind::SignalSent { to, signal: 15, sender, ending: true }), []);
    let effects = node.hears(Kind::SignalDelivered { process: root_process(0), signal: 15 });
    assert_eq!(seen(&effects), [Seen::Withdrawn(1), Seen::Lost(1)]);
}

#[test]
fn a_stopped_worker_is_asked_and_not_withdrawn() {
    let mut node = Node::serving();
    assert_eq!(node.hears(sent(Addressee::Process(engine_core()), 19)), [Effect::Probe(W)]);
    assert_eq!(node.state(), State::Serving);
}

#[test]
fn any_number_of_resets_only_asks() {
    let mut node = Node::serving();
    for _ in 0..1000 {
        assert_eq!(node.hears(reset()), [Effect::Probe(W)]);
    }
    assert_eq!(node.state(), State::Serving);
}

#[test]
fn another_program_in_the_engines_place_is_the_end_of_the_engine() {
    let mut node = Node::serving();
    let effects = node.hears(Kind::Replaced { process: root_process(0), by: "/bin/sleep".to_owned() });
    assert_eq!(seen(&effects), [Seen::Withdrawn(1), Seen::Lost(1)]);
    assert_eq!(causes(&effects)[0].kind, CauseKind::Replaced);
    // What that program dies of one day is not what the engine died of.
    assert_eq!(causes(&node.hears(killed(root_process(0)))), Vec::<&Cause>::new());
}

#[test]
fn a_replaced_engine_does_not_drain() {
    let mut node = Node::serving();
    // An exec closes its listener, in a living task.
    node.hears(Kind::ListenerClosed { exiting: false });
    let effects = node.hears(Kind::Replaced { process: root_process(0), by: "/bin/sleep".to_owned() });
    assert_eq!(seen(&effects), [Seen::Withdrawn(1), Seen::Lost(1)]);
}

#[test]
fn what_a_gpu_fault_means_is_policy() {
    let fault = |policy| Kind::GpuFault { process: Some(engine_core()), fault: "xid 79".to_owned(), policy };
    assert_eq!(seen(&Node::serving().hears(fault(GpuPolicy::Lost))), [Seen::Withdrawn(1), Seen::Lost(1)]);
    assert_eq!(Node::serving().hears(fault(GpuPolicy::Probe)), [Effect::Probe(W)]);
    assert_eq!(Node::serving().hears(fault(GpuPolicy::Note)), []);
}

//! `lastgasp drain`, `undrain`, `withdraw`.

use lastgasp_protocol::{Cause, CauseKind};

use super::*;

const DRAIN: Command = Command::Drain { window: None };

fn commanded() -> Cause {
    Cause { reason: Some("because".to_owned()), ..Cause::of(CauseKind::Commanded) }
}

impl Node {
    fn commanded(&mut self, command: Command) -> Result<Vec<Seen>, RefusedCommand> {
        self.core.command(W, command, commanded(), self.now).map(|effects| seen(&effects))
    }
}

#[test]
fn a_drain_lasts_whatever_health_says_and_then_hands_over() {
    let mut node = Node::serving();
    assert_eq!(node.commanded(DRAIN).unwrap(), [Seen::Listed(WorkerState::Draining, 1), Seen::Drain(1)]);
    assert_eq!(node.hears(SERVING), []);
    assert_eq!(seen(&node.after(WINDOW).fires(Timer::DrainWindow)), [Seen::Withdrawn(1), Seen::Handover(1)]);
    node.after(HOLD_DOWN * 2);
    assert_eq!(seen(&node.fires(Timer::HoldDown)), []);
    assert_eq!(seen(&node.hears(SERVING)), []);
    assert_eq!(node.commanded(DRAIN).unwrap(), [], "it is handed over already");
    assert_eq!(node.commanded(Command::Undrain).unwrap(), [Seen::Listed(WorkerState::Serving, 2)]);
}

#[test]
fn a_deadline_replaces_the_window() {
    let mut node = Node::serving();
    let window = Some(Duration::from_secs(77));
    let effects = node.core.command(W, Command::Drain { window }, commanded(), node.now).unwrap();
    let due = node.now.plus(Duration::from_secs(77));
    assert!(effects.contains(&Effect::Arm { worker: W, timer: Timer::DrainWindow, at: due }), "{effects:?}");
    assert!(effects.iter().any(|effect| matches!(effect, Effect::List { drain_for, .. } if *drain_for == window)));
}

#[test]
fn an_undrain_within_the_window_keeps_the_listing() {
    let mut node = Node::serving();
    node.commanded(DRAIN).unwrap();
    assert_eq!(node.commanded(Command::Undrain).unwrap(), [Seen::Listed(WorkerState::Serving, 1)]);
    assert_eq!(node.commanded(Command::Undrain), Err(RefusedCommand::InService { state: State::Serving }));
}

#[test]
fn what_is_not_well_is_not_listed_by_an_undrain() {
    let mut node = Node::serving();
    node.commanded(DRAIN).unwrap();
    node.hears(NOT_SERVING);
    assert_eq!(node.commanded(Command::Undrain).unwrap(), []);
    assert_eq!(seen(&node.hears(SERVING)), [Seen::Listed(WorkerState::Serving, 1)]);
}

#[test]
fn who_is_not_ready_comes_back_as_unready() {
    let mut node = Node::serving();
    node.commanded(DRAIN).unwrap();
    node.hears(Kind::NotServing { role: HealthRole::Readiness });
    assert_eq!(node.commanded(Command::Undrain).unwrap(), [Seen::Listed(WorkerState::Unready, 1)]);
}

#[test]
fn an_undrain_overrules_a_sigterm() {
    let mut node = Node::serving();
    node.hears(Kind::Terminating { signal: 15 });
    assert_eq!(node.commanded(Command::Undrain).unwrap(), [Seen::Listed(WorkerState::Serving, 1)]);
}

#[test]
fn a_withdrawn_worker_is_not_listed_again_until_undrain() {
    let mut node = Node::serving();
    assert_eq!(node.commanded(Command::Withdraw).unwrap(), [Seen::Withdrawn(1), Seen::Lost(1)]);
    assert_eq!(node.state(), State::Lost);
    node.after(HOLD_DOWN * 100);
    assert_eq!(seen(&node.hears(SERVING)), []);
    assert_eq!(node.commanded(Command::Undrain).unwrap(), [Seen::Listed(WorkerState::Serving, 2)]);
}

#[test]
fn a_new_life_of_a_withdrawn_worker_serves() {
    let mut node = Node::serving();
    node.commanded(Command::Withdraw).unwrap();
    node.life = 1;
    node.found();
    assert_eq!(seen(&node.hears(SERVING)), [Seen::Listed(WorkerState::Serving, 1)]);
}

#[test]
fn the_limit_on_soft_withdrawals_does_not_hold_for_people() {
    let mut node = Node::of(vec![policy(), policy(), policy(), policy()]);
    for (worker, life) in (0..4).map(|id| (WorkerId(id), id)) {
        node.core.found(worker, root(life), incarnation(life), node.now);
        node.hears_of(worker, life, SERVING);
        let effects = node.core.command(worker, Command::Withdraw, commanded(), node.now).unwrap();
        assert!(matches!(effects[0], Effect::Withdraw(_)), "{effects:?}");
    }
}

#[test]
fn a_lost_worker_that_might_come_back_is_kept_away() {
    let mut node = Node::serving();
    node.hears(Kind::ListenerClosed { exiting: true });
    assert_eq!(node.state(), State::Lost);
    assert!(matches!(node.commanded(Command::Undrain), Err(RefusedCommand::Over { state: State::Lost, .. })));
    assert_eq!(node.commanded(Command::Withdraw).unwrap(), []);
    node.after(HOLD_DOWN * 100);
    assert_eq!(seen(&node.hears(SERVING)), []);
    assert_eq!(node.commanded(Command::Undrain).unwrap(), [Seen::Listed(WorkerState::Serving, 2)]);
}

#[test]
fn the_dead_and_the_unborn_take_no_commands() {
    let mut node = Node::of(vec![policy()]);
    assert_eq!(node.commanded(DRAIN), Err(RefusedCommand::NoProcess));
    node.found();
    assert_eq!(node.commanded(Command::Withdraw), Err(RefusedCommand::Starting));
    node.hears(killed(root_process(0)));
    for command in [DRAIN, Command::Undrain, Command::Withdraw] {
        assert!(matches!(node.commanded(command), Err(RefusedCommand::Over { state: State::Lost, .. })), "{command:?}");
    }
}

#[test]
fn a_death_after_a_withdrawal_does_not_rewrite_its_cause() {
    let mut node = Node::serving();
    node.commanded(Command::Withdraw).unwrap();
    assert_eq!(node.hears(killed(engine_core())), []);
}

#[test]
fn a_restarted_daemon_keeps_it_out_of_service() {
    let mut node = Node::serving();
    let effects = node.core.still_out_of_service(W, &incarnation(0), commanded());
    assert!(matches!(&effects[..], [Effect::Changed { to: State::Draining, .. }]), "{effects:?}");
    assert_eq!(seen(&node.hears(SERVING)), []);
    assert_eq!(node.core.still_out_of_service(W, &incarnation(7), commanded()), [], "another life");
    assert_eq!(node.commanded(Command::Undrain).unwrap(), [Seen::Listed(WorkerState::Serving, 2)]);
}

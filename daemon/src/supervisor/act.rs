//! What is done about the processes of a worker that was lost, after the record is withdrawn and
//! the routers are signalled: never in `mode = "observe"`, and not to a worker that has come back.

use lastgasp_protocol::ClosedName as _;
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use lastgasp_protocol::Incarnation;

use crate::config::{Find, Mode, OnLost};
use crate::core::{Nanos, ProcessId, State, WorkerId};
use crate::effects::actions::{self, Act, ActionOutcome, ActionReport};
use crate::effects::deaths::MomentKind;
use crate::sensors::proc;

use super::{Message, Supervisor, scan};

/// Whether the tree of a root is the worker. A pid file may be stale, and a command line may be another's that
/// quotes it: processes that are not proven to be the worker are left alone, whatever becomes of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Proof {
    /// Nothing has shown it yet.
    #[default]
    None,
    /// It is being looked at, on another thread.
    Looking,
    /// A process of the tree held a listener of the worker's; or the root was found by its pid or by its
    /// environment, and the tree has the titles of the engine.
    Shown,
}

/// What is going to be done about one life.
pub(super) struct Pending {
    worker: WorkerId,
    root: ProcessId,
    incarnation: String,
    act: Act,
    grace: Duration,
    due: Nanos,
    /// It is being done, on another thread.
    running: bool,
    /// The tree, once the worker has begun another life and its present tree is another.
    tree: Option<Vec<(ProcessId, String)>>,
    /// The tree is the worker.
    proven: bool,
}

impl Supervisor {
    /// The state of a worker's present life has changed.
    pub(super) fn plan_actions(&mut self, worker: WorkerId, to: State, now: Nanos) {
        let Some(root) = self.processes.root(worker) else { return };
        if to == State::Serving {
            self.prove_trees();
            // Who owns the listener is known now, and with it whose titles count.
            self.rescan = true;
        }
        let this = |pending: &Pending| pending.worker == worker && pending.root == root && pending.act != Act::Sever;
        if to != State::Lost {
            self.actions.retain(|pending| !this(pending) || pending.running);
            return;
        }
        let slot = &self.workers[worker];
        let (act, due) = match &slot.config.on_lost {
            OnLost::None => return,
            OnLost::Reap => (Act::Reap, now.plus(slot.config.reap_grace)),
            OnLost::TerminateRoot => (Act::Terminate, now.plus(slot.config.reap_grace)),
            OnLost::KillTree => (Act::KillTree, now.plus(slot.config.reap_grace)),
            OnLost::Command(_) => (Act::Command, now),
        };
        if self.config.mode == Mode::Observe {
            let detail = "mode = \"observe\"".to_owned();
            self.acted(worker, &ActionReport { act, outcome: ActionOutcome::Observed, detail });
        } else if !self.actions.iter().any(this) {
            let grace = slot.config.reap_grace;
            let (incarnation, proven) = (slot.incarnation.clone(), slot.proof == Proof::Shown);
            self.actions.push(Pending {
                worker,
                root,
                incarnation,
                act,
                grace,
                due,
                running: false,
                tree: None,
                proven,
            });
        }
    }

    /// Looks, on blocking threads, whether the trees of those workers are the workers whose processes may have
    /// to be ended. Once that is shown of a life, it stays so.
    pub(super) fn prove_trees(&mut self) {
        let touched = |slot: &super::WorkerSlot| {
            slot.config.sever.enabled || !matches!(slot.config.on_lost, OnLost::None | OnLost::Command(_))
        };
        let open = self.workers.iter().filter(|(_, slot)| slot.proof == Proof::None && touched(slot));
        let open: Vec<WorkerId> = open.map(|(worker, _)| worker).collect();
        for worker in open {
            let alive = |id| self.processes.get(id).is_some_and(|tracked| !tracked.exit_seen);
            let Some(root) = self.processes.root(worker).filter(|root| alive(*root)) else { continue };
            let slot = &mut self.workers[worker];
            slot.proof = Proof::Looking;
            let (config, messages) = (Arc::clone(&slot.config), self.messages.clone());
            tokio::task::spawn_blocking(move || {
                let _ = messages.send(Message::Served(worker, root, scan::serves(root, &config)));
            });
        }
    }

    pub(super) fn served(&mut self, worker: WorkerId, root: ProcessId, serves: bool) {
        if self.processes.root(worker) == Some(root) && self.workers[worker].proof == Proof::Looking {
            self.workers[worker].proof = Proof::None;
            if serves {
                self.shown(worker, root);
            }
        }
    }

    /// A process of the tree has a title of the engine: with a root that was named exactly that is proof enough.
    pub(super) fn titled(&mut self, worker: WorkerId, root: ProcessId) {
        let slot = &self.workers[worker];
        if slot.declared.is_some() || matches!(slot.config.find, Find::Pid(_) | Find::Env(_)) {
            self.shown(worker, root);
        }
    }

    fn shown(&mut self, worker: WorkerId, root: ProcessId) {
        self.workers[worker].proof = Proof::Shown;
        for pending in self.actions.iter_mut().filter(|pending| pending.worker == worker && pending.root == root) {
            pending.proven = true;
        }
    }

    /// The worker begins another life: what is planned about the former one goes on.
    pub(super) fn keep_former_tree(&mut self, worker: WorkerId) {
        let tree = self.tree_without_root(worker);
        for pending in self.actions.iter_mut().filter(|pending| pending.worker == worker) {
            pending.tree.get_or_insert_with(|| tree.clone());
        }
    }

    fn tree_without_root(&self, worker: WorkerId) -> Vec<(ProcessId, String)> {
        let tree = self.processes.tree(worker).into_iter();
        tree.filter(|tracked| tracked.id != tracked.root && !tracked.exit_seen)
            .map(|tracked| (tracked.id, tracked.title.as_ref().to_owned()))
            .collect()
    }

    pub(super) fn next_action(&self) -> Option<Nanos> {
        self.actions.iter().filter(|pending| !pending.running).map(|pending| pending.due).min()
    }

    /// Whether a life's processes are still being seen to.
    pub(super) fn is_acting(actions: &[Pending], worker: WorkerId, incarnation: &Incarnation) -> bool {
        actions.iter().any(|pending| pending.worker == worker && pending.incarnation == incarnation.as_str())
    }

    pub(super) fn is_acting_on(&self, worker: WorkerId) -> bool {
        self.actions.iter().any(|pending| pending.worker == worker)
    }

    /// What has ended by itself is not waited for.
    pub(super) fn hasten_actions(&mut self) {
        let now = proc::monotonic_now();
        for pending in self.actions.iter_mut().filter(|pending| !pending.running) {
            let tree_lives = || match &pending.tree {
                Some(tree) => tree.iter().any(|(id, _)| proc::is_alive(*id)),
                None => self.processes.tree(pending.worker).iter().any(|tracked| proc::is_alive(tracked.id)),
            };
            let rest = match pending.act {
                Act::Reap => tree_lives(),
                Act::KillTree => proc::is_alive(pending.root) || tree_lives(),
                _ => proc::is_alive(pending.root),
            };
            if !rest {
                pending.due = pending.due.min(now);
            }
        }
    }

    /// Begins what is due. `/proc` is read, and signals are sent, on blocking threads.
    pub(super) fn begin_actions(&mut self, now: Nanos) {
        let mut actions = std::mem::take(&mut self.actions);
        for pending in actions.iter_mut().filter(|pending| !pending.running && pending.due <= now) {
            pending.running = true;
            let Pending { worker, root, act, tree, .. } = pending;
            let (worker, root, act, messages) = (*worker, *root, *act, self.messages.clone());
            if act == Act::Command {
                let config = Arc::clone(&self.workers[worker].config);
                let certificate = self.deaths.so_far(worker, now).map(|certificate| certificate.to_json());
                tokio::spawn(async move {
                    let OnLost::Command(command) = &config.on_lost else { return };
                    let done = actions::run(command, certificate.unwrap_or_default()).await;
                    let _ = messages.send(Message::Acted(worker, root, vec![done]));
                });
                continue;
            }
            if !pending.proven {
                let _ = messages.send(Message::Acted(worker, root, vec![unproven(act)]));
                continue;
            }
            let mut processes = match act {
                Act::Reap | Act::KillTree => tree.take().unwrap_or_else(|| self.tree_without_root(worker)),
                _ => Vec::new(),
            };
            if act != Act::Reap {
                let title = self.processes.get(root).map_or_else(|| "root".into(), |root| root.title.to_string());
                processes.push((root, title));
            }
            let spared: HashSet<ProcessId> = self.processes.of_other_roots(root).collect();
            tokio::task::spawn_blocking(move || {
                let _ = messages.send(Message::Acted(worker, root, actions::signal(act, &processes, &spared)));
            });
        }
        self.actions = actions;
    }

    /// Ends the connections of a worker that was listed and is lost now, and those of its companion.
    pub(super) fn sever(&mut self, worker: WorkerId) {
        let Some(root) = self.processes.root(worker) else { return };
        let slot = &self.workers[worker];
        if !slot.config.sever.enabled {
            return;
        }
        if self.config.mode == Mode::Observe {
            let detail = "mode = \"observe\"".to_owned();
            self.acted(worker, &ActionReport { act: Act::Sever, outcome: ActionOutcome::Observed, detail });
            return;
        }
        if slot.proof != Proof::Shown {
            self.acted(worker, &unproven(Act::Sever));
            return;
        }
        let mut owners: BTreeMap<ProcessId, String> =
            self.remaining(worker).into_iter().map(|(id, title)| (id, title.as_ref().to_owned())).collect();
        owners.extend(slot.companion.map(|companion| (companion, "companion".to_owned())));
        let mut spared = slot.config.sever.spare_ports.clone();
        // Without its lease a worker of Dynamo that recovers has nothing to come back to.
        spared.extend(self.config.dynamo.iter().filter_map(|dynamo| dynamo.backend.port()));
        let messages = self.messages.clone();
        let incarnation = slot.incarnation.clone();
        let (act, grace, due) = (Act::Sever, Duration::ZERO, proc::monotonic_now());
        let (running, proven) = (true, true);
        self.actions.push(Pending { worker, root, incarnation, act, grace, due, running, tree: None, proven });
        tokio::task::spawn_blocking(move || {
            let done = actions::sever(&owners, &spared);
            let _ = messages.send(Message::Acted(worker, root, done));
        });
    }

    /// Something was done. A root that was asked to end has its grace, and is killed after it.
    pub(super) fn action_done(&mut self, worker: WorkerId, root: ProcessId, done: &[ActionReport]) {
        for done in done {
            self.acted(worker, done);
        }
        let severed = done.first().is_some_and(|done| done.act == Act::Sever);
        let asked = done.iter().any(|done| done.act == Act::Terminate && done.outcome == ActionOutcome::Done);
        let now = proc::monotonic_now();
        self.actions.retain_mut(|pending| {
            if pending.worker != worker || pending.root != root || severed != (pending.act == Act::Sever) {
                return true;
            }
            (pending.act, pending.due, pending.running) = (Act::Kill, now.plus(pending.grace), false);
            asked
        });
    }

    fn acted(&mut self, worker: WorkerId, done: &ActionReport) {
        let ActionReport { act, outcome, detail } = done;
        let name = self.name(worker).clone();
        self.metrics.actions.with_label_values(&[act.as_str(), outcome.as_str()]).inc();
        tracing::warn!(worker = %name, action = act.as_str(), outcome = outcome.as_str(), detail, "on_lost");
        // That somebody had gone before is no news in a certificate.
        if *outcome != ActionOutcome::Gone {
            let text = format!("{}: {detail}", outcome.as_str());
            self.deaths.moment(worker, MomentKind::Effect, act.as_str(), text, proc::monotonic_now());
            self.note(&name, format!("{} {}: {detail}", act.as_str(), outcome.as_str()));
        }
    }
}

fn unproven(act: Act) -> ActionReport {
    let detail = "the processes found were not seen to listen where the worker does, nor to have the engine's titles; \
                  correct worker.find or worker.endpoint";
    ActionReport { act, outcome: ActionOutcome::Unproven, detail: detail.to_owned() }
}

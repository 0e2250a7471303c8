//! What people ask for by `lastgasp drain`, `undrain` and `withdraw`.

use lastgasp_protocol::ClosedName as _;
use std::time::Duration;

use jiff::Timestamp;
use lastgasp_protocol::{Cause, CauseKind, Incarnation, Name};

use crate::config::Mode;
use crate::core::{Command, Evidence, Kind, State, WorkerId};
use crate::effects::deaths::MomentKind;
use crate::effects::nats::ConnectionState;
use crate::sensors::proc;
use crate::status::control::{CommandError, Request};
use crate::status::proto::Commanded;

use super::Supervisor;

impl Supervisor {
    pub(super) fn command(&mut self, request: Request) {
        let Request { worker, command, cause, reply } = request;
        let outcome = self.obey(&worker, command, cause);
        if let Err(error) = &outcome {
            tracing::warn!(worker, ?command, %error, "command refused");
        }
        // An error says that whoever asked has gone.
        let _ = reply.send(outcome);
    }

    fn obey(&mut self, name: &str, command: Command, cause: Cause) -> Result<Commanded, CommandError> {
        let Some(worker) = Name::new(name).ok().and_then(|name| self.workers.named(&name)) else {
            let workers = self.workers.iter().map(|(_, slot)| slot.config.name.to_string()).collect();
            return Err(CommandError::Unknown { worker: name.to_owned(), workers });
        };
        if self.config.mode == Mode::Observe {
            return Err(CommandError::Observing);
        }
        let now = proc::monotonic_now();
        let refuse = |refused| CommandError::Refused { worker: name.to_owned(), refused };
        let effects = self.core.command(worker, command, cause.clone(), now).map_err(refuse)?;
        let word = match command {
            Command::Drain { .. } => "drain",
            Command::Undrain => "undrain",
            Command::Withdraw => "withdraw",
        };
        let by = cause.sender.as_ref().map(|sender| format!(" by {sender}")).unwrap_or_default();
        let why = cause.reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
        let text = format!("{word}{by}{why}");
        tracing::warn!(worker = name, "{text}");
        let slot = &mut self.workers[worker];
        if command == Command::Undrain {
            slot.taken_back = true;
            slot.commanded.clear();
        } else {
            slot.taken_back = false;
            slot.commanded.clone_from(&text);
        }
        self.deaths.moment(worker, MomentKind::Evidence, "commanded", text.clone(), now);
        self.carry_out(effects, now);
        self.note(&self.name(worker).clone(), text);
        let state = self.core.state(worker).unwrap_or(State::Starting);
        Ok(Commanded {
            worker: name.to_owned(),
            state: state.as_str().to_owned(),
            message: self.what_follows(worker, command, state),
        })
    }

    fn what_follows(&self, worker: WorkerId, command: Command, state: State) -> String {
        let slot = &self.workers[worker];
        let mut text = match (command, state) {
            (Command::Drain { .. }, _) if !self.timers.contains_key(&(worker, crate::core::Timer::DrainWindow)) => {
                "handed over already; it stays out of service until `lastgasp undrain`".to_owned()
            }
            (Command::Drain { window }, _) => {
                let window = window.unwrap_or(slot.config.drain_window);
                format!(
                    "no new work; its streams go on for {} s, then they are moved; `lastgasp undrain` takes it back",
                    window.as_secs_f64()
                )
            }
            (Command::Undrain, State::Serving | State::Unready) => "in service again".to_owned(),
            (Command::Undrain, _) => "no longer kept out of service; listed again as soon as it is well".to_owned(),
            (Command::Withdraw, _) => {
                "withdrawn; its streams are moved or ended, its processes are left alone; not listed again until `lastgasp undrain` or a new process".to_owned()
            }
        };
        if *self.connection.borrow() != ConnectionState::Connected {
            text.push_str("; NATS is not connected, so the record is changed as soon as it is");
        }
        text
    }

    /// Why a worker is out of service, if somebody has taken it out.
    pub(super) fn commanded(&self, worker: WorkerId) -> Option<String> {
        self.core.is_out_of_service(worker).then(|| self.workers[worker].commanded.clone())
    }

    /// An earlier daemon has listed this life as draining, and the record still stands: because
    /// somebody asked for it, or because the engine was on its way out.
    pub(super) fn go_on_draining(&mut self, worker: WorkerId, deadline: Option<Timestamp>, commanded: Option<String>) {
        let Some(reason) = commanded else {
            let Some(root) = self.processes.root(worker) else { return };
            let kind = Kind::Terminating { signal: libc::SIGTERM };
            return self.evidence(Evidence { worker, root, kind, at: proc::monotonic_now() });
        };
        let left = deadline.map(|deadline| deadline.duration_since(Timestamp::now()).as_millis().max(0));
        let window = left.and_then(|left| u64::try_from(left).ok()).map(Duration::from_millis);
        self.workers[worker].commanded.clone_from(&reason);
        let now = proc::monotonic_now();
        let cause = Cause { reason: Some(reason), ..Cause::of(CauseKind::Commanded) };
        if let Ok(effects) = self.core.command(worker, Command::Drain { window }, cause, now) {
            self.carry_out(effects, now);
        }
    }

    /// An operator had an earlier daemon take it out of service, and its tombstone says so.
    pub(super) fn still_out_of_service(
        &mut self,
        worker: WorkerId,
        incarnation: &Incarnation,
        epoch: u64,
        reason: String,
    ) {
        tracing::warn!(worker = %self.name(worker), %incarnation, reason, "worker stays out of service until `lastgasp undrain`");
        self.workers[worker].commanded.clone_from(&reason);
        let cause = Cause { reason: Some(reason), ..Cause::of(CauseKind::Commanded) };
        self.core.resumed(worker, incarnation, epoch);
        let effects = self.core.still_out_of_service(worker, incarnation, cause);
        self.carry_out(effects, proc::monotonic_now());
    }
}

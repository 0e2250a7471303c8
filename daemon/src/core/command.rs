//! What people and programs ask for: `lastgasp drain`, `undrain`, `withdraw`.

use std::time::Duration;

use lastgasp_protocol::{Cause, CauseKind, Incarnation};

use super::worker::{Life, Worker};
use super::{Effect, Nanos, State};

/// What is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Command {
    /// No new work. Streams go on for the window, then those that can be moved are.
    Drain {
        /// How long; the worker's own window without it.
        window: Option<Duration>,
    },
    /// Take it into service again: at once if it is well, else as soon as it is.
    Undrain,
    /// Out of discovery at once. Streams are moved, what cannot move ends visibly. Its processes
    /// are left alone.
    Withdraw,
}

/// Why nothing was done.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RefusedCommand {
    /// No process of it was found yet.
    #[error("no process of the worker found yet, so the worker is not listed")]
    NoProcess,
    /// It has not begun to serve.
    #[error("starting and not listed yet; wait until the worker serves")]
    Starting,
    /// Its life is over, and nobody has taken it out of service.
    #[error("{state} ({cause}) and not listed")]
    Over {
        /// `left` or `lost`.
        state: State,
        /// Why.
        cause: Box<Cause>,
    },
    /// There is nothing to take back.
    #[error("{state}; no drain or withdrawal to take back")]
    InService {
        /// Where it stands.
        state: State,
    },
}

impl Worker {
    pub(super) fn command(
        &mut self,
        command: Command,
        cause: Cause,
        now: Nanos,
        out: &mut Vec<Effect>,
    ) -> Result<(), RefusedCommand> {
        let window = self.policy.drain_window;
        let life = self.life.as_mut().ok_or(RefusedCommand::NoProcess)?;
        let over = |life: &Life| RefusedCommand::Over {
            state: life.state,
            cause: Box::new(life.cause.clone().unwrap_or_else(|| Cause::of(CauseKind::ProcessGone))),
        };
        match (command, life.state) {
            (_, State::Starting) => return Err(RefusedCommand::Starting),
            (_, State::Left) => return Err(over(life)),
            (_, State::Lost) if life.root_dead => return Err(over(life)),
            (Command::Undrain, State::Lost) if !life.out_of_service => return Err(over(life)),
            (Command::Undrain, state @ (State::Serving | State::Unready)) => {
                return Err(RefusedCommand::InService { state });
            }
            (Command::Undrain, State::Draining | State::Lost) => self.undrain(now, out),
            (Command::Drain { .. }, State::Lost) => return Err(over(life)),
            // It was handed over already; it only stays away from now on.
            (Command::Drain { .. }, State::Draining) if !life.listed => life.out_of_service = true,
            (Command::Drain { window: asked }, State::Serving | State::Unready | State::Draining) => {
                life.out_of_service = true;
                self.drain_for(asked.unwrap_or(window), cause, now, out);
            }
            // It was lost by itself and might come back: now it does not.
            (Command::Withdraw, State::Lost) => life.out_of_service = true,
            (Command::Withdraw, State::Serving | State::Unready | State::Draining) => {
                life.out_of_service = true;
                self.lost(cause, now, None, out);
            }
        }
        Ok(())
    }

    /// A person's word counts for more than a SIGTERM that was seen, and needs no hold-down; but
    /// nothing is listed that does not seem well.
    fn undrain(&mut self, now: Nanos, out: &mut Vec<Effect>) {
        let Some(life) = self.life.as_mut() else { return };
        (life.out_of_service, life.terminating, life.dismissed) = (false, false, false);
        let live = life.live != Some(false) && life.dead.is_empty();
        if live && life.ready == Some(false) {
            self.relist(State::Unready, Some(Cause::of(CauseKind::NotReady)), now, out);
        } else {
            self.healthy(now, Duration::ZERO, out);
        }
    }

    /// As after a drain whose window is over: it has no record, and gets none.
    pub(super) fn still_out_of_service(&mut self, incarnation: &Incarnation, cause: Cause, out: &mut Vec<Effect>) {
        let Some(life) = self.life.as_mut().filter(|life| life.is(incarnation) && !life.root_dead) else { return };
        if matches!(life.state, State::Left | State::Lost) {
            return;
        }
        life.out_of_service = true;
        life.listed = false;
        life.cause = Some(cause.clone());
        let from = std::mem::replace(&mut life.state, State::Draining);
        out.push(Effect::Changed { worker: self.id(), from, to: State::Draining, cause: Some(cause) });
    }
}

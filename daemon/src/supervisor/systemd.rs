//! What systemd hears (sd_notify(3)): ready, alive, stopping. Nothing, where nobody asks for it by
//! `NOTIFY_SOCKET`.

use sd_notify::NotifyState;

/// The service manager, if there is one.
pub(super) struct ServiceManager {
    /// It wants a sign of life, and `WatchdogSec=` is what it waits at the most.
    watchdog: bool,
}

impl ServiceManager {
    pub(super) fn new() -> Self {
        Self { watchdog: sd_notify::watchdog_enabled().is_some() }
    }

    /// The sensors are attached and the first scan is over.
    pub(super) fn ready(&self, status: &str) {
        tell(&[NotifyState::Ready, NotifyState::Status(status)]);
    }

    /// The loop that decides has gone round. One that is stuck is ended by systemd and started again.
    pub(super) fn alive(&self) {
        if self.watchdog {
            tell(&[NotifyState::Watchdog]);
        }
    }

    pub(super) fn stopping(&self) {
        tell(&[NotifyState::Stopping]);
    }
}

fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(%error, "cannot notify systemd through NOTIFY_SOCKET");
    }
}

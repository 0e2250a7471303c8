//! The end of a sink that the notifier holds: one task takes its commands in order.

use std::fmt;

use tokio::sync::mpsc;

use crate::losses::Loss;
use crate::metrics::Metrics;

/// Room for the workers of one node, beside what comes later.
const ROOM_FOR_WORKERS: usize = 1024;

/// Dropped, the task ends.
pub(super) struct Handle<Command> {
    name: String,
    commands: mpsc::Sender<Command>,
    metrics: Metrics,
}

impl<Command> fmt::Debug for Handle<Command> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle").field("name", &self.name).finish_non_exhaustive()
    }
}

impl<Command> Handle<Command> {
    /// Of the sink of this name, where so many commands may wait; and what its task takes.
    pub(super) fn new(name: &str, queue: usize, metrics: &Metrics) -> (Self, mpsc::Receiver<Command>) {
        let (commands, inbox) = mpsc::channel(queue + ROOM_FOR_WORKERS);
        (Self { name: name.to_owned(), commands, metrics: metrics.clone() }, inbox)
    }

    /// `false`: there was no room, which is counted.
    pub(super) fn tell(&self, command: Command) -> bool {
        let sent = self.commands.try_send(command).is_ok();
        if !sent {
            tracing::error!(sink = self.name, "notification lost: the sink's queue is full");
            self.metrics.lose(Loss::NotificationQueue, 1);
        }
        sent
    }
}

//! Every way in which information can be lost, each with a counter: `lastgasp_losses_total{hop,kind}`.
//!
//! The counters are there from the start, at zero: an alert on their increase would not see the
//! first loss of a counter that appears with it.
//!
//! Between the sensors, the core and the effects there are only queues without a bound, in which
//! nothing is lost; their one reader is the supervisor, whose stillness `/livez` shows.

use lastgasp_ebpf::EventKind;

/// A way to lose information.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// The ring buffer was full when a kernel program had this to say.
    Ring(EventKind),
    /// A record in the ring buffer that is no event of this build.
    Event,
    /// A record in discovery, of this node, that cannot be read.
    Record,
    /// An answer of a router that cannot be read.
    Answer,
    /// A process that the kernel programs could not be made to watch.
    WatchProcess,
    /// A serving port that the kernel programs could not be made to watch.
    WatchPort,
    /// A supervisor whose signals the kernel programs could not be made to watch.
    WatchSupervisor,
    /// Records of the kernel's log that were overwritten before they were read; how many is not known.
    KernelLog,
    /// A new process that the kernel programs could not begin to watch by themselves: too many are.
    WatchFork,
    /// A critical process that has no pidfd.
    Pidfd,
    /// Events that somebody who follows `lastgasp events` did not read in time.
    Follower,
    /// Moments that did not fit into a death certificate.
    Moment,
    /// A record that the server refuses to write or delete. It is tried again; somebody has to act.
    RefusedRecord,
    /// Lines of the log that could not be written, or that nobody read in time.
    Log,
    /// A signal to routers that could not be published. The record's deletion says the same.
    Signal,
    /// A death certificate that was not kept on the server.
    Certificate,
    /// A notification to a sink of `[[notify]]` for which there was no room.
    NotificationQueue,
    /// A notification to a sink of `[[notify]]` that could not be delivered, however often it was tried.
    Notification,
    /// Requests to a worker that were not remembered for `kind = "infera"`: too many, or without an
    /// inbox that one may publish to.
    InferaRequest,
    /// Frames to Infera's routers that its NATS did not take.
    InferaEndFrame,
    /// A record in Infera's etcd that could not be changed, however often it was tried.
    InferaRecord,
    /// Records of a worker in Dynamo's discovery that could not be changed, however often it was tried.
    DynamoRecord,
}

impl Loss {
    /// All of them.
    pub fn all() -> impl Iterator<Item = Self> {
        EventKind::ALL.into_iter().map(Self::Ring).chain([
            Self::Event,
            Self::Record,
            Self::Answer,
            Self::WatchProcess,
            Self::WatchPort,
            Self::WatchSupervisor,
            Self::KernelLog,
            Self::WatchFork,
            Self::Pidfd,
            Self::Follower,
            Self::Moment,
            Self::RefusedRecord,
            Self::Log,
            Self::Signal,
            Self::Certificate,
            Self::NotificationQueue,
            Self::Notification,
            Self::InferaRequest,
            Self::InferaEndFrame,
            Self::InferaRecord,
            Self::DynamoRecord,
        ])
    }

    /// Where it was lost.
    #[must_use]
    pub const fn hop(self) -> &'static str {
        match self {
            Self::Ring(_) => "ring",
            Self::Event | Self::Record | Self::Answer => "decode",
            Self::WatchProcess | Self::WatchPort | Self::WatchSupervisor | Self::WatchFork => "watch",
            Self::KernelLog => "kmsg",
            Self::Pidfd => "pidfd",
            Self::Follower => "channel",
            Self::Moment | Self::RefusedRecord => "effect",
            Self::Log => "log",
            Self::Signal | Self::Certificate => "publish",
            Self::NotificationQueue | Self::Notification => "notify",
            Self::InferaRequest | Self::InferaEndFrame | Self::InferaRecord => "infera",
            Self::DynamoRecord => "dynamo",
        }
    }

    /// What was lost there.
    #[must_use]
    pub const fn kind(self) -> &'static str {
        match self {
            Self::Ring(kind) => kind.as_str(),
            Self::Event => "event",
            Self::Record | Self::RefusedRecord | Self::InferaRecord | Self::DynamoRecord => "record",
            Self::InferaRequest => "request",
            Self::InferaEndFrame => "end_frame",
            Self::Answer => "answer",
            Self::WatchProcess => "process",
            Self::WatchPort => "port",
            Self::WatchSupervisor => "supervisor",
            Self::KernelLog => "record",
            Self::WatchFork => "fork",
            Self::Pidfd => "open",
            Self::Follower => "follower",
            Self::Moment => "moment",
            Self::Log => "line",
            Self::Signal => "signal",
            Self::Certificate => "certificate",
            Self::NotificationQueue => "queue",
            Self::Notification => "delivery",
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_loss_has_a_counter_of_its_own() {
        let names: HashSet<_> = Loss::all().map(|loss| (loss.hop(), loss.kind())).collect();
        assert_eq!(names.len(), Loss::all().count());
        for hop in ["ring", "decode", "channel", "effect", "publish", "notify"] {
            assert!(names.iter().any(|(at, _)| *at == hop), "{hop}");
        }
    }
}

//! `kind = "infera"`: Infera's routers hear of a loss where they await the answer, and its
//! discovery too. Infera itself is not changed and does not know of it: docs/infera.md.
//!
//! One task on the side thread hears which requests its workers got and remembers their reply
//! inboxes. When workers are lost, it takes all of one cause out of discovery first: a stream that is
//! moved off one of them must not be moved to the next. Then it ends every stream that may be open
//! with an error frame, which Infera's router moves to another worker, and cancels what may still
//! run. Until the worker serves again it answers in its place, where its router would wait for as
//! long as its idle timeout. A worker that lives and hands over loses only the streams that its
//! routers have marked as such that they would move them.
//!
//! What is answered is not seen, so most inboxes that are remembered are closed long since. A frame
//! to a closed inbox reaches nobody.

pub(crate) mod etcd;
mod frames;
mod inboxes;
mod watcher;

use lastgasp_protocol::Name;

use crate::config::InferaConfig;
use crate::effects::nats::NatsError;
use crate::metrics::Metrics;
use crate::notify::handle::Handle;
use crate::notify::{Lost, Report};

/// What is published for Infera's routers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
pub(crate) enum FrameKind {
    /// The end of a stream, on its reply inbox.
    End,
    /// The answer to a request that came to a worker after its loss.
    StandIn,
    /// The request to a worker to abort what it still does.
    Cancel,
}

/// What the supervisor asks of the bridge.
#[derive(Debug, Clone)]
pub(super) enum InferaCommand {
    /// A worker is known, with its id in Infera.
    Watch(Name, String),
    /// It will not be heard of again.
    Forget(Name),
    /// It is listed and takes work.
    Serves(Name),
    /// It would serve, though it is not listed yet.
    Recovers(Name),
    /// It is leaving.
    Drains(Name),
    /// These are not listed any more and hand over what can be moved, for one cause; they still run.
    HandsOver(Vec<Lost>),
    /// These are over, for one cause.
    Lost(Vec<Lost>),
}

/// One sink. Dropped, its task ends.
#[derive(Debug)]
pub struct Infera(pub(super) Handle<InferaCommand>);

impl Infera {
    /// Starts its task on the runtime of `side`; it connects for as long as it takes.
    ///
    /// # Errors
    /// A file of the login cannot be used.
    pub fn start(
        config: &InferaConfig,
        node: &Name,
        side: &tokio::runtime::Handle,
        metrics: &Metrics,
        report: Report,
    ) -> Result<Self, NatsError> {
        let (handle, inbox) = Handle::new(&config.name, config.queue, metrics);
        let options = watcher::options(config, node, metrics)?;
        side.spawn(watcher::watch(config.clone(), options, inbox, metrics.clone(), report));
        Ok(Self(handle))
    }
}

//! What every chunk of a stream repeats, as the client saw it first.

use super::chunk::Chunk;
use super::json::{Object, text};
use super::request::Endpoint;

/// JSON texts of the members that must not change at a seam.
#[derive(Debug, Default, Clone)]
pub(crate) struct Envelope {
    id: Option<String>,
    created: Option<String>,
    model: Option<String>,
    system_fingerprint: Option<String>,
}

impl Envelope {
    /// Keeps what the client sees for the first time.
    pub(crate) fn learn(&mut self, chunk: &Chunk<'_>) {
        let Self { id, created, model, system_fingerprint } = self;
        for (kept, key) in
            [(id, "id"), (created, "created"), (model, "model"), (system_fingerprint, "system_fingerprint")]
        {
            if kept.is_none() {
                *kept = chunk.top.present(key).map(str::to_owned);
            }
        }
    }

    /// Makes a later worker's chunk one of this stream.
    pub(crate) fn apply(&self, top: &mut Object<'_>) {
        let Self { id, created, model, system_fingerprint } = self;
        for (kept, key) in
            [(id, "id"), (created, "created"), (model, "model"), (system_fingerprint, "system_fingerprint")]
        {
            if let (Some(kept), true) = (kept, key != "system_fingerprint" || top.present(key).is_some()) {
                top.set(key, kept.clone());
            }
        }
    }

    /// The head of a chunk that the router writes itself.
    pub(crate) fn head(&self, endpoint: Endpoint) -> Object<'static> {
        let object = match endpoint {
            Endpoint::Chat => "chat.completion.chunk",
            Endpoint::Completions => "text_completion",
        };
        let mut head = Object::default();
        head.set("id", self.id.clone().unwrap_or_else(|| text("lastgasp")));
        head.set("object", text(object));
        head.set("created", self.created.clone().unwrap_or_else(|| "0".into()));
        head.set("model", self.model.clone().unwrap_or_else(|| text("")));
        head
    }
}

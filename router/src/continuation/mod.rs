//! The continuation of a token stream on another worker: pure, fed with bytes, no I/O, no clock.
//!
//! ```text
//! resend(target) ─▶ request for a worker
//! feed(bytes)    ─▶ bytes for the client, and whether the stream goes on
//! worker_failed  ─▶ what is to be done: finish it here, send again, or give up
//! ```
//!
//! What `feed` returns counts as sent: the caller hands all of it to the client, in order,
//! whatever happens to the worker. Whatever an engine does, the client sees one stream with one
//! id, one role, one `finish_reason`, one usage and one `[DONE]`, or a visible error.
//!
//! A move is *exact* where the engine reports token ids: the next worker is given the prompt's ids
//! and those whose text the client has whole. Else it is *approximate*: text is carried, and the
//! next worker may cut it into other tokens. These are approximate by nature: chats on SGLang
//! (no ids while streaming), TensorRT-LLM and unknown engines, requests with media, `echo`,
//! or `stop` together with `min_tokens`, and tools where the chat endpoint takes no ids. [`Options::strict`] refuses such moves.
//!
//! What is known to differ after an exact move, since the engines give no way to restore it:
//! `seed` (dropped: it would begin again), `presence_penalty` and `frequency_penalty` (they count
//! output tokens, and carried ones are prompt); strict refuses both. And one thing that only
//! the operator can tell: where an engine puts several tokens into a chunk and the finish_reason into
//! a later one (vLLM's Rust frontend), a worker that dies between the two has sent an
//! end-of-sequence id that looks like any other, unless [`Options::eos_token_ids`] names it.

mod body;
mod chunk;
mod envelope;
mod json;
mod leak;
mod request;
mod resend;
mod spool;
pub mod sse;
mod stop;
mod stream;
mod unmovable;
mod write;

pub use body::{Body, Unreadable};
pub use request::{Endpoint, Engine};
pub use resend::{Exactness, Outgoing, Refusal, Target};
pub use stream::{Broken, Continuation, Options, Progress, StreamEnd};
pub use unmovable::Unmovable;
pub use write::error_event;

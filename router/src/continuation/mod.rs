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

pub use request::{Endpoint, Engine};
pub use resend::{Exactness, Outgoing, Refusal, Target};
pub use stream::{Broken, Continuation, Options, Progress, Verdict};
pub use unmovable::Unmovable;
pub use write::error_event;

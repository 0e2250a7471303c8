//! The language model of the mock engine, as a pure function.
//!
//! The next token is a function of *all* token ids so far, prompt and output
//! alike, and of nothing else. A continuation that carries the right ids goes on
//! exactly where the first run stood; one that carries them wrongly (a token
//! missing, repeated, or re-encoded from text) differs visibly from there on.
//!
//! Nothing in here does I/O, so a test computes in its own process what a stream
//! through real processes has to look like ([`crate::reference`]).

mod chat_template;
mod detokenizer;
mod generation;
mod output;
mod request;
mod sampling;
mod sequence;
mod stop;
mod vocabulary;

pub use chat_template::{Message, Turn, render};
pub use detokenizer::Detokenizer;
pub use generation::{CoreFinish, Generation, Limits};
pub use output::{Finish, Output, Piece};
pub use request::{Dialect, Endpoint, Frontend, Rejection, Request};
pub use sampling::Sampling;
pub use sequence::Sequence;
pub use stop::{StopMatch, StopMatcher};
pub use vocabulary::{END_OF_TURN, START_OF_TURN, TokenId, VOCABULARY_SIZE, bytes_of, decode, encode};

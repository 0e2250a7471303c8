//! The output of one choice as a client sees it: text, ids, and how it ends.

use super::detokenizer::Detokenizer;
use super::generation::CoreFinish;
use super::request::{Frontend, Request};
use super::stop::StopMatcher;
use super::vocabulary::TokenId;

/// How a choice ended, as `finish_reason` and `stop_reason` say it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finish {
    /// `length`
    Length,
    /// `stop`, by the end of sequence: no `stop_reason`.
    EndOfSequence,
    /// `stop`, by this id of `stop_token_ids`.
    StopToken(TokenId),
    /// `stop`, by this stop string.
    StopString(String),
    /// `abort`: the engine shut down under the request.
    Abort,
}

impl Finish {
    /// The value of `finish_reason`.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Length => "length",
            Self::EndOfSequence | Self::StopToken(_) | Self::StopString(_) => "stop",
            Self::Abort => "abort",
        }
    }
}

/// What one or several tokens added to the output.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// The text released; behind the ids while text is withheld.
    pub text: String,
    /// The ids.
    pub ids: Vec<TokenId>,
    /// Set on the last piece.
    pub finish: Option<Finish>,
}

/// The output processor of the API server, for one choice.
#[derive(Clone, Debug)]
pub struct Output {
    detokenizer: Detokenizer,
    stop: StopMatcher,
    frontend: Frontend,
    min_tokens: u32,
    produced: u32,
}

impl Output {
    /// The output of choice `index` of `request`.
    pub fn new(request: &Request, index: usize, frontend: Frontend) -> Self {
        Self {
            detokenizer: Detokenizer::new(&request.prompts[index]),
            stop: StopMatcher::new(request.stop.clone(), request.include_stop_str_in_output),
            frontend,
            min_tokens: request.limits[index].min_tokens,
            produced: 0,
        }
    }

    /// Tokens taken so far.
    pub fn produced(&self) -> u32 {
        self.produced
    }

    /// Takes a token from the engine core, and what the core says of it.
    pub fn push(&mut self, id: TokenId, finish: Option<CoreFinish>) -> Piece {
        self.produced += 1;
        // The token that stops has no text of its own.
        let mut text = match finish {
            Some(CoreFinish::EndOfSequence | CoreFinish::StopToken) => String::new(),
            Some(CoreFinish::Length) | None => self.detokenizer.push(id),
        };
        // Measured: the Python frontend drops an unfinished character at the end, the
        // Rust frontend sends U+FFFD for it.
        if finish.is_some() && self.frontend == Frontend::Rust {
            text.push_str(&self.detokenizer.flush());
        }
        let hit = self.stop.push(&text, self.produced > self.min_tokens);
        let finish = match (hit, finish) {
            (Some(hit), _) => Some(Finish::StopString(hit.stop)),
            (None, Some(CoreFinish::Length)) => Some(Finish::Length),
            (None, Some(CoreFinish::EndOfSequence)) => Some(Finish::EndOfSequence),
            (None, Some(CoreFinish::StopToken)) => Some(Finish::StopToken(id)),
            (None, None) => None,
        };
        Piece { text: self.stop.release(finish.is_some()), ids: vec![id], finish }
    }

    /// Ends it without a token: `finish_reason: "abort"`.
    pub fn abort(&mut self) -> Piece {
        Piece { text: self.stop.release(true), ids: Vec::new(), finish: Some(Finish::Abort) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::request::{Dialect, Endpoint};
    use super::*;
    use serde_json::json;

    fn output(body: serde_json::Value, frontend: Frontend) -> Output {
        let dialect = Dialect { frontend, model: "tiny".to_owned(), max_model_len: 2048 };
        let request = Request::parse(Endpoint::Completions, &body, &dialect).unwrap();
        Output::new(&request, 0, frontend)
    }

    #[test]
    fn an_unfinished_character_at_the_end_is_dropped_by_python_and_marked_by_rust() {
        for (frontend, last) in [(Frontend::Python, ""), (Frontend::Rust, "\u{fffd}")] {
            let mut output = output(json!({"prompt": "Hi"}), frontend);
            assert_eq!(output.push(256, None).text, " kernel");
            let piece = output.push(0xe2, Some(CoreFinish::Length));
            assert_eq!(piece.text, last);
            assert_eq!(piece.finish, Some(Finish::Length));
        }
    }

    #[test]
    fn a_stop_string_wins_over_the_length_and_cuts_the_text() {
        let mut output = output(json!({"prompt": "Hi", "stop": "lt"}), Frontend::Python);
        assert_eq!(output.push(256, None).text, " kerne");
        let piece = output.push(b't'.into(), Some(CoreFinish::Length));
        assert_eq!(piece.text, "");
        assert_eq!(piece.finish, Some(Finish::StopString("lt".to_owned())));
    }

    #[test]
    fn a_token_that_stops_has_an_id_and_no_text() {
        let mut output = output(json!({"prompt": "Hi"}), Frontend::Python);
        let piece = output.push(257, Some(CoreFinish::StopToken));
        assert_eq!((piece.text.as_str(), &piece.ids[..]), ("", &[257][..]));
        assert_eq!(piece.finish, Some(Finish::StopToken(257)));
    }

    #[test]
    fn an_abort_has_the_held_text_and_no_ids() {
        let mut output = output(json!({"prompt": "Hi", "stop": "zzz"}), Frontend::Python);
        assert_eq!(output.push(256, None).text, " kern");
        let piece = output.abort();
        assert_eq!((piece.text.as_str(), &piece.ids[..]), ("el", &[][..]));
        assert_eq!(piece.finish.unwrap().reason(), "abort");
    }
}

//! From tokens to the JSON on the wire.
//!
//! Field order, nulls against absent fields, and where ids and usage stand are those of
//! vLLM 0.32.0, recorded in `tests/fixtures/vllm-0.32`.

mod python;
mod rust;

use std::sync::Arc;

use lastgasp_tests::model::{CoreFinish, Endpoint, Finish, Frontend, Output, Piece, Request, TokenId, decode};
use serde_json::{Value, json};

/// The end of a stream.
pub(crate) const DONE: &str = "data: [DONE]\n\n";

/// What the Python frontend says of the death of its engine, in the middle of a stream
/// that then ends like any other, and to requests that still come.
pub(crate) fn engine_dead() -> Value {
    json!({"error": {
        "message": "EngineCore encountered an issue. See stack trace (above) for the root cause.",
        "type": "InternalServerError", "param": null, "code": 500
    }})
}

/// One server-sent event.
pub(crate) fn event(value: &Value) -> String {
    format!("data: {value}\n\n")
}

/// The fields that every chunk of an answer begins with.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) id: String,
    pub(crate) created: i64,
    pub(crate) model: String,
}

/// Tokens of an answer that is or was reported for one choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) prompt: u32,
    pub(crate) completion: u32,
}

/// One token of the log probabilities.
#[derive(Clone, Debug)]
struct Logprob {
    token: String,
    logprob: f64,
    text_offset: usize,
}

/// One choice of the answer.
#[derive(Debug)]
struct Choice {
    index: usize,
    prompt: Vec<TokenId>,
    output: Output,
    opened: bool,
    /// Sent with the next chunk.
    piece: Piece,
    logprobs: Vec<Logprob>,
    /// Where the next token's text begins, for log probabilities.
    text_offset: usize,
    /// Everything so far, for an answer in one piece.
    whole: Piece,
}

/// Writes the answer to one request.
#[derive(Debug)]
pub(crate) struct Answer {
    frontend: Frontend,
    head: Head,
    request: Arc<Request>,
    /// Tokens a chunk.
    stream_interval: usize,
    choices: Vec<Choice>,
}

impl Answer {
    pub(crate) fn new(frontend: Frontend, head: Head, request: Arc<Request>, stream_interval: usize) -> Self {
        let choices = (0..request.prompts.len())
            .map(|index| Choice {
                index,
                prompt: request.prompts[index].clone(),
                output: Output::new(&request, index, frontend),
                opened: false,
                piece: Piece::default(),
                logprobs: Vec::new(),
                text_offset: 0,
                whole: Piece::default(),
            })
            .collect();
        Self { frontend, head, request, stream_interval, choices }
    }

    /// Takes a token; returns the chunks that are due. A choice that has finished takes
    /// no more: the engine core runs on for a moment after a stop string.
    pub(crate) fn push(&mut self, choice: usize, id: TokenId, finish: Option<CoreFinish>) -> Vec<Value> {
        let (frontend, by_id) = (self.frontend, self.request.return_tokens_as_token_ids);
        let Some(choice) = self.choices.get_mut(choice).filter(|choice| choice.whole.finish.is_none()) else {
            return Vec::new();
        };
        let piece = choice.output.push(id, finish);
        if self.request.logprobs {
            choice.logprob(id, &piece.text, frontend, by_id);
        }
        choice.extend(piece);
        let due = choice.piece.finish.is_some() || choice.piece.ids.len() >= self.stream_interval;
        let index = choice.index;
        if due { self.flush(index) } else { Vec::new() }
    }

    /// Ends every choice that runs with `finish_reason: "abort"`.
    pub(crate) fn abort(&mut self) -> Vec<Value> {
        self.end_all(Output::abort)
    }

    /// Ends every choice without a token, because none was asked for.
    pub(crate) fn end_empty(&mut self) -> Vec<Value> {
        self.end_all(|_| Piece { finish: Some(Finish::Length), ..Piece::default() })
    }

    /// The engine core's request of this choice is of no more use.
    pub(crate) fn is_finished(&self, choice: usize) -> bool {
        self.choices[choice].whole.finish.is_some()
    }

    /// Every choice has ended.
    pub(crate) fn is_complete(&self) -> bool {
        (0..self.choices.len()).all(|choice| self.is_finished(choice))
    }

    /// The chunk with the usage, if it was asked for.
    pub(crate) fn usage_chunk(&self) -> Option<Value> {
        self.request.include_usage.then(|| match self.frontend {
            Frontend::Python => python::usage_chunk(self),
            Frontend::Rust => rust::usage_chunk(self),
        })
    }

    /// The answer in one piece.
    pub(crate) fn unary(&self) -> Value {
        match self.frontend {
            Frontend::Python => python::unary(self),
            Frontend::Rust => rust::unary(self),
        }
    }

    fn end_all(&mut self, end: impl Fn(&mut Output) -> Piece) -> Vec<Value> {
        let mut chunks = Vec::new();
        for index in 0..self.choices.len() {
            if !self.is_finished(index) {
                let piece = end(&mut self.choices[index].output);
                self.choices[index].extend(piece);
                chunks.extend(self.flush(index));
            }
        }
        chunks
    }

    /// The chunks of what is due for a choice.
    fn flush(&mut self, index: usize) -> Vec<Value> {
        let choice = &mut self.choices[index];
        let opens = !std::mem::replace(&mut choice.opened, true);
        let piece = std::mem::take(&mut choice.piece);
        let logprobs = std::mem::take(&mut choice.logprobs);
        let choice = &self.choices[index];
        match self.frontend {
            Frontend::Python => python::chunks(self, choice, opens, &piece, &logprobs),
            Frontend::Rust => rust::chunks(self, choice, opens, &piece, &logprobs),
        }
    }

    fn usage_of(&self, choice: &Choice) -> Usage {
        Usage { prompt: choice.prompt.len() as u32, completion: choice.output.produced() }
    }

    /// Of all choices; a prompt counts once, however many choices it has.
    fn usage(&self) -> Usage {
        let mut prompts: Vec<&[TokenId]> = self.choices.iter().map(|c| &c.prompt[..]).collect();
        prompts.dedup();
        Usage {
            prompt: prompts.iter().map(|prompt| prompt.len() as u32).sum(),
            completion: self.choices.iter().map(|c| c.output.produced()).sum(),
        }
    }

    /// `object` of the answer, streaming or not.
    fn object(&self, stream: bool) -> &'static str {
        match (self.request.endpoint, stream) {
            (Endpoint::Completions, _) => "text_completion",
            (Endpoint::Chat, true) => "chat.completion.chunk",
            (Endpoint::Chat, false) => "chat.completion",
        }
    }

    /// The head of a chunk, to which `choices` and the rest are added.
    fn begin(&self, stream: bool) -> Value {
        json!({
            "id": self.head.id, "object": self.object(stream),
            "created": self.head.created, "model": self.head.model
        })
    }
}

impl Choice {
    fn extend(&mut self, piece: Piece) {
        self.whole.text.push_str(&piece.text);
        self.whole.ids.extend(&piece.ids);
        self.whole.finish.clone_from(&piece.finish);
        self.piece.text.push_str(&piece.text);
        self.piece.ids.extend(piece.ids);
        self.piece.finish = piece.finish;
    }

    /// The two frontends differ in what a byte of an unfinished character is called and
    /// in what the offsets count: the lengths of the tokens so far, or the text sent.
    fn logprob(&mut self, id: TokenId, text: &str, frontend: Frontend, by_id: bool) {
        let own = decode(&[id]);
        let token = if by_id {
            format!("token_id:{id}")
        } else if frontend == Frontend::Python && own.contains(char::REPLACEMENT_CHARACTER) {
            String::new()
        } else {
            own
        };
        let length = match frontend {
            Frontend::Python => token.chars().count(),
            Frontend::Rust => text.chars().count(),
        };
        self.logprobs.push(Logprob {
            token,
            logprob: -1.5 - f64::from(id % 256) / 128.0,
            text_offset: self.text_offset,
        });
        self.text_offset += length;
    }
}

/// `logprobs` of a chat: the same in both frontends.
fn chat_logprobs(logprobs: &[Logprob]) -> Value {
    let content: Vec<Value> = logprobs
        .iter()
        .map(|entry| {
            let bytes = entry.token.as_bytes();
            json!({
                "token": entry.token, "logprob": entry.logprob, "bytes": bytes,
                "top_logprobs": [
                    {"token": entry.token, "logprob": entry.logprob, "bytes": bytes}
                ]
            })
        })
        .collect();
    json!({"content": content})
}

/// The four lists of `logprobs` of a completion.
struct CompletionLogprobs {
    tokens: Vec<Value>,
    values: Vec<Value>,
    top: Vec<Value>,
    offsets: Vec<Value>,
}

impl CompletionLogprobs {
    fn new(logprobs: &[Logprob]) -> Self {
        let column = |cell: fn(&Logprob) -> Value| logprobs.iter().map(cell).collect();
        Self {
            tokens: column(|entry| json!(entry.token)),
            values: column(|entry| json!(entry.logprob)),
            top: column(|entry| {
                let mut top = json!({});
                top[&entry.token] = json!(entry.logprob);
                top
            }),
            offsets: column(|entry| json!(entry.text_offset)),
        }
    }
}

#[cfg(test)]
mod tests;

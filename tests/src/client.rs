//! A client of a token stream that notes everything it gets, and when.

use std::net::SocketAddr;
use std::time::Instant;

use serde_json::Value;

use crate::HarnessError;
use crate::model::{Endpoint, TokenId};
use crate::process::GIVE_UP;

/// One event, or one comment, of a stream.
#[derive(Clone, Debug)]
pub struct Event {
    /// When its last byte came, on the monotonic clock.
    pub at: Instant,
    /// Its lines, without the blank line that ends it.
    pub raw: String,
    /// Text that it adds.
    pub text: String,
    /// Ids that it adds.
    pub ids: Vec<TokenId>,
}

/// How the connection ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The body ended as HTTP wants it.
    Whole,
    /// The connection broke.
    Broken(String),
}

/// All that came.
#[derive(Clone, Debug)]
pub struct Transcript {
    /// HTTP status.
    pub status: u16,
    /// The worker that began the answer, as the router names it.
    pub worker: Option<String>,
    /// Every event and comment.
    pub events: Vec<Event>,
    /// All text.
    pub text: String,
    /// All ids.
    pub ids: Vec<TokenId>,
    /// Ids of the prompt.
    pub prompt_ids: Option<Vec<TokenId>>,
    /// Every `finish_reason`; a good stream has one.
    pub finish_reasons: Vec<String>,
    /// Every value of `id`; a good stream has one.
    pub answer_ids: Vec<String>,
    /// Number of `[DONE]`.
    pub dones: usize,
    /// Role deltas of a chat.
    pub roles: usize,
    /// Comment lines.
    pub comments: Vec<String>,
    /// An error event.
    pub error: Option<Value>,
    /// Every `usage` of a chunk without choices.
    pub usages: Vec<Value>,
    /// How the connection ended, once it has.
    pub ending: Option<Ending>,
}

/// A stream that is being read.
#[derive(Debug)]
pub struct LiveStream {
    response: reqwest::Response,
    unread: Vec<u8>,
    /// What came so far.
    pub transcript: Transcript,
}

impl LiveStream {
    /// Sends `body`, with `stream: true`.
    ///
    /// # Errors
    ///
    /// There is no response.
    pub async fn open(address: SocketAddr, endpoint: Endpoint, body: &Value) -> Result<Self, HarnessError> {
        let mut body = body.clone();
        body["stream"] = Value::Bool(true);
        let url = format!("http://{address}{}", endpoint.path());
        let response = reqwest::Client::new().post(url).json(&body).send().await.map_err(HarnessError::http)?;
        let worker = response.headers().get("x-lastgasp-worker").and_then(|value| value.to_str().ok());
        let transcript = Transcript {
            status: response.status().as_u16(),
            worker: worker.map(str::to_owned),
            events: Vec::new(),
            text: String::new(),
            ids: Vec::new(),
            prompt_ids: None,
            finish_reasons: Vec::new(),
            answer_ids: Vec::new(),
            dones: 0,
            roles: 0,
            comments: Vec::new(),
            error: None,
            usages: Vec::new(),
            ending: None,
        };
        Ok(Self { response, unread: Vec::new(), transcript })
    }

    /// Reads until at least `count` more ids (or, where none are reported, chunks with text)
    /// have come, or the stream ends.
    ///
    /// # Errors
    ///
    /// Nothing comes within [`GIVE_UP`].
    pub async fn tokens(&mut self, count: usize) -> Result<(), HarnessError> {
        let goal = self.transcript.progress() + count;
        while self.transcript.progress() < goal && self.read().await? {}
        Ok(())
    }

    /// Reads to the end.
    ///
    /// # Errors
    ///
    /// Nothing comes within [`GIVE_UP`].
    pub async fn finish(mut self) -> Result<Transcript, HarnessError> {
        while self.read().await? {}
        Ok(self.transcript)
    }

    /// Reads once; false at the end.
    async fn read(&mut self) -> Result<bool, HarnessError> {
        let read = tokio::time::timeout(GIVE_UP, self.response.chunk()).await;
        let read =
            read.map_err(|_| HarnessError::GaveUp(format!("more of a stream; so far {:#?}", self.transcript)))?;
        match read {
            Ok(Some(bytes)) => {
                self.unread.extend_from_slice(&bytes);
                self.take_events();
                Ok(true)
            }
            Ok(None) => {
                self.transcript.ending = Some(Ending::Whole);
                Ok(false)
            }
            Err(error) => {
                self.transcript.ending = Some(Ending::Broken(HarnessError::http(error).to_string()));
                Ok(false)
            }
        }
    }

    /// Events end at a blank line and comments at the end of theirs, wherever reads end.
    fn take_events(&mut self) {
        let at = Instant::now();
        loop {
            let ends: &[u8] = if self.unread.first() == Some(&b':') { b"\n" } else { b"\n\n" };
            let Some(end) = self.unread.windows(ends.len()).position(|bytes| bytes == ends) else { return };
            let raw: Vec<u8> = self.unread.drain(..end + ends.len()).collect();
            // The blank line that others put behind a comment belongs to it.
            while raw.starts_with(b":") && self.unread.first() == Some(&b'\n') {
                self.unread.remove(0);
            }
            self.transcript.take(at, String::from_utf8_lossy(&raw).trim_end());
        }
    }
}

impl Transcript {
    /// When the first token came at or after `since`: how long a client had to wait.
    pub fn next_token_after(&self, since: Instant) -> Option<Instant> {
        self.events
            .iter()
            .find(|event| event.at >= since && (!event.ids.is_empty() || !event.text.is_empty()))
            .map(|event| event.at)
    }

    fn progress(&self) -> usize {
        if self.ids.is_empty() {
            self.events.iter().filter(|event| !event.text.is_empty()).count()
        } else {
            self.ids.len()
        }
    }

    fn take(&mut self, at: Instant, raw: &str) {
        let mut event = Event { at, raw: raw.to_owned(), text: String::new(), ids: Vec::new() };
        for line in raw.lines() {
            if let Some(comment) = line.strip_prefix(':') {
                self.comments.push(comment.trim().to_owned());
            } else if let Some(data) = line.strip_prefix("data:") {
                match data.trim() {
                    "[DONE]" => self.dones += 1,
                    data => match serde_json::from_str(data) {
                        Ok(chunk) => self.take_chunk(&chunk, &mut event),
                        Err(error) => panic!("{error} in the event {data}"),
                    },
                }
            }
        }
        self.text.push_str(&event.text);
        self.ids.extend(&event.ids);
        self.events.push(event);
    }

    fn take_chunk(&mut self, chunk: &Value, event: &mut Event) {
        if let Some(error) = chunk.get("error") {
            self.error = Some(error.clone());
            return;
        }
        let ids = |value: &Value| -> Option<Vec<TokenId>> {
            value.as_array()?.iter().map(|id| id.as_u64()?.try_into().ok()).collect()
        };
        if let Some(id) = chunk["id"].as_str()
            && !self.answer_ids.iter().any(|known| known == id)
        {
            self.answer_ids.push(id.to_owned());
        }
        let choice = &chunk["choices"][0];
        let prompt = ids(&choice["prompt_token_ids"]).or_else(|| ids(&chunk["prompt_token_ids"]));
        self.prompt_ids = self.prompt_ids.take().or(prompt);
        let text = choice["text"].as_str().or_else(|| choice["delta"]["content"].as_str());
        event.text.push_str(text.unwrap_or_default());
        event.ids.extend(ids(&choice["token_ids"]).unwrap_or_default());
        self.roles += usize::from(choice["delta"]["role"].is_string());
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.finish_reasons.push(reason.to_owned());
        }
        if chunk["choices"].as_array().is_some_and(Vec::is_empty) && chunk["usage"].is_object() {
            self.usages.push(chunk["usage"].clone());
        }
    }
}

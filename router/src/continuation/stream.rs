//! One client's stream across the workers that serve it.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::chunk::{self, Channel, Chunk, Finish, Ids, Usage};
use super::envelope::Envelope;
use super::json::{Object, text};
use super::leak;
use super::request::{Endpoint, Engine, Prompt, Request};
use super::resend::{self, Carried, Exactness, Outgoing, Refusal, Target};
use super::spool::Spool;
use super::sse::{Event, Parser};
use super::unmovable::Unmovable;
use super::write;

/// What the router's operator chose.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Streams may be moved; without it nothing is added to requests.
    pub migrate: bool,
    /// Refuse moves that cannot be exact.
    pub strict: bool,
    /// Ids that end a sequence, where the operator knows them.
    pub eos_token_ids: Vec<u32>,
}

/// How a worker failed, as far as its bytes tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Broken {
    /// An error event in-band.
    EngineError,
    /// `finish_reason: "abort"` or the like.
    Aborted,
    /// `[DONE]` without a finish_reason.
    DoneOnly,
    /// The body ended without a finish_reason.
    Ended,
    /// An event that cannot be understood after a seam, or one without end.
    Unreadable,
    /// The text after the seam begins with the prompt.
    PromptLeak,
}

impl Broken {
    /// The name as in metrics and logs.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::EngineError => "engine_error",
            Self::Aborted => "aborted",
            Self::DoneOnly => "done_only",
            Self::Ended => "ended_without_finish",
            Self::Unreadable => "unreadable",
            Self::PromptLeak => "prompt_leak",
        }
    }
}

/// Whether the stream goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// More is to come.
    Going,
    /// The client has everything, `[DONE]` included. The worker may be let go.
    Complete,
    /// The engine refused the request itself, and the client has been told; no other would take it.
    Rejected,
    /// The worker failed; nothing of its failure was passed on.
    Broken(Broken),
}

/// What is to be done about a failed worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The stream was finished here: it lacked only its end.
    Finished,
    /// Nothing was produced: the same request may be sent elsewhere.
    Retry,
    /// [`Continuation::resend`] makes the request that continues it.
    Move,
    /// It cannot be continued.
    Unmovable(Unmovable),
}

/// One worker's part of the stream.
#[derive(Debug)]
struct Leg {
    /// The endpoint it was sent to.
    endpoint: Endpoint,
    engine: Engine,
    /// Something was sent to the client before it.
    resumed: bool,
    /// Tokens carried into its prompt.
    carried: u64,
    exactness: Exactness,
    /// Its first text must be looked at, see [`leak`].
    suspect: bool,
    /// Added to its `text_offset`s, in characters.
    text_offset: u64,
    /// It was asked for running counts.
    counting: bool,
    /// An event of it was read.
    begun: bool,
}

/// A client's stream. See the module's description.
#[derive(Debug)]
pub struct Continuation {
    request: Request,
    options: Options,
    parser: Parser,
    leg: Leg,
    envelope: Envelope,
    /// The client has a part of the stream.
    sent: bool,
    role_sent: bool,
    /// Ids, counts or logprobs of a token were sent.
    shown: bool,
    content: Spool,
    thought: Spool,
    reasoning: Option<Channel>,
    tool_calls: bool,
    /// Choices whose finish_reason the client has.
    finished: BTreeSet<u64>,
    usage_sent: bool,
    prompt_tokens: Option<u64>,
    prompt_ids: Option<Vec<u32>>,
    /// Produced ids whose text is whole.
    ids: Vec<u32>,
    /// Ids cover all text so far.
    exact: bool,
    /// The last id's text was seen to be whole.
    whole: bool,
    /// Ids that came without text, and the events that carried them.
    pending: Vec<u32>,
    held: Vec<u8>,
    /// Chunks of text without ids: each is at least one token.
    uncounted: u64,
    /// Tokens that a worker has counted itself, carried ones included.
    reported: u64,
    /// Ids were asked for, so they are taken out again.
    asked: bool,
    /// `stop` was taken out of the request, so it is matched here.
    stops_taken: bool,
    /// The `text_offset` after the last token whose logprobs came, and after the last that were sent.
    seen_offset: u64,
    sent_offset: u64,
    refusal: Option<Unmovable>,
}

impl Continuation {
    /// A stream that was asked for with `body` on `endpoint`.
    #[must_use]
    pub fn new(endpoint: Endpoint, body: Map<String, Value>, options: Options) -> Self {
        let request = Request::new(endpoint, body, options.strict);
        let prompt_ids = match &request.prompt {
            Prompt::Ids(ids) if !request.body.contains_key("truncate_prompt_tokens") => Some(ids.clone()),
            _ => None,
        };
        Self {
            refusal: request.refusal,
            leg: Leg {
                endpoint,
                engine: Engine::Generic,
                resumed: false,
                carried: 0,
                exactness: Exactness::Whole,
                suspect: false,
                text_offset: 0,
                counting: false,
                begun: false,
            },
            request,
            options,
            parser: Parser::new(),
            envelope: Envelope::default(),
            sent: false,
            role_sent: false,
            shown: false,
            content: Spool::default(),
            thought: Spool::default(),
            reasoning: None,
            tool_calls: false,
            finished: BTreeSet::new(),
            usage_sent: false,
            prompt_tokens: None,
            prompt_ids,
            ids: Vec::new(),
            exact: true,
            whole: true,
            pending: Vec::new(),
            held: Vec::new(),
            uncounted: 0,
            reported: 0,
            asked: false,
            stops_taken: false,
            seen_offset: 0,
            sent_offset: 0,
        }
    }

    /// The request for the next worker: the whole one as long as nothing was produced, else
    /// one that continues what the client has. May be called again if the worker did not answer.
    ///
    /// # Errors
    /// It cannot be continued on this target, or there is nothing left to continue.
    pub fn resend(&mut self, target: Target) -> Result<Outgoing, Refusal> {
        let outgoing = self.plan(target)?;
        let asked = outgoing.body.get("return_token_ids").is_some() && !self.request.wants_ids;
        self.asked |= asked;
        self.stops_taken |= self.request.stops.is_some() && outgoing.body.get("stop").is_none();
        self.parser = Parser::new();
        self.pending.clear();
        self.held.clear();
        self.leg = Leg {
            endpoint: outgoing.endpoint,
            engine: target.engine,
            resumed: self.sent,
            carried: if outgoing.exactness == Exactness::Whole { 0 } else { self.tokens() },
            exactness: outgoing.exactness,
            suspect: outgoing.exactness == Exactness::Exact && !self.whole,
            text_offset: if self.sent { self.sent_offset } else { 0 },
            counting: outgoing.counting,
            begun: false,
        };
        Ok(outgoing)
    }

    fn plan(&self, target: Target) -> Result<Outgoing, Refusal> {
        if self.produced() {
            if let Some(reason) = self.refusal {
                return Err(Refusal::Unmovable(reason));
            }
            let carried = Carried {
                ids: self.prompt_ids.as_deref().filter(|_| self.exact).map(|prompt| (prompt, self.ids.as_slice())),
                text: self.content.joined(),
                reasoning: self.reasoning.is_some(),
                tool_calls: self.tool_calls,
                tokens: self.tokens(),
            };
            return resend::continued(&self.request, &carried, target, self.options.strict, self.stops_taken);
        }
        Ok(resend::whole(&self.request, target, self.options.migrate && self.refusal.is_none()))
    }

    /// Whether [`Continuation::worker_failed`] would lead to a move or a retry on such an engine.
    ///
    /// # Errors
    /// Why it would not.
    pub fn movable(&self, engine: Engine) -> Result<(), Unmovable> {
        match self.plan(Target { engine, max_model_len: None }) {
            Err(Refusal::Unmovable(reason)) => Err(reason),
            Ok(_) | Err(Refusal::ContextFull) => Ok(()),
        }
    }

    /// Takes bytes of the worker and appends what the client is to be sent.
    pub fn feed(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Progress {
        self.parser.push(bytes);
        loop {
            match self.parser.next_event() {
                Ok(Some(event)) => match self.event(&event, out) {
                    Progress::Going => {}
                    // What may follow is a dead or a finished worker's: it is never read.
                    end => return end,
                },
                Ok(None) => return Progress::Going,
                Err(_) => return self.unreadable(out),
            }
        }
    }

    /// The worker ended its body properly.
    pub fn ended(&mut self, out: &mut Vec<u8>) -> Progress {
        if self.is_finished() {
            self.close(out);
            Progress::Complete
        } else {
            Progress::Broken(Broken::Ended)
        }
    }

    /// The worker is gone, or was given up. Its connection must be closed by now.
    pub fn worker_failed(&mut self, out: &mut Vec<u8>) -> Verdict {
        if self.is_finished() {
            self.close(out);
            return Verdict::Finished;
        }
        let several = self.request.choices > 1 || self.refusal == Some(Unmovable::SeveralChoices);
        if !self.sent || !self.produced() && !several {
            if !self.sent {
                self.envelope = Envelope::default();
            }
            return Verdict::Retry;
        }
        if let Some((reason, stop_reason)) = self.due() {
            self.finish_here(reason, stop_reason, out);
            return Verdict::Finished;
        }
        match self.refusal {
            Some(reason) => Verdict::Unmovable(reason),
            None => Verdict::Move,
        }
    }

    /// Ends the stream with `length`: the context is full ([`Refusal::ContextFull`]).
    pub fn finish_full(&mut self, out: &mut Vec<u8>) {
        self.finish_here("length", None, out);
    }

    /// A byte of the present worker was passed on, or will be: a move into it has worked.
    #[must_use]
    pub const fn has_begun(&self) -> bool {
        self.leg.begun
    }

    /// Text, reasoning or a tool call was produced.
    #[must_use]
    pub fn produced(&self) -> bool {
        !self.ids.is_empty() || self.uncounted > 0 || self.shown
    }

    /// How the present worker continues what came before it.
    #[must_use]
    pub const fn exactness(&self) -> Exactness {
        self.leg.exactness
    }

    /// Tokens that the client has: counted by ids, else by the worker, else at least this many.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        // A worker's own count runs ahead of text that it holds back, so ids come first.
        if self.exact { self.shown_tokens() } else { self.shown_tokens().max(self.reported) }
    }

    /// Tokens whose text the client has, at least.
    fn shown_tokens(&self) -> u64 {
        self.ids.len() as u64 + self.uncounted
    }

    /// The client has the finish_reason of every choice.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.finished.len() as u64 >= self.request.choices
    }

    /// Why nothing is left to be generated, if so.
    fn due(&self) -> Option<(&'static str, Option<String>)> {
        if self.request.choices > 1 {
            return None;
        }
        let received = self.tokens() + self.pending.len() as u64;
        // Only the last id may be without text, else held text would be lost.
        let last = match self.pending.as_slice() {
            [] => self.ids.last(),
            [one] => Some(one),
            _ => None,
        };
        if let Some(last) = last.filter(|_| self.exact && received >= self.request.min_tokens) {
            if self.request.stop_token_ids.contains(last) {
                return Some(("stop", Some(last.to_string())));
            }
            let ignored = self.request.body.get("ignore_eos").and_then(Value::as_bool).unwrap_or(false);
            if self.options.eos_token_ids.contains(last) && !ignored {
                return Some(("stop", None));
            }
        }
        let budget = self.request.budget(self.leg.engine)?;
        // What has no text yet is generated again: it may be what ends the sequence.
        (self.shown_tokens() >= budget).then_some(("length", None))
    }

    fn event(&mut self, event: &Event, out: &mut Vec<u8>) -> Progress {
        let Some(data) = &event.data else {
            out.extend_from_slice(&event.raw);
            return Progress::Going;
        };
        if data.as_ref().trim_ascii() == b"[DONE]" {
            if !self.is_finished() {
                return Progress::Broken(Broken::DoneOnly);
            }
            self.close_with(Some(&event.raw), out);
            return Progress::Complete;
        }
        let Some(mut chunk) = std::str::from_utf8(data).ok().and_then(Chunk::parse) else {
            if event.name.as_deref() == Some(b"error") {
                return self.failed(Broken::EngineError, out);
            }
            if self.leg.resumed || self.asked {
                return self.unreadable(out);
            }
            self.refuse(Unmovable::UnparsableChunk, out);
            self.sent = true;
            out.extend_from_slice(&event.raw);
            return Progress::Going;
        };
        if let Some(error) = chunk.error() {
            if error.is_clients() && !self.sent {
                out.extend_from_slice(&event.raw);
                return Progress::Rejected;
            }
            return self.failed(Broken::EngineError, out);
        }
        let index = |choice: &Object<'_>| choice.get::<u64>("index").unwrap_or(0);
        match chunk.choices.as_slice() {
            [] => self.without_choice(event, chunk, out),
            [one] if self.request.choices == 1 && index(one) == 0 => self.single(event, chunk, out),
            choices => {
                for choice in choices {
                    match chunk::finish(choice) {
                        Finish::No => {}
                        Finish::Yes => _ = self.finished.insert(index(choice)),
                        Finish::Aborted => return Progress::Broken(Broken::Aborted),
                    }
                }
                if self.stops_taken {
                    // They are matched here for one choice only.
                    return self.unreadable(out);
                }
                self.refuse(Unmovable::SeveralChoices, out);
                self.uncounted += 1;
                self.leg.begun = true;
                let changed = self.unify(&mut chunk);
                self.emit(event, changed.then(|| chunk.into_text()), out);
                Progress::Going
            }
        }
    }

    /// Usage, or something that says nothing about tokens.
    fn without_choice(&mut self, event: &Event, mut chunk: Chunk<'_>, out: &mut Vec<u8>) -> Progress {
        let usage = chunk.usage();
        if usage.is_none() && self.leg.resumed || self.leg.counting && !self.request.wants_usage {
            return Progress::Going;
        }
        if usage.is_some() {
            if self.usage_sent {
                return Progress::Going;
            }
            self.usage_sent = true;
        }
        let changed = self.unify(&mut chunk);
        self.flush(out);
        self.emit(event, changed.then(|| chunk.into_text()), out);
        Progress::Going
    }

    /// A chunk of the only choice.
    fn single(&mut self, event: &Event, chunk: Chunk<'_>, out: &mut Vec<u8>) -> Progress {
        let choice = &chunk.choices[0];
        let finish = chunk::finish(choice);
        if finish == Finish::Aborted {
            return self.failed(Broken::Aborted, out);
        }
        if self.is_finished() {
            // Nothing of a choice follows its finish_reason.
            return Progress::Going;
        }
        let delta = choice.parsed("delta").and_then(Object::parse);
        let (channel, mut text) = chunk::text(choice, delta.as_ref());
        let tool_calls = delta.as_ref().is_some_and(|delta| {
            delta.present("tool_calls").is_some_and(|calls| calls != "[]") || delta.present("function_call").is_some()
        });
        self.leg.begun = true;
        let mut cut = false;
        if self.leg.suspect && !text.is_empty() {
            self.leg.suspect = false;
            match leak::judge(&self.request, self.content.joined(), &text) {
                leak::Verdict::Clean => {}
                leak::Verdict::Leak(rest) => {
                    text = rest.to_owned();
                    cut = true;
                }
                leak::Verdict::Unclear => {
                    self.refusal = Some(Unmovable::PromptLeak);
                    return Progress::Broken(Broken::PromptLeak);
                }
            }
        }
        let ids = self.count(&chunk, channel, &text, tool_calls, finish);
        if let Some(usage) = chunk.usage() {
            if self.leg.carried == 0 {
                self.prompt_tokens = Some(usage.prompt_tokens);
            }
            self.reported = self.leg.carried.saturating_add(usage.completion_tokens);
        }
        self.release(event, chunk, delta, Piece { channel, text, cut, tool_calls, ids, finish }, out)
    }

    /// Keeps account of what a chunk stands for. Returns how many ids it had.
    fn count(&mut self, chunk: &Chunk<'_>, channel: Channel, text: &str, tool_calls: bool, finish: Finish) -> usize {
        if let (0, Ids::List(prompt)) = (self.leg.carried, chunk.prompt_ids()) {
            self.prompt_ids = Some(prompt);
        }
        let telling = !text.is_empty() || tool_calls;
        let ids = match chunk.token_ids() {
            Ids::List(ids) => ids,
            Ids::Absent => Vec::new(),
            Ids::Bad => {
                self.exact = false;
                Vec::new()
            }
        };
        if telling && ids.is_empty() {
            self.exact = false;
            self.uncounted += 1;
        }
        let count = ids.len();
        self.pending.extend(ids);
        if telling || finish == Finish::Yes {
            self.ids.append(&mut self.pending);
            // One id, and its text: nothing of it can be missing. Of several, the last may be
            // the beginning of a character.
            self.whole = count <= 1;
        }
        if channel != Channel::Content && !text.is_empty() {
            self.reasoning = Some(channel);
        }
        self.tool_calls |= tool_calls;
        count
    }

    /// Decides what of a chunk goes to the client now, and in which shape.
    fn release(
        &mut self,
        event: &Event,
        mut chunk: Chunk<'_>,
        mut delta: Option<Object<'_>>,
        piece: Piece,
        out: &mut Vec<u8>,
    ) -> Progress {
        let Piece { channel, text: whole, cut, tool_calls, ids, finish } = piece;
        let stops = self.request.stops.as_ref().filter(|_| self.stops_taken || self.leg.carried > 0);
        let countable = self.ids.len() as u64 + self.uncounted > self.request.min_tokens;
        let mut before = String::new();
        if channel == Channel::Content && (!whole.is_empty() || finish == Finish::Yes) {
            before = self.thought.finish();
        }
        let spool = if channel == Channel::Content { &mut self.content } else { &mut self.thought };
        let mut released = spool.push(&whole, stops, countable);
        if finish == Finish::Yes && released.stop.is_none() {
            released.text.push_str(&spool.finish());
        }
        let ended = finish == Finish::Yes || released.stop.is_some();
        let visible_ids = ids > 0 && (self.request.wants_ids || self.request.wants_continuous_usage);
        let logprobs = chunk.choices[0].present("logprobs").is_some();
        // What stands for a token whose text is yet to come is not shown before that.
        let early = whole.is_empty() && !tool_calls && !ended;
        let hold = early && (ids > 0 && self.exact || logprobs) && self.refusal.is_none();
        let empty = released.text.is_empty() && !ended && !tool_calls && !visible_ids && !logprobs;
        if !before.is_empty() {
            self.flush(out);
            let channel = self.reasoning.unwrap_or(Channel::Reasoning);
            self.write_text(channel, &before, out);
        }
        if empty && (self.leg.resumed || !whole.is_empty()) {
            return Progress::Going;
        }
        let mut changed = self.unify(&mut chunk);
        if self.leg.endpoint != self.request.endpoint {
            self.reshape(&mut chunk, &released.text);
            changed = true;
        } else {
            if cut || released.text != whole {
                match &mut delta {
                    Some(delta) => delta.set(channel.delta_key(), text(&released.text)),
                    None => chunk.choices[0].set("text", text(&released.text)),
                }
                changed = true;
            }
            if let Some(delta) = &mut delta {
                if delta.present("role").is_some() {
                    changed |= self.role_sent && self.leg.resumed && delta.remove("role");
                    self.role_sent = true;
                }
                if changed {
                    chunk.choices[0].set("delta", delta.to_text());
                }
            }
        }
        if let Some(stop) = &released.stop {
            chunk.choices[0].set("finish_reason", text("stop"));
            chunk.choices[0].set("stop_reason", text(stop));
            changed = true;
        }
        let changed = changed.then(|| chunk.into_text());
        if hold {
            let mut held = std::mem::take(&mut self.held);
            match changed {
                Some(json) => write::data(&mut held, &json),
                None => held.extend_from_slice(&event.raw),
            }
            self.held = held;
            return Progress::Going;
        }
        self.flush(out);
        self.emit(event, changed, out);
        self.shown |= logprobs || visible_ids;
        if ended {
            self.finished.insert(0);
        }
        if released.stop.is_some() {
            self.close(out);
            return Progress::Complete;
        }
        Progress::Going
    }

    /// Makes a chunk one of this stream: no ids that were not asked for, and after a seam the
    /// first worker's id, usage and offsets. True if that changed it.
    fn unify(&mut self, chunk: &mut Chunk<'_>) -> bool {
        let mut stripped = self.asked && chunk.strip_ids();
        if self.leg.counting && !self.request.wants_continuous_usage && !chunk.choices.is_empty() {
            stripped |= chunk.top.remove("usage");
        }
        if !self.leg.resumed {
            self.envelope.learn(chunk);
            self.note_offsets(chunk);
            return stripped;
        }
        self.envelope.apply(&mut chunk.top);
        self.envelope.learn(chunk);
        if self.leg.endpoint != self.request.endpoint {
            chunk.top.set("object", text("chat.completion.chunk"));
        }
        if self.leg.carried > 0 {
            chunk.top.remove("prompt_token_ids");
            for choice in &mut chunk.choices {
                choice.remove("prompt_token_ids");
            }
        }
        if let (Some(usage), Some(mut object)) = (chunk.usage(), chunk.top.parsed("usage").and_then(Object::parse)) {
            let Usage { prompt_tokens, completion_tokens } = self.joined_usage(usage);
            object.set("prompt_tokens", prompt_tokens.to_string());
            object.set("completion_tokens", completion_tokens.to_string());
            object.set("total_tokens", prompt_tokens.saturating_add(completion_tokens).to_string());
            // What the second worker had cached says nothing about the client's prompt.
            object.remove("prompt_tokens_details");
            chunk.top.set("usage", object.to_text());
        }
        self.shift_offsets(chunk);
        true
    }

    fn joined_usage(&self, usage: Usage) -> Usage {
        let carried = self.leg.carried;
        let prompt_tokens = match (&self.prompt_ids, self.prompt_tokens) {
            (Some(ids), _) => ids.len() as u64,
            (None, Some(seen)) => seen,
            (None, None) => usage.prompt_tokens.saturating_sub(carried),
        };
        Usage { prompt_tokens, completion_tokens: usage.completion_tokens.saturating_add(carried) }
    }

    fn note_offsets(&mut self, chunk: &Chunk<'_>) {
        let logprobs = chunk.choices.first().and_then(|choice| choice.parsed("logprobs")).and_then(Object::parse);
        let Some(logprobs) = logprobs else { return };
        let offsets: Vec<u64> = logprobs.get("text_offset").unwrap_or_default();
        let tokens: Vec<String> = logprobs.get("tokens").unwrap_or_default();
        if let (Some(offset), Some(token)) = (offsets.last(), tokens.last()) {
            let end = offset.saturating_add(token.chars().count() as u64);
            self.seen_offset = self.leg.text_offset.saturating_add(end);
        }
    }

    fn shift_offsets(&mut self, chunk: &mut Chunk<'_>) {
        self.note_offsets(chunk);
        let Some(choice) = chunk.choices.first_mut() else { return };
        let Some(mut logprobs) = choice.parsed("logprobs").and_then(Object::parse) else { return };
        let Some(mut offsets) = logprobs.get::<Vec<u64>>("text_offset") else { return };
        for offset in &mut offsets {
            *offset = offset.saturating_add(self.leg.text_offset);
        }
        logprobs.set("text_offset", text(&offsets));
        choice.set("logprobs", logprobs.to_text());
    }

    /// A completions chunk as a chat chunk.
    fn reshape(&mut self, chunk: &mut Chunk<'_>, content: &str) {
        let mut delta = Object::default();
        if !self.role_sent {
            delta.set("role", text("assistant"));
            self.role_sent = true;
        }
        if !content.is_empty() {
            delta.set("content", text(content));
        }
        let choice = &chunk.choices[0];
        let mut shaped = Object::default();
        shaped.set("index", "0");
        shaped.set("delta", delta.to_text());
        shaped.set("logprobs", "null");
        shaped.set("finish_reason", choice.raw("finish_reason").unwrap_or("null").to_owned());
        for key in ["stop_reason", "token_ids"] {
            if let Some(value) = choice.parsed(key) {
                shaped.set(key, value.to_owned());
            }
        }
        chunk.choices[0] = shaped;
    }

    fn emit(&mut self, event: &Event, changed: Option<String>, out: &mut Vec<u8>) {
        self.sent = true;
        self.sent_offset = self.seen_offset;
        match changed {
            Some(json) => write::data(out, &json),
            None => out.extend_from_slice(&event.raw),
        }
    }

    /// Lets go what was held: its ids are certain, or no longer matter.
    fn flush(&mut self, out: &mut Vec<u8>) {
        self.sent |= !self.held.is_empty();
        out.append(&mut self.held);
    }

    fn refuse(&mut self, reason: Unmovable, out: &mut Vec<u8>) {
        self.refusal.get_or_insert(reason);
        self.flush(out);
    }

    /// A failure in-band. After the finish_reason it is none: only the end is missing.
    fn failed(&mut self, broken: Broken, out: &mut Vec<u8>) -> Progress {
        if self.is_finished() {
            self.close(out);
            return Progress::Complete;
        }
        Progress::Broken(broken)
    }

    fn unreadable(&mut self, out: &mut Vec<u8>) -> Progress {
        if self.is_finished() {
            return self.failed(Broken::Unreadable, out);
        }
        self.refusal.get_or_insert(Unmovable::UnparsableChunk);
        Progress::Broken(Broken::Unreadable)
    }

    fn finish_here(&mut self, reason: &str, stop_reason: Option<String>, out: &mut Vec<u8>) {
        self.flush(out);
        self.ids.append(&mut self.pending);
        let thought = self.thought.finish();
        if !thought.is_empty() {
            self.write_text(self.reasoning.unwrap_or(Channel::Reasoning), &thought, out);
        }
        let rest = self.content.finish();
        let mut choice = self.own_choice(Channel::Content, &rest);
        choice.set("finish_reason", text(reason));
        choice.set("stop_reason", stop_reason.unwrap_or_else(|| "null".into()));
        self.write_own(choice, out);
        self.finished.insert(0);
        self.close(out);
    }

    fn write_text(&mut self, channel: Channel, content: &str, out: &mut Vec<u8>) {
        let choice = self.own_choice(channel, content);
        self.write_own(choice, out);
    }

    fn own_choice(&self, channel: Channel, content: &str) -> Object<'static> {
        let mut choice = Object::default();
        choice.set("index", "0");
        if self.request.endpoint == Endpoint::Chat {
            let mut delta = Object::default();
            if !content.is_empty() {
                delta.set(channel.delta_key(), text(content));
            }
            choice.set("delta", delta.to_text());
        } else {
            choice.set("text", text(content));
        }
        choice.set("logprobs", "null");
        choice.set("finish_reason", "null");
        choice
    }

    fn write_own(&mut self, choice: Object<'static>, out: &mut Vec<u8>) {
        let mut top = self.envelope.head(self.request.endpoint);
        top.set("choices", format!("[{}]", choice.to_text()));
        if let Some(usage) = self.own_usage().filter(|_| self.request.wants_continuous_usage) {
            top.set("usage", usage);
        }
        self.sent = true;
        write::data(out, &top.to_text());
    }

    fn own_usage(&self) -> Option<String> {
        let prompt = self.prompt_ids.as_ref().map(|ids| ids.len() as u64).or(self.prompt_tokens)?;
        let completion = self.tokens();
        let total = prompt.saturating_add(completion);
        Some(format!(r#"{{"prompt_tokens":{prompt},"total_tokens":{total},"completion_tokens":{completion}}}"#))
    }

    /// Writes what a finished stream still lacks: usage if it was asked for and is known, `[DONE]`.
    fn close(&mut self, out: &mut Vec<u8>) {
        self.close_with(None, out);
    }

    fn close_with(&mut self, done: Option<&[u8]>, out: &mut Vec<u8>) {
        self.flush(out);
        if self.request.wants_usage
            && !self.usage_sent
            && let Some(usage) = self.own_usage()
        {
            let mut top = self.envelope.head(self.request.endpoint);
            top.set("choices", "[]");
            top.set("usage", usage);
            write::data(out, &top.to_text());
            self.usage_sent = true;
        }
        match done {
            Some(raw) => out.extend_from_slice(raw),
            None => write::done(out),
        }
    }
}

/// What one chunk of the only choice says.
struct Piece {
    channel: Channel,
    text: String,
    /// The text is no longer as it came.
    cut: bool,
    tool_calls: bool,
    ids: usize,
    finish: Finish,
}

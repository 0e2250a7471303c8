//! One client's stream across the workers that serve it.

mod ending;
mod read;
mod seam;

use std::collections::BTreeSet;

use super::body::Body;
use super::chunk::{Channel, Chunk};
use super::envelope::Envelope;
use super::request::{Endpoint, Engine, Prompt, Request};
use super::resend::{self, Carried, Exactness, Outgoing, Plan, PromptIds, Refusal, Target};
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum Broken {
    /// An error event in-band.
    EngineError,
    /// `finish_reason: "abort"` or the like.
    Aborted,
    /// `[DONE]` without a finish_reason.
    DoneOnly,
    /// The body ended without a finish_reason.
    #[strum(serialize = "ended_without_finish")]
    Ended,
    /// An event that cannot be understood after a seam, or one without end.
    Unreadable,
    /// The text after the seam begins with the prompt.
    PromptLeak,
    /// The ids that were to be the prompt of a chat were not taken.
    PromptIgnored,
}

/// Whether the stream goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// More is to come.
    Going,
    /// The client has everything, `[DONE]` included. The worker may be let go.
    Complete,
    /// The engine refused the request itself, and the client has its answer; no other would take it.
    Rejected,
    /// The worker failed; nothing of its failure was passed on.
    Broken(Broken),
}

/// What is to be done about a failed worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamEnd {
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
    /// Its first text must be looked at, see `leak`.
    suspect: bool,
    /// Added to its `text_offset`s, in characters.
    text_offset: u64,
    /// It was asked for running counts.
    counting: bool,
    /// The ids that its first chunk must name as its prompt.
    prompt: Option<Vec<u32>>,
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
    /// The prompt's ids as an engine gave them.
    told_prompt: Option<Vec<u32>>,
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
    /// An engine that should take ids for a chat's prompt has not.
    chat_ids_ignored: bool,
    refusal: Option<Unmovable>,
}

impl Continuation {
    /// A stream that was asked for with `body` on `endpoint`.
    #[must_use]
    pub fn new(endpoint: Endpoint, body: Body, options: Options) -> Self {
        let request = Request::new(endpoint, body, options.strict);
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
                prompt: None,
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
            told_prompt: None,
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
            chat_ids_ignored: false,
        }
    }

    /// The request for the next worker: the whole one as long as nothing was produced, else
    /// one that continues what the client has. May be called again if the worker did not answer.
    ///
    /// # Errors
    /// It cannot be continued on this target, or there is nothing left to continue.
    pub fn resend(&mut self, target: Target) -> Result<Outgoing, Refusal> {
        let Plan { endpoint, body, exactness, as_it_came, counting, prompt } = self.plan(target)?;
        let asked = body.raw("return_token_ids").is_some() && !self.request.wants_ids;
        let stops_taken = self.request.stops.is_some() && body.raw("stop").is_none();
        let open_ended = ["max_tokens", "max_completion_tokens"].iter().all(|key| body.raw(key).is_none());
        let body = if as_it_came { self.request.body.bytes().clone() } else { body.to_text().into() };
        self.asked |= asked;
        self.stops_taken |= stops_taken;
        self.parser = Parser::new();
        self.pending.clear();
        self.held.clear();
        self.leg = Leg {
            endpoint,
            engine: target.engine,
            resumed: self.sent,
            carried: if exactness == Exactness::Whole { 0 } else { self.tokens() },
            exactness,
            suspect: exactness == Exactness::Exact && !self.whole,
            text_offset: if self.sent { self.sent_offset } else { 0 },
            counting,
            prompt,
            begun: false,
        };
        Ok(Outgoing { endpoint, body, exactness, as_it_came, open_ended })
    }

    /// The prompt's ids, if they are known.
    fn prompt_ids(&self) -> Option<PromptIds<'_>> {
        let Request { body, prompt, .. } = &self.request;
        match (&self.told_prompt, prompt) {
            (Some(given), _) => Some(PromptIds::Given(given)),
            (None, Prompt::Ids(count)) if body.raw("truncate_prompt_tokens").is_none() => {
                Some(PromptIds::Asked(body.raw("prompt")?, *count))
            }
            _ => None,
        }
    }

    fn plan(&self, target: Target) -> Result<Plan<'_>, Refusal> {
        if self.produced() {
            if let Some(reason) = self.refusal {
                return Err(Refusal::Unmovable(reason));
            }
            let carried = Carried {
                ids: self.prompt_ids().filter(|_| self.exact).map(|prompt| (prompt, self.ids.as_slice())),
                text: self.content.joined(),
                reasoning: self.reasoning.is_some(),
                tool_calls: self.tool_calls,
                tokens: self.tokens(),
            };
            let target = Target { takes_chat_ids: target.takes_chat_ids && !self.chat_ids_ignored, ..target };
            return resend::continued(&self.request, &carried, target, self.options.strict, self.stops_taken);
        }
        Ok(resend::whole(&self.request, target, self.options.migrate && self.refusal.is_none()))
    }

    /// Whether [`Continuation::worker_failed`] would lead to a move or a retry on such a worker.
    ///
    /// # Errors
    /// Why it would not.
    pub fn movable(&self, target: Target) -> Result<(), Unmovable> {
        match self.plan(target) {
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
    pub fn worker_failed(&mut self, out: &mut Vec<u8>) -> StreamEnd {
        if self.is_finished() {
            self.close(out);
            return StreamEnd::Finished;
        }
        let several = self.request.choices > 1 || self.refusal == Some(Unmovable::SeveralChoices);
        if !self.sent || !self.produced() && !several {
            if !self.sent {
                self.envelope = Envelope::default();
            }
            return StreamEnd::Retry;
        }
        if let Some((reason, stop_reason)) = self.due() {
            self.finish_here(reason, stop_reason, out);
            return StreamEnd::Finished;
        }
        match self.refusal {
            Some(reason) => StreamEnd::Unmovable(reason),
            None => StreamEnd::Move,
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
            if self.request.stops_at(*last) {
                return Some(("stop", Some(last.to_string())));
            }
            let ignored = self.request.body.flag("ignore_eos");
            if self.options.eos_token_ids.contains(last) && !ignored {
                return Some(("stop", None));
            }
        }
        let budget = self.request.budget(self.leg.engine)?;
        // What has no text yet is generated again: it may be what ends the sequence.
        (self.shown_tokens() >= budget).then_some(("length", None))
    }

    /// Passes an event on: the chunk that was made of it, if it was changed, or as it came.
    fn emit(&mut self, event: &Event, changed: Option<&Chunk<'_>>, out: &mut Vec<u8>) {
        self.sent = true;
        self.sent_offset = self.seen_offset;
        pass(event, changed, out);
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
}

fn pass(event: &Event, changed: Option<&Chunk<'_>>, out: &mut Vec<u8>) {
    match changed {
        Some(chunk) => write::data_by(out, |out| chunk.write(out)),
        None => out.extend_from_slice(&event.raw),
    }
}

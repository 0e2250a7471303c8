//! What comes from a worker: understood, accounted for, and passed on.

use super::super::chunk::{self, Channel, Chunk, Finish, Ids};
use super::super::json::{Object, text};
use super::super::leak;
use super::super::sse::Event;
use super::super::unmovable::Unmovable;
use super::{Broken, Continuation, Progress, pass};

impl Continuation {
    pub(super) fn event(&mut self, event: &Event, out: &mut Vec<u8>) -> Progress {
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
            // It cannot be made part of the stream that it would continue, nor rid of ids.
            let ids = self.asked && event.raw.windows(9).any(|piece| piece == b"token_ids");
            if self.leg.resumed || ids {
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
                self.emit(event, changed.then_some(&chunk), out);
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
        self.emit(event, changed.then_some(&chunk), out);
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
        if let Some(prompt) = self.leg.prompt.take()
            && chunk.prompt_ids() != Ids::List(prompt)
        {
            // It answers the messages, from the beginning. The same worker may still continue in another way.
            self.chat_ids_ignored = true;
            return Progress::Broken(Broken::PromptIgnored);
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
                leak::LeakCheck::Clean => {}
                leak::LeakCheck::Leak(rest) => {
                    text = rest.to_owned();
                    cut = true;
                }
                leak::LeakCheck::Unclear => {
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
            if self.request.tools && self.reported != self.ids.len() as u64 + self.pending.len() as u64 {
                self.exact = false;
            }
        }
        self.release(event, chunk, delta, Piece { channel, text, cut, tool_calls, ids, finish }, out)
    }

    /// Keeps account of what a chunk stands for. Returns how many ids it had.
    fn count(&mut self, chunk: &Chunk<'_>, channel: Channel, text: &str, tool_calls: bool, finish: Finish) -> usize {
        if let (0, Ids::List(prompt)) = (self.leg.carried, chunk.prompt_ids()) {
            self.told_prompt = Some(prompt);
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
        let movable = self.options.migrate && self.refusal.is_none();
        let hold = early && movable && (ids > 0 && self.exact || logprobs);
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
        let changed = changed.then_some(&chunk);
        if hold {
            let mut held = std::mem::take(&mut self.held);
            pass(event, changed, &mut held);
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

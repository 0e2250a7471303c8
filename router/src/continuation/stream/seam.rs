//! What makes a later worker's chunks part of the first one's stream.

use super::super::chunk::{Chunk, Usage};
use super::super::json::{Object, text};
use super::Continuation;

impl Continuation {
    /// Makes a chunk one of this stream: no ids that were not asked for, and after a seam the
    /// first worker's id, usage and offsets. True if that changed it.
    pub(super) fn unify(&mut self, chunk: &mut Chunk<'_>) -> bool {
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
        let prompt_tokens = match (self.prompt_ids(), self.prompt_tokens) {
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
    pub(super) fn reshape(&mut self, chunk: &mut Chunk<'_>, content: &str) {
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
}

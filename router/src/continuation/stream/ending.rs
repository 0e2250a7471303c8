//! What the router writes itself: the end of a stream that lacks only that.

use super::super::chunk::Channel;
use super::super::json::{Object, text};
use super::super::request::Endpoint;
use super::super::write;
use super::Continuation;

impl Continuation {
    pub(super) fn finish_here(&mut self, reason: &str, stop_reason: Option<String>, out: &mut Vec<u8>) {
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

    pub(super) fn write_text(&mut self, channel: Channel, content: &str, out: &mut Vec<u8>) {
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
        let prompt = self.prompt_ids().map(|ids| ids.len() as u64).or(self.prompt_tokens)?;
        let completion = self.tokens();
        let total = prompt.saturating_add(completion);
        Some(format!(r#"{{"prompt_tokens":{prompt},"total_tokens":{total},"completion_tokens":{completion}}}"#))
    }

    /// Writes what a finished stream still lacks: usage if it was asked for and is known, `[DONE]`.
    pub(super) fn close(&mut self, out: &mut Vec<u8>) {
        self.close_with(None, out);
    }

    pub(super) fn close_with(&mut self, done: Option<&[u8]>, out: &mut Vec<u8>) {
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

//! The guard against a prompt that ends inside a character.
//!
//! vLLM then emits the whole prompt text before the first new text (vllm#48853, measured).
//! Ids are carried only up to text that was sent, so it cannot happen as long as a chunk
//! stands for one token. Where several tokens share a chunk, the last may be one byte of a
//! character whose text is yet to come, and nothing in the stream says so. After such a
//! seam the first text is looked at: a leak contains the prompt and all that was sent.

use serde_json::Value;

use super::request::{Prompt, Request};

/// What the first text after a seam is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verdict<'a> {
    /// A continuation.
    Clean,
    /// The prompt again, then the continuation.
    Leak(&'a str),
    /// Perhaps a leak, and it cannot be told where it ends.
    Unclear,
}

/// Shortest text that counts as found; anything shorter may stand anywhere by chance.
const TELLING: usize = 12;

/// Judges the first text after a seam that followed `sent`.
pub(crate) fn judge<'a>(request: &Request, sent: &str, first: &'a str) -> Verdict<'a> {
    if first.len() <= sent.len() || sent.is_empty() {
        return Verdict::Clean;
    }
    let Some(at) = first.rfind(sent) else { return Verdict::Clean };
    let before = &first[..at];
    match last_words(request) {
        Some(words) if before.contains(words) => Verdict::Leak(&first[at + sent.len()..]),
        Some(_) => Verdict::Clean,
        None if sent.len() >= TELLING => Verdict::Unclear,
        None => Verdict::Clean,
    }
}

/// The end of what the client wrote, which a leak must contain.
fn last_words(request: &Request) -> Option<&str> {
    let words = match &request.prompt {
        Prompt::Text(text) => text.as_str(),
        Prompt::Ids(_) => return None,
        Prompt::Other => {
            let message = request.body.get("messages").and_then(Value::as_array)?.last()?;
            message.get("content").and_then(Value::as_str)?
        }
    };
    (!words.is_empty()).then_some(words)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::request::Endpoint;
    use super::*;

    fn request(body: Value) -> Request {
        Request::new(Endpoint::Completions, body.as_object().unwrap().clone(), false)
    }

    #[test]
    fn a_prompt_that_comes_again_is_cut_off() {
        let request = request(json!({ "prompt": "hello" }));
        assert_eq!(judge(&request, " three", "hello three\u{20ac}"), Verdict::Leak("\u{20ac}"));
        assert_eq!(judge(&request, " three", " three three"), Verdict::Clean);
        assert_eq!(judge(&request, " three", "\u{20ac}"), Verdict::Clean);
    }

    #[test]
    fn without_a_readable_prompt_a_repetition_of_all_that_was_sent_is_not_passed_on() {
        let request = request(json!({ "prompt": [1, 2] }));
        assert_eq!(judge(&request, " one two three", "secret one two three!"), Verdict::Unclear);
        assert_eq!(judge(&request, " one", " one by one"), Verdict::Clean);
    }
}

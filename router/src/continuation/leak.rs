//! The guard against a prompt that ends inside a character.
//!
//! vLLM then emits the whole prompt text before the first new text (vllm#48853, measured).
//! Ids are carried only up to text that was sent, so it cannot happen as long as a chunk
//! stands for one token. Where several tokens share a chunk, the last may be one byte of a
//! character whose text is yet to come, and nothing in the stream says so. After such a
//! seam the first text is looked at: a leak contains the prompt and all that was sent.

use super::json;
use super::request::{Prompt, Request};

/// What the first text after a seam is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum LeakCheck<'a> {
    /// A continuation.
    Clean,
    /// The prompt again, then the continuation.
    Leak(&'a str),
    /// Perhaps a leak, and its end cannot be seen.
    Unclear,
}

/// Judges the first text after a seam that followed `sent`.
pub(crate) fn judge<'a>(request: &Request, sent: &str, first: &'a str) -> LeakCheck<'a> {
    if first.len() <= sent.len() || sent.is_empty() {
        return LeakCheck::Clean;
    }
    match last_words(request) {
        Some(words) => {
            let Some(at) = first.find(&words) else { return LeakCheck::Clean };
            // Then the end of the template, then what was sent, then what is new.
            let after = &first[at + words.len()..];
            let mut places = (0..after.len()).filter(|&at| after.is_char_boundary(at) && after[at..].starts_with(sent));
            match (places.next(), places.next()) {
                (Some(only), None) => LeakCheck::Leak(&after[only + sent.len()..]),
                (Some(_), Some(_)) => LeakCheck::Unclear,
                (None, _) => LeakCheck::Clean,
            }
        }
        // Rather an error than a system prompt in the answer.
        None if first.rfind(sent).is_some_and(|at| at > 0) => LeakCheck::Unclear,
        None => LeakCheck::Clean,
    }
}

/// The end of what the client wrote, which a leak must contain.
fn last_words(request: &Request) -> Option<String> {
    let words = match request.prompt {
        Prompt::Text => request.body.get::<String>("prompt")?,
        Prompt::Ids(_) => return None,
        Prompt::Several(_) | Prompt::Other => {
            let message = last(request.body.raw("messages")?)?;
            let content = json::member(message, "content")?;
            let text = last(content).and_then(|part| json::member(part, "text")).unwrap_or(content);
            serde_json::from_str(text).ok()?
        }
    };
    Some(words).filter(|words| !words.is_empty())
}

fn last(list: &str) -> Option<&str> {
    let mut last = None;
    json::each(list, |element| last = Some(element));
    last
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::body::Body;
    use super::super::request::Endpoint;
    use super::*;

    fn request(body: Value) -> Request {
        Request::new(Endpoint::Completions, Body::read(body.to_string().into()).unwrap(), false)
    }

    #[test]
    fn a_prompt_that_comes_again_is_cut_off() {
        let request = request(json!({ "prompt": "hello" }));
        assert_eq!(judge(&request, " three", "hello three\u{20ac}"), LeakCheck::Leak("\u{20ac}"));
        assert_eq!(judge(&request, " three", " three three"), LeakCheck::Clean);
        assert_eq!(judge(&request, " three", "\u{20ac}"), LeakCheck::Clean);
        assert_eq!(judge(&request, " t", "hello three three"), LeakCheck::Unclear);
    }

    #[test]
    fn without_a_readable_prompt_a_repetition_of_all_that_was_sent_is_not_passed_on() {
        let request = request(json!({ "prompt": [1, 2] }));
        assert_eq!(judge(&request, " one two three", "secret one two three!"), LeakCheck::Unclear);
        assert_eq!(judge(&request, " one", " two"), LeakCheck::Clean);
    }
}

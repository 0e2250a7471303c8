//! What one event of an OpenAI-style stream says, whichever engine wrote it.
//!
//! Shapes as measured on vLLM 0.32 (Python and Rust frontends) and read in SGLang 0.5.23.

use serde::Deserialize;

use super::json::{self, Object};

/// A `data` payload that is not `[DONE]`.
#[derive(Debug)]
pub(crate) struct Chunk<'a> {
    pub(crate) top: Object<'a>,
    pub(crate) choices: Vec<Object<'a>>,
}

/// An error sent in-band, with HTTP status 200 long gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct InBandError {
    /// The HTTP status it would have had, if it says so.
    pub(crate) status: Option<u16>,
}

impl InBandError {
    /// The request is at fault: another worker would say the same.
    pub(crate) fn is_clients(&self) -> bool {
        self.status.is_some_and(|status| (400..500).contains(&status) && !matches!(status, 408 | 429 | 499))
    }
}

/// Token ids as an engine gave them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Ids {
    Absent,
    List(Vec<u32>),
    /// Something else than a list of ids: refused whole.
    Bad,
}

/// `finish_reason`, judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Finish {
    No,
    /// The generation is over.
    Yes,
    /// The engine gave up: a failed worker, not an end (vllm#57082).
    Aborted,
}

/// Token counts as in `usage`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
pub(crate) struct Usage {
    #[serde(default)]
    pub(crate) prompt_tokens: u64,
    #[serde(default)]
    pub(crate) completion_tokens: u64,
}

/// Where text was found in a choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Channel {
    /// `text` or `delta.content`.
    Content,
    /// `delta.reasoning` (vLLM).
    Reasoning,
    /// `delta.reasoning_content` (SGLang, older vLLM).
    ReasoningContent,
}

impl Channel {
    pub(crate) const fn delta_key(self) -> &'static str {
        match self {
            Self::Content => "content",
            Self::Reasoning => "reasoning",
            Self::ReasoningContent => "reasoning_content",
        }
    }
}

impl<'a> Chunk<'a> {
    /// Reads a chunk; `None` if it is not one.
    pub(crate) fn parse(data: &'a str) -> Option<Self> {
        let (top, choices) = json::object_and_list(data, "choices")?;
        Some(Self { top, choices })
    }

    /// The error this is instead of a chunk, if it is one.
    pub(crate) fn error(&self) -> Option<InBandError> {
        let inner = match self.top.present("error") {
            Some(error) => Object::parse(error).unwrap_or_default(),
            None if self.top.raw("object") == Some(r#""error""#) => self.top.clone(),
            None => return None,
        };
        Some(InBandError { status: inner.get("code").or_else(|| inner.get("status_code")) })
    }

    /// `prompt_token_ids`, at the top level, in the choice, or in `sglext`.
    pub(crate) fn prompt_ids(&self) -> Ids {
        for object in [&self.top].into_iter().chain(self.choices.first()) {
            if let Some(text) = object.present("prompt_token_ids") {
                return list(text);
            }
            if let Some(extension) = object.present("sglext").and_then(Object::parse)
                && let Some(text) = extension.present("prompt_token_ids")
            {
                return list(text);
            }
        }
        Ids::Absent
    }

    /// The ids of this chunk's tokens: `token_ids` of the choice, or as `sglext` has them.
    pub(crate) fn token_ids(&self) -> Ids {
        if let Some(text) = self.choices.first().and_then(|choice| choice.present("token_ids")) {
            return list(text);
        }
        for object in self.choices.first().into_iter().chain([&self.top]) {
            let Some(extension) = object.present("sglext").and_then(Object::parse) else { continue };
            if let Some(text) = extension.present("token_ids") {
                return list(text);
            }
            if let Some(text) = extension.present("completion_token_ids") {
                return match json::elements(text).as_deref() {
                    Some([]) => Ids::List(Vec::new()),
                    Some([first]) => list(first),
                    _ => Ids::Bad,
                };
            }
        }
        Ids::Absent
    }

    pub(crate) fn usage(&self) -> Option<Usage> {
        self.top.get("usage")
    }

    /// Takes every member out that only says ids. True if there was one.
    pub(crate) fn strip_ids(&mut self) -> bool {
        fn strip(object: &mut Object<'_>) -> bool {
            let mut found = object.remove("prompt_token_ids");
            found |= object.remove("token_ids");
            let Some(mut extension) = object.parsed("sglext").and_then(Object::parse) else {
                return found;
            };
            let mut inside = extension.remove("prompt_token_ids");
            inside |= extension.remove("token_ids");
            inside |= extension.remove("completion_token_ids");
            if extension.is_empty() {
                object.remove("sglext");
            } else if inside {
                object.set("sglext", extension.to_text());
            }
            found | inside
        }
        let mut found = strip(&mut self.top);
        for choice in &mut self.choices {
            found |= strip(choice);
        }
        found
    }

    /// Appends the chunk as JSON, with the choices as they are now.
    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        self.top.write_by(out, |key, value, out| {
            if key != "choices" {
                return out.extend_from_slice(value.as_bytes());
            }
            out.push(b'[');
            for (at, choice) in self.choices.iter().enumerate() {
                if at > 0 {
                    out.push(b',');
                }
                choice.write(out);
            }
            out.push(b']');
        });
    }
}

/// The judgement on `finish_reason`. Which words mean that the engine gave up: vLLM `abort`
/// and `error` (its gRPC), Dynamo `cancelled`.
pub(crate) fn finish(choice: &Object<'_>) -> Finish {
    match choice.get::<String>("finish_reason").as_deref() {
        None | Some("") => Finish::No,
        Some("abort" | "aborted" | "error" | "cancelled" | "canceled") => Finish::Aborted,
        Some(_) => Finish::Yes,
    }
}

/// The text of a choice: `text`, or the delta's content, or its reasoning where it has no content.
pub(crate) fn text(choice: &Object<'_>, delta: Option<&Object<'_>>) -> (Channel, String) {
    let found = |object: &Object<'_>, key| object.get::<String>(key).filter(|text| !text.is_empty());
    if let Some(delta) = delta {
        for channel in [Channel::Content, Channel::Reasoning, Channel::ReasoningContent] {
            if let Some(text) = found(delta, channel.delta_key()) {
                return (channel, text);
            }
        }
    }
    (Channel::Content, found(choice, "text").unwrap_or_default())
}

fn list(text: &str) -> Ids {
    serde_json::from_str(text).map_or(Ids::Bad, Ids::List)
}

//! What a client asked for, as far as continuing it is concerned.

use serde_json::{Map, Value};

use super::stop::Stops;
use super::unmovable::Unmovable;

/// Which endpoint the client called, or a continuation is sent to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
}

impl Endpoint {
    /// The path on the engine.
    #[must_use]
    pub const fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
        }
    }

    /// The endpoint of a path, if it is one that can be continued.
    #[must_use]
    pub fn of_path(path: &str) -> Option<Self> {
        [Self::Chat, Self::Completions].into_iter().find(|endpoint| endpoint.path() == path)
    }
}

/// How an engine differs from others in what it accepts (vLLM 0.32 measured, SGLang 0.5.23 and
/// TensorRT-LLM read).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Engine {
    /// vLLM, either frontend.
    Vllm,
    /// SGLang.
    Sglang,
    /// TensorRT-LLM: refuses fields it does not know.
    Trtllm,
    /// Anything else: nothing is added to its requests.
    Generic,
}

impl Engine {
    /// The engine of a worker's record.
    #[must_use]
    pub fn named(name: &str) -> Self {
        match name {
            "vllm" | "vllm-rs" => Self::Vllm,
            "sglang" => Self::Sglang,
            "trtllm" => Self::Trtllm,
            _ => Self::Generic,
        }
    }

    /// Whether `return_token_ids` is known to be accepted while streaming.
    #[must_use]
    pub const fn gives_ids(self, endpoint: Endpoint) -> bool {
        match self {
            Self::Vllm => true,
            // Its streaming chat answers `return_token_ids` with an error.
            Self::Sglang => matches!(endpoint, Endpoint::Completions),
            Self::Trtllm | Self::Generic => false,
        }
    }

    /// Whether `stream_options.continuous_usage_stats` is known to be accepted: it tells how many
    /// tokens the text stands for where ids do not.
    #[must_use]
    pub const fn counts_as_it_goes(self) -> bool {
        matches!(self, Self::Vllm | Self::Sglang)
    }

    /// `max_tokens` of the completions endpoint where the request has none.
    pub(crate) const fn default_budget(self) -> Option<u64> {
        match self {
            Self::Vllm | Self::Sglang | Self::Trtllm => Some(16),
            Self::Generic => None,
        }
    }
}

/// The prompt of a completion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Prompt {
    Text(String),
    Ids(Vec<u32>),
    /// A conversation, or nothing that can be extended.
    Other,
}

/// A request, read once.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) endpoint: Endpoint,
    pub(crate) body: Map<String, Value>,
    /// Why it must not be moved once something was sent.
    pub(crate) refusal: Option<Unmovable>,
    /// Choices that must finish.
    pub(crate) choices: u64,
    pub(crate) stops: Option<Stops>,
    pub(crate) prompt: Prompt,
    /// The client wants to see token ids.
    pub(crate) wants_ids: bool,
    pub(crate) wants_usage: bool,
    pub(crate) wants_continuous_usage: bool,
    pub(crate) echo: bool,
    /// Ids would not carry all of it: media are lost with them, a stop string counts only after
    /// `min_tokens`, which the chunks of an engine do not tell to the token, and in a tool call, of which the
    /// router sees no text; and a call that must come is decoded under a grammar.
    pub(crate) needs_text: bool,
    /// The model may call tools. The completions endpoint would not know of them.
    pub(crate) tools: bool,
    pub(crate) min_tokens: u64,
    pub(crate) stop_token_ids: Vec<u32>,
}

impl Request {
    pub(crate) fn new(endpoint: Endpoint, body: Map<String, Value>, strict: bool) -> Self {
        let flag = |key: &str| body.get(key).and_then(Value::as_bool).unwrap_or(false);
        let option = |key: &str| {
            body.get("stream_options").and_then(|options| options.get(key)).and_then(Value::as_bool).unwrap_or(false)
        };
        let prompt = match body.get("prompt") {
            Some(Value::String(text)) => Prompt::Text(text.clone()),
            Some(list @ Value::Array(_)) => serde_json::from_value(list.clone()).map_or(Prompt::Other, Prompt::Ids),
            _ => Prompt::Other,
        };
        let stops = Stops::of(&body);
        let min_tokens = count(&body, "min_tokens").unwrap_or(0);
        let tools = has_tools(&body);
        Self {
            endpoint,
            refusal: refusal(endpoint, &body, &prompt, strict),
            choices: count(&body, "n").unwrap_or(1).max(1).saturating_mul(prompts(&body, &prompt)),
            wants_ids: flag("return_token_ids"),
            wants_usage: option("include_usage"),
            wants_continuous_usage: option("include_usage") && option("continuous_usage_stats"),
            echo: flag("echo"),
            needs_text: has_media(&body)
                || stops.is_some() && (min_tokens > 0 || tools)
                || tools && body.get("tool_choice").is_some_and(|choice| choice != "auto" && !choice.is_null()),
            tools,
            stops,
            min_tokens,
            stop_token_ids: body
                .get("stop_token_ids")
                .and_then(|ids| serde_json::from_value(ids.clone()).ok())
                .unwrap_or_default(),
            prompt,
            body,
        }
    }

    /// The most tokens the client wants, or `None` for as many as the context holds.
    pub(crate) fn budget(&self, engine: Engine) -> Option<u64> {
        match self.endpoint {
            Endpoint::Chat => count(&self.body, "max_completion_tokens").or_else(|| count(&self.body, "max_tokens")),
            Endpoint::Completions if self.body.contains_key("max_tokens") => count(&self.body, "max_tokens"),
            Endpoint::Completions => engine.default_budget(),
        }
    }

    /// A chat that the completions endpoint would answer with less: it has no chat logprobs.
    pub(crate) fn loses_on_completions(&self) -> bool {
        self.body.get("logprobs").and_then(Value::as_bool).unwrap_or(false)
    }
}

/// A number that counts something; negative ones mean "no bound" to llama.cpp.
pub(crate) fn count(body: &Map<String, Value>, key: &str) -> Option<u64> {
    body.get(key).and_then(Value::as_u64)
}

fn prompts(body: &Map<String, Value>, prompt: &Prompt) -> u64 {
    match (prompt, body.get("prompt")) {
        (Prompt::Other, Some(Value::Array(list))) => (list.len() as u64).max(1),
        _ => 1,
    }
}

fn present(body: &Map<String, Value>, key: &str) -> bool {
    body.get(key).is_some_and(|value| !value.is_null())
}

fn refusal(endpoint: Endpoint, body: &Map<String, Value>, prompt: &Prompt, strict: bool) -> Option<Unmovable> {
    /// Parameters of guided decoding: OpenAI's, vLLM's old and new, SGLang's, llama.cpp's.
    const GUIDED: [&str; 6] = ["structured_outputs", "grammar", "regex", "ebnf", "json_schema", "structural_tag"];
    let above_one = |key| count(body, key).is_some_and(|n| n > 1);
    let not_default = |key: &str, default: f64| {
        body.get(key).and_then(Value::as_f64).is_some_and(|value| (value - default).abs() > f64::EPSILON)
    };
    let format = body.get("response_format").and_then(|format| format.get("type")).and_then(Value::as_str);
    let batch = *prompt == Prompt::Other && matches!(body.get("prompt"), Some(Value::Array(_)));
    if above_one("n") || above_one("best_of") {
        Some(Unmovable::SeveralChoices)
    } else if endpoint == Endpoint::Completions && batch {
        Some(Unmovable::PromptBatch)
    } else if body.get("use_beam_search").and_then(Value::as_bool).unwrap_or(false) {
        Some(Unmovable::BeamSearch)
    } else if present(body, "suffix") && body["suffix"] != "" {
        Some(Unmovable::Suffix)
    } else if present(body, "response_format") && format != Some("text")
        || GUIDED.iter().any(|key| present(body, key))
        || body.keys().any(|key| key.starts_with("guided_") && present(body, key))
    {
        Some(Unmovable::GuidedDecoding)
    } else if present(body, "stop_regex") {
        Some(Unmovable::StopRegex)
    } else if strict
        && (not_default("presence_penalty", 0.0)
            || not_default("frequency_penalty", 0.0)
            || not_default("repetition_penalty", 1.0))
    {
        Some(Unmovable::StrictPenalties)
    } else if strict && present(body, "seed") {
        Some(Unmovable::StrictSeed)
    } else {
        None
    }
}

fn has_tools(body: &Map<String, Value>) -> bool {
    let list = |key: &str| body.get(key).and_then(Value::as_array).is_some_and(|list| !list.is_empty());
    list("tools")
        || list("functions")
        || present(body, "function_call")
        || present(body, "tool_choice") && body["tool_choice"] != "none"
}

/// Images and the like: their ids stand for content that only the messages carry.
fn has_media(body: &Map<String, Value>) -> bool {
    let messages = body.get("messages").and_then(Value::as_array).into_iter().flatten();
    messages.filter_map(|message| message.get("content")?.as_array()).flatten().any(|part| {
        !part.is_string() && !matches!(part.get("type").and_then(Value::as_str), Some("text" | "refusal" | "thinking"))
    })
}

//! What a client asked for, as far as continuing it is concerned.

use super::body::Body;
use super::json;
use super::stop::{Stops, TooMany};
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

/// What the prompt of a completion is. It stays in the body: it may be nearly all of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Prompt {
    Text,
    /// So many ids.
    Ids(usize),
    /// A list of so many prompts.
    Several(u64),
    /// A conversation, or nothing that can be extended.
    Other,
}

impl Prompt {
    fn of(body: &Body) -> Self {
        let Some(text) = body.raw("prompt") else { return Self::Other };
        if text.starts_with('"') {
            return Self::Text;
        }
        let (mut count, mut ids) = (0, true);
        let list = json::each(text, |element| {
            count += 1;
            ids &= element.parse::<u32>().is_ok();
        });
        match (list, ids) {
            (true, true) => Self::Ids(count),
            (true, false) => Self::Several(count as u64),
            (false, _) => Self::Other,
        }
    }
}

/// A request, read once.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) endpoint: Endpoint,
    pub(crate) body: Body,
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
}

impl Request {
    pub(crate) fn new(endpoint: Endpoint, body: Body, strict: bool) -> Self {
        let options = body.present("stream_options");
        let option = |key| options.and_then(|options| json::member(options, key)) == Some("true");
        let prompt = Prompt::of(&body);
        let (stops, refusal) = match Stops::of(&body) {
            Ok(stops) => (stops, refusal(endpoint, &body, prompt, strict)),
            Err(TooMany) => (None, refusal(endpoint, &body, prompt, strict).or(Some(Unmovable::TooManyStops))),
        };
        let min_tokens = body.get("min_tokens").unwrap_or(0);
        let tools = has_tools(&body);
        let prompts = if let Prompt::Several(count) = prompt { count } else { 1 };
        Self {
            endpoint,
            refusal,
            choices: body.get("n").unwrap_or(1_u64).max(1).saturating_mul(prompts),
            wants_ids: body.flag("return_token_ids"),
            wants_usage: option("include_usage"),
            wants_continuous_usage: option("include_usage") && option("continuous_usage_stats"),
            echo: body.flag("echo"),
            needs_text: has_media(&body)
                || stops.is_some() && (min_tokens > 0 || tools)
                || tools && body.present("tool_choice").is_some_and(|choice| !is(choice, "auto")),
            tools,
            stops,
            min_tokens,
            prompt,
            body,
        }
    }

    /// The most tokens the client wants, or `None` for as many as the context holds. A negative number means
    /// "no bound" to llama.cpp.
    pub(crate) fn budget(&self, engine: Engine) -> Option<u64> {
        match self.endpoint {
            Endpoint::Chat => self.body.get("max_completion_tokens").or_else(|| self.body.get("max_tokens")),
            Endpoint::Completions if self.body.raw("max_tokens").is_some() => self.body.get("max_tokens"),
            Endpoint::Completions => engine.default_budget(),
        }
    }

    /// A chat that the completions endpoint would answer with less: it has no chat logprobs.
    pub(crate) fn loses_on_completions(&self) -> bool {
        self.body.flag("logprobs")
    }

    /// Whether this token is one of those that end the answer.
    pub(crate) fn stops_at(&self, token: u32) -> bool {
        let mut found = false;
        if let Some(list) = self.body.raw("stop_token_ids") {
            json::each(list, |id| found |= id.parse() == Ok(token));
        }
        found
    }
}

/// Whether a JSON text is this string.
pub(crate) fn is(text: &str, string: &str) -> bool {
    serde_json::from_str::<String>(text).is_ok_and(|text| text == string)
}

fn refusal(endpoint: Endpoint, body: &Body, prompt: Prompt, strict: bool) -> Option<Unmovable> {
    /// Parameters of guided decoding: OpenAI's, vLLM's old and new, SGLang's, llama.cpp's.
    const GUIDED: [&str; 6] = ["structured_outputs", "grammar", "regex", "ebnf", "json_schema", "structural_tag"];
    let above_one = |key| body.get::<u64>(key).is_some_and(|n| n > 1);
    let not_default =
        |key, default: f64| body.get::<f64>(key).is_some_and(|value| (value - default).abs() > f64::EPSILON);
    let text_only = |format: &str| json::member(format, "type").is_some_and(|kind| is(kind, "text"));
    if above_one("n") || above_one("best_of") {
        Some(Unmovable::SeveralChoices)
    } else if endpoint == Endpoint::Completions && matches!(prompt, Prompt::Several(_)) {
        Some(Unmovable::PromptBatch)
    } else if body.flag("use_beam_search") {
        Some(Unmovable::BeamSearch)
    } else if body.present("suffix").is_some_and(|suffix| suffix != "\"\"") {
        Some(Unmovable::Suffix)
    } else if body.present("response_format").is_some_and(|format| !text_only(format))
        || GUIDED.iter().any(|key| body.present(key).is_some())
        || body.keys().any(|key| key.starts_with("guided_") && body.present(key).is_some())
    {
        Some(Unmovable::GuidedDecoding)
    } else if body.present("stop_regex").is_some() {
        Some(Unmovable::StopRegex)
    } else if strict
        && (not_default("presence_penalty", 0.0)
            || not_default("frequency_penalty", 0.0)
            || not_default("repetition_penalty", 1.0))
    {
        Some(Unmovable::StrictPenalties)
    } else if strict && body.present("seed").is_some() {
        Some(Unmovable::StrictSeed)
    } else {
        None
    }
}

fn has_tools(body: &Body) -> bool {
    let list = |key| body.raw(key).and_then(|text| text.strip_prefix('[')).is_some_and(|rest| rest.trim_ascii() != "]");
    list("tools")
        || list("functions")
        || body.present("function_call").is_some()
        || body.present("tool_choice").is_some_and(|choice| !is(choice, "none"))
}

/// Images and the like: their ids stand for content that only the messages carry.
fn has_media(body: &Body) -> bool {
    let mut found = false;
    let medium = |part: &str| {
        let harmless = |kind| ["text", "refusal", "thinking"].iter().any(|harmless| is(kind, harmless));
        !part.starts_with('"') && !json::member(part, "type").is_some_and(harmless)
    };
    json::each(body.raw("messages").unwrap_or_default(), |message| {
        if let Some(content) = json::member(message, "content") {
            json::each(content, |part| found |= medium(part));
        }
    });
    found
}

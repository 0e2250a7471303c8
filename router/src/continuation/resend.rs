//! The request that continues a stream on another worker.

use serde_json::{Map, Value, json};

use super::request::{Endpoint, Engine, Prompt, Request};
use super::unmovable::Unmovable;

/// What is known of the worker that a request goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// Its engine.
    pub engine: Engine,
    /// `max_model_len` of its `/v1/models`, in tokens, if it was told.
    pub max_model_len: Option<u64>,
    /// Its chat endpoint takes ids for its prompt, in `kv_transfer_params.prompt_token_ids`: vLLM's Python
    /// frontend does, the Rust one ignores them and would begin again (both 0.32.0, measured).
    pub takes_chat_ids: bool,
}

/// How faithfully a request continues what was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Exactness {
    /// Nothing was produced yet: the request as it came.
    Whole,
    /// By token ids: no token is missing and none is repeated.
    Exact,
    /// By text, which may be cut into other tokens.
    Approximate,
}

impl Exactness {
    /// The metric label.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Whole => "whole",
            Self::Exact => "exact",
            Self::Approximate => "approximate",
        }
    }
}

/// A request for a worker.
#[derive(Debug, Clone, PartialEq)]
pub struct Outgoing {
    /// Where it goes.
    pub endpoint: Endpoint,
    /// Its JSON body.
    pub body: Value,
    /// How faithful it is.
    pub exactness: Exactness,
    /// The client's body without any change.
    pub as_it_came: bool,
    /// Running counts were asked for, which the client is not to see unless it asked too.
    pub(crate) counting: bool,
    /// The ids that a chat's prompt consists of, if the engine takes them: it says so in its first chunk.
    pub(crate) prompt: Option<Vec<u32>>,
}

/// Why no request can be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// By the stream's nature, or because of the target's engine.
    Unmovable(Unmovable),
    /// The context is full: the answer ends with `length`.
    ContextFull,
}

/// What has been sent to the client so far.
#[derive(Debug)]
pub(crate) struct Carried<'a> {
    /// Prompt ids and produced ids, if they are exact.
    pub(crate) ids: Option<(&'a [u32], &'a [u32])>,
    /// All content.
    pub(crate) text: &'a str,
    /// Reasoning was sent.
    pub(crate) reasoning: bool,
    /// Part of a tool call was sent.
    pub(crate) tool_calls: bool,
    /// Tokens that the text stands for: exact with ids, at least this many without.
    pub(crate) tokens: u64,
}

/// The first request, or the same one again. `migrate`: it may have to be continued.
pub(crate) fn whole(request: &Request, target: Target, migrate: bool) -> Outgoing {
    let Target { engine, .. } = target;
    let mut body = request.body.clone();
    // Asked for ids, vLLM's Python frontend leaves the echo out.
    let ask_ids = migrate && !request.needs_text && !request.echo && engine.gives_ids(request.endpoint);
    // With tools, ids may be fewer than tokens (vllm#27482): the count tells.
    let counting = migrate && (!ask_ids || request.tools) && engine.counts_as_it_goes();
    if ask_ids {
        ask(request, &mut body);
    }
    if counting {
        count_as_it_goes(&mut body);
    }
    Outgoing {
        endpoint: request.endpoint,
        body: Value::Object(body),
        exactness: Exactness::Whole,
        as_it_came: !ask_ids && !counting,
        counting,
        prompt: None,
    }
}

/// The request that continues `carried` on `target`.
pub(crate) fn continued(
    request: &Request,
    carried: &Carried<'_>,
    target: Target,
    strict: bool,
    stops_taken: bool,
) -> Result<Outgoing, Refusal> {
    let exact = match carried.ids {
        Some(ids) if !request.needs_text && !carried.tool_calls => by_ids(request, carried, ids, target)?,
        _ => None,
    };
    let (endpoint, mut body, exactness) = match exact {
        Some((endpoint, body)) => (endpoint, body, Exactness::Exact),
        None if strict => return Err(Refusal::Unmovable(Unmovable::StrictText)),
        None => (request.endpoint, by_text(request, carried, target)?, Exactness::Approximate),
    };
    for key in ["echo", "seed", "prompt_logprobs", "truncate_prompt_tokens"] {
        body.remove(key);
    }
    if request.min_tokens > 0 {
        let least = request.min_tokens.saturating_sub(carried.tokens);
        // A smaller context may have lowered the maximum; a minimum above it is a 400 of vLLM.
        let most = super::request::count(&body, "max_tokens").unwrap_or(u64::MAX);
        body.insert("min_tokens".into(), least.min(most).into());
    }
    let counting = (exactness == Exactness::Approximate || request.tools) && target.engine.counts_as_it_goes();
    if exactness == Exactness::Exact && target.engine.gives_ids(endpoint) {
        ask(request, &mut body);
    } else if stops_taken {
        drop_stops(&mut body);
    }
    if counting {
        count_as_it_goes(&mut body);
    }
    let prompt = (exactness == Exactness::Exact && request.endpoint == Endpoint::Chat && endpoint == Endpoint::Chat)
        .then(|| carried.ids.map(|(prompt, produced)| [prompt, produced].concat()))
        .flatten();
    Ok(Outgoing { endpoint, body: Value::Object(body), exactness, as_it_came: false, counting, prompt })
}

fn count_as_it_goes(body: &mut Map<String, Value>) {
    let mut options = body.get("stream_options").and_then(Value::as_object).cloned().unwrap_or_default();
    options.insert("include_usage".into(), true.into());
    options.insert("continuous_usage_stats".into(), true.into());
    body.insert("stream_options".into(), options.into());
}

fn ask(request: &Request, body: &mut Map<String, Value>) {
    body.insert("return_token_ids".into(), true.into());
    if request.stops.is_some() {
        drop_stops(body);
    }
}

fn drop_stops(body: &mut Map<String, Value>) {
    body.remove("stop");
    body.remove("include_stop_str_in_output");
}

/// What means nothing to the completions endpoint once the prompt is ids.
const CHAT_ONLY: [&str; 20] = [
    "messages",
    "tools",
    "tool_choice",
    "functions",
    "function_call",
    "parallel_tool_calls",
    "response_format",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "max_completion_tokens",
    "logprobs",
    "top_logprobs",
    "reasoning_effort",
    "include_reasoning",
    "modalities",
    "mm_processor_kwargs",
    "n",
];

/// A body and the endpoint it is for.
type Addressed = (Endpoint, Map<String, Value>);

/// `None` if this target cannot continue it by ids.
fn by_ids(
    request: &Request,
    carried: &Carried<'_>,
    (prompt, produced): (&[u32], &[u32]),
    target: Target,
) -> Result<Option<Addressed>, Refusal> {
    let ids: Vec<u32> = prompt.iter().chain(produced).copied().collect();
    let room = target.max_model_len.map(|len| len.saturating_sub(ids.len() as u64));
    if room == Some(0) {
        return Err(Refusal::ContextFull);
    }
    let budget = request.budget(target.engine).map(|budget| budget.saturating_sub(carried.tokens).max(1));
    // The next worker's context may be smaller; asked for more than it holds, vLLM answers 400.
    let budget = budget.map(|budget| room.map_or(budget, |room| budget.min(room)));
    if request.endpoint == Endpoint::Completions {
        let mut body = request.body.clone();
        body.insert("prompt".into(), json!(ids));
        if let Some(budget) = budget {
            body.insert("max_tokens".into(), budget.into());
        }
        return Ok(Some((Endpoint::Completions, body)));
    }
    // The chat endpoint keeps the parsers of reasoning and tool calls, and chat logprobs.
    if target.takes_chat_ids {
        let mut body = request.body.clone();
        let mut parameters = body.get("kv_transfer_params").and_then(Value::as_object).cloned().unwrap_or_default();
        parameters.insert("prompt_token_ids".into(), json!(ids));
        body.insert("kv_transfer_params".into(), parameters.into());
        // vLLM gives the newer name precedence.
        if let (Some(budget), Some(_)) = (budget, body.remove("max_completion_tokens").or(body.remove("max_tokens"))) {
            body.insert("max_tokens".into(), budget.into());
        }
        return Ok(Some((Endpoint::Chat, body)));
    }
    if carried.reasoning || request.tools || request.loses_on_completions() || budget.or(room).is_none() {
        return Ok(None);
    }
    let mut body = Map::new();
    for (key, value) in request.body.iter().filter(|(key, _)| !CHAT_ONLY.contains(&key.as_str())) {
        body.insert(key.clone(), value.clone());
    }
    body.insert("prompt".into(), json!(ids));
    // Never left out: the endpoint's default is 16.
    if let Some(budget) = budget.or(room) {
        body.insert("max_tokens".into(), budget.into());
    }
    Ok(Some((Endpoint::Completions, body)))
}

fn by_text(request: &Request, carried: &Carried<'_>, target: Target) -> Result<Map<String, Value>, Refusal> {
    let unmovable = |reason| Err(Refusal::Unmovable(reason));
    if carried.tool_calls {
        return unmovable(Unmovable::ToolCalls);
    }
    if carried.reasoning {
        return unmovable(Unmovable::ReasoningWithoutIds);
    }
    let mut body = request.body.clone();
    match (request.endpoint, &request.prompt) {
        (Endpoint::Completions, Prompt::Text(prompt)) => {
            let echoed = request.echo && carried.text.starts_with(prompt.as_str());
            let text = if echoed { carried.text.to_owned() } else { format!("{prompt}{}", carried.text) };
            body.insert("prompt".into(), text.into());
            if let Some(budget) = request.budget(target.engine) {
                body.insert("max_tokens".into(), budget.saturating_sub(carried.tokens).max(1).into());
            }
        }
        (Endpoint::Completions, Prompt::Ids(_)) => return unmovable(Unmovable::TokenPromptWithoutIds),
        (Endpoint::Completions, Prompt::Other) => return unmovable(Unmovable::PromptNotText),
        // It refuses the fields without which a new turn would begin.
        (Endpoint::Chat, _) if target.engine == Engine::Trtllm => return unmovable(Unmovable::ChatNotContinuable),
        (Endpoint::Chat, _) => {
            let begun = body.get("continue_final_message").and_then(Value::as_bool).unwrap_or(false);
            let Some(messages) = body.get_mut("messages").and_then(Value::as_array_mut) else {
                return unmovable(Unmovable::PromptNotText);
            };
            match messages.last_mut() {
                Some(last) if begun && last["role"] == "assistant" => extend(last, carried.text)?,
                _ => messages.push(json!({ "role": "assistant", "content": carried.text })),
            }
            body.insert("continue_final_message".into(), true.into());
            body.insert("add_generation_prompt".into(), false.into());
            reduce(&mut body, carried.tokens);
        }
    }
    Ok(body)
}

fn extend(message: &mut Value, text: &str) -> Result<(), Refusal> {
    match &mut message["content"] {
        Value::String(content) => content.push_str(text),
        Value::Array(parts) => parts.push(json!({ "type": "text", "text": text })),
        content @ Value::Null => *content = text.into(),
        _ => return Err(Refusal::Unmovable(Unmovable::PromptNotText)),
    }
    Ok(())
}

/// Takes what was produced from the maxima, which never fall below 1.
fn reduce(body: &mut Map<String, Value>, produced: u64) {
    for key in ["max_tokens", "max_completion_tokens"] {
        if let Some(most) = super::request::count(body, key) {
            body.insert(key.into(), most.saturating_sub(produced).max(1).into());
        }
    }
}

//! The request that continues a stream on another worker.

use std::fmt::Write as _;

use bytes::Bytes;

use super::json::{self, Object, member, text, with_members};
use super::request::{Endpoint, Engine, Prompt, Request, is};
use super::unmovable::Unmovable;

/// What is known of the worker that a request goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// Its engine.
    pub engine: Engine,
    /// `max_model_len` of its `/v1/models`, in tokens, if it is known.
    pub max_model_len: Option<u64>,
    /// Its chat endpoint takes ids for its prompt, in `kv_transfer_params.prompt_token_ids`: vLLM's Python
    /// frontend does, the Rust one ignores them and would begin again (both 0.32.0, measured).
    pub takes_chat_ids: bool,
}

/// How faithfully a request continues what was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum Exactness {
    /// Nothing was produced yet: the request as it came.
    Whole,
    /// By token ids: no token is missing and none is repeated.
    Exact,
    /// By text, which may be cut into other tokens.
    Approximate,
}

/// A request for a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outgoing {
    /// Where it goes.
    pub endpoint: Endpoint,
    /// Its JSON body.
    pub body: Bytes,
    /// How faithful it is.
    pub exactness: Exactness,
    /// The client's body without any change.
    pub as_it_came: bool,
    /// No most tokens are named: whatever does not fit, it is not they.
    pub open_ended: bool,
}

/// What a request for a worker will be.
#[derive(Debug)]
pub(crate) struct Plan<'a> {
    pub(crate) endpoint: Endpoint,
    pub(crate) body: Object<'a>,
    pub(crate) exactness: Exactness,
    /// Nothing was changed.
    pub(crate) as_it_came: bool,
    /// Running counts were asked for, which the client is not to see unless it asked too.
    pub(crate) counting: bool,
    /// The ids that a chat's prompt consists of, if the engine takes them: it says so in its first chunk.
    pub(crate) prompt: Option<Vec<u32>>,
}

/// The ids that a prompt consists of.
#[derive(Debug, Clone, Copy)]
pub(crate) enum PromptIds<'a> {
    /// An engine gave them.
    Given(&'a [u32]),
    /// They stand in the request: as text, and how many.
    Asked(&'a str, usize),
}

impl PromptIds<'_> {
    pub(crate) const fn len(self) -> usize {
        match self {
            Self::Given(ids) => ids.len(),
            Self::Asked(_, count) => count,
        }
    }

    /// The JSON list of them and of what was produced.
    fn and(self, produced: &[u32]) -> String {
        let (begin, more) = match self {
            Self::Given(ids) => ("[", ids),
            Self::Asked(list, _) => (list.strip_suffix(']').unwrap_or("[").trim_ascii_end(), &[][..]),
        };
        // An id of today's models has six digits.
        let mut list = String::with_capacity(begin.len() + 7 * (more.len() + produced.len()) + 1);
        list.push_str(begin);
        for id in more.iter().chain(produced) {
            let comma = if list.ends_with('[') { "" } else { "," };
            write!(list, "{comma}{id}").expect("a string takes all");
        }
        list.push(']');
        list
    }
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
    pub(crate) ids: Option<(PromptIds<'a>, &'a [u32])>,
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
pub(crate) fn whole(request: &Request, target: Target, migrate: bool) -> Plan<'_> {
    let Target { engine, .. } = target;
    let mut body = request.body.object();
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
    Plan {
        endpoint: request.endpoint,
        body,
        exactness: Exactness::Whole,
        as_it_came: !ask_ids && !counting,
        counting,
        prompt: None,
    }
}

/// The request that continues `carried` on `target`.
pub(crate) fn continued<'a>(
    request: &'a Request,
    carried: &Carried<'_>,
    target: Target,
    strict: bool,
    stops_taken: bool,
) -> Result<Plan<'a>, Refusal> {
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
        let most = body.get("max_tokens").unwrap_or(u64::MAX);
        body.set("min_tokens", least.min(most).to_string());
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
    let prompt = match carried.ids {
        Some((PromptIds::Given(prompt), produced))
            if exactness == Exactness::Exact && (request.endpoint, endpoint) == (Endpoint::Chat, Endpoint::Chat) =>
        {
            Some([prompt, produced].concat())
        }
        _ => None,
    };
    Ok(Plan { endpoint, body, exactness, as_it_came: false, counting, prompt })
}

fn count_as_it_goes(body: &mut Object<'_>) {
    let wanted = [("include_usage", "true"), ("continuous_usage_stats", "true")];
    let options = with_members(body.present("stream_options"), &wanted);
    body.set("stream_options", options);
}

fn ask(request: &Request, body: &mut Object<'_>) {
    body.set("return_token_ids", "true");
    if request.stops.is_some() {
        drop_stops(body);
    }
}

fn drop_stops(body: &mut Object<'_>) {
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
type Addressed<'a> = (Endpoint, Object<'a>);

/// `None` if this target cannot continue it by ids.
fn by_ids<'a>(
    request: &'a Request,
    carried: &Carried<'_>,
    (prompt, produced): (PromptIds<'_>, &[u32]),
    target: Target,
) -> Result<Option<Addressed<'a>>, Refusal> {
    let length = (prompt.len() + produced.len()) as u64;
    let room = target.max_model_len.map(|len| len.saturating_sub(length));
    if room == Some(0) {
        return Err(Refusal::ContextFull);
    }
    let budget = request.budget(target.engine).map(|budget| budget.saturating_sub(carried.tokens).max(1));
    // The next worker's context may be smaller; asked for more than it holds, vLLM answers 400.
    let budget = budget.map(|budget| room.map_or(budget, |room| budget.min(room)));
    let mut body = request.body.object();
    if request.endpoint == Endpoint::Completions {
        body.set("prompt", prompt.and(produced));
        if let Some(budget) = budget {
            body.set("max_tokens", budget.to_string());
        }
        return Ok(Some((Endpoint::Completions, body)));
    }
    // The chat endpoint keeps the parsers of reasoning and tool calls, and chat logprobs.
    if target.takes_chat_ids {
        let ids = prompt.and(produced);
        let parameters = with_members(body.present("kv_transfer_params"), &[("prompt_token_ids", &ids)]);
        body.set("kv_transfer_params", parameters);
        // vLLM gives the newer name precedence.
        let [newer, older] = ["max_completion_tokens", "max_tokens"].map(|key| body.remove(key));
        if let Some(budget) = budget.filter(|_| newer || older) {
            body.set("max_tokens", budget.to_string());
        }
        return Ok(Some((Endpoint::Chat, body)));
    }
    if carried.reasoning || request.tools || request.loses_on_completions() || budget.or(room).is_none() {
        return Ok(None);
    }
    for key in CHAT_ONLY {
        body.remove(key);
    }
    body.set("prompt", prompt.and(produced));
    // Never left out: the endpoint's default is 16.
    if let Some(budget) = budget.or(room) {
        body.set("max_tokens", budget.to_string());
    }
    Ok(Some((Endpoint::Completions, body)))
}

fn by_text<'a>(request: &'a Request, carried: &Carried<'_>, target: Target) -> Result<Object<'a>, Refusal> {
    const NOT_TEXT: Refusal = Refusal::Unmovable(Unmovable::PromptNotText);
    let unmovable = |reason| Err(Refusal::Unmovable(reason));
    if carried.tool_calls {
        return unmovable(Unmovable::ToolCalls);
    }
    if carried.reasoning {
        return unmovable(Unmovable::ReasoningWithoutIds);
    }
    let mut body = request.body.object();
    match (request.endpoint, request.prompt) {
        (Endpoint::Completions, Prompt::Text) => {
            let prompt = request.body.raw("prompt").ok_or(NOT_TEXT)?;
            let echoed = request.echo
                && serde_json::from_str::<String>(prompt).is_ok_and(|prompt| carried.text.starts_with(&prompt));
            body.set("prompt", if echoed { text(carried.text) } else { longer(prompt, carried.text).ok_or(NOT_TEXT)? });
            if let Some(budget) = request.budget(target.engine) {
                body.set("max_tokens", budget.saturating_sub(carried.tokens).max(1).to_string());
            }
        }
        (Endpoint::Completions, Prompt::Ids(_)) => return unmovable(Unmovable::TokenPromptWithoutIds),
        (Endpoint::Completions, Prompt::Several(_) | Prompt::Other) => return Err(NOT_TEXT),
        // It refuses the fields without which a new turn would begin.
        (Endpoint::Chat, _) if target.engine == Engine::Trtllm => return unmovable(Unmovable::ChatNotContinuable),
        (Endpoint::Chat, _) => {
            let messages = request.body.raw("messages").ok_or(NOT_TEXT)?;
            let mut last = None;
            if !json::each(messages, |message| last = Some(message)) {
                return Err(NOT_TEXT);
            }
            let is_begun = request.body.flag("continue_final_message");
            let begun = last.filter(|last| is_begun && member(last, "role").is_some_and(|role| is(role, "assistant")));
            let messages = match begun {
                Some(last) => {
                    let content = extended(member(last, "content"), carried.text).ok_or(NOT_TEXT)?;
                    let last_begins = last.as_ptr().addr() - messages.as_ptr().addr();
                    [&messages[..last_begins], &with_members(Some(last), &[("content", &content)]), "]"].concat()
                }
                None => {
                    let content = text(carried.text);
                    let said = with_members(None, &[("role", "\"assistant\""), ("content", &content)]);
                    json::appended(messages, &said).ok_or(NOT_TEXT)?
                }
            };
            body.set("messages", messages);
            body.set("continue_final_message", "true");
            body.set("add_generation_prompt", "false");
            reduce(&mut body, carried.tokens);
        }
    }
    Ok(body)
}

/// A JSON string with more text at its end.
fn longer(string: &str, more: &str) -> Option<String> {
    Some([string.strip_suffix('"')?, text(more).strip_prefix('"')?].concat())
}

/// The content of a message with more text at its end; `None` if it is of an unknown kind.
fn extended(content: Option<&str>, more: &str) -> Option<String> {
    match content.filter(|content| *content != "null") {
        None => Some(text(more)),
        Some(content) if content.starts_with('"') => longer(content, more),
        Some(content) if content.starts_with('[') => {
            let more = text(more);
            json::appended(content, &with_members(None, &[("type", "\"text\""), ("text", &more)]))
        }
        Some(_) => None,
    }
}

/// Takes what was produced from the maxima, which never fall below 1.
fn reduce(body: &mut Object<'_>, produced: u64) {
    for key in ["max_tokens", "max_completion_tokens"] {
        if let Some(most) = body.get::<u64>(key) {
            body.set(key, most.saturating_sub(produced).max(1).to_string());
        }
    }
}

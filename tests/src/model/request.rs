//! From the body of an HTTP request to what the engine does with it.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::chat_template::{Message, Turn, render};
use super::generation::Limits;
use super::sampling::Sampling;
use super::vocabulary::{TokenId, VOCABULARY_SIZE, encode};

/// Which of vLLM's two HTTP servers is imitated. They differ in what they accept, in
/// the shape of their answers, and in how they take the engine's death.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Frontend {
    /// `vllm serve`, version 0.32.0.
    Python,
    /// `vllm-rs serve`, version 0.32.0.
    Rust,
}

/// The endpoint that a request came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/completions`
    Completions,
    /// `/v1/chat/completions`
    Chat,
}

impl Endpoint {
    /// Its path.
    pub fn path(self) -> &'static str {
        match self {
            Self::Completions => "/v1/completions",
            Self::Chat => "/v1/chat/completions",
        }
    }
}

/// The server that a request is read for.
#[derive(Clone, Debug)]
pub struct Dialect {
    /// The HTTP server imitated.
    pub frontend: Frontend,
    /// The one model served.
    pub model: String,
    /// Context length in tokens, prompt and output together.
    pub max_model_len: u32,
}

/// A request that was understood.
#[derive(Clone, Debug)]
pub struct Request {
    /// Where it came to.
    pub endpoint: Endpoint,
    /// One prompt a choice: `n` copies of each prompt given.
    pub prompts: Vec<Vec<TokenId>>,
    /// The prompt's text, for `echo`.
    pub echo: bool,
    /// Limits, with `max_tokens` filled in and clamped to the context of each prompt.
    pub limits: Vec<Limits>,
    /// Sampling of each choice.
    pub sampling: Vec<Sampling>,
    /// Stop strings.
    pub stop: Vec<String>,
    /// The stop string is part of the text.
    pub include_stop_str_in_output: bool,
    /// Answer as server-sent events.
    pub stream: bool,
    /// A last chunk with the usage.
    pub include_usage: bool,
    /// The usage in every chunk.
    pub continuous_usage_stats: bool,
    /// Report ids of prompt and output.
    pub return_token_ids: bool,
    /// Report log probabilities.
    pub logprobs: bool,
    /// Log probabilities name tokens `token_id:<id>`.
    pub return_tokens_as_token_ids: bool,
    /// What the client wants the id of the answer to be.
    pub request_id: Option<String>,
}

/// A request that was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Rejection {
    /// HTTP status.
    pub status: u16,
    /// What is wrong.
    pub message: String,
    /// The field that it is about.
    pub param: Option<&'static str>,
}

impl Rejection {
    fn bad_request(param: Option<&'static str>, message: impl Into<String>) -> Self {
        Self { status: 400, message: message.into(), param }
    }
}

/// Fields of the body as clients send them; whatever else is there is ignored.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Body {
    model: Option<String>,
    prompt: Option<Prompt>,
    messages: Option<Vec<RawMessage>>,
    max_tokens: Option<i64>,
    max_completion_tokens: Option<i64>,
    min_tokens: Option<u32>,
    ignore_eos: Option<bool>,
    stop: Option<OneOrMany>,
    stop_token_ids: Option<Vec<TokenId>>,
    include_stop_str_in_output: Option<bool>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    return_token_ids: Option<bool>,
    return_tokens_as_token_ids: Option<bool>,
    echo: Option<bool>,
    n: Option<u32>,
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
    kv_transfer_params: Option<KvTransferParams>,
    request_id: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Prompt {
    Text(String),
    Ids(Vec<TokenId>),
    Texts(Vec<String>),
    Batch(Vec<Vec<TokenId>>),
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct StreamOptions {
    include_usage: Option<bool>,
    continuous_usage_stats: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct KvTransferParams {
    prompt_token_ids: Option<Vec<TokenId>>,
}

#[derive(Debug, Deserialize)]
struct RawMessage {
    role: String,
    content: Option<Content>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Debug, Deserialize)]
struct Part {
    #[serde(default)]
    text: String,
}

impl Request {
    /// Reads `body`, which was sent to `endpoint` of a server that speaks `dialect`.
    ///
    /// # Errors
    ///
    /// A [`Rejection`] with vLLM's status, and with its words where they were measured.
    pub fn parse(endpoint: Endpoint, body: &Value, dialect: &Dialect) -> Result<Self, Rejection> {
        let sampling = Sampling::of(body);
        let logprobs = !matches!(body["logprobs"], Value::Null | Value::Bool(false));
        let body = Body::deserialize(body).map_err(|error| Rejection::bad_request(None, error.to_string()))?;

        if let Some(model) = body.model.as_ref().filter(|model| **model != dialect.model) {
            return Err(unknown_model(model, dialect));
        }
        let n = body.n.unwrap_or(1);
        if n == 0 {
            return Err(Rejection::bad_request(Some("n"), "n must be at least 1, got 0."));
        }
        if n > 1 && dialect.frontend == Frontend::Rust {
            return Err(Rejection::bad_request(Some("n"), "Only n=1 is supported."));
        }

        let prompts = match endpoint {
            Endpoint::Completions => completion_prompts(&body, dialect)?,
            Endpoint::Chat => vec![chat_prompt(&body, dialect)?],
        };
        let limits =
            prompts.iter().map(|prompt| limits(endpoint, &body, prompt, dialect)).collect::<Result<Vec<_>, _>>()?;
        let copies = |index: usize| std::iter::repeat_n(index, n as usize);
        let order: Vec<usize> = (0..prompts.len()).flat_map(copies).collect();

        let stop = match body.stop {
            None => Vec::new(),
            Some(OneOrMany::One(stop)) => vec![stop],
            Some(OneOrMany::Many(stops)) => stops,
        };
        let stream_options = body.stream_options.unwrap_or_default();
        let include_usage = stream_options.include_usage.unwrap_or(false);
        Ok(Self {
            endpoint,
            sampling: (0..order.len() as u32).map(|index| sampling.choice(index % n)).collect(),
            limits: order.iter().map(|&index| limits[index].clone()).collect(),
            prompts: order.iter().map(|&index| prompts[index].clone()).collect(),
            echo: body.echo.unwrap_or(false) && endpoint == Endpoint::Completions,
            stop,
            include_stop_str_in_output: body.include_stop_str_in_output.unwrap_or(false),
            stream: body.stream.unwrap_or(false),
            include_usage,
            continuous_usage_stats: include_usage && stream_options.continuous_usage_stats.unwrap_or(false),
            return_token_ids: body.return_token_ids.unwrap_or(false),
            logprobs,
            return_tokens_as_token_ids: body.return_tokens_as_token_ids.unwrap_or(false),
            request_id: body.request_id,
        })
    }
}

fn unknown_model(model: &str, dialect: &Dialect) -> Rejection {
    let aliases = match dialect.frontend {
        Frontend::Python => format!(" Valid aliases: {}.", dialect.model),
        Frontend::Rust => String::new(),
    };
    Rejection { status: 404, message: format!("The model `{model}` does not exist.{aliases}"), param: Some("model") }
}

fn completion_prompts(body: &Body, dialect: &Dialect) -> Result<Vec<Vec<TokenId>>, Rejection> {
    let prompts = match &body.prompt {
        None => {
            return Err(Rejection::bad_request(
                Some("prompt"),
                "Either prompt or prompt_embeds must be provided and non-empty.",
            ));
        }
        Some(Prompt::Text(text)) => vec![encode(text)],
        Some(Prompt::Ids(ids)) => vec![ids.clone()],
        Some(Prompt::Texts(_) | Prompt::Batch(_)) if dialect.frontend == Frontend::Rust => {
            return Err(Rejection::bad_request(
                None,
                "Failed to deserialize the JSON body into the target type: prompt: data did not \
                 match any variant of untagged enum Prompt",
            ));
        }
        Some(Prompt::Texts(texts)) => texts.iter().map(|text| encode(text)).collect(),
        Some(Prompt::Batch(batch)) => batch.clone(),
    };
    for prompt in &prompts {
        check_ids(prompt)?;
    }
    Ok(prompts)
}

fn chat_prompt(body: &Body, dialect: &Dialect) -> Result<Vec<TokenId>, Rejection> {
    let Some(messages) = body.messages.as_ref().filter(|list| !list.is_empty()) else {
        return Err(Rejection::bad_request(Some("messages"), "messages must be a list of at least one message"));
    };
    // The ids of a chat's continuation: the messages are then not looked at, unless
    // `echo` asks for their text. The Rust frontend ignores them (measured on 0.32.0).
    let carried = body.kv_transfer_params.as_ref();
    if let Some(ids) = carried.and_then(|params| params.prompt_token_ids.as_ref())
        && !body.echo.unwrap_or(false)
        && dialect.frontend == Frontend::Python
    {
        check_ids(ids)?;
        return Ok(ids.clone());
    }
    let continued = body.continue_final_message.unwrap_or(false);
    if continued && body.add_generation_prompt.unwrap_or(true) && dialect.frontend == Frontend::Python {
        return Err(Rejection::bad_request(
            Some("continue_final_message"),
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
        ));
    }
    let turn = match (continued, body.add_generation_prompt.unwrap_or(true)) {
        (true, _) => Turn::Continued,
        (false, true) => Turn::New,
        (false, false) => Turn::Closed,
    };
    let messages: Vec<Message> = messages
        .iter()
        .map(|message| Message {
            role: message.role.clone(),
            content: match &message.content {
                None => String::new(),
                Some(Content::Text(text)) => text.clone(),
                Some(Content::Parts(parts)) => parts.iter().map(|part| part.text.as_str()).collect(),
            },
        })
        .collect();
    Ok(render(&messages, turn))
}

fn check_ids(ids: &[TokenId]) -> Result<(), Rejection> {
    match ids.iter().find(|&&id| id >= VOCABULARY_SIZE) {
        None => Ok(()),
        Some(id) => Err(Rejection::bad_request(None, format!("Token id {id} is out of vocabulary"))),
    }
}

fn limits(endpoint: Endpoint, body: &Body, prompt: &[TokenId], dialect: &Dialect) -> Result<Limits, Rejection> {
    let length = prompt.len() as u32;
    if length == 0 {
        return Err(Rejection::bad_request(None, "The decoder prompt cannot be empty"));
    }
    if length >= dialect.max_model_len {
        return Err(Rejection::bad_request(
            None,
            format!(
                "This model's maximum context length is {} tokens. However, your request has \
                 {length} input tokens. Please reduce the length of the input messages.",
                dialect.max_model_len
            ),
        ));
    }
    let asked = match endpoint {
        Endpoint::Completions => Some(body.max_tokens.unwrap_or(16)),
        Endpoint::Chat => body.max_completion_tokens.or(body.max_tokens),
    };
    let room = dialect.max_model_len - length;
    let max_tokens = match asked {
        None => room,
        // An echo of the prompt alone. Python samples one token all the same.
        Some(0) if body.echo.unwrap_or(false) => match dialect.frontend {
            Frontend::Python => 1,
            Frontend::Rust => 0,
        },
        Some(asked) if asked < 1 => {
            return Err(Rejection::bad_request(
                Some("max_tokens"),
                format!("max_tokens must be at least 1, got {asked}."),
            ));
        }
        Some(asked) => u32::try_from(asked).unwrap_or(u32::MAX).min(room),
    };
    let min_tokens = body.min_tokens.unwrap_or(0);
    if min_tokens > max_tokens && max_tokens > 0 {
        return Err(Rejection::bad_request(
            Some("min_tokens"),
            format!("min_tokens must be less than or equal to max_tokens={max_tokens}, got {min_tokens}."),
        ));
    }
    Ok(Limits {
        max_tokens,
        min_tokens,
        ignore_eos: body.ignore_eos.unwrap_or(false),
        stop_token_ids: body.stop_token_ids.clone().unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn dialect(frontend: Frontend) -> Dialect {
        Dialect { frontend, model: "tiny".to_owned(), max_model_len: 64 }
    }

    fn python(endpoint: Endpoint, body: Value) -> Result<Request, Rejection> {
        Request::parse(endpoint, &body, &dialect(Frontend::Python))
    }

    fn refusal(endpoint: Endpoint, body: Value) -> (u16, String) {
        let rejection = python(endpoint, body).unwrap_err();
        (rejection.status, rejection.message)
    }

    #[test]
    fn an_unset_budget_is_16_for_completions_and_the_rest_of_the_context_for_a_chat() {
        let completion = python(Endpoint::Completions, json!({"prompt": "Hi"})).unwrap();
        assert_eq!(completion.limits[0].max_tokens, 16);
        let chat = json!({"messages": [{"role": "user", "content": "Hi"}]});
        let chat = python(Endpoint::Chat, chat).unwrap();
        assert_eq!(chat.limits[0].max_tokens, 64 - chat.prompts[0].len() as u32);
    }

    #[test]
    fn a_budget_beyond_the_context_is_clamped_and_a_full_context_refused() {
        let clamped = json!({"prompt": vec![72; 60], "max_tokens": 100});
        let clamped = python(Endpoint::Completions, clamped).unwrap();
        assert_eq!(clamped.limits[0].max_tokens, 4);
        let (status, _) = refusal(Endpoint::Completions, json!({"prompt": vec![72; 64]}));
        assert_eq!(status, 400);
    }

    #[test]
    fn what_a_continuation_can_get_wrong_is_refused() {
        for (body, message) in [
            (json!({"prompt": "Hi", "max_tokens": 0}), "max_tokens must be at least 1, got 0."),
            (json!({"prompt": [5000]}), "Token id 5000 is out of vocabulary"),
            (
                json!({"prompt": "Hi", "max_tokens": 4, "min_tokens": 5}),
                "min_tokens must be less than or equal to max_tokens=4, got 5.",
            ),
        ] {
            assert_eq!(refusal(Endpoint::Completions, body), (400, message.to_owned()));
        }
    }

    #[test]
    fn a_chat_is_continued_by_ids_or_by_both_template_switches() {
        let messages = json!([
            {"role": "user", "content": "count"},
            {"role": "assistant", "content": [{"type": "text", "text": "one"}]}
        ]);
        let carried = json!({
            "messages": messages, "kv_transfer_params": {"prompt_token_ids": [1, 2, 3]}
        });
        let carried = python(Endpoint::Chat, carried).unwrap();
        assert_eq!(carried.prompts, [[1, 2, 3]]);

        let alone = json!({"messages": messages, "continue_final_message": true});
        assert_eq!(refusal(Endpoint::Chat, alone.clone()).0, 400);
        let rust = Request::parse(Endpoint::Chat, &alone, &dialect(Frontend::Rust)).unwrap();
        let both = json!({
            "messages": messages, "continue_final_message": true, "add_generation_prompt": false
        });
        let python = python(Endpoint::Chat, both).unwrap();
        assert_eq!(python.prompts, rust.prompts);
        assert!(python.prompts[0].ends_with(&encode("one")));
    }

    #[test]
    fn choices_are_prompts_times_n() {
        let body = json!({"prompt": [[1, 2], [3]], "n": 2});
        let request = python(Endpoint::Completions, body.clone()).unwrap();
        assert_eq!(request.prompts, [vec![1, 2], vec![1, 2], vec![3], vec![3]]);
        assert_eq!(request.sampling[0], request.sampling[2]);
        assert_ne!(request.sampling[0], request.sampling[1]);
        let rust = Request::parse(Endpoint::Completions, &body, &dialect(Frontend::Rust));
        assert_eq!(rust.unwrap_err().message, "Only n=1 is supported.");
    }

    #[test]
    fn another_model_is_not_found() {
        let (status, message) = refusal(Endpoint::Completions, json!({"model": "nope", "prompt": "x"}));
        assert_eq!(status, 404);
        assert_eq!(message, "The model `nope` does not exist. Valid aliases: tiny.");
    }
}

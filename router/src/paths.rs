//! The paths that are served. The list is closed: an engine has others (`/sleep`, `/pause`, `/metrics`, whatever
//! its next version adds), and they are not for clients.
//!
//! A path is matched letter by letter and never decoded: one that needs decoding or resolving (`%2e`, `..`, `//`,
//! `\`) is not on the list. A worker is sent the list's own text and never the client's.

use axum::http::Method;

/// What is passed on to one worker, besides what [`crate::continuation::Endpoint`] names: what clients of vLLM 0.32,
/// SGLang 0.5, TensorRT-LLM and llama.cpp may ask an engine for.
pub const PASSED_ON: [&str; 22] = [
    "/v1/audio/speech",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/chat/completions/render",
    "/v1/classify",
    "/v1/completions/render",
    "/v1/detokenize",
    "/v1/embeddings",
    "/v1/images/edits",
    "/v1/images/generations",
    "/v1/images/variations",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/moderations",
    "/v1/pooling",
    "/v1/rerank",
    "/v1/reranking",
    "/v1/responses",
    "/v1/score",
    "/v1/tokenize",
    "/v1/videos",
    "/v1/videos/generations",
];

/// What changes an engine, and is sent to all of them (vLLM with `VLLM_ALLOW_RUNTIME_LORA_UPDATING`).
pub const ADMIN: [&str; 2] = ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"];

/// The path to ask every worker for, if it changes engines.
#[must_use]
pub fn admin(method: &Method, path: &str) -> Option<&'static str> {
    ADMIN.into_iter().find(|listed| *listed == path).filter(|_| *method == Method::POST)
}

/// Where an answer of `/v1/responses` is had again, and given up.
const RESPONSES: &str = "/v1/responses/";
/// Longest id of an answer. vLLM's has 37 bytes, OpenAI's 53.
const LONGEST_ID: usize = 128;

/// The path to ask a worker for, if it is on the list with this method.
#[must_use]
pub fn passed_on(method: &Method, path: &str) -> Option<String> {
    if *method == Method::POST
        && let Some(path) = PASSED_ON.iter().find(|listed| **listed == path)
    {
        return Some((*path).to_owned());
    }
    let of_a_response = path.strip_prefix(RESPONSES)?;
    let (id, rest) = match (method, of_a_response.strip_suffix("/cancel")) {
        (&Method::POST, Some(id)) => (id, "/cancel"),
        (&Method::GET | &Method::DELETE, None) => (of_a_response, ""),
        _ => return None,
    };
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    (!id.is_empty() && id.len() <= LONGEST_ID && id.bytes().all(plain)).then(|| format!("{RESPONSES}{id}{rest}"))
}

//! The mock's answers beside those of a real vLLM.

use std::collections::BTreeSet;
use std::path::PathBuf;

use lastgasp_tests::model::{Dialect, Generation};
use lastgasp_tests::shape::shapes;

use super::*;

fn transcript(frontend: Frontend, name: &str) -> (Endpoint, Value, String) {
    let folder = match frontend {
        Frontend::Python => "python",
        Frontend::Rust => "rust",
    };
    let base: PathBuf = [env!("CARGO_MANIFEST_DIR"), "fixtures", "vllm-0.32", folder, name].iter().collect();
    let read = |extension: &str| {
        let path = base.with_extension(extension);
        std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path:?}: {error}"))
    };
    let request: Value = serde_json::from_str(&read("req.json")).unwrap();
    let endpoint = if request["path"] == Endpoint::Chat.path() { Endpoint::Chat } else { Endpoint::Completions };
    (endpoint, request["body"].clone(), read("sse"))
}

/// The mock's answer to `body`, as the body of the HTTP response.
fn mock(frontend: Frontend, endpoint: Endpoint, body: &Value) -> String {
    let dialect = Dialect { frontend, model: "tiny".to_owned(), max_model_len: 2048 };
    let request = Arc::new(Request::parse(endpoint, body, &dialect).unwrap());
    let head = Head { id: "cmpl-1".to_owned(), created: 1, model: "tiny".to_owned() };
    let mut answer = Answer::new(frontend, head, Arc::clone(&request), 1);
    if !request.stream {
        answer.stream_interval = usize::MAX;
    }
    let mut chunks = Vec::new();
    for index in 0..request.prompts.len() {
        let mut generation =
            Generation::new(&request.prompts[index], request.sampling[index], request.limits[index].clone());
        while request.limits[index].max_tokens > 0 && !answer.is_finished(index) {
            let (id, finish) = generation.step();
            chunks.extend(answer.push(index, id, finish));
        }
    }
    chunks.extend(answer.end_empty());
    if !request.stream {
        return answer.unary().to_string();
    }
    chunks.extend(answer.usage_chunk());
    chunks.iter().map(event).collect::<String>() + DONE
}

fn assert_same_shapes(frontend: Frontend, name: &str) {
    let (endpoint, body, real) = transcript(frontend, name);
    let mock = mock(frontend, endpoint, &body);
    assert_eq!(shapes(&mock), shapes(&real), "{frontend:?} {name}\nmock:\n{mock}\nreal:\n{real}");
}

const ALIKE: [&str; 11] = [
    "c_ids",
    "c_plain",
    "c_ids_usage",
    "c_ids_contusage",
    "c_ids_promptids",
    "c_ids_echo",
    "c_ids_echo_mt0",
    "c_ids_logprobs",
    "c_tokens_as_ids_logprobs",
    "c_nonstream_ids",
    "h_nonstream_ids",
];

#[test]
fn python_answers_have_the_shape_of_the_real_ones() {
    for name in ALIKE.iter().chain(&["h_plain", "h_ids", "h_ids_contusage", "h_ids_echo"]) {
        assert_same_shapes(Frontend::Python, name);
    }
}

#[test]
fn rust_answers_have_the_shape_of_the_real_ones() {
    for name in ALIKE.iter().chain(&["h_plain"]) {
        assert_same_shapes(Frontend::Rust, name);
    }
}

/// Where a token without text makes a shape of its own, the order of shapes depends on the
/// tokens: here only the kinds of chunks are compared.
#[test]
fn chunks_of_tokens_without_text_are_of_the_real_kinds() {
    let kinds = |body: &str| shapes(body).into_iter().collect::<BTreeSet<_>>();
    for (frontend, name) in [
        (Frontend::Rust, "h_ids"),
        (Frontend::Rust, "h_ids_contusage"),
        (Frontend::Rust, "h_ids_logprobs"),
        (Frontend::Python, "h_ids_logprobs"),
    ] {
        let (endpoint, mut body, real) = transcript(frontend, name);
        body["max_tokens"] = json!(26);
        let mock = mock(frontend, endpoint, &body);
        assert_eq!(kinds(&mock), kinds(&real), "{frontend:?} {name}\n{mock}");
    }
}

#[test]
fn a_stop_string_ends_the_stream_in_the_real_shape() {
    for frontend in [Frontend::Python, Frontend::Rust] {
        for name in ["c_ids_stop", "c_ids_stop_incl"] {
            let (endpoint, mut body, real) = transcript(frontend, name);
            body["stop"] = json!([" the", " s", ","]);
            let mock = mock(frontend, endpoint, &body);
            assert_eq!(shapes(&mock), shapes(&real), "{frontend:?} {name}");
        }
    }
}

#[test]
fn several_choices_and_prompts_are_interleaved_chunks_of_the_same_shapes() {
    let kinds = |body: &str| shapes(body).into_iter().collect::<BTreeSet<_>>();
    for name in ["c_ids_n2", "h_ids_n2", "c_two_prompts"] {
        let (endpoint, body, real) = transcript(Frontend::Python, name);
        assert_eq!(kinds(&mock(Frontend::Python, endpoint, &body)), kinds(&real), "{name}");
    }
}

#[test]
fn an_abort_ends_every_choice_without_ids() {
    let (endpoint, body, _) = transcript(Frontend::Python, "h_ids");
    let dialect = Dialect { frontend: Frontend::Python, model: "tiny".to_owned(), max_model_len: 2048 };
    let request = Arc::new(Request::parse(endpoint, &body, &dialect).unwrap());
    let head = Head { id: "chatcmpl-1".to_owned(), created: 1, model: "tiny".to_owned() };
    let mut answer = Answer::new(Frontend::Python, head, request, 1);
    assert_eq!(answer.push(0, 256, None).len(), 2, "role and first token");
    let chunks = answer.abort();
    assert!(answer.is_complete());
    assert_eq!(chunks[0]["choices"][0]["finish_reason"], "abort");
    assert_eq!(chunks[0]["choices"][0]["token_ids"], json!([]));
    assert!(answer.push(0, 257, None).is_empty(), "too late");
}

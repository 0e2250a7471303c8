//! The rules of a continuation one by one: what the second worker is asked, what the client sees, and
//! what must not be moved. The numbers T1 to T32 are the seam traps that were measured on vLLM 0.32.
//! `docs/seams.md` says which test shows which trap, and which shows the twelve defects that were found
//! in another router.
#![forbid(unsafe_code)]

use lastgasp_router::continuation::{
    Body, Broken, Continuation, Endpoint, Engine, Exactness, Options, Outgoing, Progress, Refusal, StreamEnd, Target,
    Unmovable,
};
use serde_json::{Value, json};

/// With the Rust frontend, which takes ids on the completions endpoint only.
const VLLM: Target = target(Engine::Vllm, Some(100));
const PYTHON: Target = Target { takes_chat_ids: true, ..VLLM };
const SGLANG: Target = target(Engine::Sglang, Some(100));
const TRTLLM: Target = target(Engine::Trtllm, None);
const GENERIC: Target = target(Engine::Generic, None);

const fn target(engine: Engine, max_model_len: Option<u64>) -> Target {
    Target { engine, max_model_len, takes_chat_ids: false }
}

/// A request for a worker, its body read.
struct Sent {
    endpoint: Endpoint,
    body: Value,
    exactness: Exactness,
    as_it_came: bool,
}

impl From<Outgoing> for Sent {
    fn from(Outgoing { endpoint, body, exactness, as_it_came, .. }: Outgoing) -> Self {
        Self { endpoint, body: serde_json::from_slice(&body).unwrap(), exactness, as_it_came }
    }
}

/// A stream under test.
struct Stream {
    stream: Continuation,
    first: Sent,
    client: Vec<u8>,
}

impl Stream {
    fn with(endpoint: Endpoint, body: Value, target: Target, options: Options) -> Self {
        let mut stream = Continuation::new(endpoint, Body::read(body.to_string().into()).unwrap(), options);
        let first = stream.resend(target).unwrap().into();
        Self { stream, first, client: Vec::new() }
    }

    fn completions(body: Value) -> Self {
        Self::with(Endpoint::Completions, body, VLLM, Options { migrate: true, ..Options::default() })
    }

    fn chat(body: Value) -> Self {
        Self::with(Endpoint::Chat, body, VLLM, Options { migrate: true, ..Options::default() })
    }

    fn feed(&mut self, chunk: Value) -> Progress {
        self.stream.feed(format!("data: {chunk}\n\n").as_bytes(), &mut self.client)
    }

    fn says(&mut self, text: &str, ids: &[u32]) {
        let chunk = match self.first.endpoint {
            Endpoint::Completions => {
                json!({ "id": "a", "created": 1, "model": "m", "choices": [{ "index": 0, "text": text, "token_ids": ids }] })
            }
            Endpoint::Chat => {
                json!({ "id": "a", "created": 1, "model": "m", "choices": [{ "index": 0, "delta": { "content": text }, "token_ids": ids }] })
            }
        };
        assert_eq!(self.feed(chunk), Progress::Going);
    }

    /// The first chunk, with the prompt's ids.
    fn begins(&mut self, prompt: &[u32]) {
        let chunk = match self.first.endpoint {
            Endpoint::Completions => {
                json!({ "id": "a", "created": 1, "model": "m", "choices": [{ "index": 0, "text": "", "token_ids": [], "prompt_token_ids": prompt }] })
            }
            Endpoint::Chat => {
                json!({ "id": "a", "created": 1, "model": "m", "prompt_token_ids": prompt, "choices": [{ "index": 0, "delta": { "role": "assistant", "content": "" } }] })
            }
        };
        assert_eq!(self.feed(chunk), Progress::Going);
    }

    fn moves_to(&mut self, target: Target) -> Sent {
        assert_eq!(self.stream.worker_failed(&mut self.client), StreamEnd::Move);
        self.stream.resend(target).unwrap().into()
    }

    fn refuses(&mut self, target: Target) -> Unmovable {
        match self.stream.worker_failed(&mut self.client) {
            StreamEnd::Unmovable(reason) => reason,
            StreamEnd::Move => match self.stream.resend(target) {
                Err(Refusal::Unmovable(reason)) => reason,
                other => panic!("{other:?}"),
            },
            other => panic!("{other:?}"),
        }
    }

    fn finishes(&mut self) -> (String, Value) {
        assert_eq!(self.stream.worker_failed(&mut self.client), StreamEnd::Finished);
        let last = self.chunks().into_iter().rfind(|chunk| chunk["choices"][0]["finish_reason"].is_string()).unwrap();
        let choice = &last["choices"][0];
        (choice["finish_reason"].as_str().unwrap().to_owned(), choice["stop_reason"].clone())
    }

    fn sent(&self) -> String {
        String::from_utf8(self.client.clone()).unwrap()
    }

    fn chunks(&self) -> Vec<Value> {
        let sent = self.sent();
        sent.split("\n\n").filter_map(|event| serde_json::from_str(event.strip_prefix("data: ")?).ok()).collect()
    }

    fn text(&self) -> String {
        let text = |chunk: &Value| {
            let choice = &chunk["choices"][0];
            choice["text"].as_str().or(choice["delta"]["content"].as_str()).unwrap_or_default().to_owned()
        };
        self.chunks().iter().map(text).collect()
    }
}

fn prompt(extra: Value) -> Value {
    let mut body = json!({ "model": "m", "prompt": "Hi", "stream": true });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn messages(extra: Value) -> Value {
    let mut body = json!({ "model": "m", "messages": [{ "role": "user", "content": "Hi" }], "stream": true });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

// --- what is asked of the first worker ---

#[test]
fn ids_are_asked_for_only_where_they_are_known_to_be_accepted() {
    let migrate = Options { migrate: true, ..Options::default() };
    for (endpoint, body, target, asked) in [
        (Endpoint::Completions, prompt(json!({})), VLLM, true),
        (Endpoint::Chat, messages(json!({})), VLLM, true),
        (Endpoint::Completions, prompt(json!({})), SGLANG, true),
        (Endpoint::Chat, messages(json!({})), SGLANG, false),
        (Endpoint::Completions, prompt(json!({})), TRTLLM, false),
        (Endpoint::Chat, messages(json!({})), GENERIC, false),
    ] {
        let stream = Stream::with(endpoint, body, target, migrate.clone());
        assert_eq!(stream.first.body.get("return_token_ids").is_some(), asked, "{endpoint:?} {target:?}");
    }
}

#[test]
fn with_migration_off_and_for_what_is_never_moved_nothing_is_added() {
    let off = Stream::with(Endpoint::Completions, prompt(json!({ "stop": "x" })), VLLM, Options::default());
    assert!(off.first.as_it_came);
    assert_eq!(off.first.body, prompt(json!({ "stop": "x" })));
    let guided = Stream::completions(prompt(json!({ "guided_json": {}, "stop": "x" })));
    assert!(guided.first.as_it_came);
    assert_eq!(guided.first.body["stop"], "x");
}

#[test]
fn ids_are_not_asked_for_where_that_would_take_the_echo_away() {
    let stream = Stream::completions(prompt(json!({ "echo": true })));
    assert!(stream.first.body.get("return_token_ids").is_none());
}

// --- budgets: T3, T20, T21, T22, T29 ---

#[test]
fn an_unset_budget_of_a_completion_is_the_endpoints_default() {
    let mut stream = Stream::completions(prompt(json!({})));
    stream.begins(&[1, 2]);
    stream.says("a", &[11]);
    stream.says("b", &[12]);
    assert_eq!(stream.moves_to(VLLM).body["max_tokens"], 14);
}

#[test]
fn an_unset_budget_of_a_chat_is_the_rest_of_the_context() {
    let mut stream = Stream::chat(messages(json!({})));
    stream.begins(&[1, 2]);
    stream.says("a", &[11]);
    let outgoing = stream.moves_to(VLLM);
    assert_eq!((outgoing.endpoint, &outgoing.body["max_tokens"]), (Endpoint::Completions, &json!(97)));
    assert_eq!(outgoing.body.get("messages"), None);
}

#[test]
fn where_the_context_is_not_known_a_chat_continues_on_its_own_endpoint_by_ids() {
    let mut stream = Stream::chat(messages(json!({ "kv_transfer_params": { "x": 1 } })));
    stream.begins(&[1, 2]);
    stream.says("a", &[11]);
    let outgoing = stream.moves_to(Target { max_model_len: None, ..PYTHON });
    assert_eq!((outgoing.endpoint, outgoing.exactness), (Endpoint::Chat, Exactness::Exact));
    assert_eq!(outgoing.body["kv_transfer_params"], json!({ "x": 1, "prompt_token_ids": [1, 2, 11] }));
    assert_eq!(outgoing.body.get("max_tokens"), None);
}

#[test]
fn every_budget_is_reduced_and_never_below_one() {
    let mut stream = Stream::chat(messages(json!({ "max_completion_tokens": 9, "max_tokens": 7, "min_tokens": 1 })));
    stream.begins(&[1]);
    stream.says("a", &[11]);
    stream.says("b", &[12, 13]);
    let outgoing = stream.moves_to(VLLM);
    // vLLM gives the newer name precedence.
    assert_eq!((&outgoing.body["max_tokens"], &outgoing.body["min_tokens"]), (&json!(6), &json!(0)));
    assert_eq!(outgoing.body.get("max_completion_tokens"), None);
}

#[test]
fn no_more_is_asked_for_than_the_next_workers_context_holds() {
    let mut stream = Stream::completions(prompt(json!({ "max_tokens": 500 })));
    stream.begins(&[1, 2]);
    stream.says("a", &[11]);
    assert_eq!(stream.moves_to(VLLM).body["max_tokens"], 97);
}

#[test]
fn a_smaller_context_lowers_the_minimum_with_the_maximum() {
    let mut stream = Stream::completions(prompt(json!({ "max_tokens": 500, "min_tokens": 400 })));
    stream.begins(&[1, 2]);
    stream.says("a", &[11]);
    let body = stream.moves_to(VLLM).body;
    assert_eq!((&body["max_tokens"], &body["min_tokens"]), (&json!(97), &json!(97)));
}

#[test]
fn a_full_context_ends_the_answer_instead_of_asking_for_it() {
    let mut stream = Stream::completions(prompt(json!({ "max_tokens": 500 })));
    stream.begins(&[7; 98]);
    stream.says("a", &[11]);
    stream.says("b", &[12]);
    assert_eq!(stream.stream.worker_failed(&mut stream.client), StreamEnd::Move);
    assert_eq!(stream.stream.resend(VLLM), Err(Refusal::ContextFull));
    stream.stream.finish_full(&mut stream.client);
    assert!(stream.sent().ends_with("data: [DONE]\n\n") && stream.sent().contains(r#""finish_reason":"length""#));
}

#[test]
fn an_id_that_ends_the_sequence_ends_the_answer_here() {
    let mut stream = Stream::completions(prompt(json!({ "stop_token_ids": [99], "max_tokens": 50 })));
    stream.begins(&[1]);
    stream.says("a", &[11]);
    stream.says("", &[99]);
    assert_eq!(stream.finishes(), ("stop".into(), json!(99)));

    let options = Options { migrate: true, eos_token_ids: vec![2], ..Options::default() };
    let mut stream = Stream::with(Endpoint::Completions, prompt(json!({ "max_tokens": 50 })), VLLM, options);
    stream.begins(&[1]);
    stream.says("a", &[11, 2]);
    assert_eq!(stream.finishes(), ("stop".into(), Value::Null));
}

#[test]
fn an_eos_that_the_client_ignores_is_carried_like_any_id() {
    let options = Options { migrate: true, eos_token_ids: vec![2], ..Options::default() };
    let body = prompt(json!({ "max_tokens": 50, "ignore_eos": true }));
    let mut stream = Stream::with(Endpoint::Completions, body, VLLM, options);
    stream.begins(&[1]);
    stream.says("a", &[11, 2]);
    assert_eq!(stream.moves_to(VLLM).body["prompt"], json!([1, 11, 2]));
}

// --- what a continuation drops and keeps: T1, T4 to T6, T23, T28, T31 ---

#[test]
fn what_would_begin_again_or_be_said_twice_is_dropped_and_the_rest_is_kept() {
    let mut stream = Stream::completions(prompt(json!({
        "seed": 7, "prompt_logprobs": 1, "truncate_prompt_tokens": 5, "logit_bias": { "5": 1 },
        "bad_words": ["x"], "cache_salt": "s", "priority": 3, "user": "u",
    })));
    stream.begins(&[1]);
    stream.says("a", &[11]);
    let body = stream.moves_to(VLLM).body;
    for gone in ["seed", "prompt_logprobs", "truncate_prompt_tokens", "echo"] {
        assert_eq!(body.get(gone), None, "{gone}");
    }
    for kept in ["logit_bias", "bad_words", "cache_salt", "priority", "user"] {
        assert!(body.get(kept).is_some(), "{kept}");
    }
}

#[test]
fn penalties_are_neither_lost_nor_changed() {
    let penalties = json!({ "presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5 });
    let mut stream = Stream::completions(prompt(penalties.clone()));
    stream.begins(&[1]);
    stream.says("a", &[11]);
    let body = stream.moves_to(VLLM).body;
    for (key, value) in penalties.as_object().unwrap() {
        assert_eq!(&body[key], value, "{key}");
    }
}

// --- ids, wherever they stand ---

#[test]
fn ids_are_read_wherever_engines_put_them() {
    for (first, next) in [
        (
            json!({ "sglext": { "prompt_token_ids": [1, 2], "token_ids": [11] } }),
            json!({ "sglext": { "token_ids": [12] } }),
        ),
        (
            json!({ "sglext": { "prompt_token_ids": [1, 2], "completion_token_ids": [[11]] } }),
            json!({ "sglext": { "completion_token_ids": [[12]] } }),
        ),
    ] {
        let mut stream = Stream::completions(prompt(json!({})));
        for (text, extra) in [("a", first), ("b", next)] {
            let mut chunk = json!({ "id": "a", "choices": [{ "index": 0, "text": text }] });
            chunk.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            stream.feed(chunk);
        }
        assert!(!stream.sent().contains("token_ids") && !stream.sent().contains("sglext"), "{}", stream.sent());
        assert_eq!(stream.moves_to(SGLANG).body["prompt"], json!([1, 2, 11, 12]));
    }
}

#[test]
fn a_list_with_anything_but_ids_is_refused_whole_and_the_stream_is_not_exact_again() {
    for bad in [json!([11, -1]), json!([11, "12"]), json!([1.5]), json!("11"), json!([[11]])] {
        let mut stream = Stream::completions(prompt(json!({})));
        stream.begins(&[1]);
        stream.feed(json!({ "id": "a", "choices": [{ "index": 0, "text": "x", "token_ids": bad }] }));
        stream.says("y", &[12]);
        let outgoing = stream.moves_to(VLLM);
        assert_eq!((outgoing.exactness, &outgoing.body["prompt"]), (Exactness::Approximate, &json!("Hixy")));
    }
}

#[test]
fn ids_stay_for_a_client_that_asked_and_are_taken_out_for_all_others_also_when_unmovable() {
    let mut asked = Stream::completions(prompt(json!({ "return_token_ids": true })));
    asked.begins(&[1]);
    asked.says("a", &[11]);
    assert!(asked.sent().contains(r#""token_ids":[11]"#) && asked.sent().contains("prompt_token_ids"));

    let mut other = Stream::completions(prompt(json!({})));
    other.begins(&[1]);
    other.feed(json!({ "id": "a", "choices": [{ "index": 0, "text": "a", "token_ids": [11] }, { "index": 1, "text": "b", "token_ids": [12] }] }));
    assert_eq!(other.refuses(VLLM), Unmovable::SeveralChoices);
    assert!(!other.sent().contains("token_ids"));
}

#[test]
fn ids_are_carried_up_to_the_last_text_that_was_whole() {
    let mut stream = Stream::completions(prompt(json!({ "max_tokens": 9 })));
    stream.begins(&[1]);
    stream.says("a", &[11]);
    stream.says("", &[228]);
    stream.says("", &[189]);
    let body = stream.moves_to(VLLM).body;
    assert_eq!((&body["prompt"], &body["max_tokens"]), (&json!([1, 11]), &json!(8)));
}

#[test]
fn a_prompt_that_leaks_through_a_seam_inside_a_character_is_cut_off() {
    // T10: two tokens in a chunk, the second only half a character.
    let mut stream = Stream::completions(prompt(json!({ "max_tokens": 9 })));
    stream.begins(&[1]);
    stream.says(" three", &[11, 228]);
    stream.moves_to(VLLM);
    stream.says("Hi three\u{4f60}", &[189]);
    assert_eq!(stream.text(), " three\u{4f60}");
}

// --- the second and the third move ---

#[test]
fn later_moves_are_as_exact_as_the_first() {
    let mut stream = Stream::chat(messages(json!({ "max_tokens": 50 })));
    stream.begins(&[1, 2]);
    stream.says("a", &[11]);
    for (n, text) in [(12, "b"), (13, "c"), (14, "d")] {
        let outgoing = stream.moves_to(VLLM);
        assert_eq!(outgoing.endpoint, Endpoint::Completions);
        let ids: Vec<u32> = [1, 2].into_iter().chain(11..n).collect();
        assert_eq!(outgoing.body["prompt"], json!(ids));
        stream.feed(json!({ "id": "z", "object": "text_completion", "created": 9, "model": "m", "system_fingerprint": "f", "choices": [{ "index": 0, "text": text, "token_ids": [n] }] }));
    }
    assert_eq!(stream.text(), "abcd");
    assert!(stream.chunks().iter().all(|chunk| chunk["id"] == "a" && chunk["created"] == 1));
    assert!(stream.chunks().iter().skip(2).all(|chunk| chunk["object"] == "chat.completion.chunk"));
}

// --- seams that must not show: T15 to T18 ---

#[test]
fn offsets_of_logprobs_go_on() {
    let mut stream = Stream::completions(prompt(json!({ "logprobs": 1 })));
    let chunk = |id: u32, text: &str, offset: u64| {
        json!({ "id": "a", "choices": [{ "index": 0, "text": text, "token_ids": [id], "prompt_token_ids": [1],
            "logprobs": { "text_offset": [offset], "tokens": [text], "token_logprobs": [-1.0] } }] })
    };
    stream.feed(chunk(11, "is", 0));
    stream.feed(chunk(12, " it", 2));
    stream.moves_to(VLLM);
    stream.feed(chunk(13, "!", 0));
    stream.feed(chunk(14, "?", 1));
    let offsets: Vec<Value> =
        stream.chunks().iter().map(|chunk| chunk["choices"][0]["logprobs"]["text_offset"][0].clone()).collect();
    assert_eq!(offsets, [0, 2, 5, 6]);
}

#[test]
fn running_usage_counts_the_prompt_once() {
    let usage = json!({ "include_usage": true, "continuous_usage_stats": true });
    let mut stream = Stream::completions(prompt(json!({ "stream_options": usage })));
    let chunk = |id: u32, prompt: u64, completion: u64| {
        json!({ "id": "a", "choices": [{ "index": 0, "text": "x", "token_ids": [id], "prompt_token_ids": [1, 2] }],
            "usage": { "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
                "prompt_tokens_details": { "cached_tokens": 2 } } })
    };
    stream.feed(chunk(11, 2, 1));
    stream.moves_to(VLLM);
    stream.feed(chunk(12, 3, 1));
    assert_eq!(stream.chunks()[1]["usage"], json!({ "prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4 }));
}

#[test]
fn model_and_fingerprint_stay_those_of_the_first_worker() {
    let mut stream = Stream::completions(prompt(json!({})));
    for (worker, id) in [("first", 11), ("second", 12)] {
        if worker == "second" {
            stream.moves_to(VLLM);
        }
        stream.feed(json!({ "id": worker, "model": worker, "system_fingerprint": worker,
            "choices": [{ "index": 0, "text": "x", "token_ids": [id], "prompt_token_ids": [1] }] }));
    }
    assert_eq!(stream.text(), "xx");
    for chunk in stream.chunks() {
        assert_eq!([&chunk["id"], &chunk["model"], &chunk["system_fingerprint"]], ["first"; 3]);
    }
}

#[test]
fn a_moved_chat_has_one_role_and_no_empty_chunks() {
    let mut stream = Stream::chat(messages(json!({ "logprobs": true, "max_tokens": 50 })));
    stream.begins(&[1]);
    stream.says("a", &[11]);
    // Chat logprobs exist only on the chat endpoint.
    assert_eq!(stream.moves_to(VLLM).endpoint, Endpoint::Chat);
    stream.begins(&[1, 11]);
    stream.says("b", &[12]);
    assert_eq!(stream.sent().matches("role").count(), 1);
    assert_eq!(stream.chunks().len(), 3);
}

// --- stop strings: T7, T8 ---

#[test]
fn a_stop_string_across_the_seam_is_found_and_reported() {
    let usage = json!({ "include_usage": true });
    let mut stream = Stream::completions(prompt(json!({ "stop": ["or h"], "stream_options": usage })));
    assert_eq!(stream.first.body.get("stop"), None);
    stream.begins(&[1]);
    stream.says("cor", &[11]);
    let outgoing = stream.moves_to(VLLM);
    assert_eq!((&outgoing.body["prompt"], outgoing.body.get("stop")), (&json!([1, 11]), None));
    let progress = stream.feed(json!({ "id": "z", "choices": [{ "index": 0, "text": " he", "token_ids": [12] }] }));
    assert_eq!(progress, Progress::Complete);
    assert_eq!(stream.text(), "c");
    let chunks = stream.chunks();
    let [.., last, usage] = chunks.as_slice() else { panic!() };
    assert_eq!(
        (&last["choices"][0]["finish_reason"], &last["choices"][0]["stop_reason"]),
        (&json!("stop"), &json!("or h"))
    );
    assert_eq!(usage["usage"], json!({ "prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3 }));
}

#[test]
fn text_held_for_a_stop_string_comes_with_the_end() {
    let mut stream = Stream::chat(messages(json!({ "stop": "STOP" })));
    stream.begins(&[1]);
    stream.says("a ST", &[11]);
    stream.feed(
        json!({ "id": "a", "choices": [{ "index": 0, "delta": {}, "finish_reason": "length", "token_ids": [] }] }),
    );
    assert_eq!(stream.text(), "a ST");
}

// --- what must not be moved: T14, T24, T25, T26, T27 ---

#[test]
fn what_must_not_be_moved_says_why() {
    for (extra, reason) in [
        (json!({ "best_of": 2 }), Unmovable::SeveralChoices),
        (json!({ "prompt": ["a", "b"] }), Unmovable::PromptBatch),
        (json!({ "use_beam_search": true }), Unmovable::BeamSearch),
        (json!({ "suffix": "x" }), Unmovable::Suffix),
        (json!({ "guided_choice": ["a"] }), Unmovable::GuidedDecoding),
        (json!({ "structured_outputs": {} }), Unmovable::GuidedDecoding),
        (json!({ "grammar": "x" }), Unmovable::GuidedDecoding),
        (json!({ "regex": "x" }), Unmovable::GuidedDecoding),
        (json!({ "stop_regex": "x" }), Unmovable::StopRegex),
        (json!({ "stop": vec!["x"; 1000] }), Unmovable::TooManyStops),
    ] {
        let mut stream = Stream::completions(prompt(extra));
        stream.begins(&[1]);
        stream.says("a", &[11]);
        assert_eq!(stream.refuses(VLLM), reason);
    }
}

#[test]
fn defaults_that_are_spelled_out_forbid_nothing() {
    let mut stream = Stream::chat(messages(json!({
        "n": 1, "response_format": { "type": "text" }, "tools": [], "tool_choice": "none", "stop": null, "max_tokens": 9,
    })));
    stream.begins(&[1]);
    stream.says("a", &[11]);
    assert_eq!(stream.moves_to(VLLM).exactness, Exactness::Exact);
}

#[test]
fn words_before_a_tool_call_go_by_ids_where_the_chat_endpoint_takes_them() {
    let tools = json!({ "tools": [{ "type": "function", "function": { "name": "f" } }], "max_tokens": 9 });
    let mut stream = Stream::chat(messages(tools));
    assert_eq!(stream.first.body["return_token_ids"], true);
    assert_eq!(stream.first.body["stream_options"]["continuous_usage_stats"], true);
    stream.begins(&[1]);
    stream.feed(json!({ "id": "a", "usage": { "prompt_tokens": 1, "completion_tokens": 1 },
        "choices": [{ "index": 0, "delta": { "content": "a" }, "token_ids": [11] }] }));
    let outgoing = stream.moves_to(PYTHON);
    assert_eq!((outgoing.endpoint, outgoing.exactness), (Endpoint::Chat, Exactness::Exact));
    assert_eq!(outgoing.body["kv_transfer_params"]["prompt_token_ids"], json!([1, 11]));
    assert_eq!((&outgoing.body["tools"][0]["type"], &outgoing.body["max_tokens"]), (&json!("function"), &json!(8)));
    // No chunk of a count that was not asked for.
    assert!(!stream.sent().contains("usage") && !stream.sent().contains("token_ids"), "{}", stream.sent());
}

#[test]
fn with_tools_fewer_ids_than_tokens_are_not_carried() {
    // vllm#27482.
    let tools = json!({ "tools": [{ "type": "function", "function": { "name": "f" } }] });
    let mut stream = Stream::chat(messages(tools));
    stream.begins(&[1]);
    stream.feed(json!({ "id": "a", "usage": { "prompt_tokens": 1, "completion_tokens": 2 },
        "choices": [{ "index": 0, "delta": { "content": "a" }, "token_ids": [11] }] }));
    let outgoing = stream.moves_to(PYTHON);
    assert_eq!((outgoing.endpoint, outgoing.exactness), (Endpoint::Chat, Exactness::Approximate));
}

#[test]
fn a_tool_call_is_not_moved_and_words_before_it_by_text_where_a_chat_takes_no_ids() {
    let tools = json!({ "tools": [{ "type": "function", "function": { "name": "f" } }] });
    let mut stream = Stream::chat(messages(tools));
    stream.says("a", &[]);
    let outgoing = stream.moves_to(VLLM);
    assert_eq!((outgoing.endpoint, outgoing.exactness), (Endpoint::Chat, Exactness::Approximate));
    stream.feed(
        json!({ "id": "a", "choices": [{ "index": 0, "delta": { "tool_calls": [{ "index": 0, "id": "call_1" }] } }] }),
    );
    assert_eq!(stream.refuses(PYTHON), Unmovable::ToolCalls);
}

#[test]
fn a_call_that_must_come_and_a_stop_string_beside_tools_are_left_to_the_engine() {
    for also in [json!({ "tool_choice": "required" }), json!({ "stop": "x" })] {
        let mut body = json!({ "tools": [{ "type": "function", "function": { "name": "f" } }] });
        body.as_object_mut().unwrap().extend(also.as_object().unwrap().clone());
        let stream = Stream::chat(messages(body.clone()));
        assert!(stream.first.body.get("return_token_ids").is_none());
        assert_eq!(
            (&stream.first.body["stop"], &stream.first.body["tool_choice"]),
            (&body["stop"], &body["tool_choice"])
        );
    }
}

#[test]
fn an_engine_that_ignores_a_chats_ids_is_left_before_it_says_a_word_and_asked_in_another_way() {
    for first in [
        json!({ "id": "b", "prompt_token_ids": [1], "choices": [{ "index": 0, "delta": { "role": "assistant" } }] }),
        json!({ "id": "b", "choices": [{ "index": 0, "delta": { "content": "a" }, "token_ids": [11] }] }),
    ] {
        let mut stream = Stream::chat(messages(json!({})));
        stream.begins(&[1]);
        stream.says("a", &[11]);
        let sent = stream.sent();
        assert_eq!(stream.moves_to(PYTHON).endpoint, Endpoint::Chat);
        assert_eq!(stream.feed(first), Progress::Broken(Broken::PromptIgnored));
        assert_eq!((stream.sent(), stream.stream.has_begun()), (sent, false));
        let outgoing = stream.moves_to(PYTHON);
        assert_eq!((outgoing.endpoint, &outgoing.body["prompt"]), (Endpoint::Completions, &json!([1, 11])));
    }
}

#[test]
fn reasoning_is_carried_by_ids_on_the_chat_endpoint_and_not_at_all_by_text() {
    for field in ["reasoning", "reasoning_content"] {
        let chunk =
            |ids: Value| json!({ "id": "a", "choices": [{ "index": 0, "delta": { field: "hm" }, "token_ids": ids }] });
        let mut stream = Stream::chat(messages(json!({})));
        stream.begins(&[1]);
        stream.feed(chunk(json!([11])));
        let outgoing = stream.moves_to(PYTHON);
        assert_eq!(outgoing.endpoint, Endpoint::Chat);
        assert_eq!(outgoing.body["kv_transfer_params"]["prompt_token_ids"], json!([1, 11]));

        let mut stream = Stream::chat(messages(json!({})));
        stream.begins(&[1]);
        stream.feed(chunk(Value::Null));
        assert_eq!(stream.refuses(PYTHON), Unmovable::ReasoningWithoutIds);

        let mut stream = Stream::chat(messages(json!({})));
        stream.begins(&[1]);
        stream.feed(chunk(json!([11])));
        assert_eq!(stream.refuses(VLLM), Unmovable::ReasoningWithoutIds);
    }
}

#[test]
fn media_go_with_the_messages() {
    let parts =
        json!([{ "type": "text", "text": "what is it" }, { "type": "image_url", "image_url": { "url": "data:" } }]);
    let mut stream =
        Stream::chat(json!({ "model": "m", "messages": [{ "role": "user", "content": parts }], "stream": true }));
    stream.says("a", &[]);
    let outgoing = stream.moves_to(VLLM);
    assert_eq!(outgoing.body["messages"].as_array().unwrap().len(), 2);
    assert_eq!(outgoing.body["continue_final_message"], true);
}

#[test]
fn a_chunk_that_cannot_be_read_is_passed_on_once_and_never_carried() {
    let migrate = Options { migrate: true, ..Options::default() };
    let mut stream = Stream::with(Endpoint::Completions, prompt(json!({})), GENERIC, migrate);
    stream.says("a", &[]);
    assert_eq!(stream.stream.feed(b"data: {broken\n\n", &mut stream.client), Progress::Going);
    assert!(stream.sent().ends_with("data: {broken\n\n"));
    assert_eq!(stream.refuses(GENERIC), Unmovable::UnparsableChunk);
}

// --- the text form: T11 to T13 ---

#[test]
fn a_conversation_that_ends_in_an_assistants_message_has_that_extended() {
    let body = json!({
        "model": "m", "stream": true, "continue_final_message": true, "add_generation_prompt": false,
        "messages": [{ "role": "user", "content": "Hi" }, { "role": "assistant", "content": "I say" }],
    });
    let migrate = Options { migrate: true, ..Options::default() };
    let mut stream = Stream::with(Endpoint::Chat, body, SGLANG, migrate);
    stream.says(" hello", &[]);
    let messages = stream.moves_to(SGLANG).body["messages"].clone();
    assert_eq!(messages[1], json!({ "role": "assistant", "content": "I say hello" }));
    assert_eq!(messages.as_array().unwrap().len(), 2);
}

#[test]
fn a_prompt_that_goes_by_text_is_the_clients_own_so_nothing_special_is_in_it_twice() {
    let migrate = Options { migrate: true, ..Options::default() };
    let body = prompt(json!({ "add_special_tokens": false }));
    let mut stream = Stream::with(Endpoint::Completions, body, GENERIC, migrate);
    stream.says(" hello", &[]);
    let body = stream.moves_to(GENERIC).body;
    assert_eq!((&body["prompt"], &body["add_special_tokens"]), (&json!("Hi hello"), &json!(false)));
}

#[test]
fn an_engine_that_would_begin_a_new_turn_is_not_sent_a_chat_by_text() {
    let migrate = Options { migrate: true, ..Options::default() };
    let mut stream = Stream::with(Endpoint::Chat, messages(json!({})), TRTLLM, migrate);
    stream.says("a", &[]);
    assert_eq!(stream.refuses(TRTLLM), Unmovable::ChatNotContinuable);
}

#[test]
fn where_ids_do_not_tell_the_worker_is_asked_to_count_and_the_client_does_not_see_it() {
    let migrate = Options { migrate: true, ..Options::default() };
    let mut stream = Stream::with(Endpoint::Chat, messages(json!({ "max_tokens": 50 })), SGLANG, migrate);
    assert_eq!(stream.first.body["stream_options"]["continuous_usage_stats"], true);
    stream.feed(json!({ "id": "a", "choices": [{ "index": 0, "delta": { "content": "three tokens here" } }],
        "usage": { "prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8 } }));
    assert!(!stream.sent().contains("usage"));
    assert_eq!(stream.moves_to(SGLANG).body["max_tokens"], 47);
}

// --- strict ---

#[test]
fn strict_refuses_what_is_not_exact() {
    let strict = Options { migrate: true, strict: true, ..Options::default() };
    let mut stream = Stream::with(Endpoint::Chat, messages(json!({})), SGLANG, strict.clone());
    stream.says("a", &[]);
    assert_eq!(stream.refuses(SGLANG), Unmovable::StrictText);
    for (extra, reason) in [
        (json!({ "presence_penalty": 0.5 }), Unmovable::StrictPenalties),
        (json!({ "frequency_penalty": -1 }), Unmovable::StrictPenalties),
        (json!({ "repetition_penalty": 1.1 }), Unmovable::StrictPenalties),
        (json!({ "seed": 1 }), Unmovable::StrictSeed),
    ] {
        let mut stream = Stream::with(Endpoint::Completions, prompt(extra), VLLM, strict.clone());
        stream.begins(&[1]);
        stream.says("a", &[11]);
        assert_eq!(stream.refuses(VLLM), reason);
    }
    let harmless = json!({ "presence_penalty": 0, "repetition_penalty": 1.0, "max_tokens": 9 });
    let mut stream = Stream::with(Endpoint::Completions, prompt(harmless), VLLM, strict);
    stream.begins(&[1]);
    stream.says("a", &[11]);
    assert_eq!(stream.moves_to(VLLM).exactness, Exactness::Exact);
}

// --- failures in-band ---

#[test]
fn no_failure_of_an_engine_reaches_the_client() {
    for (bytes, broken) in [
        (r#"data: {"error":{"message":"m","code":500}}"#, Broken::EngineError),
        (r#"data: {"error":"worker died"}"#, Broken::EngineError),
        (r#"data: {"object":"error","message":"m","code":503}"#, Broken::EngineError),
        ("event: error\ndata: gone", Broken::EngineError),
        (r#"data: {"choices":[{"index":0,"text":"","finish_reason":"abort"}]}"#, Broken::Aborted),
        (r#"data: {"choices":[{"index":0,"text":"","finish_reason":"cancelled"}]}"#, Broken::Aborted),
        ("data: [DONE]", Broken::DoneOnly),
    ] {
        let mut stream = Stream::completions(prompt(json!({})));
        stream.begins(&[1]);
        stream.says("a", &[11]);
        let before = stream.client.len();
        let progress = stream.stream.feed(format!("{bytes}\n\n").as_bytes(), &mut stream.client);
        assert_eq!(progress, Progress::Broken(broken));
        assert_eq!(stream.client.len(), before, "{bytes}");
    }
}

#[test]
fn the_clients_own_mistake_is_passed_on() {
    let mut stream = Stream::completions(prompt(json!({})));
    let error = r#"data: {"error":{"message":"too long","code":400}}"#;
    assert_eq!(stream.stream.feed(format!("{error}\n\n").as_bytes(), &mut stream.client), Progress::Rejected);
    assert_eq!(stream.sent(), format!("{error}\n\n"));
}

#[test]
fn after_the_finish_reason_nothing_is_a_failure() {
    for end in [
        "data: {\"error\":{\"code\":500}}\n\n",
        "data: {\"choices\":[{\"index\":0,\"text\":\"x\",\"finish_reason\":\"abort\"}]}\n\n",
    ] {
        let mut stream = Stream::completions(prompt(json!({})));
        stream.feed(
            json!({ "id": "a", "choices": [{ "index": 0, "text": "a", "finish_reason": "stop", "token_ids": [11] }] }),
        );
        let mut progress = stream.stream.feed(end.as_bytes(), &mut stream.client);
        if progress == Progress::Going {
            progress = stream.stream.ended(&mut stream.client);
        }
        assert!(matches!(progress, Progress::Complete | Progress::Broken(_)));
        if matches!(progress, Progress::Broken(_)) {
            assert_eq!(stream.stream.worker_failed(&mut stream.client), StreamEnd::Finished);
        }
        assert!(stream.sent().ends_with("data: [DONE]\n\n"));
        assert_eq!(stream.text(), "a");
    }
}

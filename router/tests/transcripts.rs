//! What a real vLLM 0.32 sent (CPU, random model, Python and Rust frontends), replayed: bytes out are
//! bytes in, but for ids that the client did not ask for. See `transcripts/`.
#![forbid(unsafe_code)]

use std::fs;
use std::path::Path;

use lastgasp_router::continuation::{Body, Continuation, Endpoint, Engine, Options, Progress, StreamEnd, Target};
use serde_json::{Map, Value};

struct Transcript {
    name: String,
    endpoint: Endpoint,
    body: Map<String, Value>,
    stream: Vec<u8>,
}

fn transcripts() -> Vec<Transcript> {
    let mut found = Vec::new();
    for frontend in ["vllm-0.32-python", "vllm-0.32-rust"] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/transcripts").join(frontend);
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|kind| kind != "sse") {
                continue;
            }
            let request: Value = serde_json::from_slice(&fs::read(path.with_extension("req.json")).unwrap()).unwrap();
            found.push(Transcript {
                name: path.display().to_string(),
                endpoint: Endpoint::of_path(request["path"].as_str().unwrap()).unwrap(),
                body: request["body"].as_object().unwrap().clone(),
                stream: fs::read(&path).unwrap(),
            });
        }
    }
    assert!(found.len() >= 30, "{} transcripts", found.len());
    found
}

fn read(body: &Map<String, Value>) -> Body {
    Body::read(serde_json::to_vec(body).unwrap().into()).unwrap()
}

fn replay(transcript: &Transcript, body: &Map<String, Value>, migrate: bool, piece: usize) -> Vec<u8> {
    let options = Options { migrate, ..Options::default() };
    let mut stream = Continuation::new(transcript.endpoint, read(body), options);
    stream.resend(Target { engine: Engine::Vllm, max_model_len: None, takes_chat_ids: false }).unwrap();
    let mut out = Vec::new();
    let mut progress = Progress::Going;
    for bytes in transcript.stream.chunks(piece) {
        if progress == Progress::Complete && migrate && body.contains_key("stop") {
            // Found here before the engine said so.
            break;
        }
        assert_eq!(progress, Progress::Going, "{}: nothing follows the end", transcript.name);
        progress = stream.feed(bytes, &mut out);
    }
    assert_eq!(progress, Progress::Complete, "{}", transcript.name);
    out
}

#[test]
fn with_migration_off_every_byte_is_passed_on() {
    for transcript in transcripts() {
        for piece in [usize::MAX, 1, 2, 3, 50, 1000] {
            let out = replay(&transcript, &transcript.body, false, piece);
            assert_eq!(out, transcript.stream, "{}, pieces of {piece}", transcript.name);
        }
    }
}

#[test]
fn with_migration_on_a_client_that_asked_for_ids_sees_every_byte() {
    for transcript in transcripts() {
        // Stop strings are matched here then, and these were held back by the engine.
        if transcript.body.contains_key("stop") || !transcript.body.contains_key("return_token_ids") {
            continue;
        }
        for piece in [usize::MAX, 1, 77] {
            let out = replay(&transcript, &transcript.body, true, piece);
            assert_eq!(out, transcript.stream, "{}, pieces of {piece}", transcript.name);
        }
    }
}

fn events(stream: &[u8]) -> Vec<Value> {
    let text = std::str::from_utf8(stream).unwrap();
    text.split("\n\n").filter_map(|event| serde_json::from_str(event.strip_prefix("data: ")?).ok()).collect()
}

#[test]
fn with_migration_on_everybody_else_sees_all_but_the_ids() {
    for transcript in transcripts() {
        let mut body = transcript.body.clone();
        let several = body.contains_key("n") || body.get("prompt").is_some_and(|prompt| prompt[0].is_array());
        // Such requests are passed on as they are, ids asked for or not.
        if body.remove("return_token_ids").is_none() || several || body.contains_key("echo") {
            continue;
        }
        let out = replay(&transcript, &body, true, 100);
        let text = String::from_utf8(out.clone()).unwrap();
        assert!(!text.contains("token_ids"), "{}", transcript.name);
        if body.contains_key("stop") {
            continue;
        }
        let mut expected = events(&transcript.stream);
        for event in &mut expected {
            event.as_object_mut().unwrap().remove("prompt_token_ids");
            for choice in event["choices"].as_array_mut().unwrap() {
                choice.as_object_mut().unwrap().retain(|key, _| !key.contains("token_ids"));
            }
        }
        assert_eq!(events(&out), expected, "{}", transcript.name);
    }
}

#[test]
fn a_death_at_any_byte_sends_no_half_event_and_carries_no_half_character() {
    for transcript in transcripts() {
        for end in (0..transcript.stream.len()).step_by(13) {
            let options = Options { migrate: true, ..Options::default() };
            let mut stream = Continuation::new(transcript.endpoint, read(&transcript.body), options);
            let target = Target { engine: Engine::Vllm, max_model_len: Some(2048), takes_chat_ids: false };
            stream.resend(target).unwrap();
            let mut out = Vec::new();
            if stream.feed(&transcript.stream[..end], &mut out) != Progress::Going {
                continue;
            }
            let sent = out.len();
            let verdict = stream.worker_failed(&mut out);
            assert!(out[..sent].is_empty() || out[..sent].ends_with(b"\n\n"), "{}", transcript.name);
            if verdict == StreamEnd::Finished {
                assert!(out.ends_with(b"data: [DONE]\n\n"), "{}", transcript.name);
                continue;
            }
            assert_eq!(out.len(), sent, "{}: nothing is sent before it is decided", transcript.name);
            if verdict == StreamEnd::Move {
                stream.resend(target).unwrap();
            }
        }
    }
}

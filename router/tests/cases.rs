//! Every case in `cases/`: one client request, what each worker tried would send, and what the client must see.
#![forbid(unsafe_code)]

use lastgasp_protocol::ClosedName as _;
use std::fs;
use std::path::Path;

use lastgasp_router::continuation::sse::Parser;
use lastgasp_router::continuation::{
    Body, Continuation, Endpoint, Engine, Options, Progress, Refusal, StreamEnd, Target, Unmovable, error_event,
};
use serde::Deserialize;
use serde_json::{Map, Value};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    source: String,
    why: String,
    engine: String,
    path: String,
    migration_limit: u64,
    request: Map<String, Value>,
    workers: Vec<Worker>,
    expect: Expect,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Worker {
    sends: Vec<String>,
    then: Then,
}

#[derive(Clone, Copy, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Then {
    End,
    Reset,
    Hang,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Expect {
    ends: Ends,
    client_text: Option<String>,
    finish_reason: Option<String>,
    moves: Option<usize>,
    unmovable: Option<String>,
    role_deltas: Option<usize>,
    ids_seen_by_client: Option<Vec<String>>,
    created_seen_by_client: Option<Vec<u64>>,
    object_seen_by_client: Option<Vec<String>>,
    #[serde(default)]
    client_must_not_contain: Vec<String>,
    #[serde(default)]
    first_request_must_not_have: Vec<String>,
    second_request: Option<Second>,
    usage: Option<Value>,
    usage_events: Option<usize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Ends {
    Complete,
    Error,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Second {
    path: Option<String>,
    #[serde(default)]
    body_has: Map<String, Value>,
    #[serde(default)]
    on_completions_must_have: Vec<String>,
}

/// What came of a case: all requests that workers were sent, and all bytes that the client was.
struct Run {
    requests: Vec<(Endpoint, Value)>,
    client: Vec<u8>,
    unmovable: Option<Unmovable>,
}

/// Plays a case through the engine alone, each write cut into pieces of at most `piece` bytes.
fn play(case: &Case, piece: usize) -> Run {
    let endpoint = Endpoint::of_path(&case.path).unwrap();
    let options = Options { migrate: case.migration_limit > 0, ..Options::default() };
    let target = Target { engine: Engine::named(&case.engine), max_model_len: Some(2048), takes_chat_ids: false };
    let mut stream =
        Continuation::new(endpoint, Body::read(serde_json::to_vec(&case.request).unwrap().into()).unwrap(), options);
    let mut run = Run { requests: Vec::new(), client: Vec::new(), unmovable: None };
    let mut moves = 0;
    for worker in &case.workers {
        match stream.resend(target) {
            Ok(sent) => run.requests.push((sent.endpoint, serde_json::from_slice(&sent.body).unwrap())),
            Err(Refusal::ContextFull) => {
                stream.finish_full(&mut run.client);
                return run;
            }
            Err(Refusal::Unmovable(reason)) => {
                run.unmovable = Some(reason);
                run.client.extend(error_event("the worker was lost", reason.as_str()));
                return run;
            }
        }
        let bytes: Vec<&[u8]> = worker.sends.iter().flat_map(|write| write.as_bytes().chunks(piece)).collect();
        let mut progress = Progress::Going;
        for bytes in bytes {
            progress = stream.feed(bytes, &mut run.client);
            if progress != Progress::Going {
                break;
            }
        }
        if progress == Progress::Going && worker.then == Then::End {
            progress = stream.ended(&mut run.client);
        }
        if matches!(progress, Progress::Complete | Progress::Rejected) {
            return run;
        }
        match stream.worker_failed(&mut run.client) {
            StreamEnd::Finished => return run,
            StreamEnd::Retry => {}
            StreamEnd::Move if moves < case.migration_limit => moves += 1,
            StreamEnd::Move => panic!("the limit was reached"),
            StreamEnd::Unmovable(reason) => {
                run.unmovable = Some(reason);
                run.client.extend(error_event("the worker was lost", reason.as_str()));
                return run;
            }
        }
    }
    panic!("no worker is left");
}

/// What a client makes of the bytes.
#[derive(Default)]
struct Client {
    text: String,
    finish_reasons: Vec<String>,
    roles: usize,
    ids: Vec<String>,
    created: Vec<u64>,
    objects: Vec<String>,
    usages: Vec<Value>,
    errors: usize,
    dones: usize,
}

fn read(bytes: &[u8]) -> Client {
    fn see<T: PartialEq>(seen: &mut Vec<T>, value: Option<T>) {
        if let Some(value) = value.filter(|value| !seen.contains(value)) {
            seen.push(value);
        }
    }
    let mut parser = Parser::new();
    parser.push(bytes);
    let mut client = Client::default();
    while let Some(event) = parser.next_event().unwrap() {
        let Some(data) = event.data else { continue };
        assert_eq!(client.dones, 0, "nothing follows [DONE]");
        if data.as_ref() == b"[DONE]" {
            client.dones += 1;
            continue;
        }
        let chunk: Value = serde_json::from_slice(&data).unwrap();
        if !chunk["error"].is_null() {
            client.errors += 1;
            continue;
        }
        see(&mut client.ids, chunk["id"].as_str().map(str::to_owned));
        see(&mut client.created, chunk["created"].as_u64());
        see(&mut client.objects, chunk["object"].as_str().map(str::to_owned));
        if !chunk["usage"].is_null() {
            client.usages.push(chunk["usage"].clone());
        }
        let choice = &chunk["choices"][0];
        client.text.push_str(choice["text"].as_str().or(choice["delta"]["content"].as_str()).unwrap_or_default());
        client.roles += usize::from(choice["delta"]["role"].is_string());
        client.finish_reasons.extend(choice["finish_reason"].as_str().map(str::to_owned));
    }
    assert!(parser.rest().is_empty(), "the last event is whole");
    client
}

fn check(case: &Case, run: &Run) {
    let client = read(&run.client);
    let expect = &case.expect;
    let ends = match (client.dones, client.errors) {
        (1, 0) => Ends::Complete,
        (0, 1) => Ends::Error,
        other => panic!("{other:?} [DONE]s and errors"),
    };
    assert_eq!(ends, expect.ends);
    if ends == Ends::Complete {
        assert_eq!(client.finish_reasons.len(), 1, "one finish_reason");
    }
    if let Some(text) = &expect.client_text {
        assert_eq!(&client.text, text);
    }
    if let Some(reason) = &expect.finish_reason {
        assert_eq!(&client.finish_reasons, std::slice::from_ref(reason));
    }
    if let Some(moves) = expect.moves {
        assert_eq!(run.requests.len() - 1, moves, "workers asked after the first");
    }
    if let Some(words) = &expect.unmovable {
        let reason = match words.as_str() {
            "guided decoding" => Unmovable::GuidedDecoding,
            "several choices" => Unmovable::SeveralChoices,
            "reasoning without ids" => Unmovable::ReasoningWithoutIds,
            "token prompt, text without ids" => Unmovable::TokenPromptWithoutIds,
            other => panic!("{other:?} has no variant"),
        };
        assert_eq!(run.unmovable, Some(reason));
    }
    if let Some(roles) = expect.role_deltas {
        assert_eq!(client.roles, roles);
    }
    if let Some(ids) = &expect.ids_seen_by_client {
        assert_eq!(&client.ids, ids);
    }
    if let Some(created) = &expect.created_seen_by_client {
        assert_eq!(&client.created, created);
    }
    if let Some(objects) = &expect.object_seen_by_client {
        assert_eq!(&client.objects, objects);
    }
    let text = String::from_utf8(run.client.clone()).unwrap();
    for part in &expect.client_must_not_contain {
        assert!(!text.contains(part), "{part} reached the client");
    }
    for key in &expect.first_request_must_not_have {
        assert!(run.requests[0].1.get(key).is_none(), "{key} in the first request");
    }
    if let Some(second) = &expect.second_request {
        let (endpoint, body) = &run.requests[1];
        if let Some(path) = &second.path {
            assert_eq!(endpoint.path(), path);
        }
        for (key, value) in &second.body_has {
            assert_eq!(&body[key], value, "{key} of the second request");
        }
        if *endpoint == Endpoint::Completions {
            for key in &second.on_completions_must_have {
                assert!(body.get(key).is_some(), "{key} of the second request");
            }
        }
    }
    if let Some(usage) = &expect.usage {
        assert_eq!(client.usages.last(), Some(usage));
    }
    if let Some(events) = expect.usage_events {
        assert_eq!(client.usages.len(), events);
    }
}

#[test]
fn every_case_has_its_right_outcome_however_the_transport_cuts_it() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cases");
    let mut names: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    names.sort();
    assert!(names.len() >= 16);
    for name in names {
        let case: Case = serde_json::from_slice(&fs::read(&name).unwrap()).unwrap();
        for piece in [usize::MAX, 1, 7, 64] {
            println!("{} ({}: {}), pieces of {piece}", name.display(), case.source, case.why);
            check(&case, &play(&case, piece));
        }
    }
}

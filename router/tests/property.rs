//! For any token sequence, any chunking, any kill point and up to three moves: the client's stream
//! equals the uninterrupted one, or it ends visibly. Never a silent difference.
#![forbid(unsafe_code)]

mod fake;

use fake::{CONTEXT, Client, EOS, Fake, Frontend};
use lastgasp_protocol::ClosedName as _;
use lastgasp_router::continuation::{
    Body, Continuation, Endpoint, Engine, Exactness, Options, Progress, Refusal, StreamEnd, Target, error_event,
};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

/// How a worker's part ends early.
#[derive(Debug, Clone, Copy)]
enum Death {
    /// The connection breaks after so many thousandths of the bytes.
    Cut(usize),
    /// As a cut, but between two events, and the body ends properly.
    Fin(usize),
    /// After so many thousandths of the events, `finish_reason: "abort"` and `[DONE]`.
    Abort(usize),
    /// An error event and `[DONE]`.
    Error(usize),
}

#[derive(Debug, Clone)]
struct Story {
    endpoint: Endpoint,
    body: Map<String, Value>,
    fake: Fake,
    deaths: Vec<Death>,
    piece: usize,
    /// Whether targets say their context length.
    context: bool,
    engine: Engine,
}

fn death() -> impl Strategy<Value = Death> {
    (0..4, 0..1000usize).prop_map(|(kind, at)| match kind {
        0 => Death::Cut(at),
        1 => Death::Fin(at),
        2 => Death::Abort(at),
        _ => Death::Error(at),
    })
}

fn story() -> impl Strategy<Value = Story> {
    let body = (
        prop::option::of(1u64..60),
        prop::option::of(0u64..12),
        prop::option::of(prop::sample::subsequence(vec!["or he", "top s", " \u{20ac}", "stop"], 1..3)),
        any::<[bool; 7]>(),
        0..3usize,
    );
    let engine = (any::<u64>(), prop::sample::select(vec![1usize, 1, 1, 2, 3]), any::<[bool; 4]>());
    (body, engine, prop::collection::vec(death(), 0..4), 1..400usize).prop_map(|(body, engine, deaths, piece)| {
        let (most, least, stop, flags, prompt) = body;
        let [chat, usage, continuous, wants_ids, logprobs, include, completion_tokens] = flags;
        let (salt, interval, [rust, ids, context, sglang]) = engine;
        let endpoint = if chat { Endpoint::Chat } else { Endpoint::Completions };
        let text = ["Hi", "count \u{20ac} to three", "secret system prompt"][prompt];
        let mut request = Map::new();
        request.insert("model".into(), "m".into());
        request.insert("stream".into(), true.into());
        if chat {
            request.insert("messages".into(), json!([{ "role": "user", "content": text }]));
        } else if prompt == 2 && ids {
            request.insert("prompt".into(), json!([1, 2, 3, 8]));
        } else {
            request.insert("prompt".into(), text.into());
        }
        if let Some(most) = most {
            request.insert(
                if chat && completion_tokens { "max_completion_tokens" } else { "max_tokens" }.into(),
                most.into(),
            );
        }
        if let Some(least) = least.filter(|least| most.is_none_or(|most| *least <= most)) {
            request.insert("min_tokens".into(), least.into());
        }
        if let Some(stop) = stop {
            request.insert("stop".into(), json!(stop));
            request.insert("include_stop_str_in_output".into(), include.into());
        }
        if usage {
            request.insert(
                "stream_options".into(),
                json!({ "include_usage": true, "continuous_usage_stats": continuous }),
            );
        }
        if wants_ids {
            request.insert("return_token_ids".into(), true.into());
        }
        if logprobs {
            request.insert("logprobs".into(), if chat { true.into() } else { 1.into() });
        }
        let frontend = if rust { Frontend::Rust } else { Frontend::Python };
        let engine = if sglang && !chat { Engine::Sglang } else { Engine::Vllm };
        Story {
            endpoint,
            body: request,
            fake: Fake { frontend, interval, salt, ids: true },
            deaths,
            piece,
            context,
            engine,
        }
    })
}

fn read(body: &Map<String, Value>) -> Body {
    Body::read(serde_json::to_vec(body).unwrap().into()).unwrap()
}

/// A worker's bytes up to its death, and whether the body ends properly then.
fn dying(events: &[String], death: Death) -> (Vec<u8>, bool) {
    let upto = |at: usize| events[..events.len() * at / 1000].concat().into_bytes();
    match death {
        Death::Cut(at) => {
            let bytes = events.concat().into_bytes();
            let end = bytes.len() * at / 1000;
            (bytes[..end].to_vec(), false)
        }
        Death::Fin(at) => (upto(at), true),
        Death::Abort(at) => {
            let mut bytes = upto(at);
            bytes.extend(br#"data: {"id":"x","choices":[{"index":0,"delta":{},"text":"","finish_reason":"abort","token_ids":[]}]}"#);
            bytes.extend(b"\n\ndata: [DONE]\n\n");
            (bytes, true)
        }
        Death::Error(at) => {
            let mut bytes = upto(at);
            bytes.extend(br#"data: {"error":{"message":"EngineCore","type":"InternalServerError","code":500}}"#);
            bytes.extend(b"\n\ndata: [DONE]\n\n");
            (bytes, true)
        }
    }
}

/// Plays a story. Returns the client's bytes and the exactness of every move.
fn play(story: &Story, deaths: &[Death]) -> (Vec<u8>, Vec<Exactness>) {
    let takes_chat_ids = story.engine == Engine::Vllm && story.fake.frontend == Frontend::Python;
    let target = Target { engine: story.engine, max_model_len: story.context.then_some(CONTEXT), takes_chat_ids };
    // Where an EOS shares a chunk with text, and the finish_reason comes later, only its id tells.
    let eos_token_ids = if story.fake.interval > 1 { vec![EOS] } else { Vec::new() };
    let options = Options { migrate: true, eos_token_ids, ..Options::default() };
    let mut stream = Continuation::new(story.endpoint, read(&story.body), options);
    let mut client = Vec::new();
    let mut legs = Vec::new();
    let fail = |client: &mut Vec<u8>, reason: &str| client.extend(error_event("lost", reason));
    for death in deaths.iter().copied().map(Some).chain([None]) {
        let outgoing = match stream.resend(target) {
            Ok(outgoing) => outgoing,
            Err(Refusal::ContextFull) => {
                stream.finish_full(&mut client);
                return (client, legs);
            }
            Err(Refusal::Unmovable(reason)) => {
                fail(&mut client, reason.as_str());
                return (client, legs);
            }
        };
        legs.push(outgoing.exactness);
        let Some(events) = story.fake.answer(outgoing.endpoint, &serde_json::from_slice(&outgoing.body).unwrap())
        else {
            // The engine says that its context is full; where that was known, it was not asked.
            assert!(outgoing.exactness == Exactness::Approximate || !story.context);
            stream.finish_full(&mut client);
            return (client, legs);
        };
        let (bytes, proper) = death.map_or_else(|| (events.concat().into_bytes(), true), |death| dying(&events, death));
        let mut progress = Progress::Going;
        for piece in bytes.chunks(story.piece) {
            progress = stream.feed(piece, &mut client);
            if progress != Progress::Going {
                break;
            }
        }
        if progress == Progress::Going && proper {
            progress = stream.ended(&mut client);
        }
        if progress == Progress::Complete {
            return (client, legs);
        }
        match stream.worker_failed(&mut client) {
            StreamEnd::Finished => return (client, legs),
            StreamEnd::Retry | StreamEnd::Move => {}
            StreamEnd::Unmovable(reason) => {
                fail(&mut client, reason.as_str());
                return (client, legs);
            }
        }
    }
    unreachable!("the last worker lives, and it answered everything: {story:?}");
}

/// What the engine says when no router is in between.
fn direct(story: &Story) -> Client {
    Client::read(story.fake.answer(story.endpoint, &Value::Object(story.body.clone())).unwrap().concat().as_bytes())
}

/// The parts of a stream that must be the same with and without a seam.
fn essence(client: &Client, story: &Story) -> Client {
    let Client { text, finish, stop_reason, roles, usage, usages, ids, prompt_ids, logprobs, offsets, .. } =
        client.clone();
    // Of several tokens in one chunk, only the engine knows which one completed a stop string.
    let coarse = story.fake.interval > 1 && story.body.contains_key("stop");
    // Then text is carried and the engine matches: whether the last token also completed a stop
    // string is known only from the finish_reason that was lost.
    let by_text = story.body.contains_key("stop") && story.body.get("min_tokens").is_some_and(|least| *least != 0);
    let keep = |list: Vec<String>| if coarse { Vec::new() } else { list };
    Client {
        text,
        finish: if by_text { Vec::new() } else { finish },
        stop_reason: if by_text { Vec::new() } else { stop_reason },
        roles,
        usage: usage.filter(|_| !coarse),
        usages,
        ids: if coarse { Vec::new() } else { ids },
        prompt_ids,
        logprobs: keep(logprobs),
        offsets: if coarse { Vec::new() } else { offsets },
        ..Client::default()
    }
}

fn check(story: &Story) -> Result<(), TestCaseError> {
    let (moved, legs) = play(story, &story.deaths);
    let moved = Client::read(&moved);
    let whole = direct(story);
    prop_assert!(moved.names.len() <= 1, "one id, object, created and model: {:?}", moved.names);
    let ended = moved.ended();
    if legs.contains(&Exactness::Approximate) {
        // By text: other tokens, so another answer. It is counted and logged as that.
        return Ok(());
    }
    if ended.is_err() {
        prop_assert!(whole.text.starts_with(&moved.text), "{:?} is no beginning of {:?}", moved.text, whole.text);
        return Ok(());
    }
    prop_assert_eq!(essence(&moved, story), essence(&whole, story), "by {:?}", legs);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_moved_stream_equals_the_uninterrupted_one_or_ends_visibly(story in story()) {
        check(&story)?;
    }
}

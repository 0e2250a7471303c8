//! The parser and the continuation under damaged input. The corpus is what real engines sent
//! (`transcripts/`); each run cuts, repeats, swaps and overwrites pieces of it.
//!
//! `PROPTEST_CASES=100000 cargo test --test fuzz` searches longer. The two targets at the end are of the
//! engine that all crates share, see `lastgasp-fuzz`.
#![forbid(unsafe_code)]

use std::fs;
use std::path::Path;
use std::sync::OnceLock;

use lastgasp_router::continuation::sse::Parser;
use lastgasp_router::continuation::{Body, Continuation, Endpoint, Engine, Options, Progress, StreamEnd, Target};
use proptest::prelude::*;
use serde_json::{Map, Value};

/// A request, and what an engine sent.
type Seed = (Endpoint, Map<String, Value>, Vec<u8>);

fn corpus() -> &'static [Seed] {
    static CORPUS: OnceLock<Vec<Seed>> = OnceLock::new();
    CORPUS.get_or_init(|| {
        let mut found = Vec::new();
        for frontend in ["vllm-0.32-python", "vllm-0.32-rust"] {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/transcripts").join(frontend);
            let mut paths: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
            paths.sort();
            for path in paths.iter().filter(|path| path.extension().is_some_and(|kind| kind == "sse")) {
                let request = fs::read(path.with_extension("req.json")).unwrap();
                let request: Value = serde_json::from_slice(&request).unwrap();
                let endpoint = Endpoint::of_path(request["path"].as_str().unwrap()).unwrap();
                found.push((endpoint, request["body"].as_object().unwrap().clone(), fs::read(path).unwrap()));
            }
        }
        found
    })
}

/// Damage to a stream: places are thousandths of its length.
#[derive(Debug, Clone)]
enum Damage {
    Overwrite(usize, u8),
    Remove(usize, usize),
    Repeat(usize, usize),
    Insert(usize, &'static str),
}

fn damage() -> impl Strategy<Value = Damage> {
    let pieces = vec![
        "\n",
        "\r",
        "\r\n\r\n",
        "data:",
        ": comment\n\n",
        "\u{feff}",
        "data: [DONE]\n\n",
        "data: {\"error\":{\"code\":500}}\n\n",
        "data: {\"choices\":[]}\n\n",
        "data: {\"choices\":[{\"index\":1}]}\n\n",
        "data: {\"choices\":[{\"delta\":{\"tool_calls\":[{}]}}]}\n\n",
        "data: {\"choices\":[{\"delta\":{\"reasoning\":\"x\"},\"token_ids\":[4294967296]}]}\n\n",
        "data: {\"choices\":[{\"text\":\"x\",\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":18446744073709551615}}\n\n",
        "\"token_ids\":[1,2],",
        "null",
        "\\ud800",
    ];
    prop_oneof![
        (0..1000usize, any::<u8>()).prop_map(|(at, byte)| Damage::Overwrite(at, byte)),
        (0..1000usize, 0..200usize).prop_map(|(at, len)| Damage::Remove(at, len)),
        (0..1000usize, 0..400usize).prop_map(|(at, len)| Damage::Repeat(at, len)),
        (0..1000usize, prop::sample::select(pieces)).prop_map(|(at, piece)| Damage::Insert(at, piece)),
    ]
}

fn damaged(stream: &[u8], damages: &[Damage]) -> Vec<u8> {
    let mut stream = stream.to_vec();
    for damage in damages {
        let place = |at: &usize| stream.len() * at / 1000;
        match damage {
            Damage::Overwrite(at, byte) => {
                let at = place(at);
                if let Some(old) = stream.get_mut(at) {
                    *old = *byte;
                }
            }
            Damage::Remove(at, len) => {
                let at = place(at);
                stream.drain(at..(at + len).min(stream.len()));
            }
            Damage::Repeat(at, len) => {
                let at = place(at);
                let piece = stream[at..(at + len).min(stream.len())].to_vec();
                stream.splice(at..at, piece);
            }
            Damage::Insert(at, piece) => {
                let at = place(at);
                stream.splice(at..at, piece.bytes());
            }
        }
    }
    stream
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_parser_loses_and_invents_nothing(
        which in 0..1000usize, damages in prop::collection::vec(damage(), 0..6), piece in 1..300usize,
    ) {
        let corpus = corpus();
        let stream = damaged(&corpus[which % corpus.len()].2, &damages);
        let parse = |piece: usize| {
            let mut parser = Parser::new();
            let (mut raw, mut data) = (Vec::new(), Vec::new());
            for bytes in stream.chunks(piece) {
                parser.push(bytes);
                while let Some(event) = parser.next_event().unwrap() {
                    raw.extend_from_slice(&event.raw);
                    data.push(event.data);
                }
            }
            raw.extend_from_slice(parser.rest());
            (raw, data)
        };
        let whole = parse(usize::MAX);
        prop_assert_eq!(&whole.0, &stream);
        prop_assert_eq!(parse(piece).1, whole.1);
    }

    #[test]
    fn whatever_workers_send_the_client_gets_whole_events_and_at_most_one_end(
        which in 0..1000usize,
        legs in prop::collection::vec(prop::collection::vec(damage(), 0..4), 1..4),
        piece in 1..300usize,
        migrate in any::<bool>(),
        keeps_ids in any::<bool>(),
        engine in prop::sample::select(vec![Engine::Vllm, Engine::Sglang, Engine::Generic]),
    ) {
        let corpus = corpus();
        let (endpoint, body, _) = &corpus[which % corpus.len()];
        let mut body = body.clone();
        if !keeps_ids {
            body.remove("return_token_ids");
        }
        let target = Target { engine, max_model_len: Some(2048), takes_chat_ids: engine == Engine::Vllm };
        let body = Body::read(serde_json::to_vec(&body).unwrap().into()).unwrap();
        let mut stream = Continuation::new(*endpoint, body, Options { migrate, ..Options::default() });
        let mut client = Vec::new();
        let mut done = false;
        for (leg, damages) in legs.iter().enumerate() {
            if stream.resend(target).is_err() {
                break;
            }
            let bytes = damaged(&corpus[(which + leg * 7) % corpus.len()].2, damages);
            let mut progress = Progress::Going;
            for bytes in bytes.chunks(piece) {
                progress = stream.feed(bytes, &mut client);
                if progress != Progress::Going {
                    break;
                }
            }
            if progress == Progress::Going {
                progress = stream.ended(&mut client);
            }
            done = progress == Progress::Complete
                || progress != Progress::Rejected && stream.worker_failed(&mut client) == StreamEnd::Finished;
            if done || progress == Progress::Rejected {
                break;
            }
        }
        let mut parser = Parser::new();
        parser.push(&client);
        let mut ends = 0;
        while let Some(event) = parser.next_event().unwrap() {
            let end = event.data.is_some_and(|data| data.as_ref().trim_ascii() == b"[DONE]");
            prop_assert!(ends == 0, "something follows [DONE]");
            ends += usize::from(end);
        }
        prop_assert_eq!(parser.rest(), b"");
        prop_assert_eq!(ends == 1, done);
    }
}

fn run<T: std::hash::Hash>(target: &str, words: &[&str], parse: impl Fn(&[u8]) -> T) {
    let seeds: Vec<Vec<u8>> = match target {
        "sse" => corpus().iter().map(|(_, _, stream)| stream.clone()).collect(),
        _ => corpus().iter().map(|(_, body, _)| serde_json::to_vec(body).unwrap()).collect(),
    };
    lastgasp_fuzz::run(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus"), target, &seeds, words, parse);
}

#[test]
fn a_stream_of_events() {
    run("sse", &["data:", "data: [DONE]\n\n", "event: x\n", "id: 1\n", "retry: 1\n", ": c\n\n", "\n\n"], |input| {
        let mut parser = Parser::new();
        let mut raw = Vec::new();
        let (mut events, mut data) = (0, 0);
        for bytes in input.chunks(37) {
            parser.push(bytes);
            loop {
                match parser.next_event() {
                    Ok(Some(event)) => {
                        raw.extend_from_slice(&event.raw);
                        events += 1;
                        data += usize::from(event.data.is_some());
                    }
                    Ok(None) => break,
                    Err(_) => return None,
                }
            }
        }
        raw.extend_from_slice(parser.rest());
        assert_eq!(raw, input);
        Some((events.min(20), data.min(20)))
    });
}

#[test]
fn a_request() {
    run(
        "request",
        &["\"stream\":true,", "\"prompt\":[1,2],", "\"n\":2,", "\"max_tokens\":-1,", "\"stop\":[\"\"],"],
        |input| {
            let body = Body::read(input.to_vec().into()).ok()?;
            let mut outcomes = Vec::new();
            for endpoint in [Endpoint::Chat, Endpoint::Completions] {
                let options = Options { migrate: true, ..Options::default() };
                let mut stream = Continuation::new(endpoint, body.clone(), options);
                let target = Target { engine: Engine::Vllm, max_model_len: Some(2048), takes_chat_ids: true };
                let sent = stream.resend(target).map(|outgoing| outgoing.as_it_came).ok();
                let mut client = Vec::new();
                let (_, _, answer) = &corpus()[0];
                let progress = stream.feed(&answer[..answer.len() / 2], &mut client);
                let moved = progress == Progress::Going && stream.worker_failed(&mut client) == StreamEnd::Move;
                outcomes.push((sent, moved, moved && stream.resend(target).is_ok()));
            }
            Some(outcomes)
        },
    );
}

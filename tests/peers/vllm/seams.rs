//! The traps of a seam (T1 to T32 of docs/seams.md) on the real engine: a stream whose connection is cut in
//! its middle is continued by the other server, and held against the same one uncut.

use lastgasp_tests::client::{LiveStream, Transcript};
use lastgasp_tests::model::Endpoint;
use lastgasp_tests::proxy::Proxy;
use serde_json::{Value, json};

use super::install::{installed, starts_with};
use super::scene::{Scene, is_complete, question};
use super::server::{Addresses, Frontend, Server};

/// Words of an answer are these, and only what follows `<think>` is reasoning.
const PARSERS: [&str; 5] = ["--reasoning-parser", "qwen3", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"];

/// The two servers, the victim behind a wire that can be cut.
struct Stage {
    scene: Scene,
    wire: Proxy,
    victim: Server,
    spare: Server,
}

impl Stage {
    async fn new(victim: (Frontend, &[&str]), spare: (Frontend, &[&str])) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let start = async |name: &str, (frontend, more): (Frontend, &[&str])| {
            let arguments = [&PARSERS, more].concat();
            Server::start(name, Addresses::free(frontend), &arguments, folder.path()).await
        };
        let (spare, victim) = (start("spare", spare).await, start("victim", victim).await);
        let wire = Proxy::start(victim.http).await.unwrap();
        let reached = (format!("http://{}", wire.address()), format!("http://{}", spare.http));
        let scene = Scene::new(folder, (&victim, reached.0), (&spare, reached.1)).await;
        scene.offered().await;
        Self { scene, wire, victim, spare }
    }

    /// The answer of the victim alone, and one through the router that is cut after so many tokens or more.
    async fn both(&self, endpoint: Endpoint, body: &Value, seam: usize) -> (Transcript, Transcript) {
        let whole = LiveStream::open(self.victim.http, endpoint, body).await.unwrap().finish().await.unwrap();
        let mut stream = self.scene.stream(endpoint, body).await;
        stream.tokens(seam).await.unwrap();
        self.wire.cut();
        (whole, stream.finish().await.unwrap())
    }

    /// As [`Self::both`], and the two are equal.
    async fn equal(&self, endpoint: Endpoint, body: &Value, seam: usize) -> (Transcript, Transcript) {
        let (whole, moved) = self.both(endpoint, body, seam).await;
        let log = || self.scene.router.process.log_tail();
        assert!(is_complete(&moved, &whole), "{body}, cut after {seam}: {whole:#?}\nbut {moved:#?}\n{}", log());
        assert_eq!(said(&moved), said(&whole), "{body}, cut after {seam}\n{}", log());
        assert!(!moved.comments.is_empty(), "it was moved: {moved:#?}");
        (whole, moved)
    }

    /// How the router counts the streams that it moved by text.
    async fn approximate(&self) -> Vec<String> {
        let metrics = self.scene.router.metrics().await.unwrap();
        let counted = |line: &&str| {
            line.starts_with("lastgasp_router_migrations_total{") && line.contains(r#"exactness="approximate""#)
        };
        metrics.lines().filter(counted).map(str::to_owned).collect()
    }

    /// A completion that is not moved: the client gets the reason.
    async fn refuses(&self, changes: Value, code: &str) {
        let mut stream = self.scene.stream(Endpoint::Completions, &with(changes)).await;
        stream.tokens(20).await.unwrap();
        self.wire.cut();
        let cut = stream.finish().await.unwrap();
        assert_eq!(cut.error.as_ref().unwrap()["code"], code, "{cut:#?}");
    }
}

/// What a chat says besides its content.
#[derive(Debug, Default, PartialEq)]
struct Said {
    reasoning: String,
    /// Names and arguments.
    calls: String,
    /// `text_offset` of each token with logprobs.
    offsets: Vec<u64>,
}

fn said(transcript: &Transcript) -> Said {
    let mut said = Said::default();
    for event in &transcript.events {
        let data = event.raw.strip_prefix("data: ").and_then(|data| serde_json::from_str::<Value>(data).ok());
        let Some(choice) = data.as_ref().and_then(|data| data["choices"].get(0)) else { continue };
        said.reasoning.push_str(choice["delta"]["reasoning"].as_str().unwrap_or_default());
        for call in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
            for part in ["name", "arguments"] {
                said.calls.push_str(call["function"][part].as_str().unwrap_or_default());
            }
        }
        let offsets = choice["logprobs"]["text_offset"].as_array().into_iter().flatten();
        said.offsets.extend(offsets.filter_map(Value::as_u64));
    }
    said
}

/// The question, with something changed.
fn with(changes: Value) -> Value {
    let mut body = question();
    body["max_tokens"] = json!(300);
    body.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    body
}

fn chat(changes: Value) -> Value {
    let mut body = with(json!({ "messages": [{ "role": "user", "content": "What does the kernel know?" }] }));
    body.as_object_mut().unwrap().remove("prompt");
    body.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    body
}

/// The model begins with what it knows by heart, and ends when that ends.
async fn by_heart(begin: &str) -> Value {
    let begin = starts_with(begin, &installed().await.model).to_string();
    json!({ "logit_bias": { begin: 100 }, "ignore_eos": false })
}

#[tokio::test]
#[ignore = "installs vLLM, 6 GB; cargo xtask test --peers runs it"]
async fn a_stream_that_is_cut_goes_on_from_the_rust_frontend_to_the_python_one_without_a_seam() {
    let python = (Frontend::Python, ["--stream-interval", "3"].as_slice());
    let stage = Stage::new((Frontend::Rust, &[]), python).await;
    completions(&stage).await;
    let by_text = stage.approximate().await;

    // T26, T27: the chat stays a chat, so what parses reasoning and tool calls goes on.
    let thinking = chat(by_heart("<think>").await);
    for seam in [1, 60, 120] {
        let (_, moved) = stage.both(Endpoint::Chat, &thinking, seam).await;
        let said = said(&moved);
        assert!(said.reasoning.starts_with(" thought 0, thought 1,"), "{moved:#?}");
        assert!(said.reasoning.ends_with(" thought 198, thought 199,"), "{moved:#?}");
        assert_eq!(moved.text.trim_start(), "So it is done.");
        assert_eq!((moved.finish_reasons.as_slice(), moved.roles), (["stop".to_owned()].as_slice(), 1));
        assert_eq!(moved.ids.len(), 208, "{moved:#?}");
    }
    let mut calling = chat(by_heart("<speak>").await);
    calling["tools"] = json!([{ "type": "function", "function": {
        "name": "look_up", "parameters": { "type": "object", "properties": { "place": { "type": "string" } } },
    } }]);
    calling["chat_template_kwargs"] = json!({ "enable_thinking": false });
    for seam in [1, 60, 120] {
        let (_, moved) = stage.equal(Endpoint::Chat, &calling, seam).await;
        assert_eq!(said(&moved).calls, r#"look_up{"place": "Paris and Rome"}"#);
        assert_eq!(moved.finish_reasons, ["tool_calls"]);
    }
    assert_eq!(stage.approximate().await, by_text, "none of the chats went by text");
    drop(stage.spare);
}

#[tokio::test]
#[ignore = "installs vLLM, 6 GB; cargo xtask test --peers runs it"]
async fn a_stream_that_is_cut_goes_on_from_the_python_frontend_to_the_rust_one_without_a_seam() {
    let stage = Stage::new((Frontend::Python, &[]), (Frontend::Rust, &[])).await;
    for seam in [1, 17, 150] {
        stage.equal(Endpoint::Completions, &with(json!({})), seam).await;
    }

    // It takes no ids for a chat: the router has to know, for it would begin again without an error.
    // (With a reasoning parser the Python frontend shows special tokens in a chat, completions do not: none here.)
    let no_special = json!({ "0": -100, "1": -100, "2": -100 });
    let words = chat(json!({ "chat_template_kwargs": { "enable_thinking": false }, "logit_bias": no_special }));
    for seam in [1, 60, 150] {
        stage.equal(Endpoint::Chat, &words, seam).await;
    }
    // Reasoning stays reasoning, or the stream ends visibly.
    let thinking = chat(by_heart("<think>").await);
    let (_, cut) = stage.both(Endpoint::Chat, &thinking, 60).await;
    assert_eq!(cut.error.as_ref().unwrap()["code"], "reasoning_without_ids", "{cut:#?}");
    drop(stage.spare);
}

/// What the router does for completions, whatever the frontends.
async fn completions(stage: &Stage) {
    use Endpoint::Completions;
    // T2, T9, T10, T29, T30: every token, also where the text of half a character is held back.
    for seam in [1, 2, 7, 15, 16, 17, 50, 128, 200] {
        stage.equal(Completions, &with(json!({})), seam).await;
    }
    // T3, T6, T28: budgets are reduced, and what is not known is carried on.
    for same in [
        json!({ "min_tokens": 280, "ignore_eos": false }),
        json!({ "repetition_penalty": 1.3 }),
        json!({ "logit_bias": { "300": 3.5 }, "cache_salt": "s", "priority": 0 }),
        json!({ "allowed_token_ids": (260..420).collect::<Vec<_>>() }),
    ] {
        stage.equal(Completions, &with(same), 60).await;
    }
    // T15, T17: one account of what was used.
    let (whole, moved) =
        stage.equal(Completions, &with(json!({ "stream_options": { "include_usage": true } })), 60).await;
    for count in ["prompt_tokens", "completion_tokens", "total_tokens"] {
        assert_eq!(moved.usages[0][count], whole.usages[0][count], "{count}");
    }
    assert_eq!(moved.usages.len(), 1);
    // T16: offsets of logprobs go on. (Compared by `equal`. The Python frontend counts special tokens and lone bytes
    // as text, the Rust one does not, so there are to be none.)
    let named = json!({ "logprobs": 2, "allowed_token_ids": (260..420).collect::<Vec<_>>() });
    let (whole, _) = stage.equal(Completions, &with(named), 60).await;
    assert_eq!(said(&whole).offsets.len(), 300);
    // T7, T8: a stop string of which the halves are two tokens.
    let (whole, _) = stage.both(Completions, &with(json!({})), 1).await;
    let stop = stop_string(&whole);
    let (whole, moved) = stage.both(Completions, &with(json!({ "stop": [stop] })), 60).await;
    assert_eq!((&moved.text, &moved.finish_reasons), (&whole.text, &whole.finish_reasons), "{stop:?}");
    assert_eq!(moved.finish_reasons, ["stop"]);
    // T1, T4, T5: not restored, so the rest is another; its length is right all the same.
    for other in [
        json!({ "presence_penalty": 1.0 }),
        json!({ "frequency_penalty": 0.5 }),
        json!({ "seed": 7, "temperature": 0.8 }),
    ] {
        let (_, moved) = stage.both(Completions, &with(other), 60).await;
        assert_eq!((moved.ids.len(), moved.finish_reasons.as_slice()), (300, ["length".to_owned()].as_slice()));
        assert_eq!((moved.error.as_ref(), moved.dones), (None, 1), "{moved:#?}");
    }
    // T20, T21: without a budget of its own a completion has 16 tokens, and no context is overrun.
    let mut default = with(json!({}));
    default.as_object_mut().unwrap().remove("max_tokens");
    stage.equal(Completions, &default, 5).await;
    stage.equal(Completions, &with(json!({ "prompt": "The kernel. ".repeat(120), "max_tokens": 2000 })), 60).await;
    // T22: after its end a sequence does not go on.
    stage.equal(Completions, &with(by_heart("<speak>").await), 60).await;
    // T23: an echo comes once. (Ids would take it away.)
    let echo = with(json!({ "echo": true, "return_token_ids": false }));
    let (whole, moved) = stage.both(Completions, &echo, 60).await;
    let prompt = echo["prompt"].as_str().unwrap();
    assert!(whole.text.starts_with(prompt) && moved.text.starts_with(prompt), "{moved:#?}");
    assert_eq!(moved.text.matches(prompt).count(), 1);
    // T14: not moved, and the client gets the reason.
    stage.refuses(json!({ "structured_outputs": { "regex": "[0-9]{300}" } }), "guided_decoding").await;
}

/// The end of one token's text and the beginning of the next one's, that come together for the first time
/// after the hundredth.
fn stop_string(whole: &Transcript) -> String {
    let pieces: Vec<&str> = whole.events.iter().map(|event| event.text.as_str()).collect();
    let found = (100..pieces.len() - 1).find_map(|at| {
        let (end, begin) = (pieces[at].chars().next_back()?, pieces[at + 1].chars().next()?);
        let stop: String = [end, begin].iter().collect();
        let known = end != '\u{fffd}' && begin != '\u{fffd}';
        (known && !pieces[..=at].concat().contains(&stop)).then_some(stop)
    });
    found.expect("there are many pairs of letters")
}

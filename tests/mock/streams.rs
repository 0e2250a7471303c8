//! What is streamed is the model's answer, and a continuation of it is its rest.

use lastgasp_tests::client::LiveStream;
use lastgasp_tests::model::{Endpoint, Frontend};
use lastgasp_tests::reference::Reference;
use nix::sys::signal::Signal;
use serde_json::json;

use crate::{chat, engine};

const FAST: [&str; 2] = ["--tokens-per-second", "2000"];

#[tokio::test]
async fn every_endpoint_of_both_frontends_streams_the_reference() {
    for frontend in ["python", "rust"] {
        let (engine, _folder) = engine(&["--frontend", frontend, FAST[0], FAST[1]]).await;
        let completion = json!({"prompt": "Hi", "max_tokens": 200, "ignore_eos": true, "return_token_ids": true});
        let free = json!({"prompt": "Hi", "max_tokens": 3000});
        let stopped = json!({"prompt": "Hi", "max_tokens": 300, "ignore_eos": true, "stop": [" r", "zzzz"]});
        for (endpoint, body) in [
            chat(200),
            (Endpoint::Completions, completion),
            (Endpoint::Completions, free),
            (Endpoint::Completions, stopped),
        ] {
            let stream = LiveStream::open(engine.ready.http, endpoint, &body).await.unwrap();
            let transcript = stream.finish().await.unwrap();
            Reference::of(endpoint, &body, &engine.dialect()).unwrap().assert_equals(&transcript);
        }
    }
}

#[tokio::test]
async fn an_answer_is_continued_by_ids_on_either_endpoint_and_not_by_text() {
    let (engine, _folder) = engine(&FAST).await;
    let (endpoint, mut body) = chat(100);
    let whole = Reference::of(endpoint, &body, &engine.dialect()).unwrap();
    // Not inside a character: the text before must be complete.
    let seam = (40..).find(|&seam| whole.ids[seam - 1] >= 256).unwrap();
    let carried = [&whole.prompt_ids, &whole.ids[..seam]].concat();
    let rest = json!(100 - seam);

    body["max_tokens"] = rest.clone();
    body["kv_transfer_params"] = json!({"prompt_token_ids": carried});
    let stream = LiveStream::open(engine.ready.http, endpoint, &body).await.unwrap();
    let by_chat = stream.finish().await.unwrap();
    assert_eq!(by_chat.ids, whole.ids[seam..]);
    assert!(whole.text.ends_with(&by_chat.text));

    let completion = json!({"prompt": carried, "max_tokens": rest, "ignore_eos": true, "return_token_ids": true});
    let stream = LiveStream::open(engine.ready.http, Endpoint::Completions, &completion).await.unwrap();
    assert_eq!(stream.finish().await.unwrap().ids, whole.ids[seam..]);

    let text_so_far = whole.text.strip_suffix(&by_chat.text).unwrap();
    let by_text = json!({
        "messages": [body["messages"][0], {"role": "assistant", "content": text_so_far}],
        "add_generation_prompt": false, "continue_final_message": true,
        "max_tokens": rest, "ignore_eos": true, "return_token_ids": true
    });
    let stream = LiveStream::open(engine.ready.http, endpoint, &by_text).await.unwrap();
    assert_ne!(stream.finish().await.unwrap().ids, whole.ids[seam..]);
}

#[tokio::test]
async fn a_prompt_that_ends_inside_a_character_shows_the_whole_prompt() {
    let (engine, _folder) = engine(&FAST).await;
    let body = json!({"prompt": [115, 101, 99, 114, 101, 116, 0xe2, 0x82], "max_tokens": 3, "ignore_eos": true});
    let stream = LiveStream::open(engine.ready.http, Endpoint::Completions, &body).await.unwrap();
    let transcript = stream.finish().await.unwrap();
    assert!(transcript.text.starts_with("secret€"), "{:?}", transcript.text);
    assert_eq!(engine.dialect().frontend, Frontend::Python);
}

#[tokio::test]
async fn a_stopped_core_stalls_the_stream_and_goes_on_where_it_stood() {
    let (engine, _folder) = engine(&["--tokens-per-second", "200"]).await;
    let (endpoint, body) = chat(120);
    let mut stream = LiveStream::open(engine.ready.http, endpoint, &body).await.unwrap();
    stream.tokens(20).await.unwrap();
    engine.signal_core(Signal::SIGSTOP);
    // Its health takes no notice, as measured.
    let health = reqwest::get(format!("{}/health", engine.endpoint())).await.unwrap();
    assert_eq!(health.status(), 200);
    assert!(nix::sys::signal::kill(nix::unistd::Pid::from_raw(engine.core.pid.cast_signed()), Signal::SIGCONT).is_ok());
    let transcript = stream.finish().await.unwrap();
    Reference::of(endpoint, &body, &engine.dialect()).unwrap().assert_equals(&transcript);
}

#[tokio::test]
async fn a_client_that_leaves_frees_the_engine() {
    let (engine, _folder) = engine(&[]).await;
    let (endpoint, body) = chat(4000);
    let mut stream = LiveStream::open(engine.ready.http, endpoint, &body).await.unwrap();
    stream.tokens(2).await.unwrap();
    drop(stream);
    let idle = async {
        loop {
            let metrics = reqwest::get(format!("{}/metrics", engine.endpoint())).await.unwrap().text().await.unwrap();
            if metrics.contains("vllm:num_requests_running{engine=\"0\",model_name=\"tiny\"} 0\n") {
                return;
            }
        }
    };
    tokio::time::timeout(lastgasp_tests::process::GIVE_UP, idle).await.expect("the request runs on");
}

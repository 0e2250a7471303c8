//! The mock engine, held against what was measured on vLLM 0.32 (times aside: they are upper
//! bounds of a busy machine, and no test here is about them).

mod deaths;
mod health;
mod streams;

use lastgasp_tests::engine::Engine;
use lastgasp_tests::model::Endpoint;
use serde_json::{Value, json};
use tempfile::TempDir;

/// An engine and the folder that it runs in.
async fn engine(arguments: &[&str]) -> (Engine, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let engine = Engine::start("engine", arguments, folder.path()).await.unwrap();
    (engine, folder)
}

/// A chat that runs for `max_tokens` whatever the model would like.
fn chat(max_tokens: u32) -> (Endpoint, Value) {
    let body = json!({
        "model": "tiny", "messages": [{"role": "user", "content": "Tell me of the last gasp."}],
        "max_tokens": max_tokens, "ignore_eos": true, "return_token_ids": true
    });
    (Endpoint::Chat, body)
}

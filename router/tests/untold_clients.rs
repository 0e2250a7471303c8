//! A stream is moved, and the client did not ask to know: nothing of it shows but the answer.
#![forbid(unsafe_code)]

mod fake;

use std::time::Duration;

use fake::story::{Behaviour, FAKE, Story, Worker};
use lastgasp_router::config::Config;
use lastgasp_router::continuation::Endpoint;
use serde_json::{Value, json};

/// What the decoder of openai-python makes of a stream, which LangChain and LlamaIndex use too: once it has seen an
/// `id`, each empty line is an event, whether anything stands before it or not.
fn dispatched(text: &str) -> Vec<String> {
    let mut events = Vec::new();
    let (mut data, mut id) = (String::new(), String::new());
    for line in text.lines() {
        match line.split_once(": ").unwrap_or((line, "")) {
            ("", "") if data.is_empty() && id.is_empty() => {}
            ("", "") => events.push(std::mem::take(&mut data)),
            ("data", value) => data.push_str(value),
            ("id", value) => value.clone_into(&mut id),
            _ => {}
        }
    }
    events
}

#[tokio::test]
async fn of_a_move_between_numbered_events_a_client_sees_no_empty_event_and_no_name() {
    let chat = json!({ "model": "m", "messages": [{ "role": "user", "content": "Hi" }], "stream": true });
    let completion = json!({ "model": "m", "prompt": "Hi", "stream": true, "max_tokens": 30 });
    // Asked to tell, the router still breaks no decoder.
    for (tell_clients, endpoint, body) in
        [(false, Endpoint::Chat, &chat), (false, Endpoint::Completions, &completion), (true, Endpoint::Chat, &chat)]
    {
        let dying = Worker::start("oldworker", Behaviour::Breaks(6)).await;
        let well = Worker::start("newworker", Behaviour::Well).await;
        dying.number_events();
        well.number_events();
        let config = Config { migration_limit: 1, wait_for_worker: Duration::from_secs(60), ..Config::default() };
        let story = Story::start(Config { tell_clients, ..config }, &[&dying]).await;
        let mut response = story.post(endpoint.path(), body).await;
        let header = response.headers().get("x-lastgasp-worker").map(|worker| worker.to_str().unwrap().to_owned());
        assert_eq!(header, tell_clients.then(|| "n/oldworker".to_owned()));
        let headers = format!("{:?}", response.headers());
        // It is kept alive before there is anybody to go on.
        let mut text = String::new();
        let alive = |text: &str| text.lines().any(|line| line.starts_with(':'));
        while !alive(&text) {
            text.push_str(std::str::from_utf8(&response.chunk().await.unwrap().expect("more is to come")).unwrap());
        }
        story.list("newworker", &well.endpoint);
        text.push_str(&response.text().await.unwrap());

        let events = dispatched(&text);
        assert!(text.contains("\nid: "), "{text}");
        assert_eq!(events.last().map(String::as_str), Some("[DONE]"), "{text}");
        for event in &events[..events.len() - 1] {
            assert!(serde_json::from_str::<Value>(event).is_ok(), "{event:?} in {text}");
        }
        let whole = fake::Client::read(FAKE.answer(endpoint, body).unwrap().concat().as_bytes());
        assert_eq!(fake::Client::read(text.as_bytes()).text, whole.text);
        if !tell_clients {
            for name in ["lastgasp", "oldworker", "newworker", "n/"] {
                assert!(!text.contains(name) && !headers.contains(name), "{headers} {text}");
            }
            assert!(text.lines().all(|line| !line.starts_with(':') || line == ":"), "{text}");
        }
    }
}

#[tokio::test]
async fn an_answer_that_comes_whole_names_no_worker() {
    let well = Worker::start("a", Behaviour::Well).await;
    for (tell_clients, expected) in [(false, None), (true, Some("n/a"))] {
        let story = Story::start(Config { tell_clients, ..Config::default() }, &[&well]).await;
        for path in ["/v1/completions", "/v1/embeddings"] {
            let response = story.post(path, &json!({ "model": "m", "prompt": "Hi" })).await;
            let header = response.headers().get("x-lastgasp-worker").map(|worker| worker.to_str().unwrap());
            assert_eq!(header, expected, "{path}");
        }
    }
}

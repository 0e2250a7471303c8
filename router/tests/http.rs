//! Stories over real HTTP: a router, workers in this process, and clients. No NATS: the worker set is changed directly.
#![forbid(unsafe_code)]

mod fake;

use std::time::{Duration, Instant};

use axum::http::StatusCode;
use fake::Client;
use fake::story::{Begun, Behaviour, FAKE, Story, Worker, read};
use lastgasp_protocol::{Mode, Name};
use lastgasp_router::config::Config;
use lastgasp_router::continuation::Endpoint;
use lastgasp_router::workers::NODE_TTL;
use serde_json::{Value, json};
use tokio::net::TcpListener;

fn moving() -> Config {
    Config { migration_limit: 2, wait_for_worker: Duration::from_secs(20), tell_clients: true, ..Config::default() }
}

fn completion() -> Value {
    json!({ "model": "m", "prompt": "Hi", "stream": true, "max_tokens": 30, "stream_options": { "include_usage": true } })
}

fn chat() -> Value {
    json!({ "model": "m", "messages": [{ "role": "user", "content": "Hi" }], "stream": true })
}

fn direct(path: &str, body: &Value) -> Client {
    let mut client = Client::read(FAKE.answer(Endpoint::of_path(path).unwrap(), body).unwrap().concat().as_bytes());
    client.names.clear();
    client
}

fn same(mut moved: Client, path: &str, body: &Value) {
    assert_eq!(moved.names.len(), 1, "{:?}", moved.names);
    moved.names.clear();
    assert_eq!(moved, direct(path, body));
}

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

#[tokio::test]
async fn a_stream_whose_connection_breaks_goes_on_elsewhere() {
    for (path, body) in [(COMPLETIONS, completion()), (CHAT, chat())] {
        let dying = Worker::start("a", Behaviour::Breaks(6)).await;
        let story = Story::start(moving(), &[&dying]).await;
        let response = story.post(path, &body).await;
        assert_eq!(response.headers()["x-lastgasp-worker"], "n/a");
        let well = Worker::start("b", Behaviour::Well).await;
        story.list("b", &well.endpoint);
        let (client, text) = read(response).await;
        assert!(text.contains("\n\n: lastgasp moved n/a -> n/b\ndata: "), "{text}");
        same(client, path, &body);
        assert!(
            story.metric(r#"lastgasp_router_migrations_total{exactness="exact",reason="connection_broken"} 1"#),
            "{}",
            story.proxy.metrics.render(&story.workers)
        );
    }
}

#[tokio::test]
async fn a_signal_moves_a_silent_stream_at_once_and_closes_the_old_one_first() {
    let hung = Worker::start("a", Behaviour::Hangs(5)).await;
    let story = Story::start(moving(), &[&hung]).await;
    let begun = Begun::after(story.post(COMPLETIONS, &completion()).await).await;
    let well = Worker::start("b", Behaviour::Well).await;
    story.list("b", &well.endpoint);
    story.signal(Mode::Lost, &["a"]);
    hung.dropped(1).await;
    same(begun.rest().await, COMPLETIONS, &completion());
    let continued = &well.requests()[0];
    assert!(continued["prompt"].is_array(), "{continued}");
}

#[tokio::test]
async fn a_deleted_record_moves_streams_as_well() {
    let hung = Worker::start("a", Behaviour::Hangs(5)).await;
    let well = Worker::start("b", Behaviour::Well).await;
    let story = Story::start(moving(), &[&hung]).await;
    let begun = Begun::after(story.post(CHAT, &chat()).await).await;
    story.list("b", &well.endpoint);
    story.workers.deleted("n.a", 99);
    same(begun.rest().await, CHAT, &chat());
}

#[tokio::test]
async fn at_a_handover_what_cannot_be_moved_stays_to_its_end() {
    let leaving = Worker::start("a", Behaviour::Paced).await;
    let story = Story::start(moving(), &[&leaving]).await;
    let mut body = completion();
    body["guided_regex"] = "x".into();
    leaving.step(6);
    let begun = Begun::after(story.post(COMPLETIONS, &body).await).await;
    let well = Worker::start("b", Behaviour::Well).await;
    story.list("b", &well.endpoint);
    story.signal(Mode::Handover, &["a"]);
    leaving.step(1000);
    same(begun.rest().await, COMPLETIONS, &body);
    assert!(well.requests().is_empty());
}

#[tokio::test]
async fn when_the_worker_is_lost_what_cannot_be_moved_ends_visibly() {
    let hung = Worker::start("a", Behaviour::Hangs(4)).await;
    let story = Story::start(moving(), &[&hung]).await;
    let mut body = completion();
    body["response_format"] = json!({ "type": "json_object" });
    let begun = Begun::after(story.post(COMPLETIONS, &body).await).await;
    story.signal(Mode::Handover, &["a"]);
    story.signal(Mode::Lost, &["a"]);
    let client = begun.rest().await;
    assert_eq!(client.ended().unwrap_err()["code"], "guided_decoding");
    assert!(story.metric(r#"lastgasp_router_migrations_failed_total{reason="guided_decoding"} 1"#));
}

#[tokio::test]
async fn nothing_is_added_and_nothing_is_moved_with_migration_off() {
    let dying = Worker::start("a", Behaviour::Breaks(6)).await;
    let story = Story::start(Config::default(), &[&dying]).await;
    let (client, _) = story.stream(COMPLETIONS, &completion()).await;
    assert_eq!(client.ended().unwrap_err()["code"], "migration_off");
    assert_eq!(dying.requests(), [completion()]);
}

#[tokio::test]
async fn a_worker_that_dies_before_a_byte_does_not_use_up_the_limit() {
    let dying = Worker::start("a", Behaviour::Breaks(6)).await;
    let story = Story::start(Config { migration_limit: 1, ..moving() }, &[&dying]).await;
    let response = story.post(COMPLETIONS, &completion()).await;
    let stillborn = Worker::start("b", Behaviour::Breaks(0)).await;
    story.list("b", &stillborn.endpoint);
    stillborn.asked(1).await;
    let well = Worker::start("c", Behaviour::Well).await;
    story.list("c", &well.endpoint);
    let (client, _) = read(response).await;
    same(client, COMPLETIONS, &completion());
}

#[tokio::test]
async fn the_limit_is_kept_and_its_end_is_visible() {
    let first = Worker::start("a", Behaviour::Breaks(4)).await;
    let second = Worker::start("b", Behaviour::Breaks(4)).await;
    let story = Story::start(Config { migration_limit: 1, ..moving() }, &[&first, &second]).await;
    let (client, _) = story.stream(COMPLETIONS, &completion()).await;
    assert_eq!(client.ended().unwrap_err()["code"], "limit_reached");
}

#[tokio::test]
async fn three_deaths_in_a_row_leave_no_seam() {
    let workers = [
        Worker::start("a", Behaviour::Breaks(5)).await,
        Worker::start("b", Behaviour::Breaks(5)).await,
        Worker::start("c", Behaviour::Breaks(5)).await,
    ];
    let well = Worker::start("d", Behaviour::Well).await;
    let story = Story::start(Config { migration_limit: 3, ..moving() }, &workers.each_ref()).await;
    let response = story.post(CHAT, &chat()).await;
    for worker in &workers {
        worker.asked(1).await;
    }
    story.list("d", &well.endpoint);
    let (client, _) = read(response).await;
    same(client, CHAT, &chat());
}

#[tokio::test]
async fn before_the_first_token_the_request_is_sent_elsewhere() {
    for behaviour in [Behaviour::Says(503), Behaviour::Breaks(0)] {
        let bad = Worker::start("a", behaviour).await;
        let story = Story::start(moving(), &[&bad]).await;
        let (body, asked) = (chat(), bad.asked(1));
        let answer = story.post(CHAT, &body);
        let well = Worker::start("b", Behaviour::Well).await;
        if matches!(behaviour, Behaviour::Says(_)) {
            // A worker that says no is only left for one that is there.
            story.list("b", &well.endpoint);
            let (client, _) = read(answer.await).await;
            same(client, CHAT, &body);
        } else {
            let list = async {
                asked.await;
                story.list("b", &well.endpoint);
            };
            let (response, ()) = tokio::join!(answer, list);
            let (client, _) = read(response).await;
            same(client, CHAT, &body);
        }
    }
}

#[tokio::test]
async fn a_listed_worker_that_is_not_there_costs_nothing() {
    let well = Worker::start("b", Behaviour::Well).await;
    let story = Story::start(Config { max_retries: 0, ..moving() }, &[&well]).await;
    let free = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    for name in ["x", "y", "z"] {
        story.list(name, &format!("http://{free}"));
    }
    for _ in 0..10 {
        let (client, _) = story.stream(COMPLETIONS, &completion()).await;
        same(client, COMPLETIONS, &completion());
    }
}

#[tokio::test]
async fn the_clients_own_mistake_is_answered_by_the_worker() {
    let refusing = Worker::start("a", Behaviour::Says(400)).await;
    let story = Story::start(moving(), &[&refusing]).await;
    let response = story.post(COMPLETIONS, &completion()).await;
    assert_eq!(response.status(), StatusCode::BAD_REQUEST);
    assert_eq!(response.json::<Value>().await.unwrap()["error"]["message"], "no");
    assert_eq!(refusing.requests().len(), 1);
}

#[tokio::test]
async fn without_a_worker_the_client_is_kept_and_then_told() {
    let dying = Worker::start("a", Behaviour::Breaks(6)).await;
    let config = Config { wait_for_worker: Duration::from_millis(1500), ..moving() };
    let story = Story::start(config, &[&dying]).await;
    let (client, text) = story.stream(COMPLETIONS, &completion()).await;
    assert!(text.contains("\n\n: lastgasp seeks a worker\n"), "{text}");
    assert_eq!(client.ended().unwrap_err()["code"], "no_worker");
    story.signal(Mode::Lost, &["a"]);
    let response = story.post(COMPLETIONS, &completion()).await;
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(response.json::<Value>().await.unwrap()["error"]["code"], "no_worker");
}

#[tokio::test]
async fn a_client_that_leaves_ends_the_generation() {
    let hung = Worker::start("a", Behaviour::Hangs(3)).await;
    let story = Story::start(moving(), &[&hung]).await;
    let response = story.post(COMPLETIONS, &completion()).await;
    drop(response);
    hung.dropped(1).await;
}

#[tokio::test]
async fn an_answer_that_comes_whole_is_had_elsewhere_if_the_worker_gives_up() {
    let aborting = Worker::start("a", Behaviour::Aborts).await;
    let story = Story::start(moving(), &[&aborting]).await;
    let body = json!({ "model": "m", "prompt": "Hi" });
    let well = Worker::start("b", Behaviour::Well).await;
    let list = async {
        aborting.asked(1).await;
        story.list("b", &well.endpoint);
    };
    let (response, ()) = tokio::join!(story.post(COMPLETIONS, &body), list);
    assert_eq!(response.json::<Value>().await.unwrap()["choices"][0]["finish_reason"], "stop");
}

#[tokio::test]
async fn a_signal_is_answered_with_what_became_of_every_stream() {
    let hung = Worker::start("a", Behaviour::Hangs(5)).await;
    let well = Worker::start("b", Behaviour::Well).await;
    let story = Story::start(moving(), &[&hung]).await;
    let mut guided = completion();
    guided["grammar"] = "x".into();
    let mut begun = Vec::new();
    for (path, body) in [(COMPLETIONS, completion()), (CHAT, chat()), (COMPLETIONS, guided)] {
        begun.push(Begun::after(story.post(path, &body).await).await);
    }
    story.list("b", &well.endpoint);
    let listings = story.signal(Mode::Lost, &["a"]);
    let counts = listings[0].settled().await;
    assert_eq!((counts.streams, counts.moved, counts.unmovable, counts.failed), (3, 2, 1, 0));
    for begun in begun {
        begun.rest().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn three_hundred_streams_leave_a_lost_worker_together() {
    let hung = Worker::start("a", Behaviour::Hangs(5)).await;
    let well = Worker::start("b", Behaviour::Well).await;
    let story = Story::start(moving(), &[&hung]).await;
    let mut begun = Vec::new();
    for _ in 0..300 {
        begun.push(Begun::after(story.post(CHAT, &chat()).await).await);
    }
    story.list("b", &well.endpoint);
    let listings = story.signal(Mode::Lost, &["a"]);
    for begun in begun {
        same(begun.rest().await, CHAT, &chat());
    }
    let counts = listings[0].settled().await;
    assert_eq!((counts.streams, counts.moved), (300, 300));
    hung.dropped(300).await;
}

#[tokio::test]
async fn a_handover_without_another_worker_leaves_the_stream_where_it_is_until_there_is_one() {
    let leaving = Worker::start("a", Behaviour::Paced).await;
    let story = Story::start(moving(), &[&leaving]).await;
    leaving.step(6);
    let begun = Begun::after(story.post(CHAT, &chat()).await).await;
    story.signal(Mode::Handover, &["a"]);
    leaving.step(2);
    let well = Worker::start("b", Behaviour::Well).await;
    story.list("b", &well.endpoint);
    leaving.dropped(1).await;
    same(begun.rest().await, CHAT, &chat());
}

#[tokio::test]
async fn a_silent_worker_that_does_not_answer_is_left_after_the_stall_timeout() {
    let hung = Worker::start("a", Behaviour::Hangs(5)).await;
    let well = Worker::start("b", Behaviour::Well).await;
    let config = Config { stall_timeout: Some(Duration::from_millis(300)), ..moving() };
    let story = Story::start(config, &[&hung]).await;
    let begun = Begun::after(story.post(CHAT, &chat()).await).await;
    story.list("b", &well.endpoint);
    hung.make_ill();
    same(begun.rest().await, CHAT, &chat());
}

#[tokio::test]
async fn of_a_node_whose_lease_lapses_only_a_silent_stream_whose_worker_is_not_there_is_moved() {
    let gone = Worker::start("a", Behaviour::Hangs(5)).await;
    let there = Worker::start("c", Behaviour::Paced).await;
    let well = Worker::start("b", Behaviour::Well).await;
    let story = Story::start(moving(), &[]).await;
    let node = |name: &str| Name::new(name).unwrap();
    // Just after it connected, the router believes no lapse.
    story.workers.connected(Instant::now().checked_sub(NODE_TTL * 3).unwrap());
    story.workers.lease_renewed(node("n"));
    story.workers.lease_renewed(node("o"));
    story.list_leased("n", "a", &gone.endpoint);
    let moved = Begun::after(story.post(COMPLETIONS, &completion()).await).await;
    story.list_leased("n", "c", &there.endpoint);
    there.step(6);
    // The one with fewer requests is chosen.
    let stays = Begun::after(story.post(CHAT, &chat()).await).await;
    assert_eq!(stays.response.headers()["x-lastgasp-worker"], "n/c");
    story.list_leased("o", "b", &well.endpoint);

    gone.vanish();
    // That it is not well does not matter: it is there.
    there.make_ill();
    story.workers.lease_lapsed(node("n"));
    same(moved.rest().await, COMPLETIONS, &completion());
    assert!(
        story.metric(r#"lastgasp_router_migrations_total{exactness="exact",reason="lease_lapsed"} 1"#),
        "{}",
        story.proxy.metrics.render(&story.workers)
    );
    // Asked a second time, it was not left after the first.
    there.probed(2).await;
    there.step(1000);
    same(stays.rest().await, CHAT, &chat());
    assert_eq!(well.requests().len(), 1);
}

/// It accepts connections and never answers, as a machine does that lost its power behind a balancer.
#[tokio::test]
async fn of_a_node_whose_lease_lapses_a_request_that_got_no_first_byte_goes_elsewhere() {
    let mute = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let well = Worker::start("b", Behaviour::Well).await;
    let story = Story::start(moving(), &[]).await;
    let node = |name: &str| Name::new(name).unwrap();
    story.workers.connected(Instant::now().checked_sub(NODE_TTL * 3).unwrap());
    story.workers.lease_renewed(node("n"));
    story.workers.lease_renewed(node("o"));
    story.list_leased("n", "a", &format!("http://{}", mute.local_addr().unwrap()));
    let whole = json!({ "model": "m", "prompt": "Hi", "max_tokens": 30 });
    let (stream, whole) = (completion(), whole);
    let decided = async {
        // Both are there, and the question for its models.
        let mut held = Vec::new();
        while held.len() < 3 {
            held.push(mute.accept().await.unwrap());
        }
        story.list_leased("o", "b", &well.endpoint);
        story.workers.lease_lapsed(node("n"));
        held
    };
    let (streamed, answered, _held) =
        tokio::join!(story.post(COMPLETIONS, &stream), story.post(COMPLETIONS, &whole), decided);
    assert_eq!(answered.headers()["x-lastgasp-worker"], "o/b");
    assert_eq!(streamed.headers()["x-lastgasp-worker"], "o/b");
    same(read(streamed).await.0, COMPLETIONS, &stream);
}

#[tokio::test]
async fn other_paths_are_passed_on_and_ids_go_with_the_request() {
    let worker = Worker::start("a", Behaviour::Well).await;
    let story = Story::start(moving(), &[&worker]).await;
    let request = story
        .client
        .post(format!("{}/v1/embeddings?x=1", story.url))
        .header("x-request-id", "mine")
        .json(&json!({ "model": "m", "input": "hello" }));
    let response = request.send().await.unwrap();
    assert_eq!(response.headers()["x-request-id"], "mine");
    assert_eq!(response.json::<Value>().await.unwrap()["path"], "/v1/embeddings");
    assert_eq!(worker.seen.requests.lock().unwrap()[0].1["x-request-id"], "mine");
    let models = story.client.get(format!("{}/v1/models", story.url)).send().await.unwrap();
    assert_eq!(models.json::<Value>().await.unwrap()["data"][0]["id"], "m");
}

#[tokio::test]
async fn what_a_client_does_wrong_is_said_in_openais_words() {
    let worker = Worker::start("a", Behaviour::Well).await;
    let config = Config { api_keys: vec!["key".into()], max_body: 1000, ..moving() };
    let story = Story::start(config, &[&worker]).await;
    let post = |body: Value| story.client.post(format!("{}{COMPLETIONS}", story.url)).json(&body);
    let long = json!({ "model": "m", "prompt": "x".repeat(2000) });
    for (request, status, code) in [
        (post(completion()), 401, "invalid_api_key"),
        (post(completion()).bearer_auth("kex"), 401, "invalid_api_key"),
        (post(json!({ "model": "other", "prompt": "" })).bearer_auth("key"), 404, "model_not_found"),
        (post(json!({ "model": 7 })).bearer_auth("key"), 400, "invalid_request"),
        (post(long).bearer_auth("key"), 413, "request_too_large"),
        (story.client.get(format!("{}/nothing", story.url)), 404, "not_found"),
        (story.client.get(format!("{}/workers", story.url)), 401, "invalid_api_key"),
    ] {
        let response = request.send().await.unwrap();
        assert_eq!(response.status().as_u16(), status);
        assert_eq!(response.json::<Value>().await.unwrap()["error"]["code"], code);
    }
    let view = story.client.get(format!("{}/workers", story.url)).bearer_auth("key").send().await.unwrap();
    let view = view.json::<Value>().await.unwrap();
    let known = json!([{ "worker": "n/a", "incarnation": "1", "epoch": 1, "takes_work": true, "in_flight": 0 }]);
    assert_eq!(view, known);
    let (client, _) = read(post(completion()).bearer_auth("key").send().await.unwrap()).await;
    assert!(client.ended().is_ok());
    // The router's key is not the worker's to see.
    assert!(!worker.seen.requests.lock().unwrap()[0].1.contains_key("authorization"));
}

//! Clients ask for paths that are not for them. A worker never hears of it.
#![forbid(unsafe_code)]

mod fake;

use std::sync::{Arc, Mutex};

use axum::Router;
use axum::extract::State;
use axum::http::{Method, StatusCode, Uri};
use fake::story::{Behaviour, Story, Worker};
use lastgasp_router::config::Config;
use lastgasp_router::paths;
use proptest::prelude::*;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// An engine that does whatever it is asked, and writes down what that was.
struct Recorder {
    endpoint: String,
    heard: Arc<Mutex<Vec<String>>>,
}

impl Recorder {
    async fn start(status: u16) -> Self {
        let heard = Arc::new(Mutex::new(Vec::new()));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let hear = async move |State(heard): State<Arc<Mutex<Vec<String>>>>, method: Method, uri: Uri| {
            // The router's own question.
            if (method.as_str(), uri.path()) != ("GET", "/v1/models") {
                heard.lock().unwrap().push(format!("{method} {uri}"));
            }
            (StatusCode::from_u16(status).unwrap(), "done")
        };
        let app = Router::new().fallback(hear).with_state(Arc::clone(&heard));
        tokio::spawn(async move { axum::serve(listener, app).await });
        Self { endpoint, heard }
    }

    fn heard(&self) -> Vec<String> {
        self.heard.lock().unwrap().clone()
    }
}

/// Sends a path as it is written: an HTTP client would put it in order first.
async fn ask(story: &Story, method: &str, target: &str, key: &str) -> String {
    let body = r#"{"model":"m","prompt":"Hi","messages":[{"role":"user","content":"Hi"}],"stream":true}"#;
    let address = story.url.strip_prefix("http://").unwrap();
    let mut connection = TcpStream::connect(address).await.unwrap();
    let head = format!(
        "{method} {target} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\nconnection: close\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    connection.write_all(head.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    connection.read_to_end(&mut answer).await.unwrap();
    String::from_utf8_lossy(&answer).into_owned()
}

fn with_keys() -> Config {
    Config { api_keys: vec!["client".into()], migration_limit: 1, ..Config::default() }
}

#[tokio::test]
async fn a_path_that_is_not_on_the_list_is_refused_before_a_worker_is_chosen() {
    let worker = Recorder::start(200).await;
    let story = Story::start(with_keys(), &[]).await;
    story.list("a", &worker.endpoint);
    for (method, target) in [
        ("POST", "/v1/../sleep?level=2"),
        ("POST", "/v1/%2e%2e/pause"),
        ("POST", "/v1/%2E%2e/pause"),
        ("POST", "/v1/%252e%252e/pause"),
        ("POST", "/v1/..%2fpause"),
        ("POST", "/v1/..%5cpause"),
        ("POST", "/v1/x/../../flush_cache"),
        ("POST", r"/v1/..\collective_rpc"),
        ("POST", r"/v1\..\collective_rpc"),
        ("GET", "/v1/../metrics"),
        ("GET", "/v1/responses/../../metrics"),
        ("GET", "/v1/responses/%2e%2e"),
        ("POST", "/v1/responses/../cancel"),
        ("POST", "/v1/./chat/completions"),
        ("POST", "/v1//chat/completions"),
        ("POST", "//v1/chat/completions"),
        ("POST", "/v1/chat/completions/"),
        ("POST", "/v1/chat/./completions"),
        ("POST", "/v1/x/../chat/completions"),
        ("POST", "/v1/chat%2fcompletions"),
        ("POST", "/v1/%63hat/completions"),
        ("POST", "/V1/chat/completions"),
        ("POST", "/v1/chat/completions;x"),
        ("POST", "http://x/v1/../sleep"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/unload_lora_adapter"),
        ("POST", "/v1/sleep"),
        ("GET", "/v1/embeddings"),
        ("DELETE", "/v1/chat/completions"),
        ("POST", "/sleep"),
        ("OPTIONS", "*"),
    ] {
        let answer = ask(&story, method, target, "client").await;
        let status = &answer[..12];
        // hyper itself does not take some of them for a request.
        let refused = ["HTTP/1.1 404", "HTTP/1.1 405", "HTTP/1.1 400"].contains(&status);
        assert!(refused && !answer.contains("done"), "{method} {target}: {answer}");
    }
    assert_eq!(worker.heard(), [""; 0]);
    let answer = ask(&story, "POST", "/v1/../sleep", "client").await;
    let error: Value = serde_json::from_str(answer.split("\r\n\r\n").nth(1).unwrap()).unwrap();
    assert_eq!(error["error"]["code"], "not_found", "{answer}");
}

#[tokio::test]
async fn what_is_on_the_list_is_passed_on_with_its_query() {
    let worker = Recorder::start(200).await;
    let story = Story::start(with_keys(), &[]).await;
    story.list("a", &worker.endpoint);
    let mut asked: Vec<String> = paths::PASSED_ON.iter().map(|path| format!("POST {path}?x=1")).collect();
    asked.extend(["GET", "DELETE"].map(|method| format!("{method} /v1/responses/resp_0-A")));
    asked.push("POST /v1/responses/resp_0-A/cancel".into());
    for line in &asked {
        let (method, target) = line.split_once(' ').unwrap();
        let answer = ask(&story, method, target, "client").await;
        assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("done"), "{line}: {answer}");
    }
    assert_eq!(worker.heard(), asked);
}

#[tokio::test]
async fn an_adapter_is_loaded_by_every_worker_and_only_with_a_key_of_its_own() {
    let workers = [Recorder::start(200).await, Recorder::start(200).await, Recorder::start(200).await];
    let story = Story::start(Config { admin_keys: vec!["admin".into()], ..with_keys() }, &[]).await;
    for (name, worker) in ["a", "b", "c"].into_iter().zip(&workers) {
        story.list(name, &worker.endpoint);
    }
    let load = async |key: &str| {
        let request = story.client.post(format!("{}/v1/load_lora_adapter", story.url)).bearer_auth(key);
        let response = request.json(&json!({ "lora_name": "l", "lora_path": "/l" })).send().await.unwrap();
        (response.status().as_u16(), response.json::<Value>().await.unwrap())
    };
    for key in ["client", "", "admix"] {
        assert_eq!(load(key).await.0, 401, "{key}");
    }
    assert_eq!(ask(&story, "POST", "/v1/embeddings", "admin").await[..12], *"HTTP/1.1 401");
    assert!(workers.iter().all(|worker| worker.heard().is_empty()));

    let said = |worker: &str, status: u16| json!({ "worker": worker, "status": status, "answer": "done" });
    let all = ["n/a", "n/b", "n/c"].map(|worker| said(worker, 200));
    let all = json!({ "workers": all });
    assert_eq!(load("admin").await, (200, all));
    assert!(workers.iter().all(|worker| worker.heard() == ["POST /v1/load_lora_adapter"]));

    let refusing = Recorder::start(400).await;
    story.list("d", &refusing.endpoint);
    let (status, answer) = load("admin").await;
    assert_eq!((status, &answer["workers"][3]), (502, &said("n/d", 400)));
}

#[tokio::test]
async fn an_adapter_that_is_being_loaded_is_loaded_although_the_client_leaves() {
    let slow = TcpListener::bind("127.0.0.1:0").await.unwrap();
    // While one request is under way there is room for no other.
    let config = Config { admin_keys: vec!["admin".into()], max_requests: 1, ..with_keys() };
    let story = Story::start(config, &[]).await;
    story.list("slow", &format!("http://{}", slow.local_addr().unwrap()));
    let address = story.url.strip_prefix("http://").unwrap();
    let mut client = TcpStream::connect(address).await.unwrap();
    let request = "POST /v1/load_lora_adapter HTTP/1.1\r\nhost: x\r\nauthorization: Bearer admin\r\n\
                   content-length: 2\r\n\r\n{}";
    client.write_all(request.as_bytes()).await.unwrap();
    let mut worker = loop {
        let (mut connection, _) = slow.accept().await.unwrap();
        let mut asked = [0; 4096];
        let read = connection.read(&mut asked).await.unwrap();
        // Others are the router's own questions.
        if asked[..read].starts_with(b"POST ") {
            break connection;
        }
    };

    client.shutdown().await.unwrap();
    assert_eq!(client.read(&mut [0; 64]).await.unwrap(), 0, "the router has seen the client leave");

    let other = async || {
        let request = story.client.post(format!("{}/v1/embeddings", story.url)).bearer_auth("client");
        request.json(&json!({ "model": "unknown" })).send().await.unwrap().status().as_u16()
    };
    assert_eq!(other().await, 503, "the worker is still waited for");
    worker.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\ndone").await.unwrap();
    let over = async {
        while other().await == 503 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(60), over).await.expect("room once the worker has answered");
}

#[tokio::test]
async fn without_keys_of_clients_an_adapter_still_needs_its_own() {
    let worker = Worker::start("a", Behaviour::Well).await;
    let config = Config { admin_keys: vec!["admin".into()], ..Config::default() };
    let story = Story::start(config, &[&worker]).await;
    let answer = story.post("/v1/unload_lora_adapter", &json!({ "lora_name": "l" })).await;
    assert_eq!(answer.status(), StatusCode::UNAUTHORIZED);
    let request = story.client.post(format!("{}/v1/unload_lora_adapter", story.url)).bearer_auth("admin");
    assert_eq!(request.json(&json!({ "lora_name": "l" })).send().await.unwrap().status(), StatusCode::OK);
    // The key is the router's, and not for workers to see.
    assert!(!worker.seen.requests.lock().unwrap()[0].1.contains_key("authorization"));
}

fn pieces() -> impl Strategy<Value = String> {
    let listed: Vec<&str> = paths::PASSED_ON.iter().chain(&paths::ADMIN).flat_map(|path| path.split('/')).collect();
    const ODD: [&str; 14] =
        ["..", ".", "", "%2e", "%2F", "%5c", "%252e", "\\", "cancel", "responses", "resp_1", "sleep", ";", "\t"];
    let piece = prop_oneof![
        4 => prop::sample::select(listed).prop_map(str::to_owned),
        2 => prop::sample::select(&ODD[..]).prop_map(str::to_owned),
        1 => "\\PC{0,6}",
    ];
    prop::collection::vec(piece, 0..8).prop_map(|pieces| format!("/v1/{}", pieces.join("/")))
}

proptest! {
    #[test]
    fn what_a_worker_is_asked_for_is_on_the_list_and_stays_so_in_a_url(path in pieces(), post in any::<bool>()) {
        let method = if post { Method::POST } else { Method::GET };
        if let Some(asked) = paths::passed_on(&method, &path) {
            let id = asked.strip_prefix("/v1/responses/").map(|id| id.strip_suffix("/cancel").unwrap_or(id));
            let plain = |id: &str| !id.contains(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != '-');
            prop_assert!(paths::PASSED_ON.contains(&asked.as_str()) || id.is_some_and(plain), "{asked}");
            let url = reqwest::Url::parse(&format!("http://worker:8000{asked}")).unwrap();
            prop_assert_eq!(url.path(), asked.as_str());
            prop_assert_eq!(asked, path);
        }
    }
}

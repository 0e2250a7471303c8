//! Health servers that behave and misbehave, and an ear for what the sensor reports.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::{Stream, StreamExt as _, stream};
use lastgasp::config::{HealthConfig, Service};
use lastgasp::core::{Evidence, HealthRole, Kind, WorkerId};
use lastgasp::sensors::health::{self, HealthHandle, Life, Place};
use lastgasp::sensors::proc;
use serde::Deserialize;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::{mpsc, watch};
use tonic::service::Routes;
use tonic::{Request, Response, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_server::{Health, HealthServer};
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

/// Longer than anything takes on the busiest machine; only a test that fails waits for it.
const PATIENCE: Duration = Duration::from_secs(60);

/// Asks often, and gives slow machines time to answer.
pub(crate) fn config() -> HealthConfig {
    HealthConfig {
        grpc: None,
        services: vec![Service { name: String::new(), role: HealthRole::Liveness }],
        http: None,
        check_interval: Duration::from_millis(20),
        check_timeout: Duration::from_secs(2),
        hang_window: Duration::from_secs(10),
        keepalive: Duration::from_secs(10),
    }
}

pub(crate) fn grpc(address: SocketAddr) -> HealthConfig {
    HealthConfig { grpc: Some(format!("http://{address}")), ..config() }
}

/// A running sensor whose worker is this test's own process.
pub(crate) struct Sensor {
    pub(crate) handle: HealthHandle,
    evidence: mpsc::UnboundedReceiver<Evidence>,
}

impl Sensor {
    pub(crate) fn of(config: HealthConfig) -> Self {
        Self::of_life(config, 1, false)
    }

    pub(crate) fn of_life(config: HealthConfig, port: u16, served_before: bool) -> Self {
        let root = proc::identify(std::process::id()).unwrap();
        let (tell, evidence) = mpsc::unbounded_channel();
        let life = Life { worker: WorkerId(7), root, port, served_before, place: Place::default() };
        Self { handle: health::spawn(&Handle::current(), life, config, tell), evidence }
    }

    /// The next thing reported.
    pub(crate) async fn next(&mut self) -> Kind {
        let Evidence { worker, root, kind, at } = self.next_or_end().await.expect("the sensor ended");
        assert_eq!((worker, root.tgid), (WorkerId(7), std::process::id()));
        assert!(at <= proc::monotonic_now());
        kind
    }

    pub(crate) async fn next_or_end(&mut self) -> Option<Evidence> {
        tokio::time::timeout(PATIENCE, self.evidence.recv()).await.expect("something should have been reported")
    }

    pub(crate) async fn expect(&mut self, kinds: &[Kind]) {
        for kind in kinds {
            assert_eq!(self.next().await, *kind, "{}", self.handle.summary());
        }
    }

    /// Skips what may come any number of times, until `wanted` comes.
    pub(crate) async fn skip_to(&mut self, wanted: Kind, skipped: &[Kind]) {
        loop {
            let kind = self.next().await;
            if kind == wanted {
                return;
            }
            assert!(skipped.contains(&kind), "{kind:?} before {wanted:?}");
        }
    }

    /// Nothing more was to be said: a probe is asked for, and its answer is what comes next.
    pub(crate) async fn expect_nothing_more(&mut self) {
        self.handle.probe();
        self.expect(&[Kind::ProbeAnswered]).await;
    }

    /// Drops the handle, after which nothing comes any more, and nothing unread had come before.
    pub(crate) async fn end(self) {
        let Self { handle, mut evidence } = self;
        drop(handle);
        let unread = tokio::time::timeout(PATIENCE, evidence.recv()).await.expect("the sensor should have ended");
        assert_eq!(unread, None);
    }

    pub(crate) async fn says(&self, part: &str) -> String {
        let mut summaries = self.handle.summaries();
        let said = tokio::time::timeout(PATIENCE, summaries.wait_for(|summary| summary.contains(part))).await;
        said.unwrap_or_else(|_| panic!("{part:?} should have been said, not {:?}", self.handle.summary()))
            .expect("the sensor ended")
            .clone()
    }
}

/// A server with a runtime of its own: when it is dropped, its connections break as if it was killed.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    runtime: Option<Runtime>,
}

impl Server {
    pub(crate) fn grpc(address: &str, routes: Routes) -> Self {
        Self::serve(address, async move |listener| {
            let incoming = tonic::transport::server::TcpIncoming::from(listener);
            tonic::transport::Server::builder().add_routes(routes).serve_with_incoming(incoming).await.unwrap();
        })
    }

    pub(crate) fn http(router: axum::Router) -> Self {
        Self::serve("127.0.0.1:0", async move |listener| axum::serve(listener, router).await.unwrap())
    }

    fn serve<F: Future<Output = ()> + Send>(
        address: &str,
        serve: impl FnOnce(TcpListener) -> F + Send + 'static,
    ) -> Self {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = std::net::TcpListener::bind(address).unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        runtime.spawn(async move { serve(TcpListener::from_std(listener).unwrap()).await });
        Self { address, runtime: Some(runtime) }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// A case of `tests/cases/health`.
#[derive(Deserialize)]
pub(crate) struct Case {
    trace: Vec<Step>,
}

#[derive(Deserialize)]
struct Step {
    rpc: Option<String>,
    #[serde(default)]
    service: String,
    #[serde(default)]
    gets: Vec<String>,
}

impl Case {
    pub(crate) fn read(name: &str) -> Self {
        let path = format!("{}/tests/cases/health/{name}.json", env!("CARGO_MANIFEST_DIR"));
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
    }

    pub(crate) fn service(&self) -> &str {
        &self.trace[0].service
    }

    fn gets(&self, rpc: &str) -> VecDeque<String> {
        let step = self.trace.iter().find(|step| step.rpc.as_deref() == Some(rpc));
        step.map(|step| step.gets.clone().into()).unwrap_or_default()
    }

    /// A server that answers as the case says. While its Watch plays, Check agrees with it; after
    /// that Check plays its own part, when it is let, and stays at the end of it. A Watch that is opened again has
    /// the same answer if that was an error, and else Check's error.
    pub(crate) fn server(&self) -> (Server, Arc<Calls>) {
        let calls = Arc::new(Calls::default());
        let watch = self.gets("Watch");
        let script = Script {
            current: Mutex::new(watch.front().cloned()),
            plays_watch: !watch.is_empty(),
            watch: Mutex::new(watch),
            check: Mutex::new(self.gets("Check")),
            calls: Arc::clone(&calls),
        };
        let routes = Routes::new(HealthServer::from_arc(Arc::new(Played(Arc::new(script)))));
        (Server::grpc("127.0.0.1:0", routes), calls)
    }
}

/// How often each RPC was called, and whether Check may leave its first answer.
#[derive(Default)]
pub(crate) struct Calls {
    pub(crate) go_on: AtomicBool,
    pub(crate) watch: watch::Sender<u32>,
    pub(crate) check: watch::Sender<u32>,
}

impl Calls {
    pub(crate) async fn checks(&self, at_least: u32) {
        let mut check = self.check.subscribe();
        tokio::time::timeout(PATIENCE, check.wait_for(|calls| *calls >= at_least)).await.unwrap().unwrap();
    }
}

struct Script {
    /// What the Watch says at present, while it plays.
    current: Mutex<Option<String>>,
    plays_watch: bool,
    watch: Mutex<VecDeque<String>>,
    check: Mutex<VecDeque<String>>,
    calls: Arc<Calls>,
}

struct Played(Arc<Script>);

fn status(word: &str) -> Result<HealthCheckResponse, Status> {
    match word.strip_prefix("ERR ") {
        Some("NOT_FOUND") => Err(Status::not_found("Unknown service")),
        Some("UNIMPLEMENTED") => Err(Status::unimplemented("Method not found!")),
        None => Ok(HealthCheckResponse { status: ServingStatus::from_str_name(word).unwrap() as i32 }),
        Some(code) => panic!("no such code in the cases: {code}"),
    }
}

impl Script {
    async fn check(&self) -> Result<HealthCheckResponse, Status> {
        let current = self.current.lock().unwrap().clone();
        let word = current.unwrap_or_else(|| {
            let mut check = self.check.lock().unwrap();
            let moves = check.len() > 1 && self.calls.go_on.load(Ordering::Relaxed);
            if moves { check.pop_front() } else { check.front().cloned() }
                .unwrap_or_else(|| "ERR UNIMPLEMENTED".to_owned())
        });
        if word == "DEADLINE" {
            return std::future::pending().await;
        }
        status(&word)
    }
}

#[tonic::async_trait]
impl Health for Played {
    async fn check(&self, _: Request<HealthCheckRequest>) -> Result<Response<HealthCheckResponse>, Status> {
        self.0.calls.check.send_modify(|calls| *calls += 1);
        self.0.check().await.map(Response::new)
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

    async fn watch(&self, _: Request<HealthCheckRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let script = Arc::clone(&self.0);
        script.calls.watch.send_modify(|calls| *calls += 1);
        let first = script.watch.lock().unwrap().front().cloned();
        match first {
            None if script.plays_watch => {
                return Err(script.check().await.err().unwrap_or_else(|| Status::cancelled("over")));
            }
            None => return Err(Status::unimplemented("Method not found!")),
            Some(word) if word.starts_with("ERR ") => {
                *script.current.lock().unwrap() = None;
                return Err(status(&word).unwrap_err());
            }
            Some(_) => {}
        }
        let messages = stream::unfold(script, async |script| {
            let word = script.watch.lock().unwrap().pop_front();
            match word.as_deref() {
                // The case leaves the stream open.
                None => std::future::pending().await,
                Some("END_OK") => {
                    *script.current.lock().unwrap() = None;
                    None
                }
                Some(word) => {
                    *script.current.lock().unwrap() = Some(word.to_owned());
                    Some((status(word), script))
                }
            }
        });
        Ok(Response::new(messages.boxed()))
    }
}

/// A network between the sensor and a server that can stop carrying packets, without a FIN.
pub(crate) struct Network {
    pub(crate) address: SocketAddr,
    cut: watch::Sender<bool>,
}

impl Network {
    pub(crate) async fn before(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (cut, state) = watch::channel(false);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(carry(client, server, state.clone()));
            }
        });
        Self { address, cut }
    }

    /// Everything that is connected now, or will be while it is cut, stays silent for ever.
    pub(crate) fn cut(&self, cut: bool) {
        self.cut.send_replace(cut);
    }
}

async fn carry(mut client: TcpStream, server: SocketAddr, mut cut: watch::Receiver<bool>) {
    let mut server = TcpStream::connect(server).await.unwrap();
    tokio::select! {
        biased;
        _ = cut.wait_for(|cut| *cut) => {}
        _ = tokio::io::copy_bidirectional(&mut client, &mut server) => return,
    }
    // Both sockets stay open.
    std::future::pending().await
}

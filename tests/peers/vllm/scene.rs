//! Two servers, lastgasp, its router, and their clients.

use lastgasp_protocol::WorkerState;
use lastgasp_tests::client::{Ending, LiveStream, Transcript};
use lastgasp_tests::daemon::{Daemon, DaemonConfig};
use lastgasp_tests::discovery::Discovery;
use lastgasp_tests::model::Endpoint;
use lastgasp_tests::nats::Nats;
use lastgasp_tests::router::Router;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::server::Server;

/// What both servers are asked, without any bound but the number of tokens: 3 s and more.
pub(super) fn question() -> Value {
    json!({
        "model": "tiny", "prompt": "The kernel knows first", "max_tokens": 600, "temperature": 0, "ignore_eos": true,
        "return_token_ids": true,
    })
}

/// The parts but for the servers. The fields are dropped from first to last.
pub(super) struct Scene {
    pub(super) router: Router,
    _daemon: Daemon,
    pub(super) discovery: Discovery,
    _nats: Nats,
    _folder: TempDir,
}

impl Scene {
    /// Watches over `victim` and `spare`, reached at these addresses by the router, and waits until both are
    /// listed.
    pub(super) async fn new(folder: TempDir, victim: (&Server, String), spare: (&Server, String)) -> Self {
        let nats = Nats::start(folder.path()).await.unwrap();
        let discovery = Discovery::watch(&nats).await.unwrap();
        let mut config = DaemonConfig::new("peers", &nats.url(), "required", folder.path()).with_hold_down_ms(1);
        for (name, (server, endpoint)) in [("victim", victim), ("spare", spare)] {
            config = config.with_vllm(name, &server.declared, endpoint, server.addresses().health());
        }
        let daemon = Daemon::start(&config, folder.path()).await.unwrap();
        for worker in ["victim", "spare"] {
            discovery.listed(worker, WorkerState::Serving).await.unwrap();
        }
        let router = Router::start("router", &nats.url(), 3, folder.path()).await.unwrap();
        Self { router, _daemon: daemon, discovery, _nats: nats, _folder: folder }
    }

    /// Waits until the router gives work to the victim as it is listed now.
    pub(super) async fn offered(&self) {
        let victim = self.discovery.listed("victim", WorkerState::Serving).await.unwrap();
        let spare = self.discovery.listed("spare", WorkerState::Serving).await.unwrap();
        let expected = [("peers/spare", &spare.incarnation), ("peers/victim", &victim.incarnation)];
        self.router.offers(&expected).await.unwrap();
    }

    /// A stream through the router that the victim serves. It takes another one where the first went to the
    /// spare.
    pub(super) async fn stream(&self, endpoint: Endpoint, body: &Value) -> LiveStream {
        let mut elsewhere = Vec::new();
        for _ in 0..4 {
            let stream = self.router.stream(endpoint, body).await.unwrap();
            if stream.transcript.worker.as_deref() == Some("peers/victim") {
                return stream;
            }
            elsewhere.push(stream);
        }
        panic!("the router gives nothing to the victim: {:#?}", self.router.workers().await);
    }
}

/// Whether a stream has every token and ended as it should.
pub(super) fn is_complete(transcript: &Transcript, whole: &Transcript) -> bool {
    transcript.ids == whole.ids
        && transcript.text == whole.text
        && transcript.finish_reasons == whole.finish_reasons
        && transcript.error.is_none()
        && transcript.dones == 1
        && transcript.answer_ids.len() == 1
        && transcript.ending == Some(Ending::Whole)
}

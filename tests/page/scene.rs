//! Engines, a daemon, a router, and a browser that looks at the daemon's page.

use std::env;
use std::path::PathBuf;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use lastgasp_protocol::WorkerState;
use lastgasp_tests::browser::Browser;
use lastgasp_tests::client::LiveStream;
use lastgasp_tests::daemon::{Daemon, DaemonConfig};
use lastgasp_tests::discovery::Discovery;
use lastgasp_tests::engine::Engine;
use lastgasp_tests::model::Endpoint;
use lastgasp_tests::nats::Nats;
use lastgasp_tests::router::Router;
use nix::sys::signal::Signal;
use serde_json::json;
use tempfile::TempDir;
use tokio::process::Command;

/// Where pictures go, if anywhere.
const PICTURES: &str = "LASTGASP_SCREENSHOTS";

/// A window, and what it is called in `docs/`.
#[derive(Clone, Copy)]
pub(crate) struct Look {
    /// Of the picture; nothing for a look that is only checked.
    name: &'static str,
    width: u32,
    height: u32,
    scheme: &'static str,
    /// What is at the top of the picture.
    at: &'static str,
}

impl Look {
    pub(crate) const DESKTOP: Self =
        Self { name: "status-page", width: 1180, height: 1240, scheme: "light", at: "header" };
    pub(crate) const DARK: Self =
        Self { name: "status-page-dark", width: 1180, height: 1240, scheme: "dark", at: "header" };
    pub(crate) const PHONE: Self =
        Self { name: "status-page-phone", width: 390, height: 844, scheme: "dark", at: "#deaths-title" };
    /// As WCAG 2.2 asks (1.4.10, reflow).
    pub(crate) const NARROWEST: Self = Self { name: "", width: 320, height: 640, scheme: "light", at: "header" };
}

/// The fields are dropped from first to last.
pub(crate) struct Scene {
    pub(crate) browser: Browser,
    router: Router,
    pub(crate) daemon: Daemon,
    config: DaemonConfig,
    pub(crate) engines: Vec<Engine>,
    _discovery: Discovery,
    _nats: Nats,
    folder: TempDir,
}

impl Scene {
    /// Workers of these names, each said to serve this model, listed; and the page open.
    pub(crate) async fn new(workers: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let nats = Nats::start(path).await.unwrap();
        let discovery = Discovery::watch(&nats).await.unwrap();
        let mut config = DaemonConfig::new("gpu-a", &nats.url(), "required", path);
        let mut engines = Vec::new();
        for (name, model) in workers {
            let arguments = ["--tokens-per-second", "100", "--frontend", "rust", "--rust-notice-ms", "3600000"];
            let engine = Engine::start(name, &arguments, path).await.unwrap();
            config = config.with(&engine);
            config.worker.last_mut().unwrap().models = vec![(*model).to_owned()];
            engines.push(engine);
        }
        let daemon = Daemon::start(&config, path).await.unwrap();
        for (name, _) in workers {
            discovery.listed(name, WorkerState::Serving).await.unwrap();
        }
        let router = Router::start("router-1", &nats.url(), 3, path).await.unwrap();
        let mut browser = Browser::start(path).await.unwrap();
        browser.look_like(1180, 1240, 1.0, "light").await.unwrap();
        browser.open(&format!("http://{}/", daemon.ready.metrics)).await.unwrap();
        Self { browser, router, daemon, config, engines, _discovery: discovery, _nats: nats, folder }
    }

    /// One answer from each worker, begun; it goes on for half a minute, also on a busy machine.
    pub(crate) async fn ask_everybody(&self) -> Vec<LiveStream> {
        let body = json!({
            "model": "tiny", "prompt": "once", "max_tokens": 3000, "temperature": 0, "ignore_eos": true,
            "return_token_ids": true, "stream": true,
        });
        let mut asked = Vec::new();
        for _ in &self.engines {
            let mut stream = self.router.stream(Endpoint::Completions, &body).await.unwrap();
            stream.tokens(5).await.unwrap();
            asked.push(stream);
        }
        asked
    }

    /// Kills the engine core of this worker, as somebody at a shell would.
    pub(crate) async fn kill_core_of(&self, worker: &str) {
        let engine = self.engines.iter().find(|engine| engine.process.name() == worker);
        let core = engine.expect("a worker of the scene").core;
        assert!(core.is_alive());
        let status = Command::new("sh").args(["-c", &format!("kill -9 {}", core.pid)]).status().await.unwrap();
        assert!(status.success());
    }

    pub(crate) async fn kill_daemon(&mut self) {
        assert!(self.daemon.process.identity.signal(Signal::SIGKILL));
        self.daemon.process.exited().await.unwrap();
    }

    /// Starts it again, where it was.
    pub(crate) async fn start_daemon(&mut self) {
        let config = self.config.clone().listening(self.daemon.ready.metrics);
        self.daemon = Daemon::start(&config, self.folder.path()).await.unwrap();
    }

    /// The page fits into this window. Takes its picture, if pictures are wanted.
    pub(crate) async fn pictured(&mut self, look: Look) {
        let Look { name, width, height, scheme, at } = look;
        let folder = env::var_os(PICTURES).map(PathBuf::from).filter(|_| !name.is_empty());
        // Twice the pixels on a phone, as phones have.
        let scale = if width < 600 { 2.0 } else { 1.0 };
        self.browser.look_like(width, height, scale, scheme).await.unwrap();
        self.browser
            .until(&format!(
                "innerWidth === {width} && document.querySelector('figure svg').viewBox.baseVal.width < {width}"
            ))
            .await
            .unwrap();
        let wide = self.browser.value("document.documentElement.scrollWidth").await.unwrap();
        assert_eq!(wide, width, "nothing sticks out of the window");
        if let Some(folder) = folder {
            let to = format!("scrollTo(0, document.querySelector('{at}').getBoundingClientRect().top + scrollY - 20)");
            self.browser.value(&to).await.unwrap();
            let picture = BASE64_STANDARD.decode(self.browser.picture().await.unwrap()).unwrap();
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join(format!("{name}.png")), picture).unwrap();
        }
    }

    /// No word on the console, and not a byte from anywhere but the daemon.
    pub(crate) async fn nothing_was_wrong(&self) {
        assert_eq!(self.browser.complaints(), [""; 0]);
        let own = format!("http://{}/", self.daemon.ready.metrics);
        let requests = self.browser.requests();
        assert!(requests.contains(&own) && requests.contains(&format!("{own}feed")), "{requests:?}");
        let foreign = requests.iter().filter(|url| !url.starts_with(&own) && !url.starts_with("data:"));
        assert_eq!(foreign.collect::<Vec<_>>(), Vec::<&String>::new());
    }
}

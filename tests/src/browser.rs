//! A headless Chromium, driven by its own protocol (Chrome DevTools Protocol, 1.3) over a WebSocket.
//!
//! It reports what a test must not overlook: whatever the page writes to the console, exceptions,
//! and every address that it asks for.

use std::collections::HashMap;
use std::env;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::stream::SplitSink;
use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::process::Command;
use tokio::sync::oneshot;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream};

use crate::HarnessError;
use crate::process::{GIVE_UP, Process};

const NAMES: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];

/// Where a Chromium is, if there is one.
pub fn find() -> Option<PathBuf> {
    let path = env::var_os("PATH")?;
    let folders: Vec<PathBuf> = env::split_paths(&path).collect();
    NAMES.iter().flat_map(|name| folders.iter().map(move |folder| folder.join(name))).find(|file| file.is_file())
}

type Socket = WebSocketStream<MaybeTlsStream<TcpStream>>;

/// What the browser has said by itself.
#[derive(Debug, Default)]
struct Received {
    answers: HashMap<u64, oneshot::Sender<Value>>,
    complaints: Vec<String>,
    requests: Vec<String>,
}

/// A browser with one page.
#[derive(Debug)]
pub struct Browser {
    socket: SplitSink<Socket, Message>,
    heard: Arc<Mutex<Received>>,
    next: u64,
    reading: tokio::task::JoinHandle<()>,
    _process: Process,
}

impl Browser {
    /// Starts one with a profile of its own in `folder`.
    ///
    /// # Errors
    ///
    /// There is none, or it does not start.
    pub async fn start(folder: &Path) -> Result<Self, HarnessError> {
        let program =
            find().ok_or_else(|| HarnessError::GaveUp("no chromium on the PATH; apt-get install chromium".into()))?;
        let profile = folder.join("chromium");
        let mut command = Command::new(program);
        command.args(["--headless=new", "--remote-debugging-port=0", "--no-first-run", "--disable-gpu"]);
        command.args(["--disable-background-networking", "--disable-component-update", "--disable-sync"]);
        // Its sandbox refuses root, and the page is ours. Containers have a small /dev/shm.
        command.args(["--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"]);
        command.arg(format!("--user-data-dir={}", profile.display())).arg("about:blank");
        let mut process = Process::spawn("chromium", command, folder)?;
        let port = port(&profile.join("DevToolsActivePort"), &mut process).await?;
        let targets = reqwest::get(format!("http://127.0.0.1:{port}/json/list")).await.map_err(HarnessError::http)?;
        let targets: Value = targets.json().await.map_err(HarnessError::http)?;
        let page = targets.as_array().and_then(|all| all.iter().find(|target| target["type"] == "page"));
        let address = page.and_then(|page| page["webSocketDebuggerUrl"].as_str());
        let address = address.ok_or_else(|| HarnessError::GaveUp(format!("chromium has no page: {targets}")))?;
        let (socket, _) = tokio_tungstenite::connect_async(address).await.map_err(gave_up)?;
        let (socket, mut messages) = socket.split();
        let heard = Arc::new(Mutex::new(Received::default()));
        let hearing = Arc::clone(&heard);
        let reading = tokio::spawn(async move {
            while let Some(Ok(message)) = messages.next().await {
                let Ok(message) = serde_json::from_str::<Value>(message.to_text().unwrap_or_default()) else {
                    continue;
                };
                hear(&mut hearing.lock().unwrap_or_else(PoisonError::into_inner), message);
            }
        });
        let mut browser = Self { socket, heard, next: 0, reading, _process: process };
        for domain in ["Runtime", "Log", "Network", "Page"] {
            browser.ask(&format!("{domain}.enable"), json!({})).await?;
        }
        Ok(browser)
    }

    /// Asks for something by its name in the protocol.
    ///
    /// # Errors
    ///
    /// It is refused, or no answer comes within [`GIVE_UP`].
    pub async fn ask(&mut self, method: &str, parameters: Value) -> Result<Value, HarnessError> {
        self.next += 1;
        let (answer, answered) = oneshot::channel();
        self.heard.lock().unwrap_or_else(PoisonError::into_inner).answers.insert(self.next, answer);
        let text = json!({ "id": self.next, "method": method, "params": parameters }).to_string();
        self.socket.send(Message::text(text)).await.map_err(gave_up)?;
        let answer = tokio::time::timeout(GIVE_UP, answered).await;
        let mut answer = answer.map_err(|_| HarnessError::GaveUp(method.to_owned()))?.map_err(gave_up)?;
        match answer.get("error") {
            Some(error) => Err(HarnessError::GaveUp(format!("{method}: {error}"))),
            None => Ok(answer["result"].take()),
        }
    }

    /// Goes to an address.
    ///
    /// # Errors
    ///
    /// As for [`Self::ask`].
    pub async fn open(&mut self, address: &str) -> Result<(), HarnessError> {
        self.ask("Page.navigate", json!({ "url": address })).await.map(drop)
    }

    /// The value of an expression; of a promise, what it becomes.
    ///
    /// # Errors
    ///
    /// It throws, or as for [`Self::ask`].
    pub async fn value(&mut self, expression: &str) -> Result<Value, HarnessError> {
        let parameters = json!({ "expression": expression, "awaitPromise": true, "returnByValue": true });
        let mut answer = self.ask("Runtime.evaluate", parameters).await?;
        if let Some(exception) = answer.get("exceptionDetails") {
            return Err(HarnessError::GaveUp(format!("{expression}: {exception:#}")));
        }
        Ok(answer["result"]["value"].take())
    }

    /// Waits until an expression is true for the page, looking after every frame.
    ///
    /// # Errors
    ///
    /// It is not within [`GIVE_UP`]; the error says what the page says.
    pub async fn until(&mut self, expression: &str) -> Result<(), HarnessError> {
        let look = format!(
            "new Promise(done => {{ const look = () => {{ let is = false; try {{ is = {expression}; }} catch {{}} \
             is ? done(true) : requestAnimationFrame(look); }}; look(); }})"
        );
        if let Err(error) = self.value(&look).await {
            let shown = self.value("document.body.innerText").await.unwrap_or_default();
            return Err(HarnessError::GaveUp(format!("{expression}: {error}; the page says: {shown}")));
        }
        Ok(())
    }

    /// A window of so many CSS pixels, `scale` real ones each; `dark` or `light`.
    ///
    /// # Errors
    ///
    /// As for [`Self::ask`].
    pub async fn look_like(&mut self, width: u32, height: u32, scale: f64, scheme: &str) -> Result<(), HarnessError> {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600 });
        self.ask("Emulation.setDeviceMetricsOverride", size).await?;
        let features = json!([
            { "name": "prefers-color-scheme", "value": scheme },
            { "name": "prefers-reduced-motion", "value": "reduce" },
        ]);
        self.ask("Emulation.setEmulatedMedia", json!({ "features": features })).await.map(drop)
    }

    /// A picture of the window as PNG, in base64.
    ///
    /// # Errors
    ///
    /// As for [`Self::ask`].
    pub async fn picture(&mut self) -> Result<String, HarnessError> {
        let mut answer = self.ask("Page.captureScreenshot", json!({ "format": "png" })).await?;
        Ok(answer["data"].take().as_str().unwrap_or_default().to_owned())
    }

    /// What was written to the console, thrown, or refused so far.
    pub fn complaints(&self) -> Vec<String> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner).complaints.clone()
    }

    /// Every address that was asked for so far.
    pub fn requests(&self) -> Vec<String> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner).requests.clone()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        self.reading.abort();
    }
}

fn hear(heard: &mut Received, mut message: Value) {
    if let Some(id) = message["id"].as_u64() {
        if let Some(answer) = heard.answers.remove(&id) {
            // An error says that nobody waits any more.
            let _ = answer.send(message);
        }
        return;
    }
    let parameters = message["params"].take();
    match message["method"].as_str().unwrap_or_default() {
        "Runtime.consoleAPICalled" | "Runtime.exceptionThrown" | "Log.entryAdded" => {
            heard.complaints.push(parameters.to_string());
        }
        "Network.requestWillBeSent" => {
            heard.requests.push(parameters["request"]["url"].as_str().unwrap_or_default().to_owned());
        }
        _ => {}
    }
}

/// The first line of this file, once it is written.
async fn port(file: &Path, process: &mut Process) -> Result<u16, HarnessError> {
    let deadline = tokio::time::Instant::now() + GIVE_UP;
    loop {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        // The second line is written with the first one.
        if let Some((port, _)) = text.split_once('\n') {
            return port.parse().map_err(gave_up);
        }
        if process.has_exited() || tokio::time::Instant::now() > deadline {
            return Err(HarnessError::GaveUp(format!("chromium has not written {}", file.display())));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn gave_up(error: impl std::fmt::Display) -> HarnessError {
    HarnessError::GaveUp(error.to_string())
}

//! The API server's end of the connection to the engine core.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use lastgasp_tests::model::Request;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, oneshot, watch};

use crate::ipc::{CoreOutput, FromCore, ToCore};

/// A token for one of the choices of a request.
pub(crate) type ChoiceOutput = (usize, CoreOutput);

/// Submits requests and hands their tokens out.
#[derive(Clone, Debug)]
pub(crate) struct CoreClient {
    shared: Arc<Shared>,
    to_core: mpsc::UnboundedSender<ToCore>,
    gone: watch::Receiver<bool>,
    /// Of the engine core.
    pub(crate) pid: u32,
}

#[derive(Debug, Default)]
struct Shared {
    last_id: AtomicU64,
    /// Where the tokens of a running request go. When the engine core dies nothing is
    /// removed: the streams stand still until somebody notices.
    routes: Mutex<HashMap<u64, (usize, mpsc::UnboundedSender<ChoiceOutput>)>>,
    compilers: Mutex<HashMap<u64, oneshot::Sender<u32>>>,
    generated: AtomicU64,
}

impl CoreClient {
    /// Waits for the engine core to be loaded.
    ///
    /// # Errors
    ///
    /// The engine core ended before it was.
    pub(crate) async fn connect(stream: UnixStream) -> io::Result<Self> {
        let (read, write) = stream.into_split();
        let mut lines = BufReader::new(read).lines();
        let ready = lines.next_line().await?.and_then(|line| serde_json::from_str(&line).ok());
        let Some(FromCore::Ready { pid }) = ready else {
            return Err(io::Error::other("the engine core ended while it loaded"));
        };
        let shared = Arc::new(Shared::default());
        let (to_core, outbox) = mpsc::unbounded_channel();
        let (gone_sender, gone) = watch::channel(false);
        tokio::spawn(receive(lines, Arc::clone(&shared), gone_sender));
        tokio::spawn(send(write, outbox));
        Ok(Self { shared, to_core, gone, pid })
    }

    /// Returns when the connection has ended, which is when the kernel has torn the engine
    /// core down. Real frontends learn it in the same way, from a pipe that closes.
    pub(crate) async fn gone(&self) {
        let _ = self.gone.clone().wait_for(|gone| *gone).await;
    }

    /// Starts all choices of `request`.
    pub(crate) fn submit(&self, request: &Request) -> Submission {
        let (sender, outputs) = mpsc::unbounded_channel();
        let mut ids = Vec::new();
        for (choice, prompt) in request.prompts.iter().enumerate() {
            let id = self.new_id();
            ids.push(id);
            lock(&self.shared.routes).insert(id, (choice, sender.clone()));
            self.send(ToCore::Add {
                id,
                prompt: prompt.clone(),
                limits: request.limits[choice].clone(),
                sampling: request.sampling[choice],
            });
        }
        Submission { client: self.clone(), ids, outputs, _open: sender }
    }

    /// Lets the engine core fork a compiler; returns its pid when it has exited.
    pub(crate) async fn compile(&self, millis: u64) -> Option<u32> {
        let (done, exited) = oneshot::channel();
        let id = self.new_id();
        lock(&self.shared.compilers).insert(id, done);
        self.send(ToCore::Compile { id, millis });
        exited.await.ok()
    }

    /// Lets the engine core hang or go on.
    pub(crate) fn hang(&self, on: bool) {
        self.send(ToCore::Hang { on });
    }

    /// Choices that run.
    pub(crate) fn running(&self) -> usize {
        lock(&self.shared.routes).len()
    }

    /// Tokens of all requests.
    pub(crate) fn generated(&self) -> u64 {
        self.shared.generated.load(Ordering::Relaxed)
    }

    fn new_id(&self) -> u64 {
        self.shared.last_id.fetch_add(1, Ordering::Relaxed) + 1
    }

    fn send(&self, message: ToCore) {
        // To an engine core that is gone nothing can be said, and no client hears of it.
        let _ = self.to_core.send(message);
    }
}

/// A request that runs; dropping it tells the engine core to forget it.
#[derive(Debug)]
pub(crate) struct Submission {
    client: CoreClient,
    ids: Vec<u64>,
    outputs: mpsc::UnboundedReceiver<ChoiceOutput>,
    /// Keeps `outputs` open.
    _open: mpsc::UnboundedSender<ChoiceOutput>,
}

impl Submission {
    /// The next token of any choice; waits for ever when there will be none.
    pub(crate) async fn next(&mut self) -> ChoiceOutput {
        match self.outputs.recv().await {
            Some(output) => output,
            None => std::future::pending().await,
        }
    }

    /// Ends one choice in the engine core, after a stop string.
    pub(crate) fn end(&self, choice: usize) {
        let id = self.ids[choice];
        if lock(&self.client.shared.routes).remove(&id).is_some() {
            self.client.send(ToCore::Abort { id });
        }
    }
}

impl Drop for Submission {
    fn drop(&mut self) {
        for choice in 0..self.ids.len() {
            self.end(choice);
        }
    }
}

async fn receive(
    mut lines: tokio::io::Lines<BufReader<OwnedReadHalf>>,
    shared: Arc<Shared>,
    gone: watch::Sender<bool>,
) {
    while let Ok(Some(line)) = lines.next_line().await {
        match serde_json::from_str(&line) {
            Ok(FromCore::Step { outputs }) => {
                shared.generated.fetch_add(outputs.len() as u64, Ordering::Relaxed);
                let mut routes = lock(&shared.routes);
                for output in outputs {
                    if let Some((choice, route)) = routes.get(&output.id) {
                        let _ = route.send((*choice, output));
                    }
                    if output.finish.is_some() {
                        routes.remove(&output.id);
                    }
                }
            }
            Ok(FromCore::Compiled { id, pid }) => {
                if let Some(done) = lock(&shared.compilers).remove(&id) {
                    let _ = done.send(pid);
                }
            }
            Ok(FromCore::Ready { .. }) => {}
            // The end of a line that the dying engine core did not finish.
            Err(_) => break,
        }
    }
    let _ = gone.send(true);
}

async fn send(mut stream: OwnedWriteHalf, mut outbox: mpsc::UnboundedReceiver<ToCore>) {
    while let Some(message) = outbox.recv().await {
        let mut line = serde_json::to_vec(&message).expect("it is plain data");
        line.push(b'\n');
        if stream.write_all(&line).await.is_err() {
            return;
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

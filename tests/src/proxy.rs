//! A TCP proxy between a client and a server, for what a network does to both.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::HarnessError;

/// What becomes of the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Weather {
    /// They pass.
    #[default]
    Fair,
    /// They pass after this time, in each direction.
    Slow(Duration),
    /// They neither pass nor is anything closed, as when a cable is pulled.
    Still,
    /// Those of the client pass, those of the server do not.
    Deaf,
}

#[derive(Debug)]
struct Shared {
    weather: watch::Sender<Weather>,
    /// Counts how often all connections were cut.
    cuts: watch::Sender<u64>,
    /// Counts how often all connections were stranded.
    strands: watch::Sender<u64>,
    /// When a client sends this text, its answer is swallowed: the weather becomes [`Weather::Deaf`].
    trap: Mutex<Option<Vec<u8>>>,
    sprung: watch::Sender<bool>,
    accepted: AtomicUsize,
}

/// A running proxy. It ends with its value.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

impl Proxy {
    /// Begins to hand on connections to `server`.
    ///
    /// # Errors
    ///
    /// There is no free port.
    pub async fn start(server: SocketAddr) -> Result<Self, HarnessError> {
        let io = |source| HarnessError::Io { what: "the proxy".into(), source };
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.map_err(io)?;
        let address = listener.local_addr().map_err(io)?;
        let shared = Arc::new(Shared {
            weather: watch::Sender::default(),
            cuts: watch::Sender::default(),
            strands: watch::Sender::default(),
            trap: Mutex::default(),
            sprung: watch::Sender::default(),
            accepted: AtomicUsize::new(0),
        });
        let task = tokio::spawn(accept(listener, server, Arc::clone(&shared)));
        Ok(Self { address, shared, task })
    }

    /// Where it listens.
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// `nats://127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        format!("nats://{}", self.address)
    }

    /// Changes what becomes of the bytes, from now on.
    pub fn set(&self, weather: Weather) {
        self.shared.weather.send_replace(weather);
    }

    /// Closes all connections. New ones are accepted.
    pub fn cut(&self) {
        self.shared.cuts.send_modify(|cuts| *cuts += 1);
    }

    /// Nothing passes any more over the connections that there are, not even their end. New ones are
    /// as the weather is.
    pub fn strand(&self) {
        self.shared.strands.send_modify(|strands| *strands += 1);
    }

    /// Swallows the answer to whatever contains `text` from the client, and all that comes after it.
    pub fn swallow_answer_to(&self, text: &str) {
        self.shared.sprung.send_replace(false);
        *self.shared.trap.lock().unwrap_or_else(PoisonError::into_inner) = Some(text.as_bytes().to_vec());
    }

    /// Waits until such a message has passed to the server.
    pub async fn swallowed(&self) {
        let mut sprung = self.shared.sprung.subscribe();
        let _ = sprung.wait_for(|sprung| *sprung).await;
    }

    /// How many connections were handed on so far.
    pub fn accepted(&self) -> usize {
        self.shared.accepted.load(Ordering::Relaxed)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(listener: TcpListener, server: SocketAddr, shared: Arc<Shared>) {
    loop {
        let Ok((client, _)) = listener.accept().await else { return };
        let now = *shared.weather.borrow();
        if now == Weather::Still {
            // Accepted by the kernel already; the client sees a silence.
            tokio::spawn(hold(client, shared.weather.subscribe()));
            continue;
        }
        let Ok(server) = TcpStream::connect(server).await else { continue };
        shared.accepted.fetch_add(1, Ordering::Relaxed);
        let _ = client.set_nodelay(true);
        let _ = server.set_nodelay(true);
        let ((from_client, to_client), (from_server, to_server)) = (client.into_split(), server.into_split());
        tokio::spawn(carry(from_client, to_server, Arc::clone(&shared), true));
        tokio::spawn(carry(from_server, to_client, Arc::clone(&shared), false));
    }
}

/// Keeps a connection that leads nowhere until the weather changes.
async fn hold(client: TcpStream, mut weather: watch::Receiver<Weather>) {
    let _ = weather.wait_for(|weather| *weather != Weather::Still).await;
    drop(client);
}

async fn carry(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, shared: Arc<Shared>, upward: bool) {
    let (mut cuts, mut strands) = (shared.cuts.subscribe(), shared.strands.subscribe());
    tokio::select! {
        () = pass(&mut from, &mut to, &shared, upward) => {}
        _ = cuts.changed() => {}
        _ = strands.changed() => drop(cuts.changed().await),
    }
}

async fn pass(from: &mut OwnedReadHalf, to: &mut OwnedWriteHalf, shared: &Shared, upward: bool) {
    let mut weather = shared.weather.subscribe();
    let mut buffer = vec![0; 64 * 1024];
    // The end of what has passed, in which a text may begin.
    let mut tail = Vec::new();
    loop {
        // An end passes, or does not, as bytes do.
        let length = from.read(&mut buffer).await.unwrap_or(0);
        if upward {
            tail.extend_from_slice(&buffer[..length]);
            spring(shared, &tail);
            let keep = tail.len().saturating_sub(4096);
            tail.drain(..keep);
        }
        let now = *weather.borrow_and_update();
        if let Weather::Slow(delay) = now {
            tokio::time::sleep(delay).await;
        }
        let passes = |weather: &Weather| match weather {
            Weather::Fair | Weather::Slow(_) => true,
            Weather::Still => false,
            Weather::Deaf => upward,
        };
        let passed = weather.wait_for(passes).await.is_ok();
        if !passed || length == 0 || to.write_all(&buffer[..length]).await.is_err() {
            return;
        }
    }
}

fn spring(shared: &Shared, passed: &[u8]) {
    let mut trap = shared.trap.lock().unwrap_or_else(PoisonError::into_inner);
    if trap.as_ref().is_some_and(|text| passed.windows(text.len()).any(|window| window == text)) {
        *trap = None;
        shared.weather.send_replace(Weather::Deaf);
        shared.sprung.send_replace(true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers every byte with itself.
    async fn echo() -> SocketAddr {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let (mut read, mut write) = client.split();
                    let _ = tokio::io::copy(&mut read, &mut write).await;
                });
            }
        });
        address
    }

    #[tokio::test]
    async fn bytes_pass_or_wait_or_are_swallowed() {
        let proxy = Proxy::start(echo().await).await.unwrap();
        let mut client = TcpStream::connect(proxy.address).await.unwrap();
        let mut read = [0; 3];
        client.write_all(b"one").await.unwrap();
        client.read_exact(&mut read).await.unwrap();
        assert_eq!(&read, b"one");

        proxy.set(Weather::Still);
        client.write_all(b"two").await.unwrap();
        assert!(tokio::time::timeout(Duration::from_millis(50), client.read_exact(&mut read)).await.is_err());
        proxy.set(Weather::Fair);
        client.read_exact(&mut read).await.unwrap();
        assert_eq!(&read, b"two");

        proxy.swallow_answer_to("hre");
        client.write_all(b"three").await.unwrap();
        proxy.swallowed().await;
        proxy.cut();
        assert_eq!(client.read(&mut read).await.unwrap_or(0), 0, "nothing came but the end");
        assert_eq!(proxy.accepted(), 1);
    }
}

//! Connections that fall silent without being closed, as behind a network that drops packets or
//! in a process whose loop is stuck.

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tonic::transport::server::{Connected, TcpConnectInfo};

/// Whether connections are silent.
#[derive(Debug, Default)]
pub(crate) struct Freezer {
    frozen: AtomicBool,
    waiting: Mutex<Vec<Waker>>,
}

impl Freezer {
    pub(crate) fn new(frozen: bool) -> Self {
        Self { frozen: AtomicBool::new(frozen), waiting: Mutex::default() }
    }

    pub(crate) fn set(&self, frozen: bool) {
        self.frozen.store(frozen, Ordering::SeqCst);
        if !frozen {
            let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            waiting.drain(..).for_each(Waker::wake);
        }
    }

    /// Ready while connections may speak.
    fn poll(&self, context: &Context<'_>) -> Poll<()> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if self.frozen.load(Ordering::SeqCst) {
            waiting.push(context.waker().clone());
            return Poll::Pending;
        }
        Poll::Ready(())
    }
}

/// A connection that is silent while its [`Freezer`] says so.
#[derive(Debug)]
pub(crate) struct Freezable {
    stream: TcpStream,
    freezer: Arc<Freezer>,
}

impl Freezable {
    pub(crate) fn new(stream: TcpStream, freezer: Arc<Freezer>) -> Self {
        Self { stream, freezer }
    }
}

impl Connected for Freezable {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.stream.connect_info()
    }
}

impl AsyncRead for Freezable {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        std::task::ready!(self.freezer.poll(context));
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Freezable {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        std::task::ready!(self.freezer.poll(context));
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

//! A way to a server that can be cut: nothing arrives any more, and neither end is told.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, tcp};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::matrix;

/// A loopback port that leads to a server. Dropped, its connections break.
#[derive(Debug)]
pub struct Wire {
    address: SocketAddr,
    cut: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Wire {
    /// One that leads to `target`, whether that listens yet or not.
    ///
    /// # Errors
    ///
    /// There is no free port.
    pub async fn to(target: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let (cut, is_cut) = watch::channel(false);
        let task = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                connections.spawn(connect(client, target, is_cut.clone()));
                while connections.try_join_next().is_some() {}
            }
        });
        Ok(Self { address, cut, task })
    }

    /// Where it begins.
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// From now on nothing passes, and nothing is lost either, as when packets are sent again.
    pub fn cut(&self) {
        matrix::count("partitions", 1);
        self.cut.send_replace(true);
    }

    /// Everything passes again.
    pub fn mend(&self) {
        self.cut.send_replace(false);
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn connect(client: TcpStream, target: SocketAddr, mut cut: watch::Receiver<bool>) {
    if mended(&mut cut).await.is_err() {
        return;
    }
    let Ok(server) = TcpStream::connect(target).await else { return };
    let ((from_client, to_client), (from_server, to_server)) = (client.into_split(), server.into_split());
    tokio::select! {
        _ = carry(from_client, to_server, cut.clone()) => {}
        _ = carry(from_server, to_client, cut) => {}
    }
}

async fn carry(
    mut from: tcp::OwnedReadHalf,
    mut to: tcp::OwnedWriteHalf,
    mut cut: watch::Receiver<bool>,
) -> Result<(), ()> {
    let mut bytes = vec![0; 16 * 1024];
    loop {
        let read = from.read(&mut bytes).await;
        // Also the news that an end has closed.
        mended(&mut cut).await?;
        match read {
            Ok(0) | Err(_) => return Ok(()),
            Ok(count) => to.write_all(&bytes[..count]).await.map_err(drop)?,
        }
    }
}

async fn mended(cut: &mut watch::Receiver<bool>) -> Result<(), ()> {
    cut.wait_for(|cut| !cut).await.map(drop).map_err(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_was_sent_while_it_was_cut_arrives_when_it_is_mended() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let wire = Wire::to(listener.local_addr().unwrap()).await.unwrap();
        let mut client = TcpStream::connect(wire.address()).await.unwrap();
        let (mut server, _) = listener.accept().await.unwrap();
        let mut byte = [0];
        client.write_all(b"a").await.unwrap();
        server.read_exact(&mut byte).await.unwrap();

        wire.cut();
        client.write_all(b"b").await.unwrap();
        tokio::select! {
            biased;
            _ = server.read_exact(&mut byte) => panic!("it passed"),
            () = tokio::time::sleep(std::time::Duration::from_millis(20)) => {}
        }
        wire.mend();
        server.read_exact(&mut byte).await.unwrap();
        assert_eq!(&byte, b"b");
    }
}

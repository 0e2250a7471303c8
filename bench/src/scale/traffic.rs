//! What goes over the wires, as the servers count it.

use std::time::{Duration, Instant};

use lastgasp_tests::HarnessError;
use lastgasp_tests::process::GIVE_UP;
use serde::Deserialize;

use crate::cpu;

/// The servers, and where they answer questions.
#[derive(Debug)]
pub(super) struct Monitors {
    /// `http://127.0.0.1:PORT`.
    pub(super) urls: Vec<String>,
    /// Their processes.
    pub(super) pids: Vec<u32>,
}

/// Messages and bytes.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Sum {
    pub(super) messages: f64,
    pub(super) bytes: f64,
}

impl Sum {
    fn add(&mut self, messages: u64, bytes: u64) {
        self.messages += messages as f64;
        self.bytes += bytes as f64;
    }

    fn since(self, before: Self, seconds: f64) -> Self {
        Self { messages: (self.messages - before.messages) / seconds, bytes: (self.bytes - before.bytes) / seconds }
    }
}

/// Counted since the servers started; or by second, between two of these.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Traffic {
    pub(super) from_daemons: Sum,
    pub(super) to_daemons: Sum,
    pub(super) from_routers: Sum,
    pub(super) to_routers: Sum,
    /// Between servers, at the receiver.
    pub(super) between: Sum,
    /// CPU time of all servers, and of this process: seconds.
    pub(super) servers_cpu: f64,
    pub(super) own_cpu: f64,
    /// Bytes of memory of all servers.
    pub(super) memory: f64,
}

/// `/connz`; the names are those that connections gave themselves.
#[derive(Deserialize)]
struct Connections {
    connections: Vec<Connection>,
}

#[derive(Deserialize)]
struct Connection {
    #[serde(default)]
    name: String,
    in_msgs: u64,
    out_msgs: u64,
    in_bytes: u64,
    out_bytes: u64,
}

/// `/routez`.
#[derive(Deserialize)]
struct Routes {
    #[serde(default)]
    routes: Vec<Route>,
}

#[derive(Deserialize)]
struct Route {
    in_msgs: u64,
    in_bytes: u64,
}

/// `/varz`.
#[derive(Deserialize)]
struct Server {
    mem: u64,
}

impl Monitors {
    async fn ask<T: for<'a> Deserialize<'a>>(&self, server: usize, path: &str) -> Result<T, HarnessError> {
        let deadline = Instant::now() + GIVE_UP;
        loop {
            let answer = async { reqwest::get(format!("{}{path}", self.urls[server])).await?.json().await };
            match answer.await {
                Ok(answer) => return Ok(answer),
                Err(error) if Instant::now() > deadline => return Err(HarnessError::http(error)),
                // A server that is busy with a thousand daemons may close before it has answered.
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    }

    /// All counters now.
    async fn counted(&self) -> Result<Traffic, HarnessError> {
        let mut sum = Traffic::default();
        for server in 0..self.urls.len() {
            let Connections { connections } = self.ask(server, "/connz?limit=20000").await?;
            for Connection { name, in_msgs, out_msgs, in_bytes, out_bytes } in connections {
                // Their order on the page: what the server received first.
                if name.starts_with("lastgasp-router ") {
                    sum.from_routers.add(in_msgs, in_bytes);
                    sum.to_routers.add(out_msgs, out_bytes);
                } else if name.starts_with("lastgasp ") {
                    sum.from_daemons.add(in_msgs, in_bytes);
                    sum.to_daemons.add(out_msgs, out_bytes);
                }
            }
            let Routes { routes } = self.ask(server, "/routez").await?;
            routes.iter().for_each(|route| sum.between.add(route.in_msgs, route.in_bytes));
            sum.memory += self.ask::<Server>(server, "/varz").await?.mem as f64;
        }
        sum.servers_cpu = self.pids.iter().map(|pid| cpu::time(*pid).as_secs_f64()).sum();
        sum.own_cpu = cpu::time(std::process::id()).as_secs_f64();
        Ok(sum)
    }

    /// By second, over so long.
    pub(super) async fn measure(&self, window: Duration) -> Result<Traffic, HarnessError> {
        let (begin, before) = (Instant::now(), self.counted().await?);
        tokio::time::sleep(window).await;
        let after = self.counted().await?;
        let seconds = begin.elapsed().as_secs_f64();
        Ok(Traffic {
            from_daemons: after.from_daemons.since(before.from_daemons, seconds),
            to_daemons: after.to_daemons.since(before.to_daemons, seconds),
            from_routers: after.from_routers.since(before.from_routers, seconds),
            to_routers: after.to_routers.since(before.to_routers, seconds),
            between: after.between.since(before.between, seconds),
            servers_cpu: (after.servers_cpu - before.servers_cpu) / seconds,
            own_cpu: (after.own_cpu - before.own_cpu) / seconds,
            memory: after.memory,
        })
    }
}

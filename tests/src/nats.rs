//! Real nats-servers, on loopback ports and in folders of their own: one by itself, or a cluster.

use std::fmt::Write as _;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use tokio::process::Command;

use crate::HarnessError;
use crate::binaries;
use crate::matrix;
use crate::process::{GIVE_UP, Patience, Process};

/// How a server is configured. May be changed between [`Nats::stop`] and [`Nats::resume`].
#[derive(Clone, Debug)]
pub struct Options {
    /// Whether it has JetStream.
    pub jetstream: bool,
    /// Room for its streams, in bytes.
    pub max_file_store: Option<u64>,
    /// The one user and password that it lets in.
    pub login: Option<(String, String)>,
    /// The program; the one that tests use by default.
    pub program: Option<PathBuf>,
    /// Runs it inside this network namespace, on this address.
    pub namespace: Option<(String, Ipv4Addr)>,
    /// Its own name, its cluster port, and those of all servers of the cluster.
    pub cluster: Option<(String, u16, Vec<u16>)>,
    /// A configuration of the story's own; none of the above but `program` counts then.
    pub config: Option<PathBuf>,
    /// More arguments.
    pub arguments: Vec<String>,
    /// Variables, as for a configuration.
    pub environment: Vec<(String, String)>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            jetstream: true,
            max_file_store: None,
            login: None,
            program: None,
            namespace: None,
            cluster: None,
            config: None,
            arguments: Vec::new(),
            environment: Vec::new(),
        }
    }
}

/// A running nats-server; it can be stopped and started again with what it had stored.
#[derive(Debug)]
pub struct Nats {
    process: Option<Process>,
    address: SocketAddr,
    folder: PathBuf,
    /// What it is started with.
    pub options: Options,
}

impl Nats {
    /// Starts one that stores below `folder`.
    ///
    /// # Errors
    ///
    /// There is no nats-server, or it does not accept connections.
    pub async fn start(folder: &Path) -> Result<Self, HarnessError> {
        Self::start_with(folder, Options::default()).await
    }

    /// As [`Self::start`], configured in this way.
    ///
    /// # Errors
    ///
    /// As for [`Self::start`].
    pub async fn start_with(folder: &Path, options: Options) -> Result<Self, HarnessError> {
        let mut nats = Self::prepare(folder, options)?;
        nats.resume().await?;
        Ok(nats)
    }

    fn prepare(folder: &Path, options: Options) -> Result<Self, HarnessError> {
        let mut address = SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()?));
        if let Some((_, ip)) = &options.namespace {
            address.set_ip((*ip).into());
        }
        Ok(Self { process: None, address, folder: folder.to_owned(), options })
    }

    /// `nats://127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        format!("nats://{}", self.address)
    }

    /// The last lines of its log.
    pub fn log_tail(&self) -> String {
        self.process.as_ref().map(Process::log_tail).unwrap_or_default()
    }

    /// A client of it.
    ///
    /// # Errors
    ///
    /// It is stopped or refuses.
    pub async fn client(&self) -> Result<async_nats::Client, HarnessError> {
        let options = match &self.options.login {
            None => async_nats::ConnectOptions::new(),
            Some((user, password)) => async_nats::ConnectOptions::with_user_and_password(user.into(), password.into()),
        };
        options.connect(self.url()).await.map_err(|error| HarnessError::Nats(error.into()))
    }

    /// JetStream of it, by a client of its own.
    ///
    /// # Errors
    ///
    /// As for [`Self::client`].
    pub async fn jetstream(&self) -> Result<async_nats::jetstream::Context, HarnessError> {
        Ok(async_nats::jetstream::new(self.client().await?))
    }

    /// Its process, if it runs.
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(|process| process.identity.pid)
    }

    /// Where it listens.
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stops it in the middle of everything, or lets it go on: SIGSTOP and SIGCONT. Nothing, if it does not run.
    pub fn signal(&self, signal: Signal) {
        if let Some(process) = &self.process {
            process.identity.signal(signal);
            if signal == Signal::SIGSTOP {
                matrix::count("nats-server killed or stopped", 1);
            }
        }
    }

    /// Kills it, as a crash would.
    pub fn stop(&mut self) {
        matrix::count("nats-server killed or stopped", 1);
        self.process = None;
    }

    /// Forgets all that a stopped server had stored.
    ///
    /// # Panics
    ///
    /// It runs.
    pub fn wipe(&self) {
        assert!(self.process.is_none(), "a running server is not wiped");
        let _ = std::fs::remove_dir_all(self.store());
    }

    fn store(&self) -> PathBuf {
        self.folder.join("jetstream")
    }

    /// Starts it again, on the same port and with what was stored.
    ///
    /// # Errors
    ///
    /// As for [`Self::start`].
    pub async fn resume(&mut self) -> Result<(), HarnessError> {
        self.launch()?;
        let deadline = Instant::now() + GIVE_UP;
        while tokio::net::TcpStream::connect(self.address).await.is_err() {
            let process = self.process.as_mut().expect("it was launched");
            if process.has_exited() || Instant::now() > deadline {
                let log = process.log_tail();
                return Err(HarnessError::Ended { name: "nats-server".into(), status: "while it started".into(), log });
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }

    fn launch(&mut self) -> Result<(), HarnessError> {
        let program = match &self.options.program {
            Some(program) => program.clone(),
            None => binaries::nats_server()?,
        };
        let mut command = match &self.options.namespace {
            None => Command::new(program),
            Some((namespace, _)) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", namespace]).arg(program);
                command
            }
        };
        let Options { config, arguments, environment, .. } = &self.options;
        match config {
            Some(config) => {
                command.arg("--config").arg(config).arg("--jetstream").arg("--store_dir").arg(self.store());
                command.args(["--addr", "127.0.0.1", "--port", &self.address.port().to_string()]);
            }
            None => {
                let config = self.folder.join("nats-server.conf");
                std::fs::write(&config, self.config())
                    .map_err(|source| HarnessError::Io { what: config.display().to_string(), source })?;
                command.arg("--config").arg(config);
            }
        }
        command.args(arguments).envs(environment.iter().map(|(name, value)| (name, value)));
        self.process = Some(Process::spawn("nats-server", command, &self.folder)?);
        Ok(())
    }

    fn config(&self) -> String {
        let Options { jetstream, max_file_store, login, cluster, .. } = &self.options;
        let mut text = format!("listen: \"{}\"\n", self.address);
        if *jetstream {
            let room = max_file_store.map(|bytes| format!("max_file_store: {bytes}")).unwrap_or_default();
            let _ = writeln!(text, "jetstream {{ store_dir: \"{}\"\n {room} }}", self.store().display());
        }
        if let Some((user, password)) = login {
            let _ = writeln!(text, "authorization {{ user: \"{user}\", password: \"{password}\" }}");
        }
        if let Some((name, port, ports)) = cluster {
            let routes: Vec<_> = ports.iter().map(|port| format!("\"nats://127.0.0.1:{port}\"")).collect();
            let routes = routes.join(", ");
            let _ = writeln!(text, "server_name: {name}");
            let _ = writeln!(text, "cluster {{ name: tests, listen: \"127.0.0.1:{port}\", routes: [{routes}] }}");
        }
        text
    }
}

/// A port of loopback that nobody listens on, and that this process was not given before.
///
/// It is none of those that the kernel gives to whoever asks for any (`ip_local_port_range`, from 32768 by
/// default): until a server listens there, or while it is stopped, no connection and no listener of another
/// test takes it.
///
/// # Errors
///
/// There is none.
pub fn free_port() -> Result<u16, HarnessError> {
    const PORTS: std::ops::Range<u16> = 10_000..32_768;
    // Other processes look for ports at the same time: each begins elsewhere.
    static NEXT: LazyLock<AtomicUsize> = LazyLock::new(|| AtomicUsize::new(fastrand::usize(..PORTS.len())));
    let mut refused = std::io::ErrorKind::AddrInUse.into();
    for _ in PORTS {
        let port = PORTS.start + (NEXT.fetch_add(1, Ordering::Relaxed) % PORTS.len()) as u16;
        match TcpListener::bind((Ipv4Addr::LOCALHOST, port)) {
            Ok(_) => return Ok(port),
            Err(error) => refused = error,
        }
    }
    Err(HarnessError::Io { what: "a free port".into(), source: refused })
}

/// Several servers that hold streams together.
#[derive(Debug)]
pub struct Cluster {
    /// The servers, named `n0`, `n1` and so on.
    pub servers: Vec<Nats>,
}

impl Cluster {
    /// Starts `size` servers below `folder` and waits until JetStream can be used.
    ///
    /// # Errors
    ///
    /// As for [`Nats::start`]; or they do not find together, and have said nothing new for [`GIVE_UP`].
    pub async fn start(folder: &Path, size: usize) -> Result<Self, HarnessError> {
        Self::start_with(folder, vec![Options::default(); size]).await
    }

    /// As [`Self::start`], one server for each of these options.
    ///
    /// # Errors
    ///
    /// As for [`Self::start`].
    pub async fn start_with(folder: &Path, options: Vec<Options>) -> Result<Self, HarnessError> {
        let size = options.len();
        let ports = (0..size).map(|_| free_port()).collect::<Result<Vec<_>, _>>()?;
        let mut servers = Vec::new();
        for ((index, port), options) in ports.iter().enumerate().zip(options) {
            let name = format!("n{index}");
            let own = folder.join(&name);
            std::fs::create_dir_all(&own)
                .map_err(|source| HarnessError::Io { what: own.display().to_string(), source })?;
            let options = Options { cluster: Some((name, *port, ports.clone())), ..options };
            let mut server = Nats::prepare(&own, options)?;
            server.launch()?;
            servers.push(server);
        }
        let mut cluster = Self { servers };
        let mut patience = Patience::new(cluster.written());
        // A stream with a copy on each can be made only once they have found together.
        while let Err(error) = cluster.try_out(size).await {
            for process in cluster.servers.iter_mut().filter_map(|server| server.process.as_mut()) {
                if process.has_exited() {
                    let (name, log) = ("nats-server".to_owned(), process.log_tail());
                    return Err(HarnessError::Ended { name, status: "while the cluster formed".to_owned(), log });
                }
            }
            if Instant::now() > patience.ends(cluster.written()) {
                let logs: Vec<_> = cluster.servers.iter().map(Nats::log_tail).collect();
                let said = logs.join("\n\n");
                return Err(HarnessError::GaveUp(format!("the cluster to form: {error}; the servers said:\n{said}")));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(cluster)
    }

    /// How much all servers have written into their logs: routes, elections, leaders.
    fn written(&self) -> u64 {
        self.servers.iter().filter_map(|server| server.process.as_ref()).map(Process::written).sum()
    }

    async fn try_out(&self, size: usize) -> Result<(), async_nats::Error> {
        let context = self.jetstream().await.map_err(|error| error.to_string())?;
        let config = async_nats::jetstream::stream::Config {
            name: "trial".into(),
            subjects: vec!["trial".into()],
            num_replicas: size,
            ..Default::default()
        };
        context.create_stream(config).await?;
        context.delete_stream("trial").await?;
        Ok(())
    }

    /// All servers, with commas.
    pub fn url(&self) -> String {
        self.servers.iter().map(Nats::url).collect::<Vec<_>>().join(",")
    }

    /// JetStream of whichever server answers.
    ///
    /// # Errors
    ///
    /// None does.
    pub async fn jetstream(&self) -> Result<async_nats::jetstream::Context, HarnessError> {
        let servers: Vec<String> = self.servers.iter().map(Nats::url).collect();
        let client = async_nats::connect(servers).await.map_err(|error| HarnessError::Nats(error.into()))?;
        Ok(async_nats::jetstream::new(client))
    }

    /// The index of the server that leads a stream, once there is one.
    ///
    /// # Errors
    ///
    /// There is none for a long time.
    pub async fn leader(&self, stream: &str) -> Result<usize, HarnessError> {
        let context = self.jetstream().await?;
        let deadline = Instant::now() + GIVE_UP;
        while Instant::now() < deadline {
            if let Ok(stream) = context.get_stream(stream).await
                && let Some(leader) = stream.cached_info().cluster.as_ref().and_then(|it| it.leader.clone())
                && let Some(index) = leader.strip_prefix('n').and_then(|index| index.parse().ok())
            {
                return Ok(index);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Err(HarnessError::GaveUp(format!("a leader of {stream}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_given_once_and_none_that_the_kernel_gives_to_others() {
        let ports: std::collections::BTreeSet<u16> = (0..100).map(|_| free_port().unwrap()).collect();
        assert_eq!(ports.len(), 100);
        assert!(ports.iter().all(|port| *port < 32_768), "{ports:?}");
    }

    /// It would not come by itself, however long one waits.
    #[tokio::test]
    async fn a_server_that_ends_while_the_cluster_forms_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = taken.local_addr().unwrap().port().to_string();
        let bad = Options { arguments: vec!["--http_port".to_owned(), port], ..Options::default() };
        let started = Cluster::start_with(folder.path(), vec![Options::default(), bad]).await;
        let error = started.unwrap_err().to_string();
        assert!(error.contains("while the cluster formed") && error.contains("address already in use"), "{error}");
    }

    #[tokio::test]
    async fn what_was_stored_is_there_after_a_restart_on_the_same_port() {
        let folder = tempfile::tempdir().unwrap();
        let mut nats = Nats::start(folder.path()).await.unwrap();
        let url = nats.url();
        let config = async_nats::jetstream::kv::Config { bucket: "kept".into(), ..Default::default() };
        let bucket = nats.jetstream().await.unwrap().create_key_value(config).await.unwrap();
        bucket.put("key", "value".into()).await.unwrap();

        nats.stop();
        assert!(nats.client().await.is_err());
        nats.resume().await.unwrap();

        assert_eq!(nats.url(), url);
        let bucket = nats.jetstream().await.unwrap().get_key_value("kept").await.unwrap();
        assert_eq!(bucket.get("key").await.unwrap().unwrap(), "value");
    }
}

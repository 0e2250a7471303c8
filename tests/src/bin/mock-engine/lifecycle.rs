//! The API server from its start to one of its ends. The times are those that were
//! measured on vLLM 0.32.0.

use std::io;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use axum::serve::ListenerExt;
use lastgasp_tests::model::Frontend;
use lastgasp_tests::ready::Ready;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::time::sleep;

use crate::args::{Args, OnSigterm};
use crate::core_client::CoreClient;
use crate::health::Health;
use crate::http::{self, App};
use crate::phase::{Phase, Phases};
use crate::tree::Tree;

const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Starts the tree, serves, and ends as the real server would.
pub(crate) async fn run(args: Args) -> io::Result<ExitCode> {
    let mut terminate = Terminate::new()?;
    let (mut tree, listener) = Tree::start(&args)?;
    let connected = async {
        let (stream, _) = listener.accept().await?;
        CoreClient::connect(stream).await
    };
    let core = tokio::select! {
        core = connected => core?,
        () = terminate.requested() => return Ok(ExitCode::SUCCESS),
    };
    drop(listener);

    let server = Server::start(&args, core, &tree).await?;
    loop {
        tokio::select! {
            () = server.app.core.gone() => {
                return Ok(server.engine_died(&args, &mut tree, &mut terminate).await);
            }
            () = terminate.requested() => {}
        }
        if args.shutdown_timeout > 0 {
            return Ok(server.drain(&args, &mut tree, &mut terminate).await);
        }
        match args.on_sigterm {
            OnSigterm::Abort => return Ok(server.abort(&args).await),
            OnSigterm::Hang => server.hang(&tree).await,
            OnSigterm::Ignore => {}
        }
    }
}

/// SIGTERM, or SIGINT from a terminal.
struct Terminate {
    term: Signal,
    interrupt: Signal,
}

impl Terminate {
    fn new() -> io::Result<Self> {
        Ok(Self { term: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    async fn requested(&mut self) {
        tokio::select! {
            _ = self.term.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

struct Server {
    app: Arc<App>,
    /// Closes the HTTP listener; what is in flight goes on.
    close: watch::Sender<bool>,
}

impl Server {
    async fn start(args: &Args, core: CoreClient, tree: &Tree) -> io::Result<Self> {
        let listener = TcpListener::bind((args.host, args.port)).await?;
        let address = listener.local_addr()?;
        let health = match args.grpc_port {
            Some(port) => Some(Health::serve(args, args.host, port).await?),
            None => None,
        };
        let ready = Ready {
            root_pid: std::process::id(),
            engine_core_pid: core.pid,
            resource_tracker_pid: tree.tracker(),
            launcher_pid: tree.launcher(),
            http: address,
            grpc: health.as_ref().map(|health| health.address),
            model: args.model.clone(),
            max_model_len: args.max_model_len,
        };
        let app = Arc::new(App {
            dialect: args.dialect(),
            stream_interval: args.stream_interval,
            core,
            phases: Phases::new(),
            health,
            last_answer: AtomicU64::new(0),
        });
        let close = watch::Sender::new(false);
        let mut closed = close.subscribe();
        let listener = listener.tap_io(|stream| {
            // Every chunk goes out at once.
            let _ = stream.set_nodelay(true);
        });
        let serving = axum::serve(listener, http::router(Arc::clone(&app))).with_graceful_shutdown(async move {
            let _ = closed.wait_for(|closed| *closed).await;
        });
        tokio::spawn(serving.into_future());
        tracing::info!(?ready, "serves");
        if let Some(path) = &args.ready_file {
            ready.write(path)?;
        }
        Ok(Self { app, close })
    }

    fn enter(&self, phase: Phase) {
        self.app.phases.enter(phase);
    }

    fn stop_listening(&self) {
        self.close.send_replace(true);
    }

    async fn not_serving(&self) {
        if let Some(health) = &self.app.health {
            health.set(false).await;
        }
    }

    /// The engine core is gone. Nobody knows yet.
    async fn engine_died(&self, args: &Args, tree: &mut Tree, terminate: &mut Terminate) -> ExitCode {
        tracing::info!("the engine core is gone");
        if args.grpc_mode {
            // The parent of `vllm serve --grpc`: says so, and stays.
            sleep(ms(51)).await;
            self.enter(Phase::Failed);
            sleep(ms(49)).await;
            self.not_serving().await;
            terminate.requested().await;
            return ExitCode::SUCCESS;
        }
        match args.frontend {
            Frontend::Python => {
                sleep(ms(170 + jitter(131))).await;
                tree.reap_engine_core();
                self.enter(Phase::Failed);
                self.not_serving().await;
                sleep(ms(32 + jitter(53))).await;
                self.stop_listening();
                sleep(ms(600)).await;
                ExitCode::SUCCESS
            }
            Frontend::Rust => {
                sleep(ms(args.rust_notice_ms)).await;
                self.not_serving().await;
                sleep(ms(2)).await;
                self.end_health().await;
                self.enter(Phase::Cut);
                self.stop_listening();
                sleep(ms(260)).await;
                ExitCode::FAILURE
            }
        }
    }

    async fn drain(&self, args: &Args, tree: &mut Tree, terminate: &mut Terminate) -> ExitCode {
        self.enter(Phase::Draining);
        if args.frontend == Frontend::Rust {
            sleep(ms(2)).await;
            self.not_serving().await;
            self.end_health().await;
            sleep(ms(6)).await;
            self.close_health();
        }
        let timeout = sleep(Duration::from_secs(args.shutdown_timeout));
        let finished = tokio::select! {
            () = self.app.phases.idle() => true,
            () = timeout => false,
            () = terminate.requested() => false,
            () = self.app.core.gone() => return self.engine_died(args, tree, terminate).await,
        };
        if !finished {
            // At the timeout, Python's streams end with the error event (two of five measured
            // runs; the others hang).
            self.enter(Phase::Failed);
        }
        sleep(ms(args.drain_linger_ms)).await;
        self.stop_listening();
        sleep(ms(50)).await;
        ExitCode::SUCCESS
    }

    async fn abort(&self, args: &Args) -> ExitCode {
        if args.frontend == Frontend::Rust {
            sleep(ms(2)).await;
            self.not_serving().await;
            self.end_health().await;
            self.close_health();
        }
        sleep(ms(60)).await;
        self.enter(Phase::Aborting);
        sleep(ms(160)).await;
        self.stop_listening();
        self.not_serving().await;
        sleep(ms(520)).await;
        ExitCode::SUCCESS
    }

    /// Never returns.
    async fn hang(&self, tree: &Tree) {
        sleep(ms(50)).await;
        self.enter(Phase::Silent);
        self.stop_listening();
        self.close_health();
        tree.kill_engine();
        std::future::pending::<()>().await;
    }

    /// The streams of Watch end, and no service is known any more.
    async fn end_health(&self) {
        if let Some(health) = &self.app.health {
            // So that the last status is sent before the end.
            sleep(ms(1)).await;
            health.clear().await;
        }
    }

    fn close_health(&self) {
        if let Some(health) = &self.app.health {
            health.close();
        }
    }
}

/// Something from 0 to below `bound`, other at every run.
fn jitter(bound: u64) -> u64 {
    u64::from(jiff::Timestamp::now().subsec_nanosecond().unsigned_abs()) % bound
}

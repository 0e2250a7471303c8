//! The parts put together.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use lastgasp_protocol::Name;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tracing::{error, info, warn};

use crate::cli::Args;
use crate::connections::{self, Limits};
use crate::proxy::Proxy;
use crate::threads::Threads;
use crate::workers::Workers;
use crate::{introspect, nats, open_files, server, tls};

/// sysexits(3): something in the configuration cannot be used.
const CONFIG: u8 = 78;

/// Runs the router until SIGTERM or SIGINT.
pub async fn run(args: Args) -> ExitCode {
    match serve(args).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            error!("{message}");
            ExitCode::from(CONFIG)
        }
    }
}

async fn serve(args: Args) -> Result<(), String> {
    let config = args.config()?;
    open_files::raise(&args);
    let name = match &args.name {
        Some(name) => name.clone(),
        None => {
            let random = ulid::Ulid::generate().to_string().to_lowercase();
            Name::new(format!("router-{}", &random[18..])).expect("letters and digits")
        }
    };
    let listener =
        TcpListener::bind(args.listen).await.map_err(|error| format!("--listen {}: {error}", args.listen))?;
    let address = listener.local_addr().map_err(|error| format!("--listen {}: {error}", args.listen))?;
    let (workers, arrivals) = Workers::new();
    let proxy = Proxy::new(workers, config).map_err(|error| format!("HTTP client: {error}"))?;
    tokio::spawn(introspect::run(arrivals, proxy.client.clone()));
    let settings =
        nats::Settings { url: args.nats.clone(), login: args.login.clone().into(), name, replicas: args.nats_replicas };
    let mut following = nats::follow(settings, Arc::clone(&proxy)).await.map_err(|error| format!("--nats: {error}"))?;

    let (stop, stopped) = watch::channel(false);
    let proxies: Result<Vec<_>, _> = (0..args.threads.get()).map(|_| proxy.for_another_runtime()).collect();
    let proxies = proxies.map_err(|error| format!("HTTP client: {error}"))?;
    let threads = Threads::start(proxies.into_iter().map(server::routes))
        .map_err(|error| format!("--threads {}: {error}", args.threads))?;
    let limits = Limits {
        connections: args.max_connections,
        head: args.request_timeout,
        handshake: connections::HANDSHAKE,
        unread: connections::UNREAD,
    };
    let tls = args.tls_cert.as_ref().zip(args.tls_key.as_ref()).map(|(cert, key)| tls::acceptor(cert, key));
    let acceptor = tls.transpose().map_err(|error| format!("--tls-cert, --tls-key: {error}"))?;
    let serving = tokio::spawn(connections::serve(listener, acceptor, threads, limits, stopped));
    info!(%address, migration_limit = args.migration_limit, "listening");
    let mut ending = tokio::spawn(asked_to_end());
    tokio::select! {
        () = following.listed() => {
            if let Some(path) = &args.ready_file {
                ready(path, &json!({ "pid": std::process::id(), "listen": address.to_string() }).to_string())?;
            }
            _ = (&mut ending).await;
        }
        _ = &mut ending => {}
    }
    info!(timeout_s = args.shutdown_timeout.as_secs(), "ending: no new requests, streams may finish");
    stop.send_replace(true);
    if tokio::time::timeout(args.shutdown_timeout.max(Duration::from_millis(1)), serving).await.is_err() {
        warn!("--shutdown-timeout is over: the router cuts the streams that are left");
    }
    following.stop().await;
    Ok(())
}

async fn asked_to_end() {
    let (Ok(mut terminate), Ok(mut interrupt)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}

/// Writes the file whole or not at all.
fn ready(path: &Path, text: &str) -> Result<(), String> {
    let whole = || {
        let unfinished = path.with_extension("unfinished");
        std::fs::write(&unfinished, text)?;
        std::fs::rename(&unfinished, path)
    };
    whole().map_err(|error: std::io::Error| format!("--ready-file {}: {error}", path.display()))
}

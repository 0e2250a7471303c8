//! grpc.health.v1 in the characters that engines give it.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use lastgasp_tests::model::Frontend;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_stream::{Stream, StreamExt};
use tonic::transport::Server;
use tonic::transport::server::Router;
use tonic::{Request, Response, Status};
use tonic_health::ServingStatus;
use tonic_health::pb::health_check_response::ServingStatus as PbStatus;
use tonic_health::pb::health_server::{Health as HealthService, HealthServer};
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};
use tonic_health::server::HealthReporter;

use crate::args::{Args, HealthWatch};
use crate::freeze::{Freezable, Freezer};

/// Service names of the two servers (smg servicer 0.14.1, vllm-rs 0.32.0). Python's second name is its engine's.
fn services(frontend: Frontend) -> &'static [&'static str] {
    match frontend {
        Frontend::Python => &["", "vllm.grpc.engine.VllmEngine"],
        Frontend::Rust => &["", "vllm.Inference", "vllm.Control"],
    }
}

/// The health server of this engine.
#[derive(Debug)]
pub(crate) struct Health {
    pub(crate) address: SocketAddr,
    services: &'static [&'static str],
    character: Character,
    freezer: Arc<Freezer>,
    stop: watch::Sender<bool>,
}

#[derive(Debug)]
enum Character {
    /// tonic-health, as in vllm-rs.
    Stream(HealthReporter),
    /// [`Servicer`].
    Other(watch::Sender<bool>),
}

impl Health {
    /// Binds `port` and serves health from now on: SERVING everywhere.
    pub(crate) async fn serve(args: &Args, host: IpAddr, port: u16) -> io::Result<Self> {
        let listener = TcpListener::bind((host, port)).await?;
        let address = listener.local_addr()?;
        let services = services(args.frontend);
        let (character, router) = match args.watch() {
            HealthWatch::Stream => {
                let (reporter, service) = tonic_health::server::health_reporter();
                for name in services {
                    reporter.set_service_status(name, ServingStatus::Serving).await;
                }
                (Character::Stream(reporter), Server::builder().add_service(service))
            }
            watch @ (HealthWatch::Once | HealthWatch::Unimplemented) => {
                let serving = watch::Sender::new(true);
                let servicer = Servicer {
                    services,
                    serving: serving.subscribe(),
                    watch: watch == HealthWatch::Once,
                    check: !args.health_check_unimplemented,
                };
                (Character::Other(serving), Server::builder().add_service(HealthServer::new(servicer)))
            }
        };
        let freezer = Arc::new(Freezer::new(args.half_open));
        let stop = watch::Sender::new(false);
        tokio::spawn(run(router, listener, Arc::clone(&freezer), stop.subscribe()));
        Ok(Self { address, services, character, freezer, stop })
    }

    /// All services say this from now on.
    pub(crate) async fn set(&self, serving: bool) {
        for service in self.services {
            self.set_service(service, serving).await;
        }
    }

    /// One service says this. (The Python servicer has one status for all.)
    pub(crate) async fn set_service(&self, service: &str, serving: bool) {
        match &self.character {
            Character::Stream(reporter) => {
                let status = if serving { ServingStatus::Serving } else { ServingStatus::NotServing };
                reporter.set_service_status(service, status).await;
            }
            Character::Other(sender) => drop(sender.send_replace(serving)),
        }
    }

    /// Ends every Watch; Check is NOT_FOUND from now on.
    pub(crate) async fn clear(&self) {
        if let Character::Stream(reporter) = &self.character {
            let mut reporter = reporter.clone();
            for service in self.services {
                reporter.clear_service_status(service).await;
            }
        }
    }

    /// Refuses connections from now on.
    pub(crate) fn close(&self) {
        self.stop.send_replace(true);
    }

    /// Connections fall silent, or speak again.
    pub(crate) fn freeze(&self, on: bool) {
        self.freezer.set(on);
    }
}

async fn run(router: Router, listener: TcpListener, freezer: Arc<Freezer>, mut stop: watch::Receiver<bool>) {
    let incoming = TcpListenerStream::new(listener).map(|accepted| {
        accepted.map(|stream| {
            // Health messages are small; Nagle's algorithm would add 40 ms to some.
            let _ = stream.set_nodelay(true);
            Freezable::new(stream, Arc::clone(&freezer))
        })
    });
    let stopped = async move {
        let _ = stop.wait_for(|stop| *stop).await;
    };
    if let Err(error) = router.serve_with_incoming_shutdown(incoming, stopped).await {
        tracing::warn!(%error, "the gRPC server ended");
    }
}

/// The servicer of vLLM's Python gRPC server (and of SGLang's): Check is right, Watch yields one
/// message and ends OK.
#[derive(Debug)]
struct Servicer {
    services: &'static [&'static str],
    serving: watch::Receiver<bool>,
    watch: bool,
    check: bool,
}

impl Servicer {
    fn status(&self, service: &str) -> Option<PbStatus> {
        let known = self.services.contains(&service);
        known.then(|| if *self.serving.borrow() { PbStatus::Serving } else { PbStatus::NotServing })
    }
}

#[tonic::async_trait]
impl HealthService for Servicer {
    async fn check(&self, request: Request<HealthCheckRequest>) -> Result<Response<HealthCheckResponse>, Status> {
        if !self.check {
            return Err(Status::unimplemented("Method not implemented!"));
        }
        let service = &request.get_ref().service;
        match self.status(service) {
            Some(status) => Ok(Response::new(answer(status))),
            None => Err(Status::not_found(format!("Unknown service: {service}"))),
        }
    }

    type WatchStream = std::pin::Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

    async fn watch(&self, request: Request<HealthCheckRequest>) -> Result<Response<Self::WatchStream>, Status> {
        if !self.watch {
            return Err(Status::unimplemented("Method not implemented!"));
        }
        let status = self.status(&request.get_ref().service).unwrap_or(PbStatus::ServiceUnknown);
        let once = tokio_stream::once(Ok(answer(status)));
        Ok(Response::new(Box::pin(once)))
    }
}

fn answer(status: PbStatus) -> HealthCheckResponse {
    HealthCheckResponse { status: status.into() }
}

//! `lastgasp.v1.Status`.

use std::pin::Pin;

use futures_util::{Stream, StreamExt};
use tokio::sync::watch;
use tokio_stream::wrappers::errors::BroadcastStreamRecvError;
use tokio_stream::wrappers::{BroadcastStream, WatchStream};
use tonic::{Request, Response};

use super::proto::{
    self, Death, DeathsRequest, Event, EventsRequest, GetStatusRequest, NodeStatus, WatchStatusRequest,
};
use super::{StatusHub, render};
use crate::losses::Loss;
use crate::metrics::Metrics;

pub(super) struct StatusService {
    pub(super) hub: StatusHub,
    pub(super) metrics: Metrics,
    /// Its sender goes with the server. tonic runs every connection in a task of its own, which
    /// would otherwise outlive it.
    pub(super) serving: watch::Receiver<()>,
}

impl StatusService {
    fn until_the_end<T: 'static>(&self, items: impl Stream<Item = T> + Send + 'static) -> Items<T> {
        let mut serving = self.serving.clone();
        let end = async move { while serving.changed().await.is_ok() {} };
        Box::pin(items.map(Ok).take_until(Box::pin(end)))
    }
}

type Items<T> = Pin<Box<dyn Stream<Item = Result<T, tonic::Status>> + Send>>;

#[tonic::async_trait]
impl proto::status_server::Status for StatusService {
    type WatchStatusStream = Items<NodeStatus>;
    type EventsStream = Items<Event>;
    type DeathsStream = Items<Death>;

    async fn get_status(&self, _: Request<GetStatusRequest>) -> Result<Response<NodeStatus>, tonic::Status> {
        Ok(Response::new((*self.hub.status()).clone()))
    }

    async fn watch_status(
        &self,
        _: Request<WatchStatusRequest>,
    ) -> Result<Response<Self::WatchStatusStream>, tonic::Status> {
        let changes = WatchStream::new(self.hub.watch()).map(|status| (*status).clone());
        Ok(Response::new(self.until_the_end(changes)))
    }

    async fn deaths(&self, _: Request<DeathsRequest>) -> Result<Response<Self::DeathsStream>, tonic::Status> {
        let deaths = self.hub.deaths().into_iter().map(|json| Death { certificate_json: json.to_string() });
        Ok(Response::new(self.until_the_end(futures_util::stream::iter(deaths))))
    }

    async fn events(&self, request: Request<EventsRequest>) -> Result<Response<Self::EventsStream>, tonic::Status> {
        let (history, live) = self.hub.events();
        let history = futures_util::stream::iter(history).map(|event| (*event).clone());
        if !request.into_inner().follow {
            return Ok(Response::new(self.until_the_end(history)));
        }
        let metrics = self.metrics.clone();
        let live = BroadcastStream::new(live).map(move |event| match event {
            Ok(event) => (*event).clone(),
            Err(BroadcastStreamRecvError::Lagged(missed)) => {
                metrics.lose(Loss::Follower, missed);
                missed_events(missed)
            }
        });
        Ok(Response::new(self.until_the_end(history.chain(live))))
    }
}

/// A reader that is too slow sees so in the place where the events would have been.
fn missed_events(missed: u64) -> Event {
    Event {
        at: render::now(),
        kind: "note".to_owned(),
        summary: format!("{missed} events are missing here: they were not read in time"),
        ..Event::default()
    }
}

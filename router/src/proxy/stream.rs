//! A streaming request: the continuation engine between a client and the workers that serve it in turn.

use lastgasp_protocol::ClosedName as _;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use lastgasp_protocol::Mode;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tracing::{info, warn};

use super::dispatch::{Declined, Tried, Upstream};
use super::reason::{Leaving, MoveFailure, Seen, Unable};
use super::unary;
use super::{Inbound, Proxy, aside};
use crate::continuation::{
    Body as Request, Broken, Continuation, Endpoint, Exactness, Options, Outgoing, Progress, Refusal, StreamEnd,
    error_event,
};
use crate::errors::ApiError;
use crate::workers::{Fate, RequestOutcome, Ticket};

/// Pieces that may wait for a slow client before the worker is no longer read.
const QUEUE: usize = 16;
/// Bytes that may wait on top of that.
const HIGH_WATER: usize = 256 * 1024;
/// Bytes that are sent at once, though more may be had.
const TOGETHER: usize = 16 * 1024;
/// How often a client is sent a comment while a worker is sought for it.
const KEEP_ALIVE: Duration = Duration::from_secs(1);
/// Comments that keep a connection alive, the second with --tell-clients. No empty line follows: to a client that
/// has seen an `id`, that is one more event (the decoder of openai-python 2).
const STILL_HERE: [&[u8]; 2] = [b":\n", b": lastgasp seeks a worker\n"];
/// What vLLM 0.32 and SGLang 0.5 say, with status 400, when a prompt leaves no room. The second is vLLM's
/// Python frontend where the prompt fills the context to the last token.
const CONTEXT_FULL: [&str; 2] = ["maximum context length", "max_tokens must be at least 1, got 0"];

/// Serves a streaming request.
pub async fn serve(proxy: Arc<Proxy>, endpoint: Endpoint, inbound: Inbound, body: Request) -> Response {
    let options = Options {
        migrate: proxy.config.migration_limit > 0,
        strict: proxy.config.strict,
        eos_token_ids: proxy.config.eos_token_ids.clone(),
    };
    let stream = aside(body.bytes().len(), move || Continuation::new(endpoint, body, options)).await;
    let mut session = Session {
        stream,
        proxy,
        inbound,
        tried: Tried::default(),
        journey: Vec::new(),
        retries: 0,
        moves: 0,
        misses: 0,
        started: Instant::now(),
        first_chunk: None,
        moving: None,
        out: Vec::new(),
    };
    let upstream = match session.open().await {
        Ok(upstream) => upstream,
        Err(Unopened::Answer(ticket, response)) => {
            return unary::pass_on(&session.proxy, &session.inbound, ticket, response);
        }
        Err(Unopened::NoWorker(error)) => return error.into_response(),
        Err(Unopened::RetriesExhausted(leaving)) => {
            let (reason, retries) = (leaving.as_str(), session.retries);
            let message = format!("The worker was lost ({reason}), and so were {retries} others before it.");
            return ApiError::unavailable("retries_exhausted", message).into_response();
        }
        Err(Unopened::Refused(_) | Unopened::NotContinued) => unreachable!("nothing was produced yet"),
    };
    let kind = upstream.response.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    if kind.is_some_and(|kind| kind.starts_with("application/json")) {
        return unary::pass_on(&session.proxy, &session.inbound, upstream.ticket, upstream.response);
    }
    let (client, body) = mpsc::channel(QUEUE);
    let mut response = Response::new(Body::from_stream(ReceiverStream::new(body)));
    unary::tell_worker(&session.proxy, &upstream.ticket, &mut response);
    tokio::spawn(session.run(upstream, client));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// Why no worker serves the stream.
enum Unopened {
    /// A worker's answer that is the client's to read.
    Answer(Ticket, reqwest::Response),
    NoWorker(ApiError),
    /// One more worker was lost that had the request, and there have been enough.
    RetriesExhausted(Leaving),
    Refused(Refusal),
    /// A worker will not have the continuation.
    NotContinued,
}

/// How a worker's part of the stream ended.
enum End {
    /// The client has everything.
    Complete,
    ClientGone,
    /// The worker is to be left, for this reason.
    Lost(Leaving),
}

/// Waits for the next change of a fate.
async fn next(mut fate: watch::Receiver<Fate>) -> watch::Receiver<Fate> {
    if fate.changed().await.is_err() {
        // Its listing is gone, and nobody is left to say anything.
        std::future::pending().await
    }
    fate
}

/// Lets every other task run that is ready to.
async fn another_turn() {
    let mut turned = false;
    std::future::poll_fn(|context| {
        if std::mem::replace(&mut turned, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await
}

/// A move that is counted when the next worker gives its first chunk.
struct Moving {
    reason: Leaving,
    since: Instant,
}

type Client = mpsc::Sender<Result<Bytes, std::convert::Infallible>>;

struct Session {
    proxy: Arc<Proxy>,
    inbound: Inbound,
    stream: Continuation,
    tried: Tried,
    /// For the log.
    journey: Vec<String>,
    retries: u32,
    moves: u32,
    /// Continuations in a row that ended before a first chunk.
    misses: u32,
    started: Instant,
    first_chunk: Option<Duration>,
    moving: Option<Moving>,
    /// What the client is to be sent next.
    out: Vec<u8>,
}

impl Session {
    /// Finds a worker that takes the request as it stands.
    async fn open(&mut self) -> Result<Upstream, Unopened> {
        let began = tokio::time::Instant::now();
        let deadline = began + self.proxy.config.wait_for_worker;
        let mut declined: Option<(Ticket, reqwest::Response)> = None;
        loop {
            // A refusal is better passed on at once than after a wait for another.
            let deadline = if declined.is_some() { tokio::time::Instant::now() } else { deadline };
            let Some(ticket) = self.proxy.reserve(&self.inbound.model, &mut self.tried, true, deadline).await else {
                return Err(self.nobody(declined));
            };
            let listing = Arc::clone(ticket.listing());
            let Outgoing { endpoint, body, open_ended, .. } =
                self.stream.resend(listing.target(&self.inbound.model)).map_err(Unopened::Refused)?;
            let path = endpoint.path();
            let leaves = |fate: &Fate| matches!(fate, Fate::Move(..));
            match self.proxy.send(ticket, &self.inbound, Method::POST, path, body, leaves).await {
                Ok(upstream) if upstream.response.status().is_success() => {
                    self.journey.push(listing.key.to_string());
                    return Ok(upstream);
                }
                Ok(Upstream { ticket, fate: _, response }) if !self.stream.produced() => {
                    return Err(Unopened::Answer(ticket, response));
                }
                Ok(upstream) => {
                    let status = upstream.response.status();
                    let text = upstream.response.text().await.unwrap_or_default();
                    info!(id = %self.inbound.id, worker = %listing.key, %status, text, "continuation refused");
                    let said = CONTEXT_FULL.iter().any(|said| text.contains(said));
                    let full = open_ended && status == StatusCode::BAD_REQUEST && said;
                    return Err(if full { Unopened::Refused(Refusal::ContextFull) } else { Unopened::NotContinued });
                }
                Err((ticket, Declined::Status(response))) => {
                    info!(id = %self.inbound.id, worker = %listing.key, status = %response.status(), "worker declined the request");
                    self.tried.failed.push(listing);
                    if !self.stream.produced() {
                        self.retry(Leaving::Seen(Seen::Status));
                        if self.retries > self.proxy.config.max_retries {
                            return Err(Unopened::Answer(ticket, response));
                        }
                        declined = Some((ticket, response));
                    }
                }
                Err((_, Declined::Unreachable(error))) => {
                    info!(id = %self.inbound.id, worker = %listing.key, error, "worker not reached");
                    self.tried.unreachable.push(listing);
                    if self.proxy.sought_long_enough(began) {
                        return Err(self.nobody(declined));
                    }
                }
                Err((_, Declined::Lost(leaving, error))) => {
                    let reason = leaving.as_str();
                    info!(id = %self.inbound.id, worker = %listing.key, reason, error, "worker lost");
                    self.tried.failed.push(listing);
                    let max = self.proxy.config.max_retries;
                    if self.stream.produced() {
                        self.misses += 1;
                        if self.misses > max {
                            return Err(Unopened::RetriesExhausted(leaving));
                        }
                    } else {
                        if self.retries >= max {
                            return Err(Unopened::RetriesExhausted(leaving));
                        }
                        self.retry(leaving);
                    }
                }
            }
        }
    }

    /// No other worker takes it; the last one that said no has the word.
    fn nobody(&self, declined: Option<(Ticket, reqwest::Response)>) -> Unopened {
        if let Some((ticket, response)) = declined {
            return Unopened::Answer(ticket, response);
        }
        let message = format!("No worker takes requests for the model `{}` at present.", self.inbound.model);
        Unopened::NoWorker(ApiError::unavailable("no_worker", message))
    }

    fn retry(&mut self, reason: Leaving) {
        self.retries += 1;
        self.proxy.metrics.retries.with_label_values(&[reason.as_str()]).inc();
    }

    /// Serves the stream to its end, through as many workers as it takes.
    async fn run(mut self, mut upstream: Upstream, client: Client) {
        let outcome = loop {
            let reason = match self.follow(&mut upstream, &client).await {
                End::Complete => break "complete",
                End::ClientGone => break "client_gone",
                End::Lost(reason) => reason,
            };
            let Upstream { mut ticket, fate: _, response } = upstream;
            // Before anything else, so that a worker that lives generates for nobody no longer.
            drop(response);
            let since = Instant::now();
            if self.stream.has_begun() {
                self.tried.before.append(&mut self.tried.failed);
            }
            // One that ignores a chat's ids is asked again, in another way.
            if reason != Leaving::Broken(Broken::PromptIgnored) {
                self.tried.failed.push(Arc::clone(ticket.listing()));
                self.misses += u32::from(self.moving.is_some());
            }
            let failure = match self.stream.worker_failed(&mut self.out) {
                StreamEnd::Finished => break "finished_by_router",
                StreamEnd::Unmovable(reason) => {
                    ticket.settle(RequestOutcome::Unmovable);
                    Some(MoveFailure::Unmovable(reason))
                }
                StreamEnd::Retry if self.retries >= self.proxy.config.max_retries => {
                    Some(MoveFailure::Unable(Unable::RetriesExhausted))
                }
                StreamEnd::Retry => {
                    self.retry(reason);
                    None
                }
                StreamEnd::Move if self.proxy.config.migration_limit == 0 => {
                    Some(MoveFailure::Unable(Unable::MigrationOff))
                }
                StreamEnd::Move if self.moves >= self.proxy.config.migration_limit => {
                    Some(MoveFailure::Unable(Unable::LimitReached))
                }
                StreamEnd::Move if self.misses > self.proxy.config.max_retries => {
                    Some(MoveFailure::Unable(Unable::RetriesExhausted))
                }
                StreamEnd::Move => {
                    let since = self.moving.take().map_or(since, |moving| moving.since);
                    self.moving = Some(Moving { reason, since });
                    None
                }
            };
            if let Some(failure) = failure {
                ticket.settle(RequestOutcome::Failed);
                self.fail(reason, failure);
                break failure.as_str();
            }
            let from = ticket.listing().key.to_string();
            let opened = tokio::select! {
                biased;
                () = client.closed() => break "client_gone",
                opened = self.reopen(&client) => opened,
            };
            match opened {
                Ok(next) => {
                    ticket.settle(RequestOutcome::Moved);
                    if self.moving.is_some() && self.proxy.config.tell_clients {
                        let comment = format!(": lastgasp moved {from} -> {}\n", next.ticket.listing().key);
                        self.out.extend_from_slice(comment.as_bytes());
                    }
                    upstream = next;
                }
                Err(Unopened::Refused(Refusal::ContextFull)) => {
                    self.stream.finish_full(&mut self.out);
                    break "finished_by_router";
                }
                Err(unopened) => {
                    let failure = match unopened {
                        Unopened::Refused(Refusal::Unmovable(reason)) => {
                            ticket.settle(RequestOutcome::Unmovable);
                            MoveFailure::Unmovable(reason)
                        }
                        Unopened::NoWorker(_) => MoveFailure::Unable(Unable::NoWorker),
                        Unopened::RetriesExhausted(_) => MoveFailure::Unable(Unable::RetriesExhausted),
                        _ => MoveFailure::Unable(Unable::RefusedByWorker),
                    };
                    ticket.settle(RequestOutcome::Failed);
                    self.fail(reason, failure);
                    break failure.as_str();
                }
            }
        };
        if !self.out.is_empty() {
            // The client may have left; then there is nobody to tell.
            _ = client.send(Ok(std::mem::take(&mut self.out).into())).await;
        }
        self.log(outcome);
    }

    /// Finds the next worker, and keeps the client's connection warm meanwhile.
    async fn reopen(&mut self, client: &Client) -> Result<Upstream, Unopened> {
        // What the client has not been sent yet counts as sent: it must outlive the search.
        let mut out = std::mem::take(&mut self.out);
        let still_here = STILL_HERE[usize::from(self.proxy.config.tell_clients)];
        let mut ticks = tokio::time::interval_at(tokio::time::Instant::now() + KEEP_ALIVE, KEEP_ALIVE);
        let opened = {
            let mut open = std::pin::pin!(self.open());
            loop {
                tokio::select! {
                    biased;
                    opened = &mut open => break opened,
                    Ok(permit) = client.reserve(), if !out.is_empty() => {
                        permit.send(Ok(std::mem::take(&mut out).into()));
                    }
                    _ = ticks.tick() => {
                        if out.is_empty() {
                            // A client that does not read is not in need of being kept.
                            _ = client.try_send(Ok(Bytes::from_static(still_here)));
                        }
                    }
                }
            }
        };
        out.append(&mut self.out);
        self.out = out;
        opened
    }

    /// Passes one worker's part on, until it ends or must be left.
    async fn follow(&mut self, upstream: &mut Upstream, client: &Client) -> End {
        let Upstream { ticket, fate, response } = upstream;
        let listing = Arc::clone(ticket.listing());
        let proxy = Arc::clone(&self.proxy);
        let mut changes = proxy.workers.changes();
        // A handover that waits for a place to go to.
        let mut leaving = None;
        let mut looked = false;
        let mut heard = tokio::time::Instant::now();
        let patience = proxy.patience();
        // Pieces that came together are sent together: one write to the client costs more than all else that
        // is done with a piece. The next one is behind the task that reads the connection, which runs when
        // this one has given it a turn.
        let mut more = false;
        // When it was heard or looked into last.
        let mut checked = heard;
        // Made once and not for each chunk: to put them into the runtime's lists, and to take them out
        // again, costs as much as a chunk does.
        let mut gone = std::pin::pin!(client.closed());
        let mut decided = std::pin::pin!(next(fate.clone()));
        let mut look = std::pin::pin!(tokio::time::sleep_until(checked + patience));
        loop {
            if !std::mem::replace(&mut looked, true) {
                let now = *fate.borrow_and_update();
                match now {
                    Fate::Stay => {}
                    Fate::Move(Mode::Lost, why) => return End::Lost(Leaving::Signalled(why)),
                    Fate::Move(Mode::Handover, why) => {
                        if self.stays(ticket) {
                            leaving = None;
                        } else if proxy.workers.choose(&self.inbound.model, &[], false).is_some() {
                            return End::Lost(Leaving::Signalled(why));
                        } else {
                            leaving = Some(why);
                        }
                    }
                }
            }
            tokio::select! {
                biased;
                () = &mut gone => return End::ClientGone,
                changed = &mut decided => {
                    decided.set(next(changed));
                    looked = false;
                }
                Ok(()) = changes.changed(), if leaving.is_some() => looked = false,
                Ok(permit) = client.reserve(), if !self.out.is_empty() && (!more || self.out.len() >= TOGETHER) => {
                    permit.send(Ok(std::mem::take(&mut self.out).into()));
                }
                piece = response.chunk(), if self.out.len() < HIGH_WATER => {
                    heard = tokio::time::Instant::now();
                    checked = heard;
                    let progress = match piece {
                        Ok(Some(bytes)) => self.stream.feed(&bytes, &mut self.out),
                        Ok(None) => self.stream.ended(&mut self.out),
                        Err(_) => return End::Lost(Leaving::Seen(Seen::ConnectionBroken)),
                    };
                    self.note_begin();
                    match progress {
                        Progress::Going => {}
                        Progress::Complete | Progress::Rejected => return End::Complete,
                        Progress::Broken(broken) => return End::Lost(Leaving::Broken(broken)),
                    }
                    more = true;
                }
                () = another_turn(), if more && !self.out.is_empty() => more = false,
                () = &mut look => {
                    if checked.elapsed() >= patience {
                        if let Some(leaving) = proxy.look_into(&listing, heard.elapsed()).await {
                            return End::Lost(leaving);
                        }
                        checked = tokio::time::Instant::now();
                    }
                    look.as_mut().reset(checked + patience);
                }
            }
        }
    }

    /// At a handover: whether the stream stays where it is, since it cannot be moved or is about to end.
    fn stays(&self, ticket: &mut Ticket) -> bool {
        if self.stream.is_finished() {
            return true;
        }
        if self.stream.movable(ticket.listing().target(&self.inbound.model)).is_err() {
            ticket.settle(RequestOutcome::Unmovable);
            return true;
        }
        let config = &self.proxy.config;
        let spent = if self.stream.produced() {
            self.moves >= config.migration_limit || self.moving.is_some() && self.misses >= config.max_retries
        } else {
            self.retries >= config.max_retries
        };
        if spent {
            ticket.settle(RequestOutcome::Failed);
            return true;
        }
        false
    }

    /// Counts the first chunk, of the stream and after a move.
    fn note_begin(&mut self) {
        if !self.stream.has_begun() {
            return;
        }
        let metrics = &self.proxy.metrics;
        if self.first_chunk.is_none() {
            let elapsed = self.started.elapsed();
            self.first_chunk = Some(elapsed);
            metrics.first_token.observe(elapsed.as_secs_f64());
        }
        if let Some(Moving { reason, since }) = self.moving.take() {
            self.moves += 1;
            self.misses = 0;
            let exactness = self.stream.exactness();
            metrics.migrations.with_label_values(&[reason.as_str(), exactness.as_str()]).inc();
            metrics.gap.observe(since.elapsed().as_secs_f64());
            if exactness == Exactness::Approximate {
                warn!(id = %self.inbound.id, reason = reason.as_str(), "stream moved by text: the engine may cut tokens differently");
            }
        }
    }

    /// Ends the stream visibly.
    fn fail(&mut self, reason: Leaving, failure: MoveFailure) {
        let (reason, failure) = (reason.as_str(), failure.as_str());
        let message = format!("The worker was lost ({reason}) and the answer could not be continued ({failure}).");
        self.out.extend(error_event(&message, failure));
        self.proxy.metrics.migrations_failed.with_label_values(&[failure]).inc();
    }

    fn log(&self, outcome: &str) {
        info!(
            id = %self.inbound.id,
            path = %self.inbound.path,
            model = self.inbound.model,
            workers = %self.journey.join(" -> "),
            moves = self.moves,
            retries = self.retries,
            exactness = self.stream.exactness().as_str(),
            tokens = self.stream.tokens(),
            first_chunk_ms = self.first_chunk.map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX)),
            ms = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX),
            outcome,
            "stream"
        );
    }
}

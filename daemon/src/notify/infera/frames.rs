//! What goes over Infera's NATS, byte for byte (`infera/common/nats_request.py` of Infera at 5890f7f).

use lastgasp_protocol::ClosedName as _;
use std::sync::Arc;

use async_nats::{HeaderMap, Message, Subject};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bytes::Bytes;
use lastgasp_protocol::{Cause, CauseKind};
use serde::Deserialize;
use serde_json::value::RawValue;

/// Says what a frame is.
const TYPE: &str = "rs-type";
/// Holds the reply inbox in throttle mode, where the message's own reply is JetStream's.
const INBOX: &str = "rs-inbox";
/// What every reply inbox of Infera's routers begins with. Nothing else is ever published to.
const INBOXES: &str = "_INBOX.";
/// Longest inbox that is remembered, in bytes; Infera's have 29.
const LONGEST_INBOX: usize = 256;
/// The wrapper's own sentence that it drains, which routers know by its beginning.
const DRAINING: &str = "infera: worker draining";

/// What stands for a worker in subjects: its id in base64url without padding.
fn token(id: &str) -> String {
    URL_SAFE_NO_PAD.encode(id)
}

/// Where routers ask a worker.
pub(super) fn requests(id: &str) -> Subject {
    format!("infera.req.{}", token(id)).into()
}

/// Where routers take a request back.
pub(super) fn cancellations(id: &str) -> Subject {
    format!("infera.cancel.{}", token(id)).into()
}

/// Where the answer to a request is awaited, if that is an inbox of a router.
pub(super) fn inbox(request: &Message) -> Option<Arc<str>> {
    let throttled = request.headers.as_ref().and_then(|headers| headers.get(INBOX));
    match throttled {
        Some(inbox) => known_inbox(inbox.as_str()),
        None => known_inbox(request.reply.as_deref()?),
    }
}

/// The inbox that a cancellation names.
pub(super) fn cancelled(payload: &[u8]) -> Option<Arc<str>> {
    known_inbox(std::str::from_utf8(payload).ok()?)
}

/// What of a request says whether its stream can go on elsewhere.
#[derive(Deserialize)]
struct Envelope<'a> {
    /// The router would move it. Absent where none are moved at all.
    #[serde(default)]
    migratable: bool,
    #[serde(borrow, default)]
    body: Option<Body<'a>>,
}

#[derive(Deserialize)]
struct Body<'a> {
    n: Option<u64>,
    best_of: Option<u64>,
    #[serde(borrow)]
    prompt: Option<&'a RawValue>,
}

/// Whether a router would move the stream of this request. It marks also some that it ends with an error
/// when it comes to that: those of several answers (`infera/router/migration.py` of Infera at 5890f7f).
pub(super) fn is_movable(request: &[u8]) -> bool {
    let Ok(Envelope { migratable, body }) = serde_json::from_slice(request) else { return false };
    let one = |count: Option<u64>| count.is_none_or(|count| count <= 1);
    let moves = |Body { n, best_of, prompt }| one(n) && one(best_of) && prompt.is_none_or(is_one_prompt);
    migratable && body.is_none_or(moves)
}

/// A text, or the ids of one; any other list has several prompts.
fn is_one_prompt(prompt: &RawValue) -> bool {
    let list = prompt.get().strip_prefix('[');
    list.is_none_or(|list| list.trim_start().starts_with(|first: char| first.is_ascii_digit()))
}

/// A request can name any subject; one that is no inbox would let its sender publish elsewhere.
/// The text is copied: a part of the message would keep all of it in memory.
fn known_inbox(text: &str) -> Option<Arc<str>> {
    let rest = text.strip_prefix(INBOXES)?;
    let plain = |token: &str| !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_alphanumeric());
    (text.len() <= LONGEST_INBOX && rest.split('.').all(plain)).then(|| text.into())
}

/// The frame that ends a stream at its router.
#[derive(Debug, Clone)]
pub(super) struct ErrorFrame {
    pub(super) headers: HeaderMap,
    pub(super) payload: Bytes,
}

impl ErrorFrame {
    /// For a worker that is lost for this cause.
    pub(super) fn of(cause: Option<&Cause>) -> Self {
        match cause {
            Some(cause) if is_planned(cause.kind) => Self::draining(),
            Some(cause) => Self::saying(format!("lastgasp: worker lost ({})", cause.kind.as_str())),
            None => Self::saying("lastgasp: worker lost".to_owned()),
        }
    }

    /// For a worker that leaves and hands over what can be moved.
    pub(super) fn draining() -> Self {
        Self::saying(DRAINING.to_owned())
    }

    fn saying(payload: String) -> Self {
        let mut headers = HeaderMap::new();
        headers.insert(TYPE, "error");
        Self { headers, payload: payload.into() }
    }
}

/// A worker that was asked to leave.
const fn is_planned(kind: CauseKind) -> bool {
    matches!(kind, CauseKind::Terminated | CauseKind::Commanded)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(reply: Option<&str>, header: Option<&str>) -> Message {
        let headers = header.map(|inbox| {
            let mut headers = HeaderMap::new();
            headers.insert("rs-inbox", inbox);
            headers
        });
        Message {
            subject: requests("10.0.0.1:8080"),
            reply: reply.map(Subject::from),
            payload: Bytes::from_static(b"{}"),
            headers,
            status: None,
            description: None,
            length: 2,
        }
    }

    #[test]
    fn subjects_are_those_of_infera() {
        assert_eq!(requests("10.0.0.1:8080").as_str(), "infera.req.MTAuMC4wLjE6ODA4MA");
        assert_eq!(cancellations("10.0.0.1:8080").as_str(), "infera.cancel.MTAuMC4wLjE6ODA4MA");
    }

    #[test]
    fn the_inbox_is_the_reply_or_in_throttle_mode_the_header() {
        let inbox = |reply, header| inbox(&request(reply, header)).map(|inbox| inbox.to_string());
        assert_eq!(inbox(Some("_INBOX.a1"), None).as_deref(), Some("_INBOX.a1"));
        assert_eq!(inbox(Some("_INBOX.puback"), Some("_INBOX.b2.c3")).as_deref(), Some("_INBOX.b2.c3"));
        assert_eq!(inbox(None, None), None);
    }

    #[test]
    fn nothing_but_an_inbox_is_published_to() {
        for strange in ["$SYS.REQ", "infera.req.x", "_INBOX.", "_INBOX.*", "_INBOX.>", "_INBOX.a..b", "_INBOX.a b"] {
            assert!(inbox(&request(Some("_INBOX.a"), Some(strange))).is_none(), "{strange}");
        }
        assert!(cancelled(format!("_INBOX.{}", "a".repeat(300)).as_bytes()).is_none());
        assert!(cancelled(b"_INBOX.a\xff").is_none());
    }

    #[test]
    fn only_what_is_marked_and_has_one_answer_is_movable() {
        let movable = |request: &str| is_movable(request.as_bytes());
        for request in [
            r#"{"migratable": true}"#,
            r#"{"path": "/v1/chat/completions", "migratable": true, "body": {"messages": [{"role": "user"}], "n": 1}}"#,
            r#"{"migratable": true, "body": {"prompt": "several words", "best_of": null}}"#,
            r#"{"migratable": true, "body": {"prompt": [ 17, 4]}}"#,
        ] {
            assert!(movable(request), "{request}");
        }
        for request in [
            "",
            "{}",
            r#"{"stream": true, "body": {"n": 1}}"#,
            r#"{"migratable": false, "body": {}}"#,
            r#"{"migratable": true, "body": {"n": 2}}"#,
            r#"{"migratable": true, "body": {"best_of": 2}}"#,
            r#"{"migratable": true, "body": {"prompt": ["one", "two"]}}"#,
            r#"{"migratable": true, "body": {"prompt": [[1, 2]]}}"#,
        ] {
            assert!(!movable(request), "{request}");
        }
    }

    #[test]
    fn the_text_tells_a_planned_leave_from_a_fault() {
        let text = |kind| {
            let frame = ErrorFrame::of(Some(&Cause::of(kind)));
            assert_eq!(frame.headers.get("rs-type").map(async_nats::HeaderValue::as_str), Some("error"));
            String::from_utf8(frame.payload.to_vec()).unwrap()
        };
        assert_eq!(text(CauseKind::Terminated), "infera: worker draining");
        assert_eq!(text(CauseKind::Commanded), "infera: worker draining");
        assert_eq!(text(CauseKind::ProcessKilled), "lastgasp: worker lost (process_killed)");
        assert_eq!(&ErrorFrame::of(None).payload[..], b"lastgasp: worker lost");
    }
}

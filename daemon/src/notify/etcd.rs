//! etcd, by the HTTP/JSON gateway of its API v3, as far as discovery is kept there.
//!
//! The gateway writes keys and values in base64, and 64-bit numbers as texts.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::BytesMut;
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};

/// How long a connection is silent before its other end is asked whether it is there, and between two such
/// questions.
const KEEPALIVE: Duration = Duration::from_secs(10);
/// Questions without an answer that end a connection.
const KEEPALIVES: u32 = 3;
/// How long an answer takes at the most, and the beginning of a watch.
const PATIENCE: Duration = Duration::from_secs(10);
/// Longest line of a watch, in bytes: etcd takes no request above 1.5 MiB, and base64 makes it longer by a
/// third.
const MAX_LINE: usize = 8 << 20;
/// Longest answer, in bytes: some thousand cards of some kilobytes, in base64.
const MAX_ANSWER: usize = 32 << 20;
/// What is kept of an error's text, in bytes.
const MAX_ERROR: usize = 1024;

/// Why nothing became of it.
#[derive(Debug, thiserror::Error)]
pub(super) enum EtcdError {
    /// It does not answer.
    #[error("etcd: {0}")]
    Request(#[from] reqwest::Error),
    /// It does not answer in time.
    #[error("etcd: no answer within {} s", PATIENCE.as_secs())]
    Late,
    /// It answers with something else.
    #[error("etcd: {0}")]
    Answer(&'static str),
    /// It refuses, with this status and in these words.
    #[error("etcd: {0}: {1}")]
    Refused(u16, String),
}

/// The gateway.
#[derive(Debug, Clone)]
pub(super) struct Gateway {
    client: reqwest::Client,
    url: String,
}

/// Records, and when they were read.
#[derive(Debug, Deserialize)]
pub(super) struct Range {
    pub(super) header: Header,
    #[serde(default)]
    pub(super) kvs: Vec<KeyValue>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Header {
    #[serde(deserialize_with = "number")]
    pub(super) revision: i64,
}

/// A record. Of one that is gone only the key is known.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct KeyValue {
    #[serde(deserialize_with = "text")]
    pub(super) key: Vec<u8>,
    #[serde(default, deserialize_with = "text")]
    pub(super) value: Vec<u8>,
    #[serde(default, deserialize_with = "number")]
    pub(super) create_revision: i64,
    #[serde(default, deserialize_with = "number")]
    pub(super) mod_revision: i64,
    #[serde(default, deserialize_with = "number")]
    pub(super) lease: i64,
}

/// What has changed.
#[derive(Debug, PartialEq, Eq, Deserialize)]
pub(super) struct Event {
    #[serde(default, rename = "type")]
    kind: EventKind,
    pub(super) kv: KeyValue,
}

/// The gateway leaves out what is zero.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Deserialize)]
enum EventKind {
    #[default]
    #[serde(rename = "PUT")]
    Put,
    #[serde(rename = "DELETE")]
    Delete,
}

impl Event {
    /// The record is gone.
    pub(super) fn is_deletion(&self) -> bool {
        self.kind == EventKind::Delete
    }
}

#[derive(Debug, Deserialize)]
struct Txn {
    #[serde(default)]
    header: Option<Header>,
    /// The gateway leaves `false` out.
    #[serde(default)]
    succeeded: bool,
}

#[derive(Debug, Deserialize)]
struct Watched {
    result: Option<WatchResult>,
}

#[derive(Debug, Deserialize)]
struct WatchResult {
    #[serde(default)]
    canceled: bool,
    #[serde(default)]
    events: Vec<Event>,
}

/// A stream of changes.
#[derive(Debug)]
pub(super) struct Watch {
    response: reqwest::Response,
    line: BytesMut,
    /// So many bytes of it were looked through for its end.
    scanned: usize,
}

/// Text as the gateway writes it.
pub(super) fn coded(text: impl AsRef<[u8]>) -> String {
    STANDARD.encode(text)
}

impl Gateway {
    /// `url` without a path.
    pub(super) fn new(url: &str) -> Self {
        let builder = reqwest::Client::builder().tcp_keepalive(KEEPALIVE).tcp_keepalive_interval(KEEPALIVE);
        let client = builder.tcp_keepalive_retries(KEEPALIVES).build().expect("nothing that can be refused");
        Self { client, url: url.trim_end_matches('/').to_owned() }
    }

    /// One record.
    pub(super) async fn read(&self, key: &str) -> Result<Option<KeyValue>, EtcdError> {
        let range: Range = self.post("kv/range", &json!({"key": coded(key)})).await?;
        Ok(range.kvs.into_iter().next())
    }

    /// Every record below a prefix.
    pub(super) async fn list(&self, prefix: &str) -> Result<Range, EtcdError> {
        self.post("kv/range", &json!({"key": coded(prefix), "range_end": coded(end_of(prefix))})).await
    }

    /// What changes below a prefix from this revision on.
    pub(super) async fn watch(&self, prefix: &str, revision: i64) -> Result<Watch, EtcdError> {
        let (key, range_end) = (coded(prefix), coded(end_of(prefix)));
        let request = json!({"create_request": {"key": key, "range_end": range_end, "start_revision": revision}});
        let response = tokio::time::timeout(PATIENCE, self.send("watch", &request)).await;
        Ok(Watch { response: response.map_err(|_| EtcdError::Late)??, line: BytesMut::new(), scanned: 0 })
    }

    /// Does all of `changes` if all of `compares` hold; the revision by then if they did.
    pub(super) async fn change(&self, compares: &[Value], changes: &[Value]) -> Result<Option<i64>, EtcdError> {
        let Txn { header, succeeded } = self.post("kv/txn", &json!({"compare": compares, "success": changes})).await?;
        Ok(succeeded.then(|| header.map_or(0, |header| header.revision)))
    }

    async fn post<T: serde::de::DeserializeOwned>(&self, call: &str, body: &Value) -> Result<T, EtcdError> {
        let answer = async {
            let mut response = self.send(call, body).await?;
            let answer = beginning(&mut response, MAX_ANSWER).await?;
            if answer.len() == MAX_ANSWER {
                return Err(EtcdError::Answer(
                    "an answer above 32 MiB: there are too many records, or they are too large",
                ));
            }
            serde_json::from_slice(&answer).map_err(|_| EtcdError::Answer("an answer that is not etcd's"))
        };
        tokio::time::timeout(PATIENCE, answer).await.map_err(|_| EtcdError::Late)?
    }

    async fn send(&self, call: &str, body: &Value) -> Result<reqwest::Response, EtcdError> {
        let mut response = self.client.post(format!("{}/v3/{call}", self.url)).json(body).send().await?;
        let status = response.status();
        if !status.is_success() {
            let text = beginning(&mut response, MAX_ERROR).await?;
            return Err(EtcdError::Refused(status.as_u16(), String::from_utf8_lossy(&text).trim().to_owned()));
        }
        Ok(response)
    }
}

/// So many bytes of what is answered at the most.
async fn beginning(response: &mut reqwest::Response, most: usize) -> Result<BytesMut, EtcdError> {
    let mut read = BytesMut::new();
    while let Some(chunk) = response.chunk().await? {
        read.extend_from_slice(&chunk[..chunk.len().min(most - read.len())]);
        if read.len() == most {
            break;
        }
    }
    Ok(read)
}

impl Watch {
    /// Waits for the next changes. Dropped before, it loses none.
    ///
    /// # Errors
    /// The stream is over, or is none: what was missed has to be listed.
    pub(super) async fn next(&mut self) -> Result<Vec<Event>, EtcdError> {
        loop {
            if let Some(end) = self.line[self.scanned..].iter().position(|byte| *byte == b'\n') {
                let line = self.line.split_to(self.scanned + end + 1);
                self.scanned = 0;
                let events = changes(&line)?;
                if !events.is_empty() {
                    return Ok(events);
                }
                continue;
            }
            self.scanned = self.line.len();
            if self.line.len() > MAX_LINE {
                return Err(EtcdError::Answer("a change that is too long"));
            }
            match self.response.chunk().await? {
                Some(chunk) => self.line.extend_from_slice(&chunk),
                None => return Err(EtcdError::Answer("the watch has ended")),
            }
        }
    }
}

/// One line of a watch.
fn changes(line: &[u8]) -> Result<Vec<Event>, EtcdError> {
    let watched = serde_json::from_slice(line).map_err(|_| EtcdError::Answer("a watch that is no JSON"))?;
    match watched {
        Watched { result: Some(WatchResult { canceled: false, events }) } => Ok(events),
        // Compaction has overtaken us.
        Watched { .. } => Err(EtcdError::Answer("the watch is cancelled")),
    }
}

/// The first key that does not begin with `prefix`, which ends with a slash.
fn end_of(prefix: &str) -> String {
    let before = prefix.strip_suffix('/').expect("prefixes end with a slash");
    // In ASCII, '0' comes after '/'.
    format!("{before}0")
}

fn text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    let text = String::deserialize(deserializer)?;
    STANDARD.decode(text).map_err(serde::de::Error::custom)
}

fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<i64, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    /// What answers each connection with this, and goes on to hold it.
    async fn answering(answer: &'static str) -> Gateway {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let gateway = Gateway::new(&format!("http://{}", listener.local_addr().unwrap()));
        tokio::spawn(async move {
            let mut held = Vec::new();
            while let Ok((mut connection, _)) = listener.accept().await {
                let _ = connection.read(&mut [0; 4096]).await;
                connection.write_all(answer.as_bytes()).await.unwrap();
                held.push(connection);
            }
        });
        gateway
    }

    #[tokio::test(start_paused = true)]
    async fn an_etcd_that_is_silent_is_not_waited_for() {
        let gateway = answering("").await;
        assert!(matches!(gateway.read("v1/").await, Err(EtcdError::Late)));
        assert!(matches!(gateway.watch("v1/", 1).await, Err(EtcdError::Late)));
    }

    #[tokio::test]
    async fn an_errors_text_is_cut_off() {
        let text: &'static str = format!("HTTP/1.1 503 No\r\ncontent-length: 9999\r\n\r\n{:9999}", "busy").leak();
        let Err(EtcdError::Refused(503, said)) = answering(text).await.read("v1/").await else { panic!("refused") };
        assert_eq!(said, "busy");
    }

    #[tokio::test]
    async fn a_watch_is_read_line_by_line_however_it_is_cut() {
        let line = "{\"result\":{\"events\":[{\"kv\":{\"key\":\"djEv\"}}]}}\n";
        let both = format!("{{\"result\":{{}}}}\n{line}{line}");
        let chunks: String = both
            .as_bytes()
            .chunks(7)
            .map(|part| format!("{:x}\r\n{}\r\n", part.len(), std::str::from_utf8(part).unwrap()))
            .collect();
        let answer = format!("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{chunks}0\r\n\r\n").leak();
        let mut watch = answering(answer).await.watch("v1/", 1).await.unwrap();
        for _ in 0..2 {
            assert_eq!(watch.next().await.unwrap()[0].kv.key, b"v1/");
        }
        assert!(matches!(watch.next().await, Err(EtcdError::Answer("the watch has ended"))));
    }

    #[test]
    fn what_the_gateway_leaves_out_is_zero() {
        let deleted: Event =
            serde_json::from_str(r#"{"type":"DELETE","kv":{"key":"djEv","mod_revision":"7"}}"#).unwrap();
        assert!(deleted.is_deletion());
        assert_eq!((deleted.kv.key.as_slice(), deleted.kv.mod_revision, deleted.kv.lease), (&b"v1/"[..], 7, 0));
        let put = r#"{"kv":{"key":"djEv","create_revision":"7","mod_revision":"7","version":"1","value":"e30=","lease":"5"}}"#;
        let put: Event = serde_json::from_str(put).unwrap();
        assert_eq!((put.is_deletion(), put.kv.value.as_slice(), put.kv.lease), (false, &b"{}"[..], 5));
        assert!(!serde_json::from_str::<Txn>("{}").unwrap().succeeded);
        let done: Txn = serde_json::from_str(r#"{"header":{"revision":"8"},"succeeded":true}"#).unwrap();
        assert_eq!((done.header.unwrap().revision, done.succeeded), (8, true));
    }

    #[test]
    fn a_damaged_line_of_a_watch_is_an_error_or_a_change() {
        let seeds = [
            r#"{"result":{"header":{"revision":"7"},"created":true}}"#,
            r#"{"result":{"events":[{"kv":{"key":"YQ==","value":"Yg==","mod_revision":"8","lease":"9"}}]}}"#,
            r#"{"result":{"events":[{"type":"DELETE","kv":{"key":"YQ==","mod_revision":"9"}}]}}"#,
            r#"{"result":{"canceled":true,"compact_revision":"5"}}"#,
        ];
        let seeds = seeds.map(|seed| seed.as_bytes().to_vec());
        let words = ["\"events\":[", "{\"kv\":{", "\"type\":\"DELETE\",", "\"lease\":\"-1\"", "YQ==", "null", "]}}"];
        let corpus = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus");
        lastgasp_fuzz::run(&corpus, "etcd_watch", &seeds, &words, |input| match changes(input) {
            Ok(events) => {
                Ok(events.iter().map(|event| (event.is_deletion(), event.kv.lease.signum())).collect::<Vec<_>>())
            }
            Err(error) => Err(error.to_string()),
        });
    }

    #[test]
    fn a_prefix_ends_where_its_slash_does() {
        assert_eq!(end_of("v1/instances/"), "v1/instances0");
    }
}

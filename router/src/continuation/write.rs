//! Events that the router writes itself.

use serde_json::json;

/// Appends a `data` event with this JSON.
pub(crate) fn data(out: &mut Vec<u8>, json: &str) {
    data_by(out, |out| out.extend_from_slice(json.as_bytes()));
}

/// Appends a `data` event with the JSON that `write` appends, which has line ends only between tokens, where a
/// space does as well.
pub(crate) fn data_by(out: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>)) {
    out.extend_from_slice(b"data: ");
    let begin = out.len();
    write(out);
    let mut at = begin;
    while let Some(found) = memchr::memchr2(b'\n', b'\r', &out[at..]) {
        at += found;
        out[at] = b' ';
    }
    out.extend_from_slice(b"\n\n");
}

/// Appends `[DONE]`.
pub(crate) fn done(out: &mut Vec<u8>) {
    out.extend_from_slice(b"data: [DONE]\n\n");
}

/// The event that ends a stream visibly, in OpenAI's format. No `[DONE]` follows it.
#[must_use]
pub fn error_event(message: &str, code: &str) -> Vec<u8> {
    let error = json!({ "error": { "message": message, "type": "server_error", "param": null, "code": code } });
    let mut out = Vec::new();
    data(&mut out, &error.to_string());
    out
}

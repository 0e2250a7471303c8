//! Events that the router writes itself.

use serde_json::json;

/// Appends a `data` event. JSON has line ends only between tokens, where a space does as well.
pub(crate) fn data(out: &mut Vec<u8>, json: &str) {
    out.reserve(json.len() + 8);
    out.extend_from_slice(b"data: ");
    let begin = out.len();
    out.extend_from_slice(json.as_bytes());
    for byte in out[begin..].iter_mut().filter(|byte| matches!(byte, b'\n' | b'\r')) {
        *byte = b' ';
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

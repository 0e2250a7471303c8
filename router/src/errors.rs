//! Errors as OpenAI's API writes them.

use std::time::Duration;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;

/// An error before any byte of an answer was sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ApiError {
    /// HTTP status.
    pub status: StatusCode,
    /// `error.type`.
    pub kind: &'static str,
    /// `error.code`.
    pub code: &'static str,
    /// `error.param`.
    pub param: Option<&'static str>,
    /// For people.
    pub message: String,
}

impl ApiError {
    /// The request is at fault.
    #[must_use]
    pub(crate) fn invalid(param: Option<&'static str>, message: impl Into<String>) -> Self {
        Self {
            status: StatusCode::BAD_REQUEST,
            kind: "invalid_request_error",
            code: "invalid_request",
            param,
            message: message.into(),
        }
    }

    /// No worker has this model.
    #[must_use]
    pub(crate) fn unknown_model(model: &str) -> Self {
        Self {
            status: StatusCode::NOT_FOUND,
            kind: "invalid_request_error",
            code: "model_not_found",
            param: Some("model"),
            message: format!("No worker serves the model `{model}`. GET /v1/models lists those that are served."),
        }
    }

    /// Nothing is served there, whatever an engine would say.
    #[must_use]
    pub(crate) fn no_such_path(path: &str) -> Self {
        let message = format!(
            "This router does not serve `{path}` with this method. It serves a closed list of paths under /v1, and \
             /health, /metrics and /workers; write them without `%`, `..`, `//` and a slash at the end."
        );
        Self { status: StatusCode::NOT_FOUND, code: "not_found", ..Self::invalid(None, message) }
    }

    /// Nobody took the request.
    #[must_use]
    pub(crate) fn unavailable(code: &'static str, message: impl Into<String>) -> Self {
        Self {
            status: StatusCode::SERVICE_UNAVAILABLE,
            kind: "server_error",
            code,
            param: None,
            message: message.into(),
        }
    }

    /// The key is missing or wrong.
    #[must_use]
    pub(crate) fn unauthorized() -> Self {
        Self {
            status: StatusCode::UNAUTHORIZED,
            kind: "invalid_request_error",
            code: "invalid_api_key",
            param: None,
            message: "Send a key of this router as `Authorization: Bearer KEY`; one of --admin-key-file where an engine is changed.".into(),
        }
    }

    /// The body is larger than the router is set to accept.
    #[must_use]
    pub(crate) fn too_large(limit: usize) -> Self {
        Self {
            status: StatusCode::PAYLOAD_TOO_LARGE,
            kind: "invalid_request_error",
            code: "request_too_large",
            param: None,
            message: format!("The body has more than {limit} bytes, which is this router's --max-body."),
        }
    }
}

impl ApiError {
    /// As many requests are under way as may be.
    #[must_use]
    pub(crate) fn full(limit: usize) -> Self {
        let message = format!("This router has {limit} requests under way, which is its --max-requests.");
        Self::unavailable("too_many_requests", message)
    }

    /// As many bytes of bodies are held as may be.
    #[must_use]
    pub(crate) fn no_room(limit: usize) -> Self {
        let message = format!("This router has no room for one more body within {limit} bytes, its --max-bodies.");
        Self::unavailable("too_many_bodies", message)
    }

    /// The body took too long to come.
    #[must_use]
    pub(crate) fn too_slow(limit: Duration) -> Self {
        Self {
            status: StatusCode::REQUEST_TIMEOUT,
            kind: "invalid_request_error",
            code: "request_timeout",
            param: None,
            message: format!(
                "The body did not come within {} s, this router's --request-timeout.",
                limit.as_secs_f64()
            ),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let Self { status, kind, code, param, message } = self;
        let error = json!({ "error": { "message": message, "type": kind, "param": param, "code": code } });
        let mut response = (status, Json(error)).into_response();
        if status == StatusCode::SERVICE_UNAVAILABLE {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

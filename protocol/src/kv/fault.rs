//! What keeps NATS from being used, and what a person can do about it.

use crate::ClosedName as _;
use async_nats::jetstream::ErrorCode;
use async_nats::jetstream::context::{
    CreateStreamError, CreateStreamErrorKind, GetStreamError, GetStreamErrorKind, RequestError, RequestErrorKind,
};
use async_nats::jetstream::stream::{ConsumerError, ConsumerErrorKind, LastRawMessageError, LastRawMessageErrorKind};
use async_nats::{ClientError, ConnectErrorKind, Event, ServerError, jetstream};
use serde::Serialize;

/// The oldest server that has what the contract needs, message TTLs and their markers (NATS ADR-43).
pub const OLDEST_SERVER: (u8, u8) = (2, 11);

/// A kind of trouble with NATS.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    strum::IntoStaticStr,
    strum::VariantArray,
    strum::VariantNames,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Fault {
    /// No server can be connected to.
    Unreachable,
    /// The server does not let us in.
    LoginRefused,
    /// The server forbids a subject.
    NotPermitted,
    /// The server has no message TTLs.
    OldServer,
    /// JetStream is off, or off for this account.
    NoJetstream,
    /// A bucket has another shape than the contract says.
    Misshapen,
    /// A bucket has another number of replicas than was asked for, or there are not so many servers.
    Replicas,
    /// There is no room to write to.
    StoreFull,
    /// A bucket may have no more consumers: whoever comes now cannot follow it.
    ConsumerLimit,
    /// The server is there but does not answer in time, or a stream has no leader.
    NoAnswer,
    /// The server refused for another reason.
    Refused,
}

impl Fault {
    /// What a person can do about it.
    #[must_use]
    pub const fn fix(self) -> &'static str {
        match self {
            Self::Unreachable => "start nats-server, or correct its address",
            Self::LoginRefused => "correct the user, token, key or credentials file, or let this user in on the server",
            Self::NotPermitted => "let this user publish and subscribe to it on the server",
            Self::OldServer => "use nats-server 2.11 or later",
            Self::NoJetstream => "start nats-server with --jetstream, and enable it for this account",
            Self::Misshapen => {
                "delete the bucket with `nats kv del NAME`: lastgasp makes it again and lists every living worker"
            }
            Self::Replicas => {
                "`nats stream edit KV_NAME --replicas N`, or ask lastgasp for as many replicas as there are; N servers \
                 are needed"
            }
            Self::StoreFull => "give JetStream more room (max_file_store, or the account's limit), or delete streams",
            Self::ConsumerLimit => {
                "run `lastgasp create-buckets` as a user that may; or `nats stream edit KV_NAME --max-consumers N`, \
                 above the number of daemons and routers; or raise the account's max_consumers"
            }
            Self::NoAnswer => {
                "see whether nats-server is overloaded and every stream has a leader (`nats stream report`)"
            }
            Self::Refused => "see what the server says",
        }
    }

    /// What is wrong, by what async-nats says.
    #[must_use]
    pub fn of(error: &(dyn std::error::Error + 'static)) -> Self {
        if let Some(code) = server_code(error) {
            return Self::of_code(code);
        }
        let mut layers = layers(error);
        let request = layers.find_map(|error| error.downcast_ref::<RequestError>().map(RequestError::kind));
        match request {
            Some(RequestErrorKind::NoResponders) => Self::NoJetstream,
            _ => Self::NoAnswer,
        }
    }

    fn of_code(code: ErrorCode) -> Self {
        match code {
            ErrorCode::JETSTREAM_NOT_ENABLED | ErrorCode::JETSTREAM_NOT_ENABLED_FOR_ACCOUNT => Self::NoJetstream,
            ErrorCode::STREAM_REPLICAS_NOT_SUPPORTED | ErrorCode::CLUSTER_NO_PEERS => Self::Replicas,
            ErrorCode::STORAGE_RESOURCES_EXCEEDED
            | ErrorCode::INSUFFICIENT_RESOURCES
            | ErrorCode::ACCOUNT_RESOURCES_EXCEEDED
            | ErrorCode::MEMORY_RESOURCES_EXCEEDED
            | ErrorCode::STREAM_STORE_FAILED
            | ErrorCode::MAXIMUM_STREAMS_LIMIT
            | ErrorCode::STREAM_MAX_STREAM_BYTES_EXCEEDED => Self::StoreFull,
            ErrorCode::MAXIMUM_CONSUMERS_LIMIT => Self::ConsumerLimit,
            ErrorCode::CLUSTER_NOT_AVAILABLE
            | ErrorCode::STREAM_OFFLINE
            | ErrorCode::STREAM_NOT_FOUND
            | ErrorCode::CLUSTER_NOT_LEADER => Self::NoAnswer,
            ErrorCode::MESSAGE_TTL_DISABLED | ErrorCode::STREAM_NAME_EXIST => Self::Misshapen,
            _ => Self::Refused,
        }
    }

    /// What an event of the connection says is wrong, if it does.
    #[must_use]
    pub fn of_event(event: &Event) -> Option<Self> {
        match event {
            Event::ServerError(ServerError::AuthorizationViolation) => Some(Self::LoginRefused),
            Event::ServerError(ServerError::Other(text)) => {
                let text = text.to_ascii_lowercase();
                if text.contains("permissions violation") {
                    Some(Self::NotPermitted)
                } else if text.contains("authentication") {
                    // "User Authentication Expired", "… Revoked", "Account Authentication Expired".
                    Some(Self::LoginRefused)
                } else {
                    Some(Self::Refused)
                }
            }
            // All that async-nats 0.51 hands on of a failed attempt is the text of its kind.
            Event::ClientError(ClientError::Other(text)) => {
                let refused = [ConnectErrorKind::AuthorizationViolation, ConnectErrorKind::Authentication];
                let refused = refused.iter().any(|kind| *text == kind.to_string());
                Some(if refused { Self::LoginRefused } else { Self::Unreachable })
            }
            Event::ClientError(_) | Event::Disconnected | Event::Closed => Some(Self::Unreachable),
            _ => None,
        }
    }
}

fn layers<'a>(
    error: &'a (dyn std::error::Error + 'static),
) -> impl Iterator<Item = &'a (dyn std::error::Error + 'static)> {
    std::iter::successors(Some(error), |error| error.source())
}

/// The code that the server gave, wherever async-nats has put it.
pub(super) fn server_code(error: &(dyn std::error::Error + 'static)) -> Option<ErrorCode> {
    layers(error).find_map(|error| {
        let kind = if let Some(error) = error.downcast_ref::<jetstream::Error>() {
            return Some(error.error_code());
        } else if let Some(error) = error.downcast_ref::<GetStreamError>() {
            match error.kind() {
                GetStreamErrorKind::JetStream(error) => Some(error),
                _ => None,
            }
        } else if let Some(error) = error.downcast_ref::<CreateStreamError>() {
            match error.kind() {
                CreateStreamErrorKind::JetStream(error) => Some(error),
                _ => None,
            }
        } else if let Some(error) = error.downcast_ref::<ConsumerError>() {
            match error.kind() {
                ConsumerErrorKind::JetStream(error) => Some(error),
                _ => None,
            }
        } else if let Some(error) = error.downcast_ref::<LastRawMessageError>() {
            match error.kind() {
                LastRawMessageErrorKind::JetStream(error) => Some(error),
                _ => None,
            }
        } else {
            None
        };
        kind.map(|error| error.error_code())
    })
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_json() {
        for fault in <Fault as strum::VariantArray>::VARIANTS.iter().copied() {
            assert_eq!(serde_json::to_value(fault).unwrap(), fault.as_str());
            assert!(!fault.fix().is_empty());
        }
    }

    #[test]
    fn what_async_nats_says_is_found_under_its_layers() {
        let full: jetstream::Error =
            serde_json::from_str(r#"{"code":500,"err_code":10047,"description":"insufficient storage"}"#).unwrap();
        let wrapped = CreateStreamError::new(CreateStreamErrorKind::JetStream(full));
        let wrapped = jetstream::context::CreateKeyValueError::with_source(
            jetstream::context::CreateKeyValueErrorKind::BucketCreate,
            wrapped,
        );
        assert_eq!(Fault::of(&wrapped), Fault::StoreFull);
        let nobody =
            GetStreamError::with_source(GetStreamErrorKind::Request, RequestError::new(RequestErrorKind::NoResponders));
        assert_eq!(Fault::of(&nobody), Fault::NoJetstream);
        assert_eq!(Fault::of(&std::io::Error::other("?")), Fault::NoAnswer);
    }

    #[test]
    fn the_end_of_a_connection_says_why() {
        let refused = ClientError::Other("authorization violation".into());
        assert_eq!(Fault::of_event(&Event::ClientError(refused)), Some(Fault::LoginRefused));
        let away = ClientError::Other("IO error".into());
        assert_eq!(Fault::of_event(&Event::ClientError(away)), Some(Fault::Unreachable));
        let forbidden = ServerError::Other("Permissions Violation for Publish to \"x\"".into());
        assert_eq!(Fault::of_event(&Event::ServerError(forbidden)), Some(Fault::NotPermitted));
        let revoked = ServerError::Other("User Authentication Revoked".into());
        assert_eq!(Fault::of_event(&Event::ServerError(revoked)), Some(Fault::LoginRefused));
        assert_eq!(Fault::of_event(&Event::Connected), None);
    }
}

//! Bounds on what is accepted from the wire, and the error for what is not.

use serde::de::DeserializeOwned;

use crate::{NameError, SCHEMA};

/// Largest message that is parsed, in bytes. A signal that lists 512 workers has about 60 KiB.
pub const MAX_MESSAGE: usize = 256 * 1024;
/// Most workers in one signal.
pub const MAX_WORKERS: usize = 1024;
/// Most models in one record.
pub const MAX_MODELS: usize = 256;
/// Most labels in one record.
pub const MAX_LABELS: usize = 64;
/// Most processes in one record.
pub const MAX_PROCESSES: usize = 256;
/// Longest model name, endpoint, label key or label value, in bytes.
pub const MAX_TEXT: usize = 1024;

/// Why a message is not acted on. The variant's name is the metric label.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum ContractError {
    /// More than [`MAX_MESSAGE`] bytes.
    #[error("message of {0} bytes, at most {MAX_MESSAGE} are read")]
    Oversized(usize),
    /// Not JSON, not UTF-8, a required field missing, or a value of another type.
    #[error("not a message of this kind: {0}")]
    Malformed(String),
    /// A schema that this version does not know.
    #[error("schema {0}, this version reads {SCHEMA}")]
    UnknownSchema(u32),
    /// A name inside is not one.
    #[error("{field} {error}")]
    BadName {
        /// Which field.
        field: &'static str,
        /// What is wrong with it.
        error: NameError,
    },
    /// The key or subject says another node or worker than the body.
    #[error("{field} is {inside:?} inside and {outside:?} in the key or subject")]
    Misplaced {
        /// Which field.
        field: &'static str,
        /// What the body says.
        inside: String,
        /// What the key or subject says.
        outside: String,
    },
    /// A text has a control character, which would reach logs and terminals.
    #[error("{0} contains a control character")]
    #[strum(serialize = "control_character")]
    Control(&'static str),
    /// A list or text beyond its bound.
    #[error("{field} has {len} entries or bytes, at most {max} are read")]
    OutOfBounds {
        /// Which field.
        field: &'static str,
        /// Its size.
        len: usize,
        /// The bound.
        max: usize,
    },
}

/// Parses a message of schema 1; the schema is looked at before anything else, so that a
/// future message is refused for its schema and not for a field that has changed.
pub(crate) fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ContractError> {
    #[derive(serde::Deserialize)]
    struct Versioned {
        schema: u32,
    }
    if bytes.len() > MAX_MESSAGE {
        return Err(ContractError::Oversized(bytes.len()));
    }
    let malformed = |error: serde_json::Error| ContractError::Malformed(error.to_string());
    let Versioned { schema } = serde_json::from_slice(bytes).map_err(malformed)?;
    if schema != SCHEMA {
        return Err(ContractError::UnknownSchema(schema));
    }
    serde_json::from_slice(bytes).map_err(malformed)
}

pub(crate) const fn at_most(field: &'static str, len: usize, max: usize) -> Result<(), ContractError> {
    if len > max {
        return Err(ContractError::OutOfBounds { field, len, max });
    }
    Ok(())
}

/// A text of at most [`MAX_TEXT`] bytes that may be shown to people.
pub(crate) fn printable(field: &'static str, text: &str) -> Result<(), ContractError> {
    at_most(field, text.len(), MAX_TEXT)?;
    if text.chars().any(char::is_control) { Err(ContractError::Control(field)) } else { Ok(()) }
}

//! Kinds of values, and how one is read from TOML or from the text of an environment variable.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use axum::http::Uri;
use lastgasp_protocol::login;
use toml::de::DeValue;

use super::error::did_you_mean;
use crate::engines::{self, Pattern};

/// What a setting may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SettingKind {
    /// Any text that is not empty, or for a health service's name, any text.
    Text,
    /// A name in discovery.
    Name,
    /// The name of an engine profile.
    Engine,
    /// One of these words.
    OneOf(&'static [&'static str]),
    /// A whole number.
    Number {
        /// Least.
        min: u64,
        /// Most.
        max: u64,
        /// With a blank before it, for messages: ` ms`.
        unit: &'static str,
    },
    /// True or false.
    Flag,
    /// IP address and port.
    Address,
    /// `http://host:port`.
    BaseUrl,
    /// `http://host:port/path`.
    Url,
    /// `http://host/path` or `https://host/path`.
    WebUrl,
    /// NATS servers, separated by commas.
    NatsUrls,
    /// A file.
    Path,
    /// A list of whole numbers; in an environment variable, separated by commas.
    Numbers {
        /// Least.
        min: u64,
        /// Most.
        max: u64,
    },
    /// A list of texts; in an environment variable, separated by commas.
    Texts,
    /// A list of process titles; in an environment variable, separated by commas.
    Patterns,
    /// A table of texts; in an environment variable, `key=value` separated by commas.
    TextMap,
}

/// A value of one of these kinds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum SettingValue {
    Text(String),
    Number(u64),
    Flag(bool),
    Numbers(Vec<u64>),
    Texts(Vec<String>),
    TextMap(BTreeMap<String, String>),
}

impl SettingKind {
    /// What is allowed, for people.
    #[must_use]
    pub fn allowed(self) -> String {
        match self {
            Self::Text => "a text".to_owned(),
            Self::Name => "a name of at most 128 bytes".to_owned(),
            Self::Engine => engines::names().collect::<Vec<_>>().join(", "),
            Self::OneOf(words) => words.join(", "),
            Self::Number { min, max, unit } => format!("a whole number from {min} to {max}{unit}"),
            Self::Flag => "true, false".to_owned(),
            Self::Address => "an IP address and a port, as \"127.0.0.1:9464\"".to_owned(),
            Self::BaseUrl => "\"http://host:port\"".to_owned(),
            Self::Url => "\"http://host:port\", with a path where the server needs one".to_owned(),
            Self::WebUrl => "\"https://host/path\" or \"http://host/path\"".to_owned(),
            Self::NatsUrls => "\"nats://host:port\", also tls, ws or wss, several separated by commas".to_owned(),
            Self::Path => "a file name".to_owned(),
            Self::Numbers { min, max } => format!("a list of whole numbers from {min} to {max}"),
            Self::Texts => "a list of texts".to_owned(),
            Self::Patterns => "a list of titles, as \"*::EngineCore*\"".to_owned(),
            Self::TextMap => "a table of texts, as { zone = \"a\" }".to_owned(),
        }
    }

    /// Reads the text of an environment variable, a flag or a default.
    pub(super) fn read_text(self, text: &str) -> Result<SettingValue, String> {
        let list = || text.split(',').map(str::trim).filter(|part| !part.is_empty());
        match self {
            Self::Number { .. } => {
                let number =
                    text.trim().parse().map_err(|_| self.refuse(&format!("{text:?} is not a whole number")))?;
                self.in_range(number)
            }
            Self::Flag => match text.trim() {
                "true" | "1" => Ok(SettingValue::Flag(true)),
                "false" | "0" => Ok(SettingValue::Flag(false)),
                _ => Err(self.refuse(&format!("{text:?} is neither true nor false"))),
            },
            Self::Numbers { .. } => {
                let numbers = list().map(|part| {
                    let number = part.parse().map_err(|_| self.refuse(&format!("{part:?} is not a whole number")))?;
                    self.bounded(number)
                });
                numbers.collect::<Result<_, _>>().map(SettingValue::Numbers)
            }
            Self::Texts | Self::Patterns => self.checked_list(list().map(str::to_owned).collect()),
            Self::TextMap => list()
                .map(|part| {
                    let (key, value) = part.split_once('=').ok_or_else(|| format!("{part:?} is not key=value"))?;
                    Ok((key.trim().to_owned(), value.trim().to_owned()))
                })
                .collect::<Result<_, String>>()
                .map(SettingValue::TextMap),
            _ => self.checked_text(text),
        }
    }

    /// Reads a TOML value.
    pub(super) fn read_toml(self, value: &DeValue<'_>) -> Result<SettingValue, String> {
        match (self, value) {
            (Self::Number { .. }, DeValue::Integer(number)) => {
                let read = i128::from_str_radix(number.as_str(), number.radix());
                self.in_range(read.map_err(|_| self.refuse(&format!("{number} is out of range")))?)
            }
            (Self::Numbers { .. }, DeValue::Array(array)) => {
                let numbers = array.iter().map(|entry| match entry.get_ref() {
                    DeValue::Integer(number) => {
                        let read = i128::from_str_radix(number.as_str(), number.radix());
                        self.bounded(read.map_err(|_| self.refuse(&format!("{number} is out of range")))?)
                    }
                    other => Err(self.refuse(&format!("holds {}", shown(other)))),
                });
                numbers.collect::<Result<_, _>>().map(SettingValue::Numbers)
            }
            (Self::Flag, DeValue::Boolean(flag)) => Ok(SettingValue::Flag(*flag)),
            (Self::Texts | Self::Patterns, DeValue::Array(array)) => {
                let texts = array.iter().map(|entry| match entry.get_ref() {
                    DeValue::String(text) => Ok(text.to_string()),
                    other => Err(self.refuse(&format!("holds {}", shown(other)))),
                });
                self.checked_list(texts.collect::<Result<_, _>>()?)
            }
            (Self::TextMap, DeValue::Table(table)) => table
                .iter()
                .map(|(key, value)| match value.get_ref() {
                    DeValue::String(text) => Ok((key.get_ref().to_string(), text.to_string())),
                    other => Err(self.refuse(&format!("holds {}", shown(other)))),
                })
                .collect::<Result<_, String>>()
                .map(SettingValue::TextMap),
            (
                Self::Number { .. } | Self::Numbers { .. } | Self::Flag | Self::Texts | Self::Patterns | Self::TextMap,
                other,
            ) => Err(self.refuse(&format!("{} does not fit", shown(other)))),
            (_, DeValue::String(text)) => self.checked_text(text),
            (_, other) => Err(self.refuse(&format!("{} does not fit", shown(other)))),
        }
    }

    fn refuse(self, wrong: &str) -> String {
        format!("{wrong}; allowed: {}", self.allowed())
    }

    fn in_range(self, number: i128) -> Result<SettingValue, String> {
        self.bounded(number).map(SettingValue::Number)
    }

    fn bounded(self, number: i128) -> Result<u64, String> {
        let (Self::Number { min, max, .. } | Self::Numbers { min, max }) = self else {
            return Err(self.refuse("a number does not fit"));
        };
        match u64::try_from(number) {
            Ok(number) if (min..=max).contains(&number) => Ok(number),
            _ => Err(self.refuse(&format!("{number} is out of range"))),
        }
    }

    fn checked_list(self, texts: Vec<String>) -> Result<SettingValue, String> {
        for text in &texts {
            if self == Self::Patterns
                && let Err(error) = text.parse::<Pattern>()
            {
                return Err(self.refuse(&format!("{text:?} {error}")));
            }
            if text.is_empty() {
                return Err(self.refuse("holds an empty text"));
            }
        }
        Ok(SettingValue::Texts(texts))
    }

    fn checked_text(self, text: &str) -> Result<SettingValue, String> {
        match self {
            Self::Name => {
                lastgasp_protocol::Name::new(text).map_err(|error| self.refuse(&format!("{text:?} {error}")))?;
            }
            Self::Engine if !engines::names().any(|name| name == text) => {
                let near = did_you_mean(text, engines::names());
                return Err(format!("{}{near}", self.refuse(&format!("{text:?} is not an engine profile"))));
            }
            Self::OneOf(words) if !words.contains(&text) => {
                let near = did_you_mean(text, words.iter().copied());
                return Err(format!("{}{near}", self.refuse(&format!("{text:?} is unknown"))));
            }
            Self::Address => {
                text.parse::<SocketAddr>().map_err(|_| self.refuse(&format!("{text:?} is not an address")))?;
            }
            Self::BaseUrl | Self::Url if text.contains('@') => {
                return Err(self.refuse("holds credentials, which would be published"));
            }
            Self::BaseUrl | Self::Url => {
                http_url(text, self == Self::Url).map_err(|wrong| self.refuse(&format!("{text:?} {wrong}")))?;
            }
            Self::WebUrl => {
                web_url(text).map_err(|wrong| self.refuse(wrong))?;
            }
            Self::NatsUrls => {
                login::servers(text).map_err(|error| error.to_string())?;
            }
            Self::Path if text.is_empty() => return Err(self.refuse("is empty")),
            _ => {}
        }
        Ok(SettingValue::Text(text.to_owned()))
    }
}

/// What a TOML value is, as a person would say.
fn shown(value: &DeValue<'_>) -> String {
    match value {
        DeValue::String(text) => format!("the text {text:?}"),
        DeValue::Integer(number) => format!("the number {number}"),
        DeValue::Float(number) => format!("the fraction {number}"),
        DeValue::Boolean(flag) => flag.to_string(),
        DeValue::Datetime(_) => "a date".to_owned(),
        DeValue::Array(_) => "a list".to_owned(),
        DeValue::Table(_) => "a table".to_owned(),
    }
}

/// Only what both ends of the daemon speak: plain HTTP to an explicit port.
fn http_url(text: &str, with_path: bool) -> Result<(), &'static str> {
    let uri: Uri = text.parse().map_err(|_| "is not a URL")?;
    match uri.scheme_str() {
        Some("http") => {}
        Some("https") => return Err("asks for TLS, which workers on this node are not asked for"),
        _ => return Err("does not begin with http://"),
    }
    uri.authority().ok_or("has no host")?;
    match uri.port_u16() {
        None => return Err("has no port"),
        Some(0) => return Err("has port 0"),
        Some(_) => {}
    }
    if !with_path && uri.path_and_query().is_some_and(|path| path != "/") {
        return Err("has a path");
    }
    Ok(())
}

/// Its text is not repeated in errors: what stands in a path may be a secret.
fn web_url(text: &str) -> Result<(), &'static str> {
    let uri: Uri = text.parse().map_err(|_| "is not a URL")?;
    if !matches!(uri.scheme_str(), Some("http" | "https")) {
        return Err("does not begin with http:// or https://");
    }
    match uri.authority() {
        Some(authority) if authority.as_str().contains('@') => Err("holds credentials; use token_file or headers"),
        Some(_) => Ok(()),
        None => Err("has no host"),
    }
}

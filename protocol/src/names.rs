//! Names of nodes, workers and routers, and how they become NATS tokens.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Longest name, in bytes. A name of only escaped bytes makes a token three times as long.
pub const MAX_NAME: usize = 128;
/// Longest incarnation, in bytes.
pub const MAX_INCARNATION: usize = 64;

/// Why a string is not a name or an incarnation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// Names have at least one byte.
    #[error("is empty")]
    Empty,
    /// Longer than [`MAX_NAME`] or [`MAX_INCARNATION`] bytes.
    #[error("has {len} bytes, at most {max} are allowed")]
    TooLong {
        /// Bytes given.
        len: usize,
        /// Bytes allowed.
        max: usize,
    },
    /// Control characters would reach logs and terminals.
    #[error("contains a control character")]
    Control,
    /// The token does not decode: a lone `=`, lower-case hex, an escaped byte that needs no escape.
    #[error("is not an encoded name")]
    BadToken,
}

/// The name of a node, a worker or a router. A sidecar's node is `<node>/<pod>`.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Name(Box<str>);

impl Name {
    /// Checks and wraps a name.
    ///
    /// # Errors
    /// Empty, longer than [`MAX_NAME`], or with a control character.
    pub fn new(name: impl Into<String>) -> Result<Self, NameError> {
        let name = name.into();
        check(&name, MAX_NAME)?;
        Ok(Self(name.into_boxed_str()))
    }

    /// The name itself.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The name as one token of a NATS subject or KV key: `[A-Za-z0-9_-]` stand as they
    /// are, every other byte becomes `=HH` in upper-case hex. One to one, see [`Name::from_token`].
    #[must_use]
    pub fn token(&self) -> String {
        const HEX: &[u8; 16] = b"0123456789ABCDEF";
        let mut token = String::with_capacity(self.0.len());
        for byte in self.0.bytes() {
            if is_plain(byte) {
                token.push(char::from(byte));
            } else {
                token.push('=');
                token.push(char::from(HEX[usize::from(byte >> 4)]));
                token.push(char::from(HEX[usize::from(byte & 15)]));
            }
        }
        token
    }

    /// The inverse of [`Name::token`].
    ///
    /// # Errors
    /// [`NameError::BadToken`] for anything that [`Name::token`] does not produce.
    pub fn from_token(token: &str) -> Result<Self, NameError> {
        let hex = |byte: u8| match byte {
            b'0'..=b'9' => Some(byte - b'0'),
            b'A'..=b'F' => Some(byte - b'A' + 10),
            _ => None,
        };
        let mut name = Vec::with_capacity(token.len());
        let mut bytes = token.bytes();
        while let Some(byte) = bytes.next() {
            if byte == b'=' {
                let high = bytes.next().and_then(hex).ok_or(NameError::BadToken)?;
                let low = bytes.next().and_then(hex).ok_or(NameError::BadToken)?;
                let byte = high << 4 | low;
                if is_plain(byte) {
                    return Err(NameError::BadToken);
                }
                name.push(byte);
            } else if is_plain(byte) {
                name.push(byte);
            } else {
                return Err(NameError::BadToken);
            }
        }
        Self::new(String::from_utf8(name).map_err(|_| NameError::BadToken)?)
    }
}

const fn is_plain(byte: u8) -> bool {
    matches!(byte, b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-')
}

fn check(text: &str, max: usize) -> Result<(), NameError> {
    if text.is_empty() {
        Err(NameError::Empty)
    } else if text.len() > max {
        Err(NameError::TooLong { len: text.len(), max })
    } else if text.chars().any(char::is_control) {
        Err(NameError::Control)
    } else {
        Ok(())
    }
}

/// One life of a worker: opaque, at most 64 bytes, compared byte for byte.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Incarnation(Box<str>);

impl Incarnation {
    /// Checks and wraps what a writer chose.
    ///
    /// # Errors
    /// Empty, longer than [`MAX_INCARNATION`], or with a control character.
    pub fn new(incarnation: impl Into<String>) -> Result<Self, NameError> {
        let incarnation = incarnation.into();
        check(&incarnation, MAX_INCARNATION)?;
        Ok(Self(incarnation.into_boxed_str()))
    }

    /// What the daemon calls a process: the first eight digits of the boot id, the tgid, and
    /// the start time in clock ticks since boot (field 22 of `/proc/PID/stat`, proc(5)).
    #[must_use]
    pub fn of_process(boot_id: &str, tgid: u32, start_ticks: u64) -> Self {
        let boot: String = boot_id.chars().filter(char::is_ascii_hexdigit).take(8).collect();
        Self(format!("{boot}-{tgid}-{start_ticks}").into_boxed_str())
    }

    /// The tgid and start time of the process that [`Self::of_process`] made this of, if that was in
    /// this boot.
    #[must_use]
    pub fn process(&self, boot_id: &str) -> Option<(u32, u64)> {
        let mut parts = self.0.split('-').skip(1);
        let process = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        // Its exact form: another's incarnation may happen to look like it.
        (*self == Self::of_process(boot_id, process.0, process.1)).then_some(process)
    }

    /// The incarnation as written.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

macro_rules! text_type {
    ($type:ident) => {
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.0, f)
            }
        }
        impl TryFrom<String> for $type {
            type Error = NameError;
            fn try_from(text: String) -> Result<Self, NameError> {
                Self::new(text)
            }
        }
        impl std::str::FromStr for $type {
            type Err = NameError;
            fn from_str(text: &str) -> Result<Self, NameError> {
                Self::new(text)
            }
        }
        impl From<$type> for String {
            fn from(name: $type) -> String {
                name.0.into()
            }
        }
    };
}
text_type!(Name);
text_type!(Incarnation);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_plain_name_is_its_own_token() {
        assert_eq!(Name::new("gpu-a_7").unwrap().token(), "gpu-a_7");
    }

    #[test]
    fn a_sidecar_or_dotted_name_stays_one_token() {
        assert_eq!(Name::new("gpu-a/pod.1").unwrap().token(), "gpu-a=2Fpod=2E1");
        assert_eq!(Name::new("é").unwrap().token(), "=C3=A9");
    }

    #[test]
    fn names_that_would_reach_a_terminal_as_escapes_are_refused() {
        assert_eq!(Name::new("a\u{1b}[2J"), Err(NameError::Control));
        assert_eq!(Name::new(""), Err(NameError::Empty));
        assert_eq!(Name::new("x".repeat(129)), Err(NameError::TooLong { len: 129, max: 128 }));
    }

    #[test]
    fn a_token_has_one_spelling() {
        for bad in ["=", "=2", "=2f", "=41", "a.b", "a b", "=FF"] {
            assert_eq!(Name::from_token(bad), Err(NameError::BadToken), "{bad}");
        }
    }

    #[test]
    fn an_incarnation_names_its_process_in_its_own_boot() {
        let boot = "5f0c1d2e-0000-4000-8000-000000000000";
        let incarnation = Incarnation::of_process(boot, 4711, 99_887_766);
        assert_eq!(incarnation.process(boot), Some((4711, 99_887_766)));
        assert_eq!(incarnation.process("6f0c1d2e-0000"), None);
        for other in ["5f0c1d2e-04711-7", "5f0c1d2e-4711-7-8", "5f0c1d2e-4711", "instance-1-2", "x"] {
            assert_eq!(Incarnation::new(other).unwrap().process(boot), None, "{other}");
        }
    }

    proptest! {
        #[test]
        fn the_mapping_is_one_to_one(name in "[^\\p{Cc}]{1,40}") {
            let Ok(name) = Name::new(name) else { return Ok(()) };
            let token = name.token();
            prop_assert!(token.bytes().all(|b| is_plain(b) || b == b'='));
            prop_assert_eq!(Name::from_token(&token), Ok(name));
        }
    }
}

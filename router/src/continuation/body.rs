//! A request's body, read without making a value of each of its parts: a number of two bytes becomes a value of
//! 32, and there may be millions of them.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use bytes::Bytes;
use serde::Deserializer as _;
use serde::de::{DeserializeOwned, Error as _, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::json::{Key, Object};

/// Most members of a body, those of a repeated name counted each time. The engines together know some 150.
const MEMBERS: usize = 1024;
/// Longest name of a member, in bytes.
const NAME: usize = 256;

/// Why a text is no body.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Unreadable {
    /// It is something else, or no JSON at all.
    #[error("The body is not a JSON object.")]
    NotAnObject,
    /// It would cost more to hold than it has bytes.
    #[error("The body has more than {MEMBERS} members, or a member whose name has more than {NAME} bytes.")]
    TooManyMembers,
}

/// A JSON object as it came, and where its members stand. Clones share the text.
#[derive(Debug, Clone)]
pub struct Body {
    text: Bytes,
    members: Vec<(String, Range<usize>)>,
}

impl Body {
    /// Reads an object. Of several members of one name the last counts, as for the engines.
    ///
    /// # Errors
    /// Why it is none.
    pub fn read(text: Bytes) -> Result<Self, Unreadable> {
        let whole = std::str::from_utf8(&text).map_err(|_| Unreadable::NotAnObject)?;
        let mut deserializer = serde_json::Deserializer::from_str(whole);
        let mut found = Members { whole, members: Vec::with_capacity(16), read: 0, too_many: false };
        let read = deserializer.deserialize_map(&mut found).and_then(|()| deserializer.end());
        let Members { members, too_many, .. } = found;
        match read {
            Ok(()) => Ok(Self { members, text }),
            Err(_) if too_many => Err(Unreadable::TooManyMembers),
            Err(_) => Err(Unreadable::NotAnObject),
        }
    }

    /// The whole text.
    #[must_use]
    pub const fn bytes(&self) -> &Bytes {
        &self.text
    }

    /// The text of a member, as it came.
    #[must_use]
    pub fn raw(&self, key: &str) -> Option<&str> {
        let (_, at) = self.members.iter().find(|(name, _)| name == key)?;
        Some(self.at(at))
    }

    /// Whether a member is `true`, the word.
    #[must_use]
    pub fn flag(&self, key: &str) -> bool {
        self.raw(key) == Some("true")
    }

    /// The text of a member that is there and not null.
    pub(crate) fn present(&self, key: &str) -> Option<&str> {
        self.raw(key).filter(|value| *value != "null")
    }

    /// A member as a type; `None` if it is absent, null or another type.
    pub(crate) fn get<T: DeserializeOwned>(&self, key: &str) -> Option<T> {
        self.present(key).and_then(|text| serde_json::from_str(text).ok())
    }

    /// The names of its members.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &str> {
        self.members.iter().map(|(name, _)| name.as_str())
    }

    /// The object, to be changed.
    pub(crate) fn object(&self) -> Object<'_> {
        let escaped = |byte: u8| byte < b' ' || byte == b'"' || byte == b'\\';
        Object::of(self.members.iter().map(|(name, at)| {
            let key = if name.bytes().any(escaped) { Cow::Owned(name.clone()) } else { Cow::Borrowed(name.as_str()) };
            (key, Cow::Borrowed(self.at(at)))
        }))
    }

    fn at(&self, at: &Range<usize>) -> &str {
        std::str::from_utf8(&self.text[at.clone()]).expect("the whole was read as a string")
    }
}

struct Members<'a> {
    whole: &'a str,
    members: Vec<(String, Range<usize>)>,
    read: usize,
    too_many: bool,
}

impl<'de> Visitor<'de> for &mut Members<'de> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(Key(key)) = map.next_key::<Key<'de>>()? {
            let value = map.next_value::<&'de RawValue>()?.get();
            let begin = value.as_ptr().addr() - self.whole.as_ptr().addr();
            let at = begin..begin + value.len();
            self.read += 1;
            // Each is compared with all: a body of one name repeated a million times would take seconds.
            if self.read > MEMBERS || key.len() > NAME {
                self.too_many = true;
                return Err(A::Error::custom("too many members"));
            }
            match self.members.iter_mut().find(|(name, _)| *name == key) {
                Some((_, old)) => *old = at,
                None => self.members.push((key.into_owned(), at)),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(text: &str) -> Result<Body, Unreadable> {
        Body::read(Bytes::copy_from_slice(text.as_bytes()))
    }

    #[test]
    fn of_members_of_one_name_the_last_counts_and_the_text_stays() {
        let text = "{ \"a\" : 1, \"b\\n\":[ 1,2 ], \"\\u0061\":1e400 }";
        let body = body(text).unwrap();
        assert_eq!((body.raw("a"), body.raw("b\n"), body.raw("c")), (Some("1e400"), Some("[ 1,2 ]"), None));
        assert_eq!(body.bytes(), text);
        assert_eq!(body.object().to_text(), "{\"a\":1e400,\"b\\n\":[ 1,2 ]}");
    }

    #[test]
    fn what_is_not_an_object_or_costs_more_than_its_bytes_is_refused() {
        for bad in ["[]", "{", "{\"a\":1}x", "{\"a\":[1,]}", "\"a\"", "", "{\"a\":NaN}"] {
            assert_eq!(body(bad).unwrap_err(), Unreadable::NotAnObject, "{bad}");
        }
        let many: Vec<String> = (0..=MEMBERS).map(|n| format!("\"{n}\":0")).collect();
        let long = format!("{{\"{}\":0}}", "x".repeat(NAME + 1));
        let repeated = |times| format!("{{{}}}", vec!["\"a\":0"; times].join(","));
        for bad in [format!("{{{}}}", many.join(",")), long, repeated(MEMBERS + 1)] {
            assert_eq!(body(&bad).unwrap_err(), Unreadable::TooManyMembers);
        }
        assert!(body(&repeated(MEMBERS)).is_ok());
    }
}

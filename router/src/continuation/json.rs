//! A JSON object whose values stay the text they came as, so that changing one member
//! neither parses nor reformats the others.

use std::borrow::Cow;
use std::fmt;

use serde::de::{DeserializeOwned, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;

/// Members in their order; values are JSON text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Object<'a> {
    members: Vec<(Cow<'a, str>, Cow<'a, str>)>,
}

impl<'a> Object<'a> {
    /// Reads an object; `None` for any other text.
    pub(crate) fn parse(text: &'a str) -> Option<Self> {
        serde_json::from_str(text).ok()
    }

    /// The text of a member.
    pub(crate) fn raw(&self, key: &str) -> Option<&str> {
        self.members.iter().find(|(name, _)| name == key).map(|(_, value)| value.as_ref())
    }

    /// The text of a member that is as it was parsed, for as long as the input lives; not null.
    pub(crate) fn parsed(&self, key: &str) -> Option<&'a str> {
        match self.members.iter().find(|(name, _)| name == key)? {
            (_, Cow::Borrowed(text)) => Some(text).copied().filter(|text| *text != "null"),
            (_, Cow::Owned(_)) => None,
        }
    }

    /// The text of a member that is there and not null.
    pub(crate) fn present(&self, key: &str) -> Option<&str> {
        self.raw(key).filter(|value| *value != "null")
    }

    /// A member as a type; `None` if it is absent, null or another type.
    pub(crate) fn get<T: DeserializeOwned>(&self, key: &str) -> Option<T> {
        self.present(key).and_then(|text| serde_json::from_str(text).ok())
    }

    /// Replaces a member in its place, or appends it.
    pub(crate) fn set(&mut self, key: &'static str, value: impl Into<Cow<'a, str>>) {
        let value = value.into();
        match self.members.iter_mut().find(|(name, _)| name == key) {
            Some((_, old)) => *old = value,
            None => self.members.push((Cow::Borrowed(key), value)),
        }
    }

    /// Takes a member out; says whether it was there.
    pub(crate) fn remove(&mut self, key: &str) -> bool {
        let before = self.members.len();
        self.members.retain(|(name, _)| name != key);
        self.members.len() != before
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// The object as JSON, without spaces between members.
    pub(crate) fn write(&self, out: &mut String) {
        out.push('{');
        for (at, (key, value)) in self.members.iter().enumerate() {
            if at > 0 {
                out.push(',');
            }
            write_key(key, out);
            out.push(':');
            out.push_str(value);
        }
        out.push('}');
    }

    pub(crate) fn to_text(&self) -> String {
        let length: usize = self.members.iter().map(|(key, value)| key.len() + value.len() + 4).sum();
        let mut out = String::with_capacity(length + 2);
        self.write(&mut out);
        out
    }
}

/// Every chunk has a dozen keys, and none of them has anything to be escaped.
fn write_key(key: &str, out: &mut String) {
    if key.bytes().all(|byte| byte >= b' ' && byte != b'"' && byte != b'\\') {
        out.push('"');
        out.push_str(key);
        out.push('"');
    } else {
        out.push_str(&text(key));
    }
}

/// A list of JSON texts, borrowed from the input.
pub(crate) fn elements(text: &str) -> Option<Vec<&str>> {
    let elements: Vec<&RawValue> = serde_json::from_str(text).ok()?;
    Some(elements.into_iter().map(RawValue::get).collect())
}

/// A value as JSON text.
pub(crate) fn text<T: Serialize + ?Sized>(value: &T) -> String {
    serde_json::to_string(value).expect("strings, numbers and lists of them are always JSON")
}

impl<'de: 'a, 'a> Deserialize<'de> for Object<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Members;
        impl<'de> Visitor<'de> for Members {
            type Value = Object<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Object<'de>, A::Error> {
                let mut members = Vec::with_capacity(8);
                while let Some(Key(key)) = map.next_key::<Key<'de>>()? {
                    let value: &'de RawValue = map.next_value()?;
                    members.push((key, Cow::Borrowed(value.get())));
                }
                Ok(Object { members })
            }
        }
        deserializer.deserialize_map(Members)
    }
}

/// A key, borrowed where it has no escapes (serde's own `Cow` always copies).
struct Key<'a>(Cow<'a, str>);

impl<'de> Deserialize<'de> for Key<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl<'de> Visitor<'de> for Text {
            type Value = Key<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }
            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Key<'de>, E> {
                Ok(Key(Cow::Borrowed(text)))
            }
            fn visit_str<E>(self, text: &str) -> Result<Key<'de>, E> {
                Ok(Key(Cow::Owned(text.to_owned())))
            }
        }
        deserializer.deserialize_str(Text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_changed_stays_as_it_was_written() {
        let mut object = Object::parse(r#"{ "a" : 1.50, "b\n":[ 1,2 ], "é\"\\":0, "c":{"d":"\u00e9"} }"#).unwrap();
        object.remove("a");
        object.set("e", "7");
        assert_eq!(object.to_text(), r#"{"b\n":[ 1,2 ],"é\"\\":0,"c":{"d":"\u00e9"},"e":7}"#);
    }

    #[test]
    fn null_is_the_same_as_absent() {
        let object = Object::parse(r#"{"a":null,"b":3}"#).unwrap();
        assert_eq!((object.present("a"), object.get::<u64>("b"), object.get::<String>("b")), (None, Some(3), None));
    }

    #[test]
    fn what_is_not_an_object_is_refused() {
        for bad in ["[]", "{", "{\"a\":1}x", "\"a\"", ""] {
            assert_eq!(Object::parse(bad), None, "{bad}");
        }
    }
}

//! A JSON object whose values stay the text they came as, so that changing one member
//! neither parses nor reformats the others.

use std::borrow::Cow;
use std::fmt;

use serde::de::{DeserializeOwned, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;

/// Members in their order; values are JSON text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Object<'a> {
    members: Vec<(Cow<'a, str>, Cow<'a, str>)>,
}

impl<'a> Object<'a> {
    /// An object of these members, none of which stands there twice.
    pub(crate) fn of(members: impl Iterator<Item = (Cow<'a, str>, Cow<'a, str>)>) -> Self {
        Self { members: members.collect() }
    }

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

    /// Appends the object as JSON, without spaces between members; `value` appends the value of each, of which it
    /// gets the key and the text.
    pub(crate) fn write_by(&self, out: &mut Vec<u8>, value: impl Fn(&str, &str, &mut Vec<u8>)) {
        out.push(b'{');
        for (at, (key, text)) in self.members.iter().enumerate() {
            if at > 0 {
                out.push(b',');
            }
            match key {
                // It had no escapes where it stood, or is one of our own, so it needs none.
                Cow::Borrowed(key) => {
                    out.push(b'"');
                    out.extend_from_slice(key.as_bytes());
                    out.push(b'"');
                }
                Cow::Owned(key) => out.extend_from_slice(self::text(key).as_bytes()),
            }
            out.push(b':');
            value(key, text, out);
        }
        out.push(b'}');
    }

    /// Appends the object as JSON, without spaces between members.
    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        self.write_by(out, |_, value, out| out.extend_from_slice(value.as_bytes()));
    }

    pub(crate) fn to_text(&self) -> String {
        let length: usize = self.members.iter().map(|(key, value)| key.len() + value.len() + 4).sum();
        let mut out = Vec::with_capacity(length + 2);
        self.write(&mut out);
        String::from_utf8(out).expect("it is put together of strings")
    }
}

/// An object, and the objects of the list that is its member `key`, in one pass over the text. In the object
/// itself stands an empty text for the list, unless it was null. `None` for any other text.
pub(crate) fn object_and_list<'a>(text: &'a str, key: &'static str) -> Option<(Object<'a>, Vec<Object<'a>>)> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let found = deserializer.deserialize_map(WithList(key)).ok()?;
    deserializer.end().ok()?;
    Some(found)
}

/// The text of the last member of this name; `None` if there is none, or the text is no object.
pub(crate) fn member<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let mut found = None;
    members(text, |name, value| {
        if name == key {
            found = Some(value);
        }
    })
    .then_some(found)?
}

/// An object with these members in the place of its own of their names; of them alone if the text is no object.
pub(crate) fn with_members(text: Option<&str>, changes: &[(&str, &str)]) -> String {
    let added: usize = changes.iter().map(|(key, value)| key.len() + value.len() + 6).sum();
    let mut out = String::with_capacity(text.map_or(0, str::len) + added + 2);
    let write = |out: &mut String, key: &str, value: &str| {
        out.push(if out.is_empty() { '{' } else { ',' });
        out.push_str(&self::text(key));
        out.push(':');
        out.push_str(value);
    };
    let kept = |key: &str| changes.iter().all(|(changed, _)| *changed != key);
    if !text.is_some_and(|text| {
        members(text, |key, value| {
            if kept(key) {
                write(&mut out, key, value);
            }
        })
    }) {
        out.clear();
    }
    for (key, value) in changes {
        write(&mut out, key, value);
    }
    out.push('}');
    out
}

/// Shows each element of a list; false if the text is none.
pub(crate) fn each<'a>(text: &'a str, see: impl FnMut(&'a str)) -> bool {
    struct Elements<F>(F);
    impl<'de, F: FnMut(&'de str)> Visitor<'de> for Elements<F> {
        type Value = ();
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list")
        }
        fn visit_seq<A: SeqAccess<'de>>(mut self, mut list: A) -> Result<(), A::Error> {
            while let Some(element) = list.next_element::<&'de RawValue>()? {
                self.0(element.get());
            }
            Ok(())
        }
    }
    serde_json::Deserializer::from_str(text).deserialize_seq(Elements(see)).is_ok()
}

/// A list with one more element, which is JSON.
pub(crate) fn appended(list: &str, element: &str) -> Option<String> {
    let inside = list.strip_suffix(']')?.trim_ascii_end();
    let comma = if inside == "[" { "" } else { "," };
    Some([inside, comma, element, "]"].concat())
}

/// Shows each member of an object; false if the text is none.
fn members<'a>(text: &'a str, see: impl FnMut(&str, &'a str)) -> bool {
    struct Members<F>(F);
    impl<'de, F: FnMut(&str, &'de str)> Visitor<'de> for Members<F> {
        type Value = ();
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }
        fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
            while let Some(Key(key)) = map.next_key::<Key<'de>>()? {
                self.0(&key, map.next_value::<&'de RawValue>()?.get());
            }
            Ok(())
        }
    }
    serde_json::Deserializer::from_str(text).deserialize_map(Members(see)).is_ok()
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

/// An object whose member of this name is a list of objects.
struct WithList(&'static str);

impl<'de> Visitor<'de> for WithList {
    type Value = (Object<'de>, Vec<Object<'de>>);
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object whose `{}` is a list of objects", self.0)
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut list = None;
        let mut members = Vec::with_capacity(8);
        while let Some(Key(key)) = map.next_key::<Key<'de>>()? {
            let value = if list.is_none() && key == self.0 {
                list = Some(map.next_value::<Option<Vec<Object<'de>>>>()?);
                if matches!(list, Some(Some(_))) { "" } else { "null" }
            } else {
                map.next_value::<&'de RawValue>()?.get()
            };
            members.push((key, Cow::Borrowed(value)));
        }
        Ok((Object { members }, list.flatten().unwrap_or_default()))
    }
}

/// A key, borrowed where it has no escapes (serde's own `Cow` always copies).
pub(crate) struct Key<'a>(pub(crate) Cow<'a, str>);

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
    fn parts_of_a_text_are_found_and_changed_where_they_stand() {
        assert_eq!(member(r#"{"a":1,"b":[ 2 ],"a":3}"#, "a"), Some("3"));
        assert_eq!((member("[1]", "a"), member("{\"b\":1}", "a")), (None, None));
        assert_eq!(
            with_members(Some(r#"{"a":1, "b":{"c":[]}}"#), &[("a", "2"), ("d", "3")]),
            r#"{"b":{"c":[]},"a":2,"d":3}"#
        );
        assert_eq!([Some("7"), None].map(|text| with_members(text, &[("a", "2")])), [r#"{"a":2}"#; 2]);
        let mut seen = Vec::new();
        assert!(each("[1, [2],\"]\" ]", |element| seen.push(element)) && !each("{}", |_| {}));
        assert_eq!(seen, ["1", "[2]", "\"]\""]);
        assert_eq!(["[]", "[ ]", "[1, 2 ]"].map(|list| appended(list, "3").unwrap()), ["[3]", "[3]", "[1, 2,3]"]);
    }

    #[test]
    fn what_is_not_an_object_is_refused() {
        for bad in ["[]", "{", "{\"a\":1}x", "\"a\"", ""] {
            assert_eq!(Object::parse(bad), None, "{bad}");
        }
    }
}

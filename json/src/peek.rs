//! Reads the method and name of a JSON-RPC message from its beginning alone.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};

/// Length limit of a method or name.
const MAX_NAME: usize = 256;

/// The members found. They are not validated: the rest of the message may be anything.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Peeked {
    pub method: Option<String>,
    /// `name` in `params`.
    pub name: Option<String>,
}

/// Searches the beginning of a message for the method and the name. Allocates only these two.
pub fn peek(beginning: &[u8]) -> Peeked {
    let mut found = Peeked::default();
    let mut reader = serde_json::Deserializer::from_slice(beginning);
    // A truncated text is an error, and so is one that is not JSON. Members found before the error
    // are kept.
    let _ = Members {
        found: &mut found,
        inside: Inside::Message,
    }
    .deserialize(&mut reader);
    found
}

#[derive(Clone, Copy)]
enum Inside {
    Message,
    Params,
}

struct Members<'a> {
    found: &'a mut Peeked,
    inside: Inside,
}

impl<'de> DeserializeSeed<'de> for Members<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Members<'_> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<(), A::Error> {
        while let Some(Key(key)) = members.next_key()? {
            match (self.inside, key) {
                (Inside::Message, Some(Known::Method)) => {
                    self.found.method = members.next_value::<Name>()?.0
                }
                (Inside::Params, Some(Known::Name)) => {
                    self.found.name = members.next_value::<Name>()?.0
                }
                (Inside::Message, Some(Known::Params)) => {
                    members.next_value_seed(Members {
                        found: &mut *self.found,
                        inside: Inside::Params,
                    })?;
                }
                _ => drop(members.next_value::<IgnoredAny>()?),
            }
        }
        Ok(())
    }
}

enum Known {
    Method,
    Params,
    Name,
}

struct Key(Option<Known>);

impl<'de> serde::Deserialize<'de> for Key {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Key, D::Error> {
        struct Text;
        impl Visitor<'_> for Text {
            type Value = Key;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a key")
            }

            fn visit_str<E>(self, key: &str) -> Result<Key, E> {
                Ok(Key(match key {
                    "method" => Some(Known::Method),
                    "params" => Some(Known::Params),
                    "name" => Some(Known::Name),
                    _ => None,
                }))
            }
        }
        deserializer.deserialize_str(Text)
    }
}

struct Name(Option<String>);

impl<'de> serde::Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Name, D::Error> {
        struct Text;
        impl Visitor<'_> for Text {
            type Value = Name;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a string")
            }

            fn visit_str<E>(self, name: &str) -> Result<Name, E> {
                Ok(Name((name.len() <= MAX_NAME).then(|| name.to_owned())))
            }
        }
        deserializer.deserialize_str(Text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> (Option<String>, Option<String>) {
        let Peeked { method, name } = peek(text.as_bytes());
        (method, name)
    }

    #[test]
    fn method_and_name_are_found_wherever_they_are() {
        let both = (Some("tools/call".to_owned()), Some("reset".to_owned()));
        for text in [
            r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"reset","arguments":{"name":"x"}}}"#,
            r#"{"params":{"arguments":{"method":"y","params":{}},"name":"\u0072eset"},"method":"tools/call"}"#,
            r#" {"method":"tools/call","params":{"name":"reset","arguments":{"code":"1+1"#,
        ] {
            assert_eq!(found(text), both, "{text}");
        }
    }

    #[test]
    fn what_has_not_arrived_or_is_not_there_is_not_found() {
        assert_eq!(
            found(r#"{"method":"tools/call","params":{"arguments":{"code":"1+"#),
            (Some("tools/call".into()), None)
        );
        for text in [
            "",
            "[",
            "5",
            r#"{"params":{"name":"#,
            r#"["method","x"]"#,
            r#"{"method":5,"params":{"name":"a"}}"#,
        ] {
            assert_eq!(found(text), (None, None), "{text}");
        }
        assert_eq!(
            found(&format!(r#"{{"method":"{}"}}"#, "x".repeat(1000))),
            (None, None)
        );
        assert_eq!(found(&"[".repeat(100_000)), (None, None));
    }
}

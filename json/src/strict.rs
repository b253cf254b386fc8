//! Decoding within a budget.

use std::fmt;

use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor,
};
use serde_json::{Map, Value};

use crate::budget::{Budget, Excess};

/// Reason why a text was not decoded.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error(transparent)]
    Excess(#[from] Excess),
    #[error(transparent)]
    Json(#[from] serde_json::Error),
}

/// Decodes a text within a budget.
pub fn read<T: DeserializeOwned>(text: &[u8], budget: Budget) -> Result<T, ReadError> {
    budget.check(text)?;
    Ok(serde_json::from_slice(text)?)
}

/// Decodes a text within a budget, and rejects an object with a repeated key: another reader of the
/// same text might use the other value.
pub fn read_strict(text: &[u8], budget: Budget) -> Result<Value, ReadError> {
    budget.check(text)?;
    let mut reader = serde_json::Deserializer::from_slice(text);
    let value = UniqueKeys.deserialize(&mut reader)?;
    reader.end()?;
    Ok(value)
}

/// Reads one value.
#[derive(Clone, Copy)]
struct UniqueKeys;

impl<'de> DeserializeSeed<'de> for UniqueKeys {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for UniqueKeys {
    type Value = Value;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(Value::String(value))
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(self)? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(key) = members.next_key::<String>()? {
            let value = members.next_value_seed(self)?;
            // The key is not part of the error: it may be long, and it is the sender's own text.
            if object.insert(key, value).is_some() {
                return Err(A::Error::custom("an object has the same key twice"));
            }
        }
        Ok(Value::Object(object))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUDGET: Budget = Budget {
        depth: 8,
        memory: 1 << 16,
    };

    #[test]
    fn values_are_decoded_as_usual() {
        let text = r#"{"a":[1,-2,3.5,1e300,18446744073709551615,null,true,"\u00e4"],"b":{"c":""}}"#;
        assert_eq!(
            read_strict(text.as_bytes(), BUDGET).unwrap(),
            serde_json::from_str::<Value>(text).unwrap()
        );
        assert_eq!(
            read::<Value>(text.as_bytes(), BUDGET).unwrap(),
            serde_json::from_str::<Value>(text).unwrap()
        );
    }

    #[test]
    fn a_repeated_key_is_refused_at_every_level() {
        for text in [r#"{"a":1,"a":2}"#, r#"[{"x":{"b":1,"\u0062":2}}]"#] {
            let error = read_strict(text.as_bytes(), BUDGET).unwrap_err();
            assert!(error.to_string().contains("the same key twice"), "{error}");
        }
        assert!(
            read_strict(br#"[{"b":1},{"b":2}]"#, BUDGET).is_ok(),
            "the control"
        );
    }

    #[test]
    fn the_budget_is_checked_before_anything_is_decoded() {
        let deep = format!("{}{}", "[".repeat(9), "]".repeat(9));
        let wide = format!("[{}0]", "{},".repeat(1000));
        for (text, excess) in [(deep, Excess::Depth(8)), (wide, Excess::Memory(1 << 16))] {
            for error in [
                read_strict(text.as_bytes(), BUDGET).unwrap_err(),
                read::<Value>(text.as_bytes(), BUDGET).unwrap_err(),
            ] {
                assert!(
                    matches!(error, ReadError::Excess(found) if found == excess),
                    "{error}"
                );
            }
        }
    }

    #[test]
    fn what_follows_the_value_is_refused() {
        assert!(read_strict(b"{} {}", BUDGET).is_err());
        assert!(read_strict(b"{} ", BUDGET).is_ok(), "the control");
    }
}

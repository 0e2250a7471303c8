//! Answers of an engine without what they say, to hold a mock against the real thing.

use std::collections::BTreeSet;

use serde_json::Value;

/// What remains of a value when its content is taken away: names in their order, types.
#[must_use]
pub fn shape(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(_) => "bool".to_owned(),
        Value::Number(_) => "number".to_owned(),
        Value::String(_) => "string".to_owned(),
        Value::Array(items) => {
            let shapes: BTreeSet<String> = items.iter().map(shape).collect();
            format!("[{}]", shapes.into_iter().collect::<Vec<_>>().join("|"))
        }
        Value::Object(fields) => {
            // The names of `top_logprobs` are tokens.
            let fields: Vec<String> = fields
                .iter()
                .map(|(name, value)| match value {
                    Value::Number(number) if number.is_f64() && name != "logprob" => "<token>:number".to_owned(),
                    _ => format!("{name}:{}", shape(value)),
                })
                .collect();
            format!("{{{}}}", fields.join(","))
        }
    }
}

/// The shapes of an answer's events in order, equal neighbours taken together.
#[must_use]
pub fn shapes(body: &str) -> Vec<String> {
    let mut shapes: Vec<String> = body
        .split("\n\n")
        .filter(|event| !event.trim().is_empty())
        .map(|event| {
            let data = event.trim().trim_start_matches("data: ");
            serde_json::from_str(data).map_or(data.to_owned(), |value| shape(&value))
        })
        .collect();
    shapes.dedup();
    shapes
}

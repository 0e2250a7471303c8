//! What the sampling parameters of a request do to the next token.

use serde_json::Value;

use super::sequence::mix;

/// The part of a request that changes what is sampled.
///
/// A real sampler is not imitated; what matters is which parameters survive a seam.
/// Those that a real engine applies from the ids alone (`logit_bias`, …) change the
/// tokens in a way that a continuation repeats exactly, if it carries them. Those that
/// start afresh with each request (`seed` with a temperature, presence and frequency
/// penalty, which count output tokens only; guided decoding) depend on the number of
/// tokens produced by *this* request, so that a continuation differs, as measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Sampling {
    carried: u64,
    restarting: u64,
}

const CARRIED: [&str; 4] = ["allowed_token_ids", "bad_words", "logit_bias", "repetition_penalty"];

const RESTARTING: [&str; 9] = [
    "frequency_penalty",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "presence_penalty",
    "response_format",
    "seed",
    "structured_outputs",
];

impl Sampling {
    /// Reads the parameters from the body of a request. Neutral values (a penalty of
    /// 0, a seed at temperature 0) count as absent.
    pub fn of(body: &Value) -> Self {
        let greedy = body["temperature"].as_f64().unwrap_or(1.0) == 0.0;
        let hash = |keys: &[&str]| {
            keys.iter()
                .filter(|key| !(greedy && **key == "seed"))
                .map(|key| (*key, &body[*key]))
                .filter(|(key, value)| !is_neutral(key, value))
                .fold(0, |hash, (key, value)| {
                    format!("{key}={value}").bytes().fold(hash, |hash, byte| mix(hash ^ u64::from(byte)))
                })
        };
        Self { carried: hash(&CARRIED), restarting: hash(&RESTARTING) }
    }

    /// Another sample of the same request: choice `index` of `n`.
    pub fn choice(self, index: u32) -> Self {
        Self { carried: self.carried ^ u64::from(index), ..self }
    }

    /// What is mixed into the choice of the token after `produced` output tokens.
    pub fn salt(self, produced: u32) -> u64 {
        if self.restarting == 0 {
            return self.carried;
        }
        self.carried ^ mix(self.restarting ^ u64::from(produced))
    }
}

fn is_neutral(key: &str, value: &Value) -> bool {
    match key {
        "repetition_penalty" => value.as_f64() == Some(1.0) || value.is_null(),
        "presence_penalty" | "frequency_penalty" => value.as_f64() == Some(0.0) || value.is_null(),
        "response_format" => value.is_null() || value["type"] == "text",
        _ => value.is_null(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn neutral_values_change_nothing() {
        let neutral = json!({
            "temperature": 0, "seed": 7, "presence_penalty": 0, "frequency_penalty": 0.0,
            "repetition_penalty": 1.0, "response_format": {"type": "text"}, "logit_bias": null
        });
        assert_eq!(Sampling::of(&neutral), Sampling::default());
        assert_eq!(Sampling::default().salt(5), 0);
    }

    #[test]
    fn what_is_applied_from_the_ids_is_the_same_on_both_sides_of_a_seam() {
        let sampling = Sampling::of(&json!({"logit_bias": {"300": 5.0}}));
        assert_ne!(sampling.salt(0), 0);
        assert_eq!(sampling.salt(0), sampling.salt(100));
    }

    #[test]
    fn what_counts_its_own_output_starts_afresh() {
        for body in [
            json!({"seed": 7, "temperature": 0.8}),
            json!({"presence_penalty": 1.0}),
            json!({"guided_regex": "[0-9]{6}"}),
        ] {
            let sampling = Sampling::of(&body);
            assert_ne!(sampling.salt(0), sampling.salt(100), "{body}");
        }
    }
}

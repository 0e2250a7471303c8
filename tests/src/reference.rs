//! The answer that nothing interrupts, computed without any process.

use serde_json::Value;

use crate::client::{Ending, Transcript};
use crate::matrix;
use crate::model::{Dialect, Endpoint, Generation, Output, Rejection, Request, TokenId};

/// What a client has to get, whatever happens on the way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference {
    /// The prompt's ids.
    pub prompt_ids: Vec<TokenId>,
    /// The output's ids.
    pub ids: Vec<TokenId>,
    /// The output's text.
    pub text: String,
    /// `finish_reason`.
    pub finish_reason: String,
}

impl Reference {
    /// The answer to `body` on an engine of this dialect: its first choice.
    ///
    /// # Errors
    ///
    /// The engine would refuse the request.
    pub fn of(endpoint: Endpoint, body: &Value, dialect: &Dialect) -> Result<Self, Rejection> {
        let request = Request::parse(endpoint, body, dialect)?;
        let mut generation = Generation::new(&request.prompts[0], request.sampling[0], request.limits[0].clone());
        let mut output = Output::new(&request, 0, dialect.frontend);
        let (mut ids, mut text) = (Vec::new(), String::new());
        loop {
            let (id, finish) = generation.step();
            let piece = output.push(id, finish);
            ids.extend(piece.ids);
            text.push_str(&piece.text);
            if let Some(finish) = piece.finish {
                return Ok(Self {
                    prompt_ids: request.prompts[0].clone(),
                    ids,
                    text,
                    finish_reason: finish.reason().to_owned(),
                });
            }
        }
    }

    /// Holds a transcript against it.
    ///
    /// # Panics
    ///
    /// Where they differ, token by token if the client asked for ids, else by text; also if the
    /// stream did not end as it should: one finish reason, one `[DONE]`, one answer id, no error.
    pub fn assert_equals(&self, transcript: &Transcript) {
        assert_eq!(transcript.status, 200, "{:#?}", transcript.events);
        assert_eq!(transcript.error, None, "the client was shown an error");
        if !transcript.ids.is_empty() {
            let differs = self.ids.iter().zip(&transcript.ids).position(|(expected, got)| expected != got);
            let around = |ids: &[TokenId]| {
                let at = differs.unwrap_or(self.ids.len().min(transcript.ids.len()));
                ids[at.saturating_sub(3).min(ids.len())..(at + 4).min(ids.len())].to_vec()
            };
            assert!(
                differs.is_none() && self.ids.len() == transcript.ids.len(),
                "token {differs:?} differs: expected …{:?}… of {}, got …{:?}… of {}; comments: {:?}",
                around(&self.ids),
                self.ids.len(),
                around(&transcript.ids),
                transcript.ids.len(),
                transcript.comments,
            );
        }
        assert_eq!(transcript.text, self.text);
        assert_eq!(transcript.finish_reasons, std::slice::from_ref(&self.finish_reason));
        assert_eq!(transcript.dones, 1, "one [DONE]");
        assert_eq!(transcript.answer_ids.len(), 1, "one answer: {:?}", transcript.answer_ids);
        assert!(transcript.roles <= 1, "the role came {} times", transcript.roles);
        assert_eq!(transcript.ending, Some(Ending::Whole));
        matrix::count("streams exact", 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Frontend, encode};
    use serde_json::json;

    #[test]
    fn a_chat_and_the_completion_of_its_prompt_have_the_same_answer() {
        let dialect = Dialect { frontend: Frontend::Python, model: "tiny".into(), max_model_len: 4096 };
        let chat = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50, "ignore_eos": true});
        let chat = Reference::of(Endpoint::Chat, &chat, &dialect).unwrap();
        let completion = json!({"prompt": chat.prompt_ids, "max_tokens": 50, "ignore_eos": true});
        let completion = Reference::of(Endpoint::Completions, &completion, &dialect).unwrap();
        assert_eq!(chat, completion);
        assert_eq!((chat.ids.len(), chat.finish_reason.as_str()), (50, "length"));
        assert_ne!(chat.ids, encode(&chat.text));
    }
}

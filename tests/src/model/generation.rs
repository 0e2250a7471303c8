//! One request as the engine core runs it.

use serde::{Deserialize, Serialize};

use super::sampling::Sampling;
use super::sequence::Sequence;
use super::vocabulary::{END_OF_TURN, TokenId};

/// When the engine core ends a request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Tokens to produce at most.
    pub max_tokens: u32,
    /// Tokens before which neither the end of sequence nor a stop counts.
    pub min_tokens: u32,
    /// Never ends by the end of sequence.
    pub ignore_eos: bool,
    /// Ids that end the output like the end of sequence does.
    pub stop_token_ids: Vec<TokenId>,
}

/// Why the engine core ended a request. Stop *strings* are not its business: the API
/// server finds those in the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CoreFinish {
    /// `max_tokens` are produced.
    Length,
    /// The end of sequence, which the model sampled.
    EndOfSequence,
    /// An id of `stop_token_ids`.
    StopToken,
}

/// A running generation.
#[derive(Clone, Debug)]
pub struct Generation {
    sequence: Sequence,
    sampling: Sampling,
    limits: Limits,
    produced: u32,
}

impl Generation {
    /// Starts after `prompt`.
    pub fn new(prompt: &[TokenId], sampling: Sampling, limits: Limits) -> Self {
        Self { sequence: Sequence::new(prompt), sampling, limits, produced: 0 }
    }

    /// Produces one token, and says whether it is the last.
    pub fn step(&mut self) -> (TokenId, Option<CoreFinish>) {
        let may_stop = self.produced >= self.limits.min_tokens;
        let id = self.sequence.next(self.sampling.salt(self.produced), may_stop && !self.limits.ignore_eos);
        self.sequence.push(id);
        self.produced += 1;
        let finish = if may_stop && id == END_OF_TURN && !self.limits.ignore_eos {
            Some(CoreFinish::EndOfSequence)
        } else if may_stop && self.limits.stop_token_ids.contains(&id) {
            Some(CoreFinish::StopToken)
        } else if self.produced >= self.limits.max_tokens {
            Some(CoreFinish::Length)
        } else {
            None
        };
        (id, finish)
    }
}

#[cfg(test)]
mod tests {
    use super::super::vocabulary::encode;
    use super::*;
    use serde_json::json;

    fn run(prompt: &[TokenId], sampling: Sampling, limits: &Limits) -> (Vec<TokenId>, CoreFinish) {
        let mut generation = Generation::new(prompt, sampling, limits.clone());
        let mut ids = Vec::new();
        loop {
            let (id, finish) = generation.step();
            ids.push(id);
            if let Some(finish) = finish {
                return (ids, finish);
            }
        }
    }

    fn up_to(max_tokens: u32) -> Limits {
        Limits { max_tokens, ..Limits::default() }
    }

    #[test]
    fn ends_by_length_or_by_the_end_of_sequence() {
        let prompt = encode("Hi");
        let (ids, finish) = run(&prompt, Sampling::default(), &up_to(5));
        assert_eq!((ids.len(), finish), (5, CoreFinish::Length));
        let (ids, finish) = run(&prompt, Sampling::default(), &up_to(100_000));
        assert_eq!(finish, CoreFinish::EndOfSequence);
        assert_eq!(ids.iter().filter(|&&id| id == END_OF_TURN).count(), 1);
    }

    #[test]
    fn min_tokens_must_be_reduced_by_what_a_continuation_carries() {
        let prompt = encode("Hi");
        let (free, _) = run(&prompt, Sampling::default(), &up_to(100_000));
        let limits = Limits { min_tokens: free.len() as u32 + 10, ..up_to(100_000) };
        let (whole, finish) = run(&prompt, Sampling::default(), &limits);
        assert_eq!(finish, CoreFinish::EndOfSequence);
        assert!(whole.len() > free.len() + 10);

        let seam = free.len() - 1;
        let carried = [&prompt, &whole[..seam]].concat();
        let reduced = Limits { min_tokens: limits.min_tokens - seam as u32, ..limits.clone() };
        assert_eq!(run(&carried, Sampling::default(), &reduced).0, whole[seam..]);
        assert_ne!(run(&carried, Sampling::default(), &limits).0, whole[seam..]);
    }

    #[test]
    fn a_seed_starts_afresh_and_a_bias_does_not() {
        let prompt = encode("Hi");
        for (body, survives) in
            [(json!({"seed": 1, "temperature": 0.8}), false), (json!({"logit_bias": {"300": 1}}), true)]
        {
            let sampling = Sampling::of(&body);
            let (whole, _) = run(&prompt, sampling, &up_to(60));
            let carried = [&prompt, &whole[..30]].concat();
            let (rest, _) = run(&carried, sampling, &up_to(30));
            assert_eq!(rest == whole[30..], survives, "{body}");
        }
    }

    #[test]
    fn a_stop_token_ends_it() {
        let prompt = encode("Hi");
        let (free, _) = run(&prompt, Sampling::default(), &up_to(40));
        let limits = Limits { stop_token_ids: vec![free[20]], ..up_to(40) };
        let (ids, finish) = run(&prompt, Sampling::default(), &limits);
        assert_eq!(finish, CoreFinish::StopToken);
        assert_eq!(ids.last(), Some(&free[20]));
    }
}

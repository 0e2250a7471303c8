//! From the ids so far to the next id.

use super::vocabulary::{BYTE_TOKENS, END_OF_TURN, TokenId, WORDS};

/// One token in so many ends the sequence, where the request lets it.
const END_OF_TURN_EVERY: u64 = 400;

/// One token in so many begins a character of several bytes.
const CHARACTER_EVERY: u64 = 9;

/// The characters that the model emits byte by byte, one token a byte. Their first
/// bytes differ, so the bytes so far say which character is under way.
const CHARACTERS: [&str; 4] = ["é", "€", "你", "🦀"];

/// A token sequence, reduced to what the next token depends on.
#[derive(Clone, Debug, Default)]
pub struct Sequence {
    hash: u64,
    /// The bytes at the end that begin one of [`CHARACTERS`] without finishing it.
    unfinished: Vec<u8>,
}

impl Sequence {
    /// The sequence of `ids`.
    pub fn new(ids: &[TokenId]) -> Self {
        let mut sequence = Self::default();
        for &id in ids {
            sequence.push(id);
        }
        sequence
    }

    /// Appends one token.
    pub fn push(&mut self, id: TokenId) {
        self.hash = mix(self.hash.rotate_left(7) ^ u64::from(id).wrapping_add(1));
        match u8::try_from(id) {
            Ok(byte) => {
                self.unfinished.push(byte);
                if character_begun_by(&self.unfinished).is_none() {
                    self.unfinished = vec![byte];
                }
                if character_begun_by(&self.unfinished).is_none_or(|character| character.len() == self.unfinished.len())
                {
                    self.unfinished.clear();
                }
            }
            Err(_) => self.unfinished.clear(),
        }
    }

    /// The token that follows. `salt` is what the sampling parameters of the request
    /// add ([`super::Sampling::salt`]); `may_end` is false with `ignore_eos` and
    /// before `min_tokens`, where an engine masks the end of sequence.
    pub fn next(&self, salt: u64, may_end: bool) -> TokenId {
        if let Some(character) = character_begun_by(&self.unfinished) {
            return TokenId::from(character[self.unfinished.len()]);
        }
        let choice = mix(self.hash ^ salt);
        if may_end && choice.is_multiple_of(END_OF_TURN_EVERY) {
            return END_OF_TURN;
        }
        let pick = (choice >> 32) as usize;
        if (choice >> 16).is_multiple_of(CHARACTER_EVERY) {
            return TokenId::from(CHARACTERS[pick % CHARACTERS.len()].as_bytes()[0]);
        }
        BYTE_TOKENS + (pick % WORDS.len()) as TokenId
    }
}

/// The character that `bytes` begin or are; nothing for no bytes at all.
fn character_begun_by(bytes: &[u8]) -> Option<&'static [u8]> {
    CHARACTERS
        .iter()
        .map(|character| character.as_bytes())
        .find(|character| !bytes.is_empty() && character.starts_with(bytes))
}

/// The finaliser of SplitMix64: every bit of the input moves every bit of the output.
pub(super) const fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::super::vocabulary::{decode, encode};
    use super::*;

    fn generate(prompt: &[TokenId], tokens: usize) -> Vec<TokenId> {
        let mut sequence = Sequence::new(prompt);
        (0..tokens)
            .map(|_| {
                let id = sequence.next(0, false);
                sequence.push(id);
                id
            })
            .collect()
    }

    #[test]
    fn a_continuation_by_ids_equals_the_uninterrupted_run_at_every_seam() {
        let prompt = encode("Tell me of the last gasp.");
        let whole = generate(&prompt, 400);
        for seam in 0..whole.len() {
            let carried = [&prompt, &whole[..seam]].concat();
            assert_eq!(generate(&carried, whole.len() - seam), whole[seam..], "seam after {seam} tokens");
        }
    }

    #[test]
    fn a_missing_or_repeated_token_at_the_seam_shows() {
        let prompt = encode("Hi");
        let whole = generate(&prompt, 80);
        let seam = 40;
        let missing = [&prompt, &whole[..seam - 1]].concat();
        let repeated = [&prompt, &whole[..seam], &whole[seam - 1..seam]].concat();
        for carried in [missing, repeated] {
            assert_ne!(generate(&carried, 40), whole[seam..]);
        }
    }

    #[test]
    fn a_continuation_by_text_differs() {
        let prompt = encode("Hi");
        let whole = generate(&prompt, 80);
        let carried = encode(&format!("Hi{}", decode(&whole[..40])));
        assert_ne!(generate(&carried, 40), whole[40..]);
    }

    #[test]
    fn characters_of_several_bytes_come_one_byte_a_token_and_come_out_whole() {
        let ids = generate(&encode("Hi"), 2000);
        let text = decode(&ids);
        for character in CHARACTERS {
            assert!(text.contains(character), "{character} never came");
        }
        assert_eq!(text.trim_end_matches('\u{fffd}').find('\u{fffd}'), None);
        assert!(ids.iter().filter(|&&id| id < BYTE_TOKENS).count() > 100);
    }

    #[test]
    fn a_prompt_that_ends_inside_a_character_is_taken_up() {
        let euro = "€".as_bytes();
        let mut sequence = Sequence::new(&[72, euro[0].into(), euro[1].into()]);
        assert_eq!(sequence.next(0, true), TokenId::from(euro[2]));
        sequence.push(euro[2].into());
        assert!(sequence.unfinished.is_empty());
    }

    #[test]
    fn the_end_comes_at_a_place_of_its_own_and_only_where_it_may() {
        let end_of = |prompt: &str| {
            let mut sequence = Sequence::new(&encode(prompt));
            (0..20_000).find(|_| {
                let id = sequence.next(0, true);
                sequence.push(id);
                id == END_OF_TURN
            })
        };
        let (one, other) = (end_of("one").unwrap(), end_of("other").unwrap());
        assert_ne!(one, other);
        assert!(!generate(&encode("one"), one + 2000).contains(&END_OF_TURN));
    }
}

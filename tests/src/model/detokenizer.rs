//! From ids to text, with the withholding of real engines.

use super::vocabulary::{TokenId, bytes_of};

/// Turns sampled ids into text as the streaming decoder of the `tokenizers` library
/// does (`decoders/…/step_decode_stream`, used by vLLM 0.32): text is released once
/// what is pending no longer ends in U+FFFD. So a byte that does not finish a
/// character gives no text, and the text of a later token contains it.
///
/// The pending part starts with the *whole prompt* if that ends inside a character:
/// the first text released then is the prompt's (vllm#48853, measured).
#[derive(Clone, Debug)]
pub struct Detokenizer {
    pending: Vec<u8>,
}

impl Detokenizer {
    /// A decoder for what follows `prompt`.
    pub fn new(prompt: &[TokenId]) -> Self {
        let bytes: Vec<u8> = prompt.iter().flat_map(|&id| bytes_of(id)).copied().collect();
        let mut detokenizer = Self { pending: bytes };
        // Text of a prompt that ends cleanly is the prompt's own and is not repeated.
        detokenizer.release();
        detokenizer
    }

    /// Takes one sampled token and returns the text that it released, often its own,
    /// sometimes none.
    pub fn push(&mut self, id: TokenId) -> String {
        self.push_bytes(bytes_of(id))
    }

    /// The bytes that are still withheld, with U+FFFD for what is not UTF-8. The Rust
    /// frontend sends them with the last token, the Python frontend drops them.
    pub fn flush(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned()
    }

    fn push_bytes(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        self.release()
    }

    fn release(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.pending);
        if text.ends_with(char::REPLACEMENT_CHARACTER) {
            return String::new();
        }
        let text = text.into_owned();
        self.pending.clear();
        text
    }
}

#[cfg(test)]
mod tests {
    use super::super::vocabulary::encode;
    use super::*;

    fn deltas(prompt: &[TokenId], ids: &[TokenId]) -> Vec<String> {
        let mut detokenizer = Detokenizer::new(prompt);
        ids.iter().map(|&id| detokenizer.push(id)).collect()
    }

    #[test]
    fn a_character_of_three_tokens_comes_with_its_last() {
        assert_eq!(deltas(&encode("Hi"), &[256, 0xe4, 0xbd, 0xa0, 257]), [" kernel", "", "", "你", " daemon"]);
    }

    #[test]
    fn a_prompt_that_ends_inside_a_character_comes_out_whole() {
        let prompt = [&encode("hello")[..], &[0xe2, 0x82]].concat();
        assert_eq!(deltas(&prompt, &[0xac, 256]), ["hello€", " kernel"]);
        let prompt = [&encode("hello")[..], &[0xe2]].concat();
        assert_eq!(deltas(&prompt, &[0x82, 0xac]), ["", "hello€"]);
    }

    /// `c_ids_stoptok` of the transcripts: ids 118, 163, 257, 243 and 100 of that
    /// model are bytes that begin nothing; only which ones do matters here.
    #[test]
    fn real_deltas_of_a_model_that_emits_stray_bytes() {
        let stray = b"\xb0".as_slice();
        let pieces: [(&[u8], &str); 10] = [
            (stray, ""),
            (b"iz", "\u{fffd}iz"),
            (stray, ""),
            (b"7", "\u{fffd}7"),
            (b"\r", "\r"),
            (stray, ""),
            (b" eight", "\u{fffd} eight"),
            (stray, ""),
            (stray, ""),
            (stray, ""),
        ];
        let mut detokenizer = Detokenizer::new(&encode("Hi"));
        for (bytes, expected) in pieces {
            assert_eq!(detokenizer.push_bytes(bytes), expected);
        }
        assert_eq!(detokenizer.flush(), "\u{fffd}\u{fffd}\u{fffd}");
        assert_eq!(detokenizer.flush(), "");
    }
}

//! Token ids and their bytes.

/// A token id, as it appears in `token_ids` and `prompt_token_ids`.
pub type TokenId = u32;

/// Ids below this are single bytes.
pub(super) const BYTE_TOKENS: TokenId = 256;

/// `<|im_start|>`: opens a turn of a chat. Has no text.
pub const START_OF_TURN: TokenId = BYTE_TOKENS + WORDS.len() as TokenId;

/// `<|im_end|>`: closes a turn of a chat; sampled by the model it is the end of
/// sequence. Has no text.
pub const END_OF_TURN: TokenId = START_OF_TURN + 1;

/// Number of ids; a prompt with an id at or above it is refused.
pub const VOCABULARY_SIZE: TokenId = END_OF_TURN + 1;

const BYTES: [[u8; 1]; BYTE_TOKENS as usize] = {
    let mut table = [[0]; BYTE_TOKENS as usize];
    let mut byte = 0;
    while byte < table.len() {
        table[byte] = [byte as u8];
        byte += 1;
    }
    table
};

/// The ids from 256: words with their leading space, as byte-level BPE has them.
/// No prompt is ever encoded to these, so text that is encoded again gives other
/// ids than those that were sampled, as on a real vLLM.
pub(super) const WORDS: [&str; 191] = [
    " kernel", " daemon", " worker", " engine", " token", " stream", " router", " signal", " process", " thread",
    " parent", " child", " orphan", " socket", " port", " packet", " frame", " modem", " line", " gasp", " last",
    " first", " next", " then", " again", " once", " never", " always", " often", " soon", " late", " early", " long",
    " short", " quick", " slow", " quiet", " loud", " bright", " dark", " warm", " cold", " old", " new", " small",
    " large", " red", " green", " blue", " brown", " white", " black", " one", " two", " three", " four", " five",
    " six", " seven", " eight", " nine", " ten", " the", " a", " an", " this", " that", " each", " every", " some",
    " no", " and", " or", " but", " so", " if", " when", " while", " until", " before", " after", " under", " over",
    " through", " across", " into", " out", " of", " to", " from", " with", " without", " by", " for", " at", " on",
    " in", " is", " was", " were", " be", " has", " had", " does", " did", " can", " may", " will", " must", " runs",
    " waits", " stops", " starts", " falls", " rises", " moves", " turns", " opens", " closes", " reads", " writes",
    " sends", " hears", " sees", " says", " asks", " knows", " finds", " keeps", " leaves", " returns", " answers",
    " carries", " counts", " breaks", " mends", " sleeps", " wakes", " morning", " evening", " night", " day", " hour",
    " minute", " second", " year", " river", " sea", " hill", " road", " bridge", " house", " door", " window",
    " garden", " tree", " leaf", " bird", " fox", " dog", " cat", " horse", " fish", " stone", " sand", " rain",
    " snow", " wind", " fire", " light", " shadow", " sound", " voice", " word", " letter", " book", " page", " story",
    " name", " number", " clock", " wheel", " rope", " glass", " iron", " wood", ",", ".", ";", "s", "ing",
];

/// The bytes that a token stands for; none for the two turn markers and for ids
/// outside the vocabulary.
pub fn bytes_of(id: TokenId) -> &'static [u8] {
    let index = id as usize;
    if let Some(byte) = BYTES.get(index) {
        return byte;
    }
    WORDS.get(index - BYTES.len()).map_or(&[], |word| word.as_bytes())
}

/// Encodes text byte by byte.
pub fn encode(text: &str) -> Vec<TokenId> {
    text.bytes().map(TokenId::from).collect()
}

/// The text of `ids`; bytes that are not UTF-8 become U+FFFD, one for each
/// maximal ill-formed part, as in the tokenizers of real engines.
pub fn decode(ids: &[TokenId]) -> String {
    let bytes: Vec<u8> = ids.iter().flat_map(|&id| bytes_of(id)).copied().collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_is_listed_once_and_has_its_own_text() {
        let mut seen = std::collections::BTreeSet::new();
        for word in WORDS {
            assert!(seen.insert(word), "{word:?} is listed twice");
        }
    }

    #[test]
    fn text_that_is_encoded_again_has_other_ids() {
        let sampled = [BYTE_TOKENS, BYTE_TOKENS + 1];
        let text = decode(&sampled);
        assert_eq!(text, " kernel daemon");
        assert_ne!(encode(&text), sampled);
        assert_eq!(decode(&encode(&text)), text);
    }

    #[test]
    fn turn_markers_and_unknown_ids_have_no_text() {
        assert_eq!(decode(&[START_OF_TURN, 72, 105, END_OF_TURN, VOCABULARY_SIZE + 7]), "Hi");
    }
}

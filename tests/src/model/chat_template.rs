//! From chat messages to a prompt.

use super::vocabulary::{END_OF_TURN, START_OF_TURN, TokenId, encode};

/// One message of a chat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// `system`, `user`, `assistant`, …
    pub role: String,
    /// Its text.
    pub content: String,
}

/// How the prompt of a chat ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// With the start of a new assistant turn: the default.
    New,
    /// After the last message's end: `add_generation_prompt: false`.
    Closed,
    /// Inside the last message: `continue_final_message: true`.
    Continued,
}

/// The prompt of a chat, in the ChatML shape that the measured model used: for each
/// message `<|im_start|>role\ncontent<|im_end|>\n`.
pub fn render(messages: &[Message], turn: Turn) -> Vec<TokenId> {
    let mut ids = Vec::new();
    for message in messages {
        ids.push(START_OF_TURN);
        ids.extend(encode(&message.role));
        ids.extend(encode("\n"));
        ids.extend(encode(&message.content));
        ids.push(END_OF_TURN);
        ids.extend(encode("\n"));
    }
    match turn {
        Turn::New => {
            ids.push(START_OF_TURN);
            ids.extend(encode("assistant\n"));
        }
        Turn::Closed => {}
        Turn::Continued => ids.truncate(ids.len().saturating_sub(2)),
    }
    ids
}

#[cfg(test)]
mod tests {
    use super::super::vocabulary::decode;
    use super::*;

    fn message(role: &str, content: &str) -> Message {
        Message { role: role.to_owned(), content: content.to_owned() }
    }

    #[test]
    fn a_trailing_assistant_message_opens_a_new_turn_unless_it_is_continued() {
        let messages = [message("user", "count"), message("assistant", "one two")];
        let tail = |turn| {
            let ids = render(&messages, turn);
            (decode(&ids), ids.last().copied())
        };
        let new_line = Some(TokenId::from(b'\n'));
        assert_eq!(tail(Turn::New), ("user\ncount\nassistant\none two\nassistant\n".to_owned(), new_line));
        assert_eq!(tail(Turn::Closed), ("user\ncount\nassistant\none two\n".to_owned(), new_line));
        assert_eq!(tail(Turn::Continued), ("user\ncount\nassistant\none two".to_owned(), Some(TokenId::from(b'o'))));
    }

    #[test]
    fn continuing_an_empty_message_gives_exactly_the_generation_prompt() {
        let question = message("user", "count");
        assert_eq!(
            render(&[question.clone(), message("assistant", "")], Turn::Continued),
            render(&[question], Turn::New)
        );
    }
}

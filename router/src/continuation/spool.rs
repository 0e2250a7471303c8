//! The text of a stream: what has come, and how much of it was released to the client.

use super::stop::Stops;

/// Joined text of one channel.
#[derive(Debug, Default)]
pub(crate) struct Spool {
    joined: String,
    /// Bytes of `joined` that the client has.
    released: usize,
    /// A stop string must end after this byte (`min_tokens`, and what was matched before).
    floor: usize,
}

/// What a piece of text releases.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Release {
    /// Text for the client.
    pub(crate) text: String,
    /// The stop string that ended the text.
    pub(crate) stop: Option<String>,
}

impl Spool {
    /// Everything that has come.
    pub(crate) fn joined(&self) -> &str {
        &self.joined
    }

    /// Adds text and says what may be released. With `stops`, what may yet become a stop string
    /// stays here; `countable` says that enough tokens were produced for one to count.
    pub(crate) fn push(&mut self, text: &str, stops: Option<&Stops>, countable: bool) -> Release {
        let from = self.joined.len().max(self.floor);
        self.joined.push_str(text);
        let Some(stops) = stops else {
            return Release { text: self.release_to(self.joined.len()), stop: None };
        };
        if !countable {
            // As in vLLM (v1/engine/detokenizer.py): it may begin in here, but not end.
            self.floor = self.joined.len();
        } else if let Some(found) = stops.find(&self.joined, from) {
            // What was released cannot be taken back; engines that hold nothing back release too much.
            let cut = found.cut.max(self.released);
            self.joined.truncate(cut);
            return Release { text: self.release_to(cut), stop: Some(found.string.to_owned()) };
        }
        let sure = self.joined.len() - stops.undecided(&self.joined);
        Release { text: self.release_to(sure.max(self.released)), stop: None }
    }

    /// Releases what was held: no more text will come.
    pub(crate) fn finish(&mut self) -> String {
        self.release_to(self.joined.len())
    }

    fn release_to(&mut self, end: usize) -> String {
        let text = self.joined[self.released..end].to_owned();
        self.released = end;
        text
    }
}

#[cfg(test)]
mod tests {
    use super::super::body::Body;
    use super::*;

    fn stops() -> Stops {
        Stops::of(&Body::read(r#"{"stop":["STOP"]}"#.into()).unwrap()).unwrap().unwrap()
    }

    #[test]
    fn what_may_become_a_stop_string_is_held_until_it_cannot() {
        let (stops, mut spool) = (stops(), Spool::default());
        let mut push = |text| spool.push(text, Some(&stops), true).text;
        assert_eq!([push("a ST"), push("O"), push("NE")], ["a ", "", "STONE"]);
    }

    #[test]
    fn a_stop_string_in_three_pieces_ends_the_text_before_it() {
        let (stops, mut spool) = (stops(), Spool::default());
        spool.push("go S", Some(&stops), true);
        spool.push("TO", Some(&stops), true);
        assert_eq!(
            spool.push("P and on", Some(&stops), true),
            Release { text: String::new(), stop: Some("STOP".into()) }
        );
        assert_eq!(spool.joined(), "go ");
    }

    #[test]
    fn a_stop_string_before_min_tokens_does_not_count_but_may_begin_there() {
        let (stops, mut spool) = (stops(), Spool::default());
        assert_eq!(spool.push("STOP ST", Some(&stops), false).stop, None);
        assert_eq!(spool.push("OP", Some(&stops), true).stop, Some("STOP".into()));
        assert_eq!(spool.joined(), "STOP ");
    }
}

//! Stop strings and the text that is held back for them.

/// Why and where a stop string ended the text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StopMatch {
    /// The stop string, as it goes into `stop_reason`.
    pub stop: String,
}

/// Finds stop strings in generated text, and holds text back that could still turn
/// out to be part of one, as vLLM does (`v1/engine/detokenizer.py`,
/// `get_next_output_text` and `check_stop_strings`, read in 0.33.0): the last
/// `longest stop string − 1` characters, whatever they are.
#[derive(Clone, Debug, Default)]
pub struct StopMatcher {
    stops: Vec<String>,
    include_in_output: bool,
    /// Text that has been generated and not released, in characters of the whole text.
    text: Vec<char>,
    released: usize,
}

impl StopMatcher {
    /// A matcher for `stops`; with `include_in_output` the stop string itself is text.
    pub fn new(stops: Vec<String>, include_in_output: bool) -> Self {
        Self {
            stops: stops.into_iter().filter(|stop| !stop.is_empty()).collect(),
            include_in_output,
            text: Vec::new(),
            released: 0,
        }
    }

    /// Adds generated text. With `check` false (before `min_tokens`) a stop string in
    /// it does not count. After a match the text is cut, and [`Self::release`] gives
    /// all that is left of it.
    pub fn push(&mut self, text: &str, check: bool) -> Option<StopMatch> {
        let added = text.chars().count();
        self.text.extend(text.chars());
        if !check || added == 0 {
            return None;
        }
        for stop in &self.stops {
            let needle: Vec<char> = stop.chars().collect();
            let from = (self.text.len() + 1).saturating_sub(added + needle.len());
            let Some(at) = find(&self.text[from..], &needle).map(|at| at + from) else {
                continue;
            };
            let end = if self.include_in_output { at + needle.len() } else { at };
            self.text.truncate(end.max(self.released));
            return Some(StopMatch { stop: stop.clone() });
        }
        None
    }

    /// The text that may be sent now; all of it when `finished`.
    pub fn release(&mut self, finished: bool) -> String {
        let held = if finished { 0 } else { self.held_back() };
        let end = self.text.len().saturating_sub(held).max(self.released);
        let text = self.text[self.released..end].iter().collect();
        self.released = end;
        text
    }

    /// Characters held back while the stream runs.
    fn held_back(&self) -> usize {
        if self.include_in_output {
            return 0;
        }
        let longest = self.stops.iter().map(|stop| stop.chars().count()).max();
        longest.map_or(0, |longest| longest - 1)
    }
}

fn find(text: &[char], needle: &[char]) -> Option<usize> {
    text.windows(needle.len()).position(|window| window == needle)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matcher(stops: &[&str], include_in_output: bool) -> StopMatcher {
        StopMatcher::new(stops.iter().map(|stop| stop.to_string()).collect(), include_in_output)
    }

    /// The text that each piece releases, and the stop string that ends it.
    fn run(matcher: &mut StopMatcher, pieces: &[&str]) -> (Vec<String>, Option<String>) {
        let mut released = Vec::new();
        for piece in pieces {
            let hit = matcher.push(piece, true);
            released.push(matcher.release(hit.is_some()));
            if let Some(hit) = hit {
                return (released, Some(hit.stop));
            }
        }
        released.push(matcher.release(true));
        (released, None)
    }

    #[test]
    fn without_stop_strings_nothing_is_held() {
        assert_eq!(run(&mut matcher(&[], false), &["a", "", "bc"]).0, ["a", "", "bc", ""]);
    }

    /// `c_ids_stop` of the transcripts, Rust frontend, which sends a chunk a token.
    #[test]
    fn real_deltas_with_a_stop_string() {
        let pieces = ["", "\u{fffd}iz", "", "\u{fffd}7", "\r", "", "\u{fffd} eight"];
        let (released, stop) = run(&mut matcher(&[" ei"], false), &pieces);
        assert_eq!(released, ["", "\u{fffd}", "", "iz", "\u{fffd}", "", "7\r\u{fffd}"]);
        assert_eq!(stop.as_deref(), Some(" ei"));
    }

    /// `c_ids_stop_incl` of the transcripts: nothing is held back.
    #[test]
    fn real_deltas_with_the_stop_string_in_the_output() {
        let pieces = ["", "\u{fffd}iz", "", "\u{fffd}7", "\r", "", "\u{fffd} eight"];
        let (released, stop) = run(&mut matcher(&[" ei"], true), &pieces);
        assert_eq!(released, ["", "\u{fffd}iz", "", "\u{fffd}7", "\r", "", "\u{fffd} ei"]);
        assert_eq!(stop.as_deref(), Some(" ei"));
    }

    #[test]
    fn a_stop_string_over_two_tokens_is_found_and_held_text_comes_at_the_end() {
        let (released, stop) = run(&mut matcher(&["or h"], false), &["cor", " he"]);
        assert_eq!(released, ["", "c"]);
        assert_eq!(stop.as_deref(), Some("or h"));
        let (released, stop) = run(&mut matcher(&["or h"], false), &["cor", "gi"]);
        assert_eq!((released.concat(), stop), ("corgi".to_owned(), None));
    }

    #[test]
    fn before_min_tokens_a_stop_string_is_text() {
        let mut matcher = matcher(&["x"], false);
        assert_eq!(matcher.push("axb", false), None);
        assert_eq!(matcher.push("cxd", true).unwrap().stop, "x");
        assert_eq!(matcher.release(true), "axbc");
    }
}

//! Stop strings, matched by the router over the joined text.
//!
//! An engine that matches them itself holds text back whose ids it has already sent
//! (vllm#36830), and sees only its own half of a string that lies across the seam. So
//! where ids are carried, `stop` is not sent upstream, and this does its work.

use super::body::Body;
use super::json;

/// Most stop strings that are looked for in each chunk. OpenAI takes 4.
const MOST: usize = 256;

/// More stop strings than that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TooMany;

/// The stop strings of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stops {
    strings: Vec<String>,
    /// `include_stop_str_in_output`.
    include: bool,
}

/// A stop string that was found: the text ends at byte `cut`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Match<'a> {
    pub(crate) cut: usize,
    pub(crate) string: &'a str,
}

impl Stops {
    /// The stop strings, or `None` if there are none or they are not what engines accept:
    /// then the engine shall say so.
    ///
    /// # Errors
    /// There are too many to be matched here.
    pub(crate) fn of(body: &Body) -> Result<Option<Self>, TooMany> {
        let Some(text) = body.raw("stop") else { return Ok(None) };
        let mut strings = Some(Vec::new());
        let mut take = |text: &str| match (&mut strings, serde_json::from_str::<String>(text)) {
            (Some(strings), Ok(string)) if !string.is_empty() => {
                if strings.len() <= MOST {
                    strings.push(string);
                }
            }
            _ => strings = None,
        };
        if !json::each(text, &mut take) {
            take(text);
        }
        match strings {
            Some(strings) if strings.len() > MOST => Err(TooMany),
            Some(strings) if !strings.is_empty() => {
                Ok(Some(Self { strings, include: body.flag("include_stop_str_in_output") }))
            }
            _ => Ok(None),
        }
    }

    /// The stop string that is complete first, if it ends after byte `from` of `text`.
    pub(crate) fn find(&self, text: &str, from: usize) -> Option<Match<'_>> {
        let ends = self.strings.iter().filter_map(|string| {
            // It may begin before `from`, but must end after it.
            let mut begin = (from + 1).saturating_sub(string.len());
            while !text.is_char_boundary(begin) {
                begin += 1;
            }
            let start = begin + text.get(begin..)?.find(string.as_str())?;
            Some((start + string.len(), start, string))
        });
        let (end, start, string) = ends.min_by_key(|(end, ..)| *end)?;
        Some(Match { cut: if self.include { end } else { start }, string })
    }

    /// How many bytes at the end of `text` may be the beginning of a stop string.
    pub(crate) fn undecided(&self, text: &str) -> usize {
        let longest = self.strings.iter().map(String::len).max().unwrap_or(0).saturating_sub(1);
        (1..=longest.min(text.len()))
            .rev()
            .find(|&len| {
                let at = text.len() - len;
                text.is_char_boundary(at) && self.strings.iter().any(|s| s.len() > len && s.starts_with(&text[at..]))
            })
            .unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn of(stop: &Value) -> Result<Option<Stops>, TooMany> {
        Stops::of(&Body::read(json!({ "stop": stop }).to_string().into()).unwrap())
    }

    fn stops(stop: Value) -> Stops {
        of(&stop).unwrap().unwrap()
    }

    #[test]
    fn a_string_that_lies_across_the_seam_is_found() {
        let stops = stops(json!(["or h"]));
        assert_eq!(stops.find("cor he", 3), Some(Match { cut: 1, string: "or h" }));
    }

    #[test]
    fn a_string_that_ended_before_is_not_found_again() {
        assert_eq!(stops(json!("ab")).find("ab c", 2), None);
    }

    #[test]
    fn the_one_complete_first_wins_whatever_its_place_in_the_list() {
        assert_eq!(stops(json!(["cdef", "cd"])).find("abcdef", 0).unwrap().string, "cd");
    }

    #[test]
    fn only_what_may_become_a_stop_string_is_held() {
        let stops = stops(json!(["</s>", "é!"]));
        assert_eq!(["ab", "a<", "a</s", "aé", "</s>"].map(|text| stops.undecided(text)), [0, 1, 3, 2, 0]);
    }

    #[test]
    fn what_engines_refuse_is_left_to_them() {
        for bad in [json!(""), json!(["a", ""]), json!([]), json!(7), json!([1]), json!(null)] {
            assert_eq!(of(&bad), Ok(None));
        }
    }

    #[test]
    fn more_than_can_be_looked_for_are_said_to_be_too_many() {
        assert!(matches!(of(&json!(vec!["a"; MOST])), Ok(Some(_))));
        assert_eq!(of(&json!(vec!["a"; MOST + 1])), Err(TooMany));
        assert_eq!(of(&json!(vec!["a"; 3 * MOST])), Err(TooMany));
    }
}

//! A parser for `text/event-stream` (WHATWG HTML, 9.2.6), fed with bytes as the transport cuts them.
//!
//! Every byte that goes in comes out again in exactly one event's `raw`, in order, so that
//! what needs no change is passed on untouched.

use bytes::{Bytes, BytesMut};

/// Largest event that is kept, in bytes. A first chunk with 1 M prompt ids has about 7 MiB.
pub const MAX_EVENT: usize = 32 * 1024 * 1024;

/// An event beyond [`MAX_EVENT`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("an event has more than {MAX_EVENT} bytes")]
pub struct TooLarge;

/// One event, as it was sent and as it is understood.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The bytes as they came, with the empty line that ends them.
    pub raw: Bytes,
    /// The `data` lines joined with a newline; `None` for comments and the like.
    pub data: Option<Bytes>,
    /// The last `event` line's value, if there was one.
    pub name: Option<Bytes>,
}

/// Cuts a byte stream into events.
#[derive(Debug, Default)]
pub struct Parser {
    buffer: BytesMut,
    /// Bytes of `buffer` that have been looked at.
    scanned: usize,
    /// Where the current line begins in `buffer`.
    line: usize,
    /// The current event has a line that is not empty.
    begun: bool,
    /// The last byte looked at was a CR: a LF that follows belongs to it.
    after_cr: bool,
    /// Nothing has been looked at yet, so a byte order mark may come.
    fresh: bool,
}

impl Parser {
    /// A parser at the beginning of a stream.
    #[must_use]
    pub fn new() -> Self {
        Self { fresh: true, ..Self::default() }
    }

    /// Takes what the transport delivered.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next complete event.
    ///
    /// # Errors
    /// The event under way is larger than [`MAX_EVENT`].
    pub fn next_event(&mut self) -> Result<Option<Event>, TooLarge> {
        while let Some(&byte) = self.buffer.get(self.scanned) {
            let at = self.scanned;
            self.scanned += 1;
            let after_cr = std::mem::replace(&mut self.after_cr, byte == b'\r');
            if after_cr && byte == b'\n' {
                self.line = self.scanned;
            } else if byte == b'\n' || byte == b'\r' {
                let empty = self.line == at;
                if empty && self.begun {
                    if byte == b'\r' && self.buffer.get(self.scanned) == Some(&b'\n') {
                        self.scanned += 1;
                        self.after_cr = false;
                    }
                    return Ok(Some(self.take()));
                }
                self.begun |= !empty;
                self.line = self.scanned;
            } else if let Some(rest) = memchr_line_end(&self.buffer[self.scanned..]) {
                self.scanned += rest;
            } else {
                self.scanned = self.buffer.len();
            }
        }
        if self.buffer.len() > MAX_EVENT { Err(TooLarge) } else { Ok(None) }
    }

    /// What has come and is not yet a complete event.
    #[must_use]
    pub fn rest(&self) -> &[u8] {
        &self.buffer
    }

    fn take(&mut self) -> Event {
        let raw = self.buffer.split_to(self.scanned).freeze();
        self.scanned = 0;
        self.line = 0;
        self.begun = false;
        let bom = std::mem::take(&mut self.fresh) && raw.starts_with(b"\xEF\xBB\xBF");
        understand(raw, if bom { 3 } else { 0 })
    }
}

fn memchr_line_end(bytes: &[u8]) -> Option<usize> {
    memchr::memchr2(b'\n', b'\r', bytes)
}

fn understand(raw: Bytes, skip: usize) -> Event {
    let mut data: Option<Bytes> = None;
    let mut name = None;
    let mut at = skip;
    while at < raw.len() {
        let end = memchr_line_end(&raw[at..]).map_or(raw.len(), |n| at + n);
        let line = &raw[at..end];
        let colon = line.iter().position(|&byte| byte == b':').unwrap_or(line.len());
        let mut value = (at + colon + 1).min(end);
        if raw.get(value) == Some(&b' ') && value < end {
            value += 1;
        }
        match &line[..colon] {
            b"data" => {
                let value = raw.slice(value..end);
                data = Some(match data {
                    None => value,
                    Some(before) => [&before[..], b"\n", &value[..]].concat().into(),
                });
            }
            b"event" => name = Some(raw.slice(value..end)),
            _ => {}
        }
        at = end + 1;
    }
    Event { raw, data, name }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events(pieces: &[&str]) -> Vec<(Option<String>, Option<String>)> {
        let mut parser = Parser::new();
        let mut events = Vec::new();
        let mut raw = Vec::new();
        for piece in pieces {
            parser.push(piece.as_bytes());
            while let Some(event) = parser.next_event().unwrap() {
                raw.extend_from_slice(&event.raw);
                let text = |bytes: Option<Bytes>| bytes.map(|b| String::from_utf8(b.to_vec()).unwrap());
                events.push((text(event.name), text(event.data)));
            }
        }
        raw.extend_from_slice(parser.rest());
        assert_eq!(raw, pieces.concat().as_bytes(), "no byte is lost or made up");
        events
    }

    fn data(pieces: &[&str]) -> Vec<String> {
        events(pieces).into_iter().filter_map(|(_, data)| data).collect()
    }

    #[test]
    fn one_space_after_the_colon_is_optional_and_only_one() {
        assert_eq!(data(&["data: a\n\ndata:b\n\ndata:  c\n\n"]), ["a", "b", " c"]);
    }

    #[test]
    fn every_line_end_ends_a_line() {
        assert_eq!(data(&["data: a\r\n\r\ndata: b\r\rdata: c\n\r\ndata: d\n\n"]), ["a", "b", "c", "d"]);
    }

    #[test]
    fn a_line_end_cut_in_two_is_one_line_end() {
        assert_eq!(data(&["data: a\r", "\ndata: b\r", "\n\r", "\ndata: c\r", "\n\r\n"]), ["a\nb", "c"]);
    }

    #[test]
    fn comments_and_other_fields_carry_no_data() {
        assert_eq!(data(&[": ping\n\nid: 7\nretry: 5\n\nevent: x\ndata: a\n\n"]), ["a"]);
        assert_eq!(events(&["event: error\ndata: {}\n\n"]), [(Some("error".to_owned()), Some("{}".to_owned()))]);
    }

    #[test]
    fn several_data_lines_are_joined() {
        assert_eq!(data(&["data: {\"a\":\ndata: 1}\n\n"]), ["{\"a\":\n1}"]);
        assert_eq!(data(&["data\ndata\n\n"]), ["\n"]);
    }

    #[test]
    fn a_byte_order_mark_is_skipped_once() {
        assert_eq!(data(&["\u{feff}data: a\n\n\u{feff}data: b\n\n"]), ["a"]);
    }

    #[test]
    fn an_event_may_be_cut_at_any_byte() {
        let whole = "\n: c\r\n\r\ndata: {\"x\":\"é\"}\n\ndata: [DONE]\r\n\r\n";
        let expected = events(&[whole]);
        for cut in (1..whole.len()).filter(|&cut| whole.is_char_boundary(cut)) {
            assert_eq!(events(&[&whole[..cut], &whole[cut..]]), expected, "cut at {cut}");
        }
    }

    #[test]
    fn an_event_without_end_is_given_up_at_the_bound() {
        let mut parser = Parser::new();
        parser.push(&vec![b'x'; MAX_EVENT + 1]);
        assert_eq!(parser.next_event(), Err(TooLarge));
    }
}

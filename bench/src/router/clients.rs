//! Clients that cost next to nothing: raw sockets, one thread, no JSON. They must not take the time that
//! they measure.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use lastgasp::sensors::proc::monotonic_now;
use nix::time::{ClockId, clock_gettime};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;

/// What is asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Order {
    pub(super) tokens: usize,
    /// Between tokens; zero for as fast as they come.
    pub(super) pace: Duration,
}

/// One token as a client saw it. Times are CLOCK_MONOTONIC in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Token {
    pub(super) sent: u64,
    pub(super) received: u64,
    pub(super) engine: u8,
}

/// A stream, to its end.
#[derive(Debug, Default)]
pub(super) struct Read {
    pub(super) tokens: Vec<Token>,
    /// Each token once, in order, and `[DONE]`.
    pub(super) whole: bool,
}

/// What a crowd of clients has read.
#[derive(Debug, Default)]
pub(super) struct Crowded {
    /// In the order of the groups.
    pub(super) groups: Vec<Vec<Read>>,
    /// What the clients' thread has run.
    pub(super) cpu: Duration,
}

/// Clients in a thread of their own.
#[derive(Debug)]
pub(super) struct Crowd {
    /// How many streams have their first token.
    pub(super) begun: watch::Receiver<usize>,
    over: oneshot::Receiver<Crowded>,
}

impl Crowd {
    /// Begins to send so many requests to each of these, in turns, spread over `ramp`.
    pub(super) fn gather(groups: Vec<(SocketAddr, usize)>, order: Order, ramp: Duration) -> io::Result<Self> {
        let (begin, begun) = watch::channel(0);
        let (tell, over) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        std::thread::Builder::new().name("clients".to_owned()).spawn(move || {
            let groups = runtime.block_on(crowd(groups, order, ramp, begin));
            // The runtime has no other thread.
            let cpu = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map(Duration::from).unwrap_or_default();
            _ = tell.send(Crowded { groups, cpu });
        })?;
        Ok(Self { begun, over })
    }

    /// Waits until so many streams have their first token.
    pub(super) async fn begun(&mut self, count: usize) {
        // If a client fails, what it has not read tells.
        _ = self.begun.wait_for(|begun| *begun >= count).await;
    }

    /// Waits until every stream has ended.
    pub(super) async fn over(self) -> Crowded {
        self.over.await.unwrap_or_default()
    }
}

async fn crowd(
    groups: Vec<(SocketAddr, usize)>,
    order: Order,
    ramp: Duration,
    begun: watch::Sender<usize>,
) -> Vec<Vec<Read>> {
    let (count, most) = (groups.len(), groups.iter().map(|(_, streams)| *streams).max().unwrap_or_default());
    let begun = Arc::new(begun);
    let begin = tokio::time::Instant::now();
    let mut tasks = JoinSet::new();
    for index in 0..most {
        tokio::time::sleep_until(begin + ramp.mul_f64(index as f64 / most as f64)).await;
        for (group, (at, streams)) in groups.iter().enumerate() {
            if index < *streams {
                let (at, begun) = (*at, Arc::clone(&begun));
                tasks.spawn(async move { (group, read(at, order, &begun).await.unwrap_or_default()) });
            }
        }
    }
    drop(begun);
    let mut found: Vec<Vec<Read>> = (0..count).map(|_| Vec::new()).collect();
    while let Some(read) = tasks.join_next().await {
        let (group, read) = read.expect("no client panics");
        found[group].push(read);
    }
    found
}

/// Asks for a stream and reads it. `begun` counts the streams that have their first token.
async fn read(at: SocketAddr, order: Order, begun: &watch::Sender<usize>) -> io::Result<Read> {
    let body = format!(
        r#"{{"model":"m","prompt":"x","stream":true,"max_tokens":{},"user":"{}"}}"#,
        order.tokens,
        order.pace.as_micros()
    );
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: {at}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let mut connection = TcpStream::connect(at).await?;
    connection.set_nodelay(true)?;
    connection.write_all((head + &body).as_bytes()).await?;
    let mut reader =
        Reader { order, read: Read { tokens: Vec::with_capacity(order.tokens), whole: false }, ..Reader::default() };
    let mut buffer = vec![0; 16 * 1024];
    while !reader.over {
        let count = connection.read(&mut buffer).await?;
        if count == 0 {
            break;
        }
        let first = reader.read.tokens.is_empty();
        reader.take(&buffer[..count], monotonic_now().0);
        if first && !reader.read.tokens.is_empty() {
            begun.send_modify(|begun| *begun += 1);
        }
    }
    Ok(reader.read)
}

impl Default for Order {
    fn default() -> Self {
        Self { tokens: 1, pace: Duration::ZERO }
    }
}

/// Where in a chunked body (RFC 9112, 7.1) a reader is.
#[derive(Clone, Copy, Debug, Default)]
enum Place {
    #[default]
    Head,
    Size,
    Data(usize),
    End,
}

#[derive(Debug, Default)]
struct Reader {
    order: Order,
    read: Read,
    place: Place,
    /// What of a line or an event has come.
    partial: Vec<u8>,
    event: Vec<u8>,
    /// Nothing more will come that matters.
    over: bool,
}

impl Reader {
    fn take(&mut self, mut bytes: &[u8], now: u64) {
        while !bytes.is_empty() && !self.over {
            match self.place {
                Place::Data(rest) => {
                    let (data, after) = bytes.split_at(rest.min(bytes.len()));
                    self.data(data, now);
                    bytes = after;
                    self.place = if data.len() == rest { Place::End } else { Place::Data(rest - data.len()) };
                }
                Place::Head | Place::Size | Place::End => {
                    let end = bytes.iter().position(|byte| *byte == b'\n');
                    let (line, after) = bytes.split_at(end.map_or(bytes.len(), |end| end + 1));
                    self.partial.extend_from_slice(line);
                    bytes = after;
                    if end.is_some() {
                        let line = std::mem::take(&mut self.partial);
                        self.line(line.trim_ascii());
                    }
                }
            }
        }
    }

    fn line(&mut self, line: &[u8]) {
        match self.place {
            Place::Head if line.is_empty() => self.place = Place::Size,
            Place::Head => {}
            Place::End => self.place = Place::Size,
            Place::Size | Place::Data(_) => {
                let size = std::str::from_utf8(line).ok().and_then(|size| usize::from_str_radix(size, 16).ok());
                match size {
                    Some(size) if size > 0 => self.place = Place::Data(size),
                    _ => self.over = true,
                }
            }
        }
    }

    fn data(&mut self, mut data: &[u8], now: u64) {
        while let Some(end) = data.iter().position(|byte| *byte == b'\n') {
            self.event.extend_from_slice(&data[..end]);
            data = &data[end + 1..];
            let line = std::mem::take(&mut self.event);
            self.token(&line, now);
            self.event = line;
            self.event.clear();
        }
        self.event.extend_from_slice(data);
    }

    fn token(&mut self, line: &[u8], now: u64) {
        const TEXT: &[u8] = b"\"text\":\" ";
        if line == b"data: [DONE]" {
            self.read.whole = !self.over && self.read.tokens.len() == self.order.tokens;
            self.over = true;
            return;
        }
        // A chunk begins with some 90 bytes of head.
        let Some(at) = line.windows(TEXT.len()).position(|piece| piece == TEXT) else { return };
        let text = &line[at + TEXT.len()..];
        let mut numbers = text.split(|byte| !byte.is_ascii_digit()).map(|digits| {
            digits.iter().fold(0u64, |sum, digit| sum.wrapping_mul(10).wrapping_add(u64::from(digit - b'0')))
        });
        let (number, sent) = (numbers.next().unwrap_or(u64::MAX), numbers.next().unwrap_or(0));
        if usize::try_from(number) != Ok(self.read.tokens.len()) {
            // Missing or repeated.
            self.over = true;
            return;
        }
        let engine = text.iter().copied().find(u8::is_ascii_alphabetic).unwrap_or(b'?');
        self.read.tokens.push(Token { sent, received: now, engine });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8], tokens: usize, cut: usize) -> Read {
        let mut reader = Reader { order: Order { tokens, pace: Duration::ZERO }, ..Reader::default() };
        bytes.chunks(cut).for_each(|piece| reader.take(piece, 9));
        reader.read
    }

    #[test]
    fn a_token_that_is_missing_or_comes_twice_is_seen_however_the_bytes_are_cut() {
        let stream = |numbers: &[u32]| {
            let mut bytes = b"HTTP/1.1 200 OK\r\na: b\r\n\r\n".to_vec();
            for number in numbers {
                let event = format!("data: {{\"text\":\" {number}a77\"}}\n\n");
                bytes.extend(format!("{:x}\r\n{event}\r\n", event.len()).bytes());
            }
            bytes.extend(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n");
            bytes
        };
        for cut in [1, 2, 7, 1000] {
            assert!(read(&stream(&[0, 1, 2]), 3, cut).whole, "{cut}");
            assert!(!read(&stream(&[0, 2]), 3, cut).whole, "{cut}");
            assert!(!read(&stream(&[0, 1, 1]), 3, cut).whole, "{cut}");
            assert!(!read(&stream(&[0, 1]), 3, cut).whole, "{cut}");
        }
        let seen = read(&stream(&[0]), 1, 5).tokens[0];
        assert_eq!((seen.sent, seen.received, seen.engine), (77, 9, b'a'));
    }
}

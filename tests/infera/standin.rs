//! Infera's side of its NATS transport, as far as a failover sees it.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use lastgasp_tests::process::GIVE_UP;

pub(crate) fn request_subject(id: &str) -> String {
    format!("infera.req.{}", URL_SAFE_NO_PAD.encode(id))
}

pub(crate) fn cancel_subject(id: &str) -> String {
    format!("infera.cancel.{}", URL_SAFE_NO_PAD.encode(id))
}

/// A connection to NATS that shows the protocol's bytes as they are.
pub(crate) struct Wire(BufReader<TcpStream>);

impl Wire {
    /// Subscribes to these subjects, by their place.
    pub(crate) fn hearing(url: &str, subjects: &[&str]) -> Self {
        let stream = TcpStream::connect(url.trim_start_matches("nats://")).unwrap();
        stream.set_read_timeout(Some(GIVE_UP)).unwrap();
        let mut wire = Self(BufReader::new(stream));
        assert!(wire.line().starts_with("INFO "));
        wire.write("CONNECT {\"verbose\":false,\"headers\":true,\"no_responders\":true}\r\n");
        for (place, subject) in subjects.iter().enumerate() {
            wire.write(&format!("SUB {subject} {place}\r\n"));
        }
        wire.write("PING\r\n");
        assert_eq!(wire.line(), "PONG\r\n");
        wire
    }

    pub(crate) fn write(&mut self, text: &str) {
        self.0.get_mut().write_all(text.as_bytes()).unwrap();
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        line
    }

    /// The next message, with its protocol line and all.
    pub(crate) fn message(&mut self) -> String {
        loop {
            let line = self.line();
            match line.trim() {
                "PING" => self.write("PONG\r\n"),
                "PONG" | "" => {}
                said if said.starts_with("INFO ") => {}
                said => {
                    let length: usize = said.rsplit(' ').next().unwrap().parse().unwrap();
                    let mut rest = vec![0; length + 2];
                    self.0.read_exact(&mut rest).unwrap();
                    return line + std::str::from_utf8(&rest).unwrap();
                }
            }
        }
    }
}

/// An error frame with this text, at the subscription in this place, as it is on the wire.
pub(crate) fn error_frame(inbox: &str, place: usize, text: &str) -> String {
    let headers = "NATS/1.0\r\nrs-type: error\r\n\r\n";
    let (head, all) = (headers.len(), headers.len() + text.len());
    format!("HMSG {inbox} {place} {head} {all}\r\n{headers}{text}\r\n")
}

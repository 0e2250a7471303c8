//! Signals, answers, records, leases, tokens and lists of servers under damaged input.
#![forbid(unsafe_code)]

use lastgasp_protocol::ClosedName as _;
use std::path::Path;

use lastgasp_protocol::{Answer, MigrateSignal, Name, NodeLease, RouterLease, WorkerRecord};

fn run<T: std::hash::Hash>(target: &str, words: &[&str], parse: impl Fn(&[u8]) -> T) {
    lastgasp_fuzz::run(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus"), target, &[], words, parse);
}

const WORDS: [&str; 8] = [
    r#""schema":1,"#,
    r#""schema":2,"#,
    r#""epoch":18446744073709551615,"#,
    r#""mode":"handover","#,
    r#""workers":[],"#,
    r#""x":{"y":[1,2]},"#,
    r#"\u001b[2J"#,
    r#"\ud800"#,
];

#[test]
fn a_signal_is_refused_or_read_back_as_it_was_written() {
    run("signal", &WORDS, |input| match MigrateSignal::parse("lastgasp.v1.migrate.gpu-a", input) {
        Ok(signal) => {
            assert!(!signal.cause.to_string().contains(char::is_control));
            let again = MigrateSignal::parse("lastgasp.v1.migrate.gpu-a", &signal.to_json()).unwrap();
            assert_eq!(again, signal);
            (None, signal.workers.len().min(3), signal.mode.is_some(), signal.cause.sender.is_some())
        }
        Err(error) => (Some(error.as_str()), error.to_string().len().min(40), false, false),
    });
}

#[test]
fn an_answer_is_refused_or_read_back_as_it_was_written() {
    run("answer", &WORDS, |input| match Answer::parse(input) {
        Ok(answer) => {
            // Counts that are not said are zeros.
            let counts = Some(answer.counts.unwrap_or_default());
            assert_eq!(Answer::parse(&answer.to_json()).unwrap(), Answer { counts, ..answer.clone() });
            (None, answer.counts.is_some())
        }
        Err(error) => (Some(error.as_str()), false),
    });
}

#[test]
fn a_record_or_lease_is_refused_or_read_back_as_it_was_written() {
    run("record", &WORDS, |input| {
        let lease = NodeLease::parse(input);
        if let Ok(lease) = &lease {
            assert_eq!(NodeLease::parse(&lease.to_json()).as_ref(), Ok(lease));
        }
        let router = RouterLease::parse(input).is_ok();
        match WorkerRecord::parse("gpu-a.vllm-0", input) {
            Ok(record) => {
                let texts = record.models.iter().chain([&record.endpoint, &record.engine]);
                assert!(texts.chain(record.labels.values()).all(|text| !text.contains(char::is_control)));
                assert_eq!(WorkerRecord::parse("gpu-a.vllm-0", &record.to_json()).as_ref(), Ok(&record));
                (None, lease.is_ok(), router, record.models.len().min(3))
            }
            Err(error) => (Some(error.as_str()), lease.is_ok(), router, error.to_string().len().min(40)),
        }
    });
}

#[test]
fn a_token_is_refused_or_has_one_spelling() {
    run("token", &["=2F", "=C3=A9", "=1B", "=41"], |input| {
        let Ok(text) = std::str::from_utf8(input) else { return None };
        let name = Name::from_token(text);
        if let Ok(name) = &name {
            assert_eq!(name.token(), text);
        }
        Some(name.map(|name| name.as_str().len().min(8)).map_err(|error| error.to_string().len()))
    });
}

#[cfg(feature = "nats")]
#[test]
fn a_list_of_servers_is_refused_or_can_be_connected_to() {
    use lastgasp_protocol::login;
    run("servers", &["nats://", "tls://", "ws://", ":4222", "[::1]", ",", "@", "user:hunter2@"], |input| {
        let Ok(text) = std::str::from_utf8(input) else { return None };
        let servers = login::servers(text);
        if let Err(error) = &servers {
            assert!(!text.contains('@') || !error.to_string().contains("hunter2"));
        }
        Some(servers.map(|servers| servers.len().min(4)).map_err(|error| error.to_string().len().min(60)))
    });
}

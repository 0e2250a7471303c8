//! What Infera's routers get when a worker is lost.

use async_nats::HeaderMap;
use lastgasp::notify::NotificationKind;
use lastgasp_protocol::CauseKind;

use crate::notifications::{self, name};
use crate::sink::Sink;
use crate::standin::{Wire, cancel_subject, error_frame, request_subject};

const ALPHA: (&str, &str) = ("alpha", "10.0.0.1:8080");
const BETA: (&str, &str) = ("beta", "10.0.0.2:8080");

#[tokio::test(flavor = "multi_thread")]
async fn every_open_stream_of_a_dead_worker_ends_and_then_what_still_runs_is_cancelled() {
    let mut sink = Sink::watching(&[ALPHA, BETA], 100, None).await;
    let mut wire = Wire::hearing(&sink.nats.url(), &["_INBOX.>", &cancel_subject(ALPHA.1)]);
    for inbox in ["_INBOX.one", "_INBOX.back", "_INBOX.two"] {
        sink.ask(ALPHA.1, inbox).await;
    }
    sink.ask(BETA.1, "_INBOX.healthy").await;
    sink.remembers("alpha", 3).await;
    sink.remembers("beta", 1).await;
    sink.client.publish(cancel_subject(ALPHA.1), "_INBOX.back".into()).await.unwrap();
    sink.remembers("alpha", 2).await;
    assert!(wire.message().ends_with("_INBOX.back\r\n"), "the router's own cancellation");

    let done = sink.lose(&["alpha"], CauseKind::ProcessKilled).await;

    let text = "lastgasp: worker lost (process_killed)";
    assert_eq!(done, [format!("10.0.0.1:8080: 2 of 2 inboxes got \"{text}\"")]);
    assert_eq!(wire.message(), error_frame("_INBOX.two", 0, text));
    assert_eq!(wire.message(), error_frame("_INBOX.one", 0, text));
    for inbox in ["_INBOX.two", "_INBOX.one"] {
        assert_eq!(wire.message(), format!("MSG {} 1 10\r\n{inbox}\r\n", cancel_subject(ALPHA.1)));
    }
    // Nothing else was sent: neither to the one that was taken back, nor to the healthy worker's.
    sink.client.publish("_INBOX.end", "".into()).await.unwrap();
    assert_eq!(wire.message(), "MSG _INBOX.end 0 0\r\n\r\n");
    assert_eq!(sink.remembered("beta"), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_was_asked_to_leave_is_told_of_in_infera_s_own_words() {
    for kind in [CauseKind::Terminated, CauseKind::Commanded] {
        let mut sink = Sink::watching(&[ALPHA], 100, None).await;
        let mut wire = Wire::hearing(&sink.nats.url(), &["_INBOX.>"]);
        sink.ask(ALPHA.1, "_INBOX.one").await;
        sink.remembers("alpha", 1).await;
        sink.lose(&["alpha"], kind).await;
        assert_eq!(wire.message(), error_frame("_INBOX.one", 0, "infera: worker draining"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_hands_over_and_lives_loses_only_what_can_be_moved() {
    let mut sink = Sink::watching(&[ALPHA], 100, None).await;
    let mut wire = Wire::hearing(&sink.nats.url(), &["_INBOX.>", &cancel_subject(ALPHA.1)]);
    sink.ask_for(ALPHA.1, "_INBOX.movable", r#"{"migratable": true, "body": {"messages": []}}"#).await;
    sink.ask_for(ALPHA.1, "_INBOX.two", r#"{"migratable": true, "body": {"n": 2}}"#).await;
    sink.ask_for(ALPHA.1, "_INBOX.limit0", r#"{"migratable": false, "body": {}}"#).await;
    sink.remembers("alpha", 3).await;

    let text = "infera: worker draining";
    assert_eq!(sink.notifier.hands_over(&notifications::lost(&["alpha"], CauseKind::Commanded)), 1);

    assert_eq!(sink.done().await, format!("10.0.0.1:8080: 1 of 1 inboxes got \"{text}\"; 2 go on"));
    assert_eq!(wire.message(), error_frame("_INBOX.movable", 0, text));
    assert_eq!(wire.message(), format!("MSG {} 1 14\r\n_INBOX.movable\r\n", cancel_subject(ALPHA.1)));
    // It answers what comes now by itself.
    sink.ask(ALPHA.1, "_INBOX.new").await;
    sink.remembers("alpha", 3).await;
    let text = "lastgasp: worker lost (process_killed)";
    sink.lose(&["alpha"], CauseKind::ProcessKilled).await;
    for inbox in ["_INBOX.new", "_INBOX.limit0", "_INBOX.two"] {
        assert_eq!(wire.message(), error_frame(inbox, 0, text));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn in_throttle_mode_the_inbox_is_in_the_header() {
    let mut sink = Sink::watching(&[ALPHA], 100, None).await;
    let mut wire = Wire::hearing(&sink.nats.url(), &["_INBOX.>"]);
    let mut headers = HeaderMap::new();
    headers.insert("rs-inbox", "_INBOX.throttled");
    let subject = request_subject(ALPHA.1);
    sink.client.publish_with_reply_and_headers(subject, "_INBOX.puback", headers, "{}".into()).await.unwrap();
    sink.remembers("alpha", 1).await;

    sink.lose(&["alpha"], CauseKind::Hung).await;

    assert_eq!(wire.message(), error_frame("_INBOX.throttled", 0, "lastgasp: worker lost (hung)"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_cannot_make_the_daemon_publish_elsewhere() {
    let mut sink = Sink::watching(&[ALPHA], 100, None).await;
    let mut wire = Wire::hearing(&sink.nats.url(), &["lastgasp.v1.>", "_INBOX.end"]);
    let mut headers = HeaderMap::new();
    headers.insert("rs-inbox", "lastgasp.v1.signal.gpu-a");
    let subject = request_subject(ALPHA.1);
    sink.client.publish_with_reply_and_headers(subject, "_INBOX.puback", headers, "{}".into()).await.unwrap();
    sink.ask(ALPHA.1, "_INBOX.end").await;
    sink.remembers("alpha", 1).await;

    sink.lose(&["alpha"], CauseKind::OomKilled).await;

    assert_eq!(wire.message(), error_frame("_INBOX.end", 1, "lastgasp: worker lost (oom_killed)"));
    assert_eq!(sink.lost("request"), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_worker_s_requests_are_answered_until_it_serves_again() {
    let mut sink = Sink::watching(&[ALPHA], 100, None).await;
    let mut wire = Wire::hearing(&sink.nats.url(), &["_INBOX.>"]);
    let text = "lastgasp: worker lost (process_crashed)";
    sink.lose(&["alpha"], CauseKind::ProcessCrashed).await;
    for inbox in ["_INBOX.one", "_INBOX.two"] {
        sink.ask(ALPHA.1, inbox).await;
        assert_eq!(wire.message(), error_frame(inbox, 0, text));
    }

    sink.listed("alpha", NotificationKind::Serving, 2);
    sink.ask(ALPHA.1, "_INBOX.three").await;
    sink.remembers("alpha", 1).await;

    // A worker that is held down serves too.
    sink.lose(&["alpha"], CauseKind::ProcessCrashed).await;
    assert_eq!(wire.message(), error_frame("_INBOX.three", 0, text));
    sink.notifier.recovers(&name("alpha"));
    sink.ask(ALPHA.1, "_INBOX.four").await;
    sink.remembers("alpha", 1).await;
    sink.client.publish("_INBOX.end", "".into()).await.unwrap();
    assert_eq!(wire.message(), "MSG _INBOX.end 0 0\r\n\r\n", "no more answers in its place");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_too_much_to_remember_is_counted() {
    let mut sink = Sink::watching(&[ALPHA], 2, None).await;
    let mut wire = Wire::hearing(&sink.nats.url(), &["_INBOX.>"]);
    for inbox in ["_INBOX.one", "_INBOX.two", "_INBOX.three"] {
        sink.ask(ALPHA.1, inbox).await;
    }
    while sink.lost("request") == 0 {
        tokio::task::yield_now().await;
    }
    sink.lose(&["alpha"], CauseKind::ProcessKilled).await;
    let text = "lastgasp: worker lost (process_killed)";
    assert_eq!(wire.message(), error_frame("_INBOX.three", 0, text));
    assert_eq!(wire.message(), error_frame("_INBOX.two", 0, text));
    assert_eq!(sink.lost("request"), 1);
}

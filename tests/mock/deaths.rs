//! How it dies, and what its clients see of it, as docs/engines.md has it.

use std::os::unix::process::ExitStatusExt;

use lastgasp_tests::client::{Ending, LiveStream, Transcript};
use lastgasp_tests::engine::Engine;
use lastgasp_tests::process::{GIVE_UP, Identity};
use lastgasp_tests::reference::Reference;
use nix::sys::signal::Signal;
use serde_json::json;

use crate::{chat, engine};

/// A stream of which ten tokens have come.
async fn running_stream(engine: &Engine) -> LiveStream {
    let (endpoint, body) = chat(3000);
    let mut stream = LiveStream::open(engine.ready.http, endpoint, &body).await.unwrap();
    stream.tokens(10).await.unwrap();
    stream
}

/// What came is a beginning of the right answer, and no more than that.
fn assert_cut_short(engine: &Engine, transcript: &Transcript) {
    let (endpoint, body) = chat(3000);
    let whole = Reference::of(endpoint, &body, &engine.dialect()).unwrap();
    assert!(whole.ids.starts_with(&transcript.ids) && transcript.ids.len() < whole.ids.len());
    assert!(whole.text.starts_with(&transcript.text));
}

#[tokio::test]
async fn python_reports_the_death_of_its_core_like_a_success_and_exits_with_0() {
    let (mut engine, _folder) = engine(&[]).await;
    let stream = running_stream(&engine).await;
    engine.signal_core(Signal::SIGKILL);
    let transcript = stream.finish().await.unwrap();
    assert_cut_short(&engine, &transcript);
    assert_eq!(
        transcript.error.as_ref().unwrap().to_string(),
        json!({
            "message": "EngineCore encountered an issue. See stack trace (above) for the root cause.",
            "type": "InternalServerError", "param": null, "code": 500
        })
        .to_string()
    );
    assert_eq!(transcript.dones, 1);
    assert_eq!(transcript.finish_reasons, Vec::<String>::new());
    assert_eq!(transcript.ending, Some(Ending::Whole));
    assert_eq!(engine.process.exited().await.unwrap().code(), Some(0));
}

#[tokio::test]
async fn rust_says_nothing_of_the_death_of_its_core_and_exits_with_1() {
    let (mut engine, _folder) = engine(&["--frontend", "rust", "--rust-notice-ms", "300"]).await;
    let stream = running_stream(&engine).await;
    engine.signal_core(Signal::SIGKILL);
    let transcript = stream.finish().await.unwrap();
    assert_cut_short(&engine, &transcript);
    assert_eq!((transcript.error, transcript.dones), (None, 0));
    assert!(matches!(transcript.ending, Some(Ending::Broken(_))), "{:?}", transcript.ending);
    assert_eq!(engine.process.exited().await.unwrap().code(), Some(1));
}

#[tokio::test]
async fn the_parent_of_a_grpc_server_outlives_its_core() {
    let (mut engine, _folder) = engine(&["--grpc-mode"]).await;
    let stream = running_stream(&engine).await;
    engine.signal_core(Signal::SIGKILL);
    assert!(stream.finish().await.unwrap().error.is_some());
    let health = reqwest::get(format!("{}/health", engine.endpoint())).await.unwrap();
    assert_eq!(health.status(), 503);
    assert!(!engine.process.has_exited());
    engine.signal_root(Signal::SIGTERM);
    assert_eq!(engine.process.exited().await.unwrap().code(), Some(0));
}

#[tokio::test]
async fn a_killed_api_server_leaves_its_core_behind() {
    let (mut engine, _folder) = engine(&[]).await;
    let stream = running_stream(&engine).await;
    engine.signal_root(Signal::SIGKILL);
    assert_eq!(engine.process.exited().await.unwrap().signal(), Some(9));
    let transcript = stream.finish().await.unwrap();
    assert!(matches!(transcript.ending, Some(Ending::Broken(_))));
    assert!(engine.core.is_alive());
}

#[tokio::test]
async fn sigterm_aborts_every_stream_and_exits_with_0() {
    for frontend in ["python", "rust"] {
        let (mut engine, _folder) = engine(&["--frontend", frontend]).await;
        let stream = running_stream(&engine).await;
        engine.signal_root(Signal::SIGTERM);
        let transcript = stream.finish().await.unwrap();
        assert_cut_short(&engine, &transcript);
        assert_eq!(transcript.finish_reasons, ["abort"]);
        assert_eq!((transcript.error, transcript.dones), (None, 1));
        assert_eq!(engine.process.exited().await.unwrap().code(), Some(0));
        assert!(!engine.core.is_alive());
    }
}

#[tokio::test]
async fn a_drain_lets_streams_finish_and_gives_new_ones_nothing() {
    let arguments = ["--shutdown-timeout", "60", "--drain-linger-ms", "100", "--tokens-per-second", "200"];
    let (mut engine, _folder) = engine(&arguments).await;
    let (endpoint, body) = chat(200);
    let mut stream = LiveStream::open(engine.ready.http, endpoint, &body).await.unwrap();
    stream.tokens(10).await.unwrap();
    engine.signal_root(Signal::SIGTERM);
    // The signal is taken asynchronously: until then new streams are served as ever.
    let nothing = async {
        loop {
            let late = LiveStream::open(engine.ready.http, endpoint, &chat(1).1).await.unwrap();
            let late = late.finish().await.unwrap();
            if late.ids.is_empty() {
                return late;
            }
        }
    };
    let nothing = tokio::time::timeout(GIVE_UP, nothing).await.expect("it never drains");
    assert_eq!((nothing.status, nothing.events.len(), nothing.dones), (200, 1, 1));
    let health = reqwest::get(format!("{}/health", engine.endpoint())).await.unwrap();
    assert_eq!(health.status(), 200);
    let transcript = stream.finish().await.unwrap();
    Reference::of(endpoint, &body, &engine.dialect()).unwrap().assert_equals(&transcript);
    assert_eq!(engine.process.exited().await.unwrap().code(), Some(0));
}

#[tokio::test]
async fn a_hanging_shutdown_stays_silent_and_leaves_a_zombie() {
    let (mut engine, _folder) = engine(&["--on-sigterm", "hang"]).await;
    let mut stream = running_stream(&engine).await;
    engine.signal_root(Signal::SIGTERM);
    let core_gone = async {
        while engine.core.is_alive() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(GIVE_UP, core_gone).await.expect("the core lives on");
    assert!(std::path::Path::new(&format!("/proc/{}", engine.core.pid)).exists(), "a zombie stays until it is reaped");
    assert!(!engine.process.has_exited());
    let more = tokio::time::timeout(std::time::Duration::from_millis(300), stream.tokens(1000)).await;
    assert!(more.is_err(), "the stream is silent and open");
}

#[tokio::test]
async fn the_tree_has_the_names_of_a_real_one() {
    let comm = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap().trim_end().to_owned();
    let command_line = |pid: u32| std::fs::read(format!("/proc/{pid}/cmdline")).unwrap();
    for (frontend, root) in [("python", "vllm"), ("rust", "vllm-rs")] {
        let (engine, _folder) = engine(&["--frontend", frontend, "--process-name-prefix", "prod"]).await;
        let ready = &engine.ready;
        assert_eq!(comm(ready.root_pid), root);
        assert_eq!(comm(ready.engine_core_pid), "prod::EngineCor");
        let title = String::from_utf8(command_line(ready.engine_core_pid)).unwrap();
        assert_eq!(title.trim_end_matches(['\0', ' ']), "prod::EngineCore");
        assert!(title.len() > 40, "padded with blanks, as setproctitle does");
        let tracker = command_line(ready.resource_tracker_pid);
        assert_eq!(
            String::from_utf8(tracker).unwrap(),
            "python\0-B\0-c\0from multiprocessing.resource_tracker import main;main(32)\0"
        );
        assert_eq!(ready.launcher_pid.is_some(), frontend == "rust");
    }
}

#[tokio::test]
async fn a_compiler_comes_and_goes() {
    let (engine, _folder) = engine(&[]).await;
    let pid = engine.compile().await.unwrap();
    assert_eq!(Identity::of(pid), None);
    assert!(engine.core.is_alive());
}

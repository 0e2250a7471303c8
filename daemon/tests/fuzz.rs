//! What the kernel, `/proc` and the configuration say, damaged.
#![forbid(unsafe_code)]

use std::path::Path;

use lastgasp::config::{self, Config};
use lastgasp::processes::Processes;
use lastgasp::sensors::ebpf::btf::Btf;
use lastgasp::sensors::kmsg::{self, Facilities};
use lastgasp::sensors::proc::{addresses, cgroup, listeners};
use lastgasp_ebpf::Event;

fn run<T: std::hash::Hash>(target: &str, words: &[&str], parse: impl Fn(&[u8]) -> T) {
    lastgasp_fuzz::run(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus"), target, &[], words, parse);
}

#[test]
fn a_description_of_the_kernels_types() {
    run("btf", &["task_struct\0", "\u{1}\0\0\0", "\u{7f}\0\0\0"], |input| {
        let btf = match Btf::parse(input.to_vec()) {
            Ok(btf) => btf,
            Err(error) => return Err(error.to_string().len()),
        };
        let field = btf.field("task_struct", &["nsproxy"]).is_ok();
        let deep = btf.field("net", &["ns", "inum"]).is_ok();
        let arguments = btf.tracepoint("sched_process_exit").map(|arguments| arguments.len()).ok();
        Ok((field, deep, arguments, btf.enumerators("skb_drop_reason").len().min(4), btf.len().min(20)))
    });
}

#[test]
fn events_of_the_ring_buffer() {
    run("ring_events", &[], |input| {
        let event = Event::from_bytes(input)?;
        let observation = Processes::default().event(&event);
        Some((event.kind().map(|kind| kind as u32), event.comm().len().min(4), observation.is_some()))
    });
}

#[test]
fn records_of_the_kernels_log() {
    run("kmsg", &["NVRM: Xid (", "pid=", "amdgpu", "oom-kill:constraint=", "'<unknown>'", ";", ","], |input| {
        let text = String::from_utf8_lossy(input);
        kmsg::parse(&text, Facilities::Any).map(|fact| format!("{fact:?}").len().min(80))
    });
}

#[test]
fn the_cgroup_of_a_process() {
    run("cgroup", &["0::/", "/..", ".scope", ".slice", ":", "kubepods-pod", "docker-", "crio-conmon-"], |input| {
        let container = cgroup::parse(&String::from_utf8_lossy(input))?;
        assert!(!container.cgroup_path.contains(char::is_control));
        for id in container.container_id.iter().chain(&container.pod_uid) {
            assert!(id.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-'), "{id}");
        }
        Some((container.container_id.is_some(), container.pod_uid.is_some(), container.runtime))
    });
}

#[test]
fn the_tables_of_a_network_namespace() {
    run("tables", &["|-- ", "/32 host LOCAL\n", " 0A ", ":1F90 "], |input| {
        let mut local = std::collections::HashSet::new();
        let table = addresses::read_v4(input, &mut local).is_ok();
        let text = String::from_utf8_lossy(input);
        let listeners = text.lines().filter_map(listeners::listener).count();
        let v6 = text.lines().filter_map(addresses::v6).count();
        (table, local.len().min(3), listeners.min(3), v6.min(3))
    });
}

#[test]
fn a_configuration() {
    let words = ["[[worker]]\n", "[nats]\n", "url = ", "0x", "= [", "= { ", "\"\"\"", "find.pid = 1\n", "1979-05-27\n"];
    run("config", &words, |input| {
        let text = String::from_utf8_lossy(input);
        match Config::read(Some((Path::new("f"), &text)), [], &[]) {
            Ok((config, warnings)) => Ok((config.workers.len().min(4), warnings.len().min(4))),
            Err(error) => Err(error.to_string().lines().next().map(|line| line.len().min(60))),
        }
    });
}

#[test]
fn what_a_process_declares_of_itself() {
    let words = ["LASTGASP_WORKER=", "LASTGASP_ENDPOINT=", "\0", "http://", "@", "../../etc/passwd", "\u{1b}]0;x\u{7}"];
    run("declaration", &words, |input| {
        let text = String::from_utf8_lossy(input);
        let variables: Vec<(String, String)> = text
            .split('\0')
            .filter_map(|entry| entry.split_once('='))
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect();
        match config::declared(&variables) {
            Ok(worker) => {
                let token = worker.name.token();
                assert!(token.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-=".contains(&byte)), "{token}");
                Ok((worker.engine, worker.models.len().min(3), worker.health.grpc.is_some()))
            }
            Err(problems) => Err(problems.len()),
        }
    });
}

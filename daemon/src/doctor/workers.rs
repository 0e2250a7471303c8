//! Each worker: its process, its health address, and whether its drain window fits its engine.

use std::time::Duration;

use futures_util::future::join_all;

use super::{Area, Finding, Grade};
use crate::config::{Config, OnLost, WorkerConfig};
use crate::network::Namespace;
use crate::sensors::health::{Asked, ask};
use crate::sensors::proc::{self, find_root, listeners};

pub(super) async fn examine(config: &Config) -> Vec<Finding> {
    join_all(config.workers.iter().map(worker)).await.into_iter().flatten().collect()
}

async fn worker(config: &WorkerConfig) -> Vec<Finding> {
    let (process, tgid) = process(config);
    let mut findings = vec![process];
    findings.extend(of_process(config, tgid, None).await);
    findings
}

/// Everything but how its process is found. Its health is asked from within that network namespace, or from this
/// thread's own.
pub(super) async fn of_process(config: &WorkerConfig, tgid: Option<u32>, namespace: Option<Namespace>) -> Vec<Finding> {
    let mut findings = health(config, tgid, namespace).await;
    findings.extend(drain_window(config));
    findings.extend(tgid.and_then(|tgid| on_lost(config, tgid)));
    findings
}

/// Whether what is configured to be ended may be.
fn on_lost(config: &WorkerConfig, tgid: u32) -> Option<Finding> {
    let what = match config.on_lost {
        OnLost::None | OnLost::Command(_) => return None,
        OnLost::Reap => "its orphans",
        OnLost::TerminateRoot => "its root",
        OnLost::KillTree => "its processes",
    };
    // No signal is sent: kill(2) with signal 0 only asks.
    let may = nix::sys::signal::kill(nix::unistd::Pid::from_raw(tgid.cast_signed()), None);
    Some(match may {
        Err(nix::Error::EPERM) => {
            let detail = format!("{what} may not be ended: the process is another user's");
            new(config, "on_lost", Grade::Degraded, detail).fix("give lastgasp CAP_KILL, or set on_lost to \"none\"")
        }
        _ => new(config, "on_lost", Grade::Fine, format!("{what} may be ended")),
    })
}

fn new(config: &WorkerConfig, what: &str, grade: Grade, detail: impl Into<String>) -> Finding {
    Finding::new(Area::Workers, format!("{} {what}", config.name), grade, detail)
}

fn process(config: &WorkerConfig) -> (Finding, Option<u32>) {
    let finding = |grade, detail: String| new(config, "process", grade, detail);
    match find_root(&config.find) {
        Ok(Some(root)) => {
            let title = proc::comm(root.tgid).unwrap_or_default();
            (finding(Grade::Fine, format!("pid {} ({title})", root.tgid)), Some(root.tgid))
        }
        Ok(None) => {
            let detail = format!("not found by {}", config.find);
            (finding(Grade::Degraded, detail).fix("start the engine, or correct worker.find"), None)
        }
        Err(error) => (finding(Grade::Degraded, error.to_string()), None),
    }
}

async fn health(config: &WorkerConfig, tgid: Option<u32>, namespace: Option<Namespace>) -> Vec<Finding> {
    // An engine that is not there cannot answer, and that has been said.
    let bad = if tgid.is_some() { Grade::Degraded } else { Grade::Note };
    let Some(address) = config.health.grpc.as_ref().or(config.health.http.as_ref()) else {
        let listening = listeners::listening(tgid, config.port);
        let port = config.port;
        return vec![match listening {
            Ok(true) => new(config, "health", Grade::Note, format!("no health address; it listens on port {port}")),
            Ok(false) => {
                new(config, "health", bad, format!("no health address, and no process listens on port {port}"))
            }
            Err(error) => new(config, "health", bad, format!("no health address; port {port}: {error}")),
        }];
    };
    let answers = ask(&config.health, namespace).await;
    answers
        .into_iter()
        .map(|(service, asked)| {
            let service = match service.as_str() {
                "" => String::new(),
                service => format!(" of {service:?}"),
            };
            let finding = |grade, says: String| new(config, "health", grade, format!("{address}{service}: {says}"));
            match asked {
                Asked::Serving => finding(Grade::Fine, "serving".to_owned()),
                Asked::NotServing => finding(bad, "not serving".to_owned()),
                Asked::NoSuchService(known) => {
                    let detail = format!("no such service; it has: {}", known.join(", "));
                    finding(bad, detail).fix("name one of these in worker.health.services")
                }
                Asked::Unimplemented => finding(bad, "no grpc.health.v1 there".to_owned())
                    .fix("use worker.health.http, or leave health out: then listening counts"),
                Asked::Refused if tgid.is_none() => finding(bad, "connection refused".to_owned()),
                Asked::Refused => finding(bad, "connection refused".to_owned())
                    .fix("correct worker.health, or let the engine serve health on an address that this node reaches"),
                Asked::Unanswered => {
                    let timeout = config.health.check_timeout.as_millis();
                    finding(bad, format!("no answer within {timeout} ms")).fix("see worker.health.check_timeout_ms")
                }
                Asked::Other(says) => finding(bad, says),
            }
        })
        .collect()
}

/// Whether streams have the time that they are given: the drain window, the engine's own timeout and
/// the pod's grace period.
fn drain_window(config: &WorkerConfig) -> Vec<Finding> {
    let misfits: Vec<Finding> = config
        .misfits()
        .iter()
        .map(|misfit| new(config, "drain window", Grade::Degraded, misfit.to_string()).fix(misfit.fix()))
        .collect();
    if !misfits.is_empty() {
        return misfits;
    }
    let ms = |duration: Duration| format!("{} ms", duration.as_millis());
    let engine = match config.engine_timeout() {
        Some(timeout) => format!("{} gives its streams {}", config.engine, ms(timeout)),
        None => format!("when {} ends its streams is not known", config.engine),
    };
    let pod = config.termination_grace.map(|grace| format!(", its pod {}", ms(grace))).unwrap_or_default();
    vec![new(config, "drain window", Grade::Fine, format!("{}; {engine}{pod}", ms(config.drain_window)))]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(lines: &str) -> WorkerConfig {
        let text = format!("[[worker]]\nname = \"vllm-0\"\nendpoint = \"http://127.0.0.1:1\"\n{lines}");
        let (config, _) =
            Config::read(Some(("x.toml".as_ref(), &text)), [], &[("--node", "node", "n".into())]).unwrap();
        config.workers.into_iter().next().unwrap()
    }

    #[test]
    fn a_window_longer_than_the_engines_own_is_said() {
        let grade = |lines| drain_window(&worker(lines))[0].grade;
        assert_eq!(grade("engine = \"vllm\""), Grade::Fine);
        assert_eq!(grade("engine = \"vllm\"\ndrain_window_ms = 60000"), Grade::Degraded);
        assert_eq!(grade("engine = \"generic\"\ndrain_window_ms = 60000"), Grade::Fine);
        assert_eq!(grade("termination_grace_s = 30\ndrain_window_ms = 29000"), Grade::Fine);
        let cut = &drain_window(&worker("termination_grace_s = 30\ndrain_window_ms = 30000"))[0];
        assert_eq!(cut.grade, Grade::Degraded);
        assert!(cut.fix.as_ref().unwrap().contains("terminationGracePeriodSeconds to at least 31"), "{cut:?}");
    }

    #[test]
    fn a_process_that_is_not_there_is_said_with_how_it_was_looked_for() {
        let (finding, tgid) = process(&worker("find = { cmdline = \"no such engine anywhere\" }"));
        assert_eq!((finding.grade, tgid), (Grade::Degraded, None));
        assert!(finding.detail.contains("no such engine anywhere"), "{finding:?}");
    }

    #[tokio::test]
    async fn nobody_is_blamed_twice_for_an_engine_that_is_not_there() {
        let config = worker("[worker.health]\ngrpc = \"http://127.0.0.1:1\"");
        let absent = health(&config, None, None).await;
        assert_eq!((absent.len(), absent[0].grade), (1, Grade::Note), "{absent:?}");
        let there = health(&config, Some(std::process::id()), None).await;
        assert_eq!(there[0].grade, Grade::Degraded, "{there:?}");
        assert!(there[0].detail.contains("refused"), "{there:?}");
    }
}

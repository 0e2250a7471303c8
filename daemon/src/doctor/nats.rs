//! NATS: whether it answers and has what is needed there. Nothing is made or changed.

use std::time::Duration;

use async_nats::jetstream::{self, context::ContextBuilder};
use lastgasp_protocol::kv::{Bucket, Content, OpenError};
use lastgasp_protocol::{DEATHS_STREAM, NODES_BUCKET, NodeLease, ROUTERS_BUCKET, WORKERS_BUCKET};

use super::{Area, Finding, Grade};
use crate::config::{Config, Mode};
use crate::core::ProcessId;
use crate::effects::{lease, nats};
use crate::sensors::proc;

/// How long each answer is awaited.
const PATIENCE: Duration = Duration::from_secs(3);

fn new(name: impl Into<String>, grade: Grade, detail: impl Into<String>) -> Finding {
    Finding::new(Area::Nats, name, grade, detail)
}

pub(super) async fn examine(config: &Config) -> Vec<Finding> {
    let url = &config.nats.url;
    let mut findings = login(config);
    let client = match nats::connect_once(&config.nats, &config.node, PATIENCE).await {
        Ok(client) => client,
        Err(error) => {
            let detail = format!("{error}; nothing can be listed or withdrawn");
            findings.push(new("server", Grade::Broken, detail).fix("start it, or correct nats.url and the login"));
            return findings;
        }
    };
    let has_ttl = client.is_server_compatible(2, 11, 0);
    findings.push(server(url, &client.server_info().version, has_ttl));
    let context = ContextBuilder::new().timeout(PATIENCE).build(client);
    match context.query_account().await {
        Ok(account) => {
            let detail = format!("enabled; {} streams in this account", account.streams);
            findings.push(new("jetstream", Grade::Fine, detail));
        }
        Err(error) => {
            let fix = "start nats-server with --jetstream, and enable it for this account";
            findings.push(new("jetstream", Grade::Broken, format!("not usable: {error}")).fix(fix));
            return findings;
        }
    }
    for name in [WORKERS_BUCKET, NODES_BUCKET, ROUTERS_BUCKET] {
        let bucket = Bucket::existing(&context, name).await;
        findings.push(shape(name, bucket.as_ref(), config.mode));
        if let (NODES_BUCKET, Ok(Some(bucket))) = (name, &bucket) {
            findings.push(holder(config, bucket).await);
        }
    }
    findings.push(deaths(&context, config.mode).await);
    findings
}

/// What is odd about the files of the login. What is wrong with them ends the connection, and is shown
/// there.
fn login(config: &Config) -> Vec<Finding> {
    let warnings = config.nats.login.read().map(|read| read.warnings).unwrap_or_default();
    warnings.into_iter().map(|warning| new("login", Grade::Degraded, warning)).collect()
}

fn server(url: &str, version: &str, has_message_ttl: bool) -> Finding {
    let detail = format!("{url}: version {version}");
    if has_message_ttl {
        new("server", Grade::Fine, detail)
    } else {
        let detail = format!("{detail}, which has no per-message TTL: leases of dead nodes would never lapse");
        new("server", Grade::Broken, detail).fix("use nats-server 2.11 or later")
    }
}

/// Of something that is not there.
const fn missing(mode: Mode) -> &'static str {
    match mode {
        Mode::Enforce => "not there yet; the daemon makes it",
        Mode::Observe => "not there; the daemon makes it once its mode is \"enforce\"",
    }
}

fn shape(name: &str, bucket: Result<&Option<Bucket>, &OpenError>, mode: Mode) -> Finding {
    match bucket {
        Ok(Some(_)) => new(name, Grade::Fine, "there, with per-message TTL"),
        Ok(None) => new(name, Grade::Note, missing(mode)),
        Err(error @ OpenError::OldServer { .. }) => {
            new(name, Grade::Broken, error.to_string()).fix(error.fault().fix())
        }
        Err(OpenError::Misshapen { shape, .. }) => new(name, Grade::Broken, format!("there, but it {shape}"))
            .fix(format!("`nats kv del {name}`, and let lastgasp make it")),
        Err(OpenError::Unavailable { source, .. }) => {
            let fix = "allow this user $JS.API.STREAM.INFO.KV_lastgasp_*, see the contract's subjects";
            new(name, Grade::Broken, format!("cannot be asked for: {source}")).fix(fix)
        }
    }
}

async fn deaths(context: &jetstream::Context, mode: Mode) -> Finding {
    match context.get_stream(DEATHS_STREAM).await {
        Ok(_) => new(DEATHS_STREAM, Grade::Fine, "there"),
        Err(error) if lastgasp_protocol::kv::is_missing(&error) => new(DEATHS_STREAM, Grade::Note, missing(mode)),
        Err(error) => {
            let detail = format!("cannot be asked for: {error}; death certificates are not kept on the server");
            new(DEATHS_STREAM, Grade::Degraded, detail)
        }
    }
}

/// Who holds this node's name.
async fn holder(config: &Config, bucket: &Bucket) -> Finding {
    let name = format!("lease of node {}", config.node);
    let entry = match bucket.read(&config.node.token()).await {
        Ok(entry) => entry,
        Err(error) => return new(name, Grade::Degraded, format!("cannot be read: {error}")),
    };
    let lease = entry.and_then(|entry| match entry.value {
        Content::Put(value) => NodeLease::parse(&value).ok(),
        Content::Deleted | Content::Expired => None,
    });
    match (lease, lease::own_lease(config.node.clone())) {
        (None, _) if config.mode == Mode::Observe => {
            new(name, Grade::Fine, "free; a daemon in mode \"observe\" does not take it")
        }
        (None, _) => new(name, Grade::Fine, "free; the daemon takes it at its start"),
        (Some(holder), Ok(own)) => judge(&name, &holder, &own),
        (Some(_), Err(error)) => new(name, Grade::Broken, format!("/proc does not answer: {error}")).fix("mount /proc"),
    }
}

fn judge(name: &str, holder: &NodeLease, own: &NodeLease) -> Finding {
    let process = ProcessId { tgid: holder.pid, start_ticks: holder.start_ticks };
    if holder.boot_id == own.boot_id {
        return if proc::identify(holder.pid) == Some(process) {
            new(name, Grade::Fine, format!("held by the daemon with pid {} of this machine", holder.pid))
        } else {
            let detail =
                format!("left by pid {} of this machine, which is gone; the next daemon takes it over", holder.pid);
            new(name, Grade::Fine, detail)
        };
    }
    if holder.machine_id == own.machine_id && !own.machine_id.is_empty() {
        return new(name, Grade::Fine, "left before this machine was booted; the next daemon takes it over");
    }
    let detail = format!("held by another machine (machine id {}, pid {})", holder.machine_id, holder.pid);
    new(name, Grade::Broken, detail).fix("give this node another `node` name; or wait for the lease to lapse")
}

#[cfg(test)]
mod tests {
    use lastgasp_protocol::kv::Misshapen;

    use super::*;

    #[test]
    fn a_server_without_message_ttl_does_not_do() {
        assert_eq!(server("nats://a", "2.11.0", true).grade, Grade::Fine);
        let old = server("nats://a", "2.10.29", false);
        assert_eq!(old.grade, Grade::Broken);
        assert!(old.detail.contains("2.10.29") && old.fix.unwrap().contains("2.11"));
    }

    #[test]
    fn a_bucket_is_made_by_the_daemon_and_may_not_be_of_another_shape() {
        assert_eq!(shape("b", Ok(&None), Mode::Enforce).grade, Grade::Note);
        assert_eq!(
            shape("b", Err(&OpenError::Misshapen { bucket: "b", shape: Misshapen::NoMessageTtl }), Mode::Enforce).grade,
            Grade::Broken
        );
    }

    #[test]
    fn a_name_that_another_machine_holds_cannot_be_used_here() {
        let own = lease::own_lease("gpu-a".parse().unwrap()).unwrap();
        assert!(judge("lease", &own, &own).detail.contains("held by the daemon"));
        let dead = NodeLease { start_ticks: own.start_ticks - 1, ..own.clone() };
        assert_eq!(judge("lease", &dead, &own).grade, Grade::Fine);
        assert!(judge("lease", &dead, &own).detail.contains("gone"));
        let foreign = NodeLease { boot_id: "other".into(), machine_id: "other".into(), ..own.clone() };
        assert_eq!(judge("lease", &foreign, &own).grade, Grade::Broken);
    }
}

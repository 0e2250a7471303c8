//! The daemon that runs now, if there is one: what it has to do without, and what it lost.

use super::{Area, Finding, Grade};
use crate::config::Config;
use crate::status::client::{self, ClientError};
use crate::status::proto::GetStatusRequest;
use crate::status::{Degradation, LossStatus, NodeStatus};

fn new(name: impl Into<String>, grade: Grade, detail: impl Into<String>) -> Finding {
    Finding::new(Area::Daemon, name, grade, detail)
}

pub(super) async fn examine(config: &Config) -> Vec<Finding> {
    match ask(config).await {
        Ok(status) => running(&status),
        Err(ClientError::NotThere { .. }) => vec![new("status", Grade::Note, "no daemon runs here")],
        Err(error) => vec![new("status", Grade::Note, error.to_string())],
    }
}

async fn ask(config: &Config) -> Result<NodeStatus, ClientError> {
    let mut client = client::connect(&config.status.socket).await?;
    Ok(client.get_status(GetStatusRequest {}).await?.into_inner())
}

fn running(status: &NodeStatus) -> Vec<Finding> {
    let NodeStatus { version, death_source, nats, lease, ready, degraded, privileges, losses, .. } = status;
    let or_none = |names: &[String]| if names.is_empty() { "none".to_owned() } else { names.join(" ") };
    let detail = format!("lastgasp {version}, deaths by {death_source}, nats {nats}, lease {lease}");
    let grade = if *ready { Grade::Fine } else { Grade::Degraded };
    let mut findings = vec![new("status", grade, detail)];
    findings.extend(privileges.iter().map(|privileges| {
        let detail = format!("held: {}; given up: {}", or_none(&privileges.held), or_none(&privileges.dropped));
        new("capabilities", Grade::Fine, detail)
    }));
    findings.extend(degraded.iter().map(|Degradation { what, reason, cost, fix }| {
        let finding = new(what, Grade::Degraded, format!("{reason}; {cost}"));
        if fix.is_empty() { finding } else { finding.fix(fix) }
    }));
    findings.extend(losses.iter().map(|LossStatus { hop, kind, count }| {
        new(format!("loss at {hop}"), Grade::Degraded, format!("{kind}: {count} since the daemon started"))
            .fix("see the alert LastgaspInformationLost in deploy/prometheus/alerts.yaml")
    }));
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_daemon_lost_or_lacks_is_a_finding() {
        let healthy = NodeStatus { ready: true, ..NodeStatus::default() };
        assert!(running(&healthy).iter().all(|finding| finding.grade == Grade::Fine));
        let loss = LossStatus { hop: "ring".into(), kind: "fork".into(), count: 3 };
        let degraded = Degradation { what: "ebpf".into(), ..Degradation::default() };
        for status in [
            NodeStatus { losses: vec![loss], ..healthy.clone() },
            NodeStatus { degraded: vec![degraded], ..healthy.clone() },
        ] {
            assert_eq!(running(&status).last().unwrap().grade, Grade::Degraded, "{status:?}");
        }
    }
}

//! `lastgasp doctor`: whether lastgasp would work on this node, and what is missing.
//!
//! It asks what the daemon would ask, and changes nothing: kernel programs are loaded, attached and
//! let go again, NATS is only read. Any user may run it; what that user may not do is a finding.

mod daemon;
mod declared;
mod kernel;
mod kernel_programs;
mod nats;
mod privileges;
mod render;
mod workers;

use lastgasp_protocol::ClosedName as _;
use serde::Serialize;

use crate::config::{Config, ConfigError, Problem};
use crate::sensors::proc::memory;

pub use self::render::text;

/// How bad a finding is. Later is worse.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, strum::IntoStaticStr, strum::VariantNames)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Grade {
    /// As it should be.
    Fine,
    /// Worth knowing, nothing more.
    Note,
    /// lastgasp works, but not as well as it could.
    Degraded,
    /// lastgasp does not work.
    Broken,
}

/// What a finding is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, strum::IntoStaticStr)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Area {
    /// The configuration.
    Configuration,
    /// The kernel.
    Kernel,
    /// What this process may do.
    Privileges,
    /// The kernel programs and the pidfd.
    Sensors,
    /// NATS and what is kept there.
    Nats,
    /// The workers of this node.
    Workers,
    /// The daemon that runs now.
    Daemon,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What it is about.
    pub area: Area,
    /// What was looked at, as `btf` or `vllm-0 health`.
    pub name: String,
    /// How it is.
    pub grade: Grade,
    /// What was seen, and what that costs.
    pub detail: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
}

impl Finding {
    fn new(area: Area, name: impl Into<String>, grade: Grade, detail: impl Into<String>) -> Self {
        Self { area, name: name.into(), grade, detail: detail.into(), fix: None }
    }

    fn fix(self, fix: impl Into<String>) -> Self {
        Self { fix: Some(fix.into()), ..self }
    }
}

/// Everything that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The worst of the findings.
    pub grade: Grade,
    /// In the order in which they were made.
    pub findings: Vec<Finding>,
}

impl Report {
    fn of(mut findings: Vec<Finding>) -> Self {
        findings.extend(memory::stuck().into_iter().map(|stuck| {
            let name = format!("process {}", stuck.id.tgid);
            Finding::new(Area::Workers, name, Grade::Degraded, stuck.to_string())
                .fix("end it, or see what its threads wait for in /proc/PID/task/*/stack")
        }));
        let grade = findings.iter().map(|finding| finding.grade).max().unwrap_or(Grade::Fine);
        Self { grade, findings }
    }

    /// As JSON, over several lines.
    #[must_use]
    pub fn json(&self) -> String {
        serde_json::to_string_pretty(self).expect("texts and names only")
    }
}

/// Looks at everything. A configuration that is wrong is the first finding; what does not depend on
/// it is looked at all the same.
///
/// # Errors
/// No runtime can be made.
pub fn examine(config: Result<(Config, Vec<Problem>), ConfigError>) -> std::io::Result<Report> {
    let mut findings = Vec::new();
    let config = match config {
        Ok((config, warnings)) => {
            findings.extend(
                warnings
                    .iter()
                    .map(|warning| Finding::new(Area::Configuration, "warning", Grade::Note, warning.to_string())),
            );
            let detail =
                format!("node {}, mode {}, workers: {}", config.node, config.mode.as_str(), config.workers.len());
            findings.push(Finding::new(Area::Configuration, "settings", Grade::Fine, detail));
            Some(config)
        }
        Err(ConfigError::Invalid(problems)) => {
            findings.extend(
                problems
                    .iter()
                    .map(|problem| Finding::new(Area::Configuration, "problem", Grade::Broken, problem.to_string())),
            );
            None
        }
        Err(error) => {
            findings.push(Finding::new(Area::Configuration, "file", Grade::Broken, error.to_string()));
            None
        }
    };
    let ebpf = config.as_ref().map(|config| &config.ebpf);
    findings.extend(kernel::examine(ebpf));
    findings.extend(privileges::examine());
    findings.extend(kernel_programs::examine(ebpf));
    if let Some(config) = &config {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            findings.push(kernel_programs::pidfd());
            // Both mostly wait.
            let (nats, workers, declared) =
                tokio::join!(nats::examine(config), workers::examine(config), declared::examine(config));
            for group in [nats, workers, declared] {
                findings.extend(group);
            }
            findings.extend(daemon::examine(config).await);
        });
    }
    Ok(Report::of(findings))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_finding_is_the_verdict() {
        let finding = |grade| Finding::new(Area::Kernel, "x", grade, "y");
        let grade = |grades: &[Grade]| Report::of(grades.iter().copied().map(finding).collect()).grade;
        assert_eq!(grade(&[]), Grade::Fine);
        assert_eq!(grade(&[Grade::Note, Grade::Fine]), Grade::Note);
        assert_eq!(grade(&[Grade::Broken, Grade::Degraded]), Grade::Broken);
    }

    #[test]
    fn a_wrong_configuration_is_a_finding_and_the_kernel_is_looked_at_all_the_same() {
        let config = Config::read(None, [("LASTGASP_MODE".to_owned(), "maybe".to_owned())], &[]);
        let report = examine(config).unwrap();
        assert_eq!(report.grade, Grade::Broken);
        assert_eq!((report.findings[0].area, report.findings[0].grade), (Area::Configuration, Grade::Broken));
        assert!(report.findings[0].detail.contains("mode"), "{report:?}");
        for area in [Area::Kernel, Area::Privileges, Area::Sensors] {
            assert!(report.findings.iter().any(|finding| finding.area == area), "{area:?}");
        }
    }
}

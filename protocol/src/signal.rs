//! The migration signal and a router's two answers to it.

use serde::{Deserialize, Deserializer, Serialize};

use crate::bounds::{self, ContractError};
use crate::record::to_json;
use crate::{Cause, Incarnation, Name};

/// What a router is to do. They only escalate: a `move` follows every `drain`
/// unless the worker is listed again.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    strum::IntoStaticStr,
    strum::VariantNames,
    strum::VariantArray,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Action {
    /// No new work there; streams go on.
    Drain,
    /// Move the streams, in the [`Mode`] given.
    Move,
}

/// How streams that cannot be moved are treated.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    strum::IntoStaticStr,
    strum::VariantNames,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Mode {
    /// The worker still runs: what cannot be moved stays until upstream ends it.
    Handover,
    /// The worker is gone: what cannot be moved ends visibly at once.
    Lost,
}

/// One worker that a signal is about.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerRef {
    /// Worker name.
    pub worker: Name,
    /// Which life.
    pub incarnation: Incarnation,
    /// Which listing of that life.
    #[serde(default)]
    pub epoch: u64,
    /// Revision of the record that is being withdrawn; 0 if it is not known.
    #[serde(default)]
    pub revision: u64,
}

/// One message per cause, on `lastgasp.v1.migrate.<node>`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigrateSignal {
    /// Always [`crate::SCHEMA`].
    pub schema: u32,
    /// Node name, as in the subject.
    pub node: Name,
    /// What to do.
    pub action: Action,
    /// With [`Action::Move`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<Mode>,
    /// Which certificate this belongs to (a ULID); answers name it.
    pub certificate: String,
    /// Every worker known lost by this cause.
    pub workers: Vec<WorkerRef>,
    /// Why.
    pub cause: Cause,
}

impl MigrateSignal {
    /// Reads a signal that arrived on `subject`.
    ///
    /// # Errors
    /// Anything out of bounds, of another schema, or on the subject of another node.
    pub fn parse(subject: &str, payload: &[u8]) -> Result<Self, ContractError> {
        let signal: Self = bounds::parse(payload)?;
        let own = crate::migrate_subject(&signal.node);
        if own != subject {
            return Err(ContractError::Misplaced { field: "node", inside: own, outside: subject.to_owned() });
        }
        bounds::at_most("workers", signal.workers.len(), bounds::MAX_WORKERS)?;
        bounds::at_most("certificate", signal.certificate.len(), 64)?;
        Ok(signal)
    }

    /// The signal as JSON.
    #[must_use]
    pub fn to_json(&self) -> Vec<u8> {
        to_json(self)
    }
}

/// Which of the two answers.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Hash,
    Serialize,
    Deserialize,
    strum::IntoStaticStr,
    strum::VariantNames,
    strum::VariantArray,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Phase {
    /// Sent at once.
    Received,
    /// Sent when every stream was dealt with, with [`Counts`].
    Done,
}

/// What a router did with the streams of the workers named.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Counts {
    /// Streams it had there.
    #[serde(default)]
    pub streams: u64,
    /// Continued on another worker.
    #[serde(default)]
    pub moved: u64,
    /// Could not be moved by their nature.
    #[serde(default)]
    pub unmovable: u64,
    /// Could have been moved, but no worker took them.
    #[serde(default)]
    pub failed: u64,
}

/// A router's answer, published on the signal's reply subject.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// Always [`crate::SCHEMA`].
    pub schema: u32,
    /// Who answers.
    pub router: Name,
    /// Which signal is answered.
    pub certificate: String,
    /// First or second answer.
    pub phase: Phase,
    /// With [`Phase::Done`]; zeros otherwise.
    #[serde(flatten, deserialize_with = "counted")]
    pub counts: Option<Counts>,
}

/// A flattened `Option` would take counts of a wrong type for no counts at all.
fn counted<'de, D: Deserializer<'de>>(fields: D) -> Result<Option<Counts>, D::Error> {
    Counts::deserialize(fields).map(Some)
}

impl Answer {
    /// Reads an answer.
    ///
    /// # Errors
    /// Anything out of bounds or of another schema.
    pub fn parse(payload: &[u8]) -> Result<Self, ContractError> {
        let answer: Self = bounds::parse(payload)?;
        bounds::at_most("certificate", answer.certificate.len(), 64)?;
        Ok(answer)
    }

    /// The answer as JSON.
    #[must_use]
    pub fn to_json(&self) -> Vec<u8> {
        to_json(self)
    }
}

#[cfg(test)]
mod tests {
    use crate::ClosedName as _;

    use super::*;
    use crate::CauseKind;

    const DESIGN: &str = r#"{"schema":1,"node":"gpu-a","action":"move","mode":"lost","certificate":"01K","workers":[{"worker":"vllm-0","incarnation":"5f0c1d2e-4711-883412","epoch":1,"revision":42}],"cause":{"kind":"process_killed","signal":9,"process":"VLLM::EngineCore","sender":{"pid":4242,"comm":"kill"}}}"#;

    #[test]
    fn the_signal_of_the_design_is_read_and_written_as_it_stands() {
        let signal = MigrateSignal::parse("lastgasp.v1.migrate.gpu-a", DESIGN.as_bytes()).unwrap();
        assert_eq!(signal.cause.kind, CauseKind::ProcessKilled);
        assert_eq!(String::from_utf8(signal.to_json()).unwrap(), DESIGN);
    }

    #[test]
    fn a_signal_on_another_nodes_subject_is_refused() {
        let error = MigrateSignal::parse("lastgasp.v1.migrate.gpu-b", DESIGN.as_bytes()).unwrap_err();
        assert_eq!(error.as_str(), "misplaced");
    }

    #[test]
    fn both_answers_of_the_design_are_read_and_written_as_they_stand() {
        for (text, phase, counts) in [
            (
                r#"{"schema":1,"router":"router-7c9","certificate":"01K","phase":"received"}"#,
                Phase::Received,
                Counts::default(),
            ),
            (
                r#"{"schema":1,"router":"router-7c9","certificate":"01K","phase":"done","streams":12,"moved":11,"unmovable":1,"failed":0}"#,
                Phase::Done,
                Counts { streams: 12, moved: 11, unmovable: 1, failed: 0 },
            ),
        ] {
            let mut answer = Answer::parse(text.as_bytes()).unwrap();
            assert_eq!((answer.phase, answer.counts.unwrap_or_default()), (phase, counts));
            if phase == Phase::Received {
                answer.counts = None;
            }
            assert_eq!(String::from_utf8(answer.to_json()).unwrap(), text);
        }
    }

    #[test]
    fn an_answer_whose_counts_are_no_numbers_is_refused_and_not_read_as_zeros() {
        for wrong in [r#""12""#, "-1", "1.5", "null", "[]"] {
            let text = format!(r#"{{"schema":1,"router":"r","certificate":"01K","phase":"done","streams":{wrong}}}"#);
            let error = Answer::parse(text.as_bytes()).unwrap_err();
            assert_eq!(error.as_str(), "malformed", "{wrong}");
        }
    }
}

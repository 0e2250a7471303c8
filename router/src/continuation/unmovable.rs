//! Why a stream cannot be continued elsewhere: a closed list, used verbatim in metrics and in the client's error.

use lastgasp_protocol::ClosedName as _;
use serde::{Deserialize, Serialize};

/// What makes a stream unmovable.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    strum::IntoStaticStr,
    strum::VariantNames,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Unmovable {
    /// `n` or `best_of` above 1, or several choices arrived unasked: there is no single prefix.
    SeveralChoices,
    /// A list of prompts.
    PromptBatch,
    /// Beam search keeps several sequences.
    BeamSearch,
    /// Text after the gap cannot be given together with text before it.
    Suffix,
    /// The grammar's state machine would begin again and give corrupt output with status 200.
    GuidedDecoding,
    /// There are more stop strings than a router can look for in every chunk.
    TooManyStops,
    /// A regular expression may match across the seam, where no engine would see it.
    StopRegex,
    /// A chunk that is not JSON, or not of a known shape: what was sent is not known.
    UnparsableChunk,
    /// The prompt was given as token ids, and the text that followed came without ids.
    TokenPromptWithoutIds,
    /// The prompt or the conversation is neither text nor ids.
    PromptNotText,
    /// Part of a tool call was sent: its parser's state cannot be restored.
    ToolCalls,
    /// Reasoning cannot be carried as content, and there are no ids to carry it.
    ReasoningWithoutIds,
    /// The engine cannot be made to continue an assistant message.
    ChatNotContinuable,
    /// What was carried may end inside a character, and the next worker began with what may be the prompt.
    PromptLeak,
    /// Strict mode: only text could be carried, which is an approximation.
    StrictText,
    /// Strict mode: penalties count output tokens, and carried ones become prompt.
    StrictPenalties,
    /// Strict mode: a seed begins again.
    StrictSeed,
}

impl std::fmt::Display for Unmovable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.as_str())
    }
}

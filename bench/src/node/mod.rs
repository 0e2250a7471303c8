//! What the daemon costs the node that it watches.

mod idle;
mod programs;
mod storms;
mod victim;

use crate::report::Section;
use crate::{BenchError, Options};

pub(crate) async fn run(options: &Options) -> Result<Vec<Section>, BenchError> {
    let mut sections = Vec::new();
    if options.wants("idle") {
        sections.push(idle::section(options).await?);
    }
    if options.wants("storms") {
        sections.push(storms::section(options).await?);
    }
    if options.wants("programs") {
        sections.push(programs::section(options).await?);
    }
    Ok(sections)
}

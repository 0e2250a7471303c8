//! What the daemon costs the node that it watches.

mod idle;
mod programs;
mod storms;
mod victim;

use crate::report::Section;
use crate::{BenchError, Options};

pub(crate) async fn run(options: &Options) -> Result<Vec<Section>, BenchError> {
    let idle = idle::section(options).await?;
    let storms = storms::section(options).await?;
    let programs = programs::section(options).await?;
    Ok(vec![idle, storms, programs])
}

//! The router: what it adds to a chunk's way, what a chunk and a stream cost, how soon the streams of a
//! lost worker are elsewhere; beside another router on the same engines, with the same clients.

mod clients;
mod moves;
mod parts;
mod passing;

use std::path::Path;

use lastgasp_tests::nats::Nats;
use tempfile::TempDir;

use crate::report::Section;
use crate::{BenchError, Options, file};

use parts::{Engine, Register, Router};

pub(crate) async fn run(options: &Options) -> Result<Vec<Section>, BenchError> {
    // It would have to be installed, only to see whether the bench runs.
    let python = if options.quick { None } else { Some(parts::python().await?) };
    let stage = Stage::set(python.as_deref(), options.beside.as_deref()).await?;
    let mut sections = Vec::new();
    if options.wants("latency") {
        sections.extend(passing::latency(&stage, options).await?);
    }
    if options.wants("throughput") {
        sections.extend(passing::throughput(&stage, options).await?);
    }
    if options.wants("memory") {
        sections.push(passing::memory(&stage, python.as_deref(), options).await?);
    }
    drop(stage);
    if options.wants("moves") {
        sections.extend(moves::run(python.as_deref(), options).await?);
    }
    Ok(sections)
}

/// Three routers before two engines.
struct Stage {
    ours: Router,
    /// With `--migration-limit 0`, which passes on and keeps no account, as the other one does.
    unmoving: Router,
    /// Not in a quick run.
    peer: Option<Router>,
    /// As it was before a change.
    former: Option<Router>,
    engines: [Engine; 2],
    nats: Nats,
    folder: TempDir,
}

impl Stage {
    async fn set(python: Option<&Path>, former: Option<&Path>) -> Result<Self, BenchError> {
        let folder = tempfile::tempdir().map_err(file(&std::env::temp_dir()))?;
        let nats = Nats::start(folder.path()).await?;
        let engines = [Engine::start('a', "a", folder.path()).await?, Engine::start('b', "b", folder.path()).await?];
        let register = Register::open(&nats).await?;
        register.list("a", &engines[0]).await?;
        register.list("b", &engines[1]).await?;
        let ours = Router::ours("moving", &nats, 3, folder.path()).await?;
        let unmoving = Router::ours("unmoving", &nats, 0, folder.path()).await?;
        let former = match former {
            Some(program) => Some(Router::of(program, "former", &nats, 3, folder.path()).await?),
            None => None,
        };
        for router in [&ours, &unmoving].into_iter().chain(&former) {
            router.offers(&["a", "b"]).await?;
        }
        let peer = match python {
            Some(python) => Some(Router::peer(python, &[&engines[0], &engines[1]], folder.path()).await?),
            None => None,
        };
        Ok(Self { ours, unmoving, peer, former, engines, nats, folder })
    }

    /// By the names that the tables have.
    fn routers(&self) -> Vec<(&'static str, &Router)> {
        let known = [
            (OURS, Some(&self.ours)),
            (UNMOVING, Some(&self.unmoving)),
            (PEER, self.peer.as_ref()),
            (FORMER, self.former.as_ref()),
        ];
        known.into_iter().filter_map(|(name, router)| Some((name, router?))).collect()
    }
}

const OURS: &str = "lastgasp-router";
const FORMER: &str = "lastgasp-router, before";
const UNMOVING: &str = "lastgasp-router, moving off";
const PEER: &str = "sglang-router";
const DIRECT: &str = "none";

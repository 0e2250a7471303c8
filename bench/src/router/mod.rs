//! The router: what it adds to a chunk's way, what a chunk and a stream cost, how soon the streams of a
//! lost worker are elsewhere; beside another router on the same engines, with the same clients.

mod clients;
mod moves;
mod parts;
mod passing;

use lastgasp_tests::nats::Nats;
use tempfile::TempDir;

use crate::report::Section;
use crate::{BenchError, Options, file};

use parts::{Engine, Register, Router};

pub(crate) async fn run(options: &Options) -> Result<Vec<Section>, BenchError> {
    let python = parts::python().await?;
    let stage = Stage::set(&python).await?;
    let mut sections = passing::run(&stage, options).await?;
    sections.push(passing::memory(&stage, &python, options).await?);
    drop(stage);
    sections.extend(moves::run(&python, options).await?);
    Ok(sections)
}

/// Three routers before two engines.
struct Stage {
    ours: Router,
    /// With `--migration-limit 0`, which passes on and keeps no account, as the other one does.
    unmoving: Router,
    peer: Router,
    engines: [Engine; 2],
    nats: Nats,
    folder: TempDir,
}

impl Stage {
    async fn set(python: &std::path::Path) -> Result<Self, BenchError> {
        let folder = tempfile::tempdir().map_err(file(&std::env::temp_dir()))?;
        let nats = Nats::start(folder.path()).await?;
        let engines = [Engine::start('a', "a", folder.path()).await?, Engine::start('b', "b", folder.path()).await?];
        let register = Register::open(&nats).await?;
        register.list("a", &engines[0]).await?;
        register.list("b", &engines[1]).await?;
        let ours = Router::ours("moving", &nats, 3, folder.path()).await?;
        let unmoving = Router::ours("unmoving", &nats, 0, folder.path()).await?;
        for router in [&ours, &unmoving] {
            router.offers(&["a", "b"]).await?;
        }
        let peer = Router::peer(python, &[&engines[0], &engines[1]], folder.path()).await?;
        Ok(Self { ours, unmoving, peer, engines, nats, folder })
    }

    /// By the names that the tables have.
    fn routers(&self) -> [(&'static str, &Router); 3] {
        [("lastgasp-router", &self.ours), (UNMOVING, &self.unmoving), (PEER, &self.peer)]
    }
}

const UNMOVING: &str = "lastgasp-router, moving off";
const PEER: &str = "sglang-router";
const DIRECT: &str = "none";

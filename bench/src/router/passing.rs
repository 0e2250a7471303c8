//! Chunks that pass: how much later they come, and what they cost.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use lastgasp_tests::HarnessError;
use lastgasp_tests::distribution::Unit;

use super::clients::{Crowd, Order, Token};
use super::parts::{Engine, Router, cpu_time, memory as resident};
use super::{DIRECT, OURS, PEER, Stage, UNMOVING};
use crate::progress::Progress;
use crate::report::{Plot, Row, Section};
use crate::{BenchError, Options, file};

/// Streams through the router (and as many without it), and tokens a second of each.
const LOADS: [(usize, u64); 2] = [(50, 30), (400, 30)];
/// Tokens of an answer.
const TOKENS: usize = 90;
/// A chunk is compared with the median of those that went without a router in the same time slice.
const SLICE: u64 = 100_000_000;
/// Streams that are sent as fast as they are taken, and their tokens.
const FLOOD: (usize, usize) = (64, 1500);
/// The first tokens of a stream come while others still begin.
const WARM: usize = 3;

/// What one router did under one load.
#[derive(Default)]
struct Found {
    routed: Vec<f64>,
    direct: Vec<f64>,
    added: Vec<f64>,
    /// Of the router, in microseconds a chunk, by rounds.
    cost: Vec<f64>,
    /// Shares of one core, by rounds: router, engines, clients.
    shares: [Vec<f64>; 3],
}

pub(super) async fn latency(stage: &Stage, options: &Options) -> Result<[Section; 2], BenchError> {
    // The first round is not counted: engines and routers get their memory, connections and caches in it, and
    // whoever came first would pay for all.
    let rounds = if options.quick { 1 } else { 5 };
    let mut found: HashMap<(usize, &str), Found> = HashMap::new();
    let mut progress = Progress::begin("added latency", rounds * LOADS.len() * stage.routers().len());
    for round in 0..rounds {
        if round == 1 {
            found.clear();
        }
        for (streams, rate) in LOADS {
            let streams = if options.quick { streams / 10 } else { streams };
            let order =
                Order { tokens: if options.quick { 15 } else { TOKENS }, pace: Duration::from_secs(1) / rate as u32 };
            let mut routers = stage.routers();
            let count = routers.len();
            routers.rotate_left(round % count);
            for (name, router) in routers {
                let found = found.entry((streams, name)).or_default();
                pass(found, stage, router, streams, order).await?;
                progress.step();
            }
        }
    }
    drop(progress);
    let mut loads: Vec<usize> = found.keys().map(|(streams, _)| *streams).collect();
    loads.sort_unstable();
    loads.dedup();
    Ok([added(&found, &loads, stage), cost(&found, &loads, stage)])
}

async fn pass(
    found: &mut Found,
    stage: &Stage,
    router: &Router,
    streams: usize,
    order: Order,
) -> Result<(), BenchError> {
    let engines = || stage.engines.iter().map(|engine| cpu_time(&engine.process)).sum::<Duration>();
    let (begin, before, engines_before) = (Instant::now(), cpu_time(&router.process), engines());
    // Half of those without a router go to each engine, as with one.
    let direct = [&stage.engines[0], &stage.engines[1]].map(|engine| (engine.address(), streams.div_ceil(2)));
    let groups = vec![(router.address, streams), direct[0], direct[1]];
    let crowd = Crowd::gather(groups, order, order.pace).map_err(file("a thread".as_ref()))?.over().await;
    let (took, used) = (begin.elapsed().as_secs_f64(), cpu_time(&router.process).saturating_sub(before));
    let engines_used = engines().saturating_sub(engines_before);
    let all = || crowd.groups.iter().flatten();
    if all().any(|read| !read.whole) {
        let cut = all().filter(|read| !read.whole).count();
        let log = router.process.log_tail();
        return Err(HarnessError::GaveUp(format!(
            "{cut} of {} streams that nothing happened to; {log}",
            all().count()
        ))
        .into());
    }
    let tokens = |group: &[super::clients::Read]| -> Vec<Token> {
        group.iter().flat_map(|read| read.tokens.iter().skip(WARM)).copied().collect()
    };
    let routed = tokens(&crowd.groups[0]);
    let direct = [tokens(&crowd.groups[1]), tokens(&crowd.groups[2])].concat();
    let mut slices: HashMap<u64, Vec<f64>> = HashMap::new();
    for token in &direct {
        slices.entry(token.sent / SLICE).or_default().push(delay(token));
    }
    let medians: HashMap<u64, f64> = slices
        .into_iter()
        .map(|(slice, mut delays)| {
            delays.sort_by(f64::total_cmp);
            (slice, delays[delays.len() / 2])
        })
        .collect();
    found.added.extend(routed.iter().filter_map(|token| Some(delay(token) - medians.get(&(token.sent / SLICE))?)));
    found.routed.extend(routed.iter().map(delay));
    found.direct.extend(direct.iter().map(delay));
    found.cost.push(used.as_secs_f64() * 1e6 / (streams * order.tokens) as f64);
    let shares = [used, engines_used, crowd.cpu].map(|time| time.as_secs_f64() / took * 100.0);
    found.shares.iter_mut().zip(shares).for_each(|(all, share)| all.push(share));
    Ok(())
}

fn delay(token: &Token) -> f64 {
    token.received.saturating_sub(token.sent) as f64 / 1e3
}

fn added(found: &HashMap<(usize, &str), Found>, loads: &[usize], stage: &Stage) -> Section {
    let mut rows = Vec::new();
    for streams in loads {
        let load = format!("{streams} streams");
        let direct = found.iter().filter(|((at, _), _)| at == streams).flat_map(|(_, found)| found.direct.clone());
        rows.extend(Row::of([&load, DIRECT, "whole way"], Unit::Microseconds, direct));
        for (name, _) in stage.routers() {
            let Some(found) = found.get(&(*streams, name)) else { continue };
            rows.extend(Row::of([&load, name, "whole way"], Unit::Microseconds, found.routed.iter().copied()));
            rows.extend(Row::of([&load, name, "added"], Unit::Microseconds, found.added.iter().copied()));
        }
    }
    let most = rows.iter().filter(|row| Some(&row.labels[0]) == loads.last().map(|n| format!("{n} streams")).as_ref());
    let added = most.filter(|row| row.labels[2] == "added").map(|row| (row.labels[1].clone(), row));
    let plots =
        vec![Plot::cumulative("added", "What a router adds to a chunk's way", ("added to a chunk's way", true), added)];
    Section {
        title: "Added latency".to_owned(),
        about: format!(
            "From just before an engine writes a chunk (one token, vLLM's format) to after the client has read it. As many \
             streams again go to the same engines without a router at the same time; *added* is a chunk's time less the \
             median of those chunks that went without one in the same {} ms. {} tokens a second on each stream, routers in \
             turns. lastgasp-router asks engines for token ids and takes them out again, so that it can move streams \
             exactly; with moving off it passes on what comes, as the other does.",
            SLICE / 1_000_000,
            LOADS[0].1,
        ),
        labels: ["load", "router", "time"].map(str::to_owned).to_vec(),
        compared_with: None,
        rows,
        plots,
    }
}

fn cost(found: &HashMap<(usize, &str), Found>, loads: &[usize], stage: &Stage) -> Section {
    let mut rows = Vec::new();
    for streams in loads {
        let load = format!("{streams} streams");
        let peer =
            |rows: &[Row], what: &str| rows.iter().find(|row| row.labels == [load.as_str(), PEER, what]).cloned();
        let mut these = Vec::new();
        for (name, _) in stage.routers() {
            let Some(found) = found.get(&(*streams, name)) else { continue };
            these.extend(Row::of([&load, name, "CPU time a chunk"], Unit::Microseconds, found.cost.iter().copied()));
            let streams = found.cost.iter().map(|cost| 1e6 / cost / LOADS[0].1 as f64);
            these.extend(Row::of([&load, name, "streams a core"], Unit::Count, streams));
            let [router, engines, clients] = &found.shares;
            for (part, share) in [("router", router), ("engines", engines), ("clients", clients)] {
                let what = format!("share of one core: {part}");
                these.extend(Row::of([&load, name, &what], Unit::Percent, share.iter().copied()));
            }
        }
        let known = these.clone();
        rows.extend(these.into_iter().map(|row| {
            let other = peer(&known, &row.labels[2]);
            row.against(other.as_ref())
        }));
    }
    Section {
        title: "What a chunk costs".to_owned(),
        about: format!(
            "In the same runs: CPU time of the router's process by the chunks that it passed on, its requests included \
             (answers have {TOKENS} tokens), and how many streams of {} tokens a second one core would carry at that. The \
             engines and clients serve twice as many streams, half of them without a router.",
            LOADS[0].1
        ),
        labels: ["load", "router", "what"].map(str::to_owned).to_vec(),
        compared_with: Some(format!(": {PEER}")),
        rows,
        plots: Vec::new(),
    }
}

/// As many chunks as the machine carries.
pub(super) async fn throughput(stage: &Stage, options: &Options) -> Result<[Section; 2], BenchError> {
    let rounds = if options.quick { 1 } else { 5 };
    let (streams, tokens) = if options.quick { (8, 100) } else { FLOOD };
    let order = Order { tokens, pace: Duration::ZERO };
    let mut rates: HashMap<&str, Vec<f64>> = HashMap::new();
    let mut shares: HashMap<(&str, &str), Vec<f64>> = HashMap::new();
    let mut progress = Progress::begin("throughput", rounds * (stage.routers().len() + 1));
    for round in 0..rounds {
        let [a, b] = [&stage.engines[0], &stage.engines[1]].map(Engine::address);
        let mut targets = vec![(DIRECT, None, vec![(a, streams / 2), (b, streams / 2)])];
        targets.extend(
            stage.routers().into_iter().map(|(name, router)| (name, Some(router), vec![(router.address, streams)])),
        );
        let count = targets.len();
        targets.rotate_left(round % count);
        for (name, router, groups) in targets {
            let engines = || stage.engines.iter().map(|engine| cpu_time(&engine.process)).sum::<Duration>();
            let of_router = || router.map_or(Duration::ZERO, |router| cpu_time(&router.process));
            let (begin, before) = (Instant::now(), [of_router(), engines()]);
            let crowd = Crowd::gather(groups, order, Duration::ZERO).map_err(file("a thread".as_ref()))?.over().await;
            let took = begin.elapsed().as_secs_f64();
            let used = [of_router() - before[0], engines() - before[1], crowd.cpu];
            if crowd.groups.iter().flatten().any(|read| !read.whole) {
                return Err(HarnessError::GaveUp(format!("a stream through {name} that nothing happened to")).into());
            }
            rates.entry(name).or_default().push((streams * tokens) as f64 / took);
            for (part, used) in ["router", "engines", "clients"].into_iter().zip(used) {
                shares.entry((name, part)).or_default().push(used.as_secs_f64() / took * 100.0);
            }
            progress.step();
        }
    }
    let names: Vec<&str> = std::iter::once(DIRECT).chain(stage.routers().into_iter().map(|(name, _)| name)).collect();
    let row = |name: &str| Row::of([name], Unit::PerSecond, rates.get(name).into_iter().flatten().copied());
    let peer = row(PEER);
    let rows = names.iter().filter_map(|name| Some(row(name)?.against(peer.as_ref()))).collect();
    let used = names.iter().flat_map(|name| {
        let shares = &shares;
        ["router", "engines", "clients"].into_iter().filter_map(move |part| {
            let shares = shares.get(&(*name, part))?;
            Row::of([*name, part], Unit::Percent, shares.iter().copied())
        })
    });
    let used = used.filter(|row| row.values.max > 0.0).collect();
    let rate = Section {
        title: "Throughput".to_owned(),
        about: format!(
            "{streams} streams of {tokens} chunks each, which the engines write as fast as they are taken, one write a \
             chunk; chunks a second at the clients, routers in turns. Everything shares the machine's cores, so the most \
             that a router can do here is what is left of them."
        ),
        labels: vec!["router".to_owned()],
        compared_with: Some(format!(": {PEER}")),
        rows,
        plots: Vec::new(),
    };
    let shares = Section {
        title: "Who used the cores meanwhile".to_owned(),
        about: "Percent of one core, in those runs.".to_owned(),
        labels: ["router", "part"].map(str::to_owned).to_vec(),
        compared_with: None,
        rows: used,
        plots: Vec::new(),
    };
    Ok([rate, shares])
}

/// What a stream keeps in memory.
pub(super) async fn memory(
    stage: &Stage,
    python: Option<&std::path::Path>,
    options: &Options,
) -> Result<Section, BenchError> {
    let rounds = if options.quick { 1 } else { 3 };
    let streams = if options.quick { 50 } else { 1000 };
    let order = Order { tokens: 4, pace: Duration::from_secs(1) };
    let names: Vec<&str> = [OURS, UNMOVING].into_iter().chain(python.map(|_| PEER)).collect();
    let mut each: HashMap<(&str, &str), Vec<f64>> = HashMap::new();
    let mut progress = Progress::begin("memory", rounds * names.len());
    for _ in 0..rounds {
        for name in names.iter().copied() {
            let [a, b] = [&stage.engines[0], &stage.engines[1]];
            let router = match python.filter(|_| name == PEER) {
                Some(python) => Router::peer(python, &[a, b], stage.folder.path()).await?,
                None => {
                    let moves = if name == UNMOVING { 0 } else { 3 };
                    let router = Router::ours("measured", &stage.nats, moves, stage.folder.path()).await?;
                    router.offers(&["a", "b"]).await?;
                    router
                }
            };
            let before = resident(&router.process);
            let ramp = Duration::from_secs(1);
            let mut crowd =
                Crowd::gather(vec![(router.address, streams)], order, ramp).map_err(file("a thread".as_ref()))?;
            crowd.begun(streams).await;
            tokio::time::sleep(order.pace).await;
            let after = resident(&router.process);
            each.entry((name, "before the first stream")).or_default().push(before as f64);
            let stream = after.saturating_sub(before) as f64 / streams as f64;
            each.entry((name, "each stream")).or_default().push(stream);
            crowd.over().await;
            progress.step();
        }
    }
    let rows = ["before the first stream", "each stream"].into_iter().flat_map(|what| {
        let each = &each;
        let row = move |name: &str| {
            Row::of([name, what], Unit::Bytes, each.get(&(name, what)).into_iter().flatten().copied())
        };
        let peer = row(PEER);
        names.clone().into_iter().filter_map(move |name| Some(row(name)?.against(peer.as_ref())))
    });
    Ok(Section {
        title: "Memory".to_owned(),
        about: format!(
            "`Pss` of a router that was just started, and what it has more with {streams} live streams, by stream. The \
             prompt is one token; what a stream keeps of its prompt and answer comes on top."
        ),
        labels: ["router", "what"].map(str::to_owned).to_vec(),
        compared_with: Some(format!(": {PEER}")),
        rows: rows.collect(),
        plots: Vec::new(),
    })
}

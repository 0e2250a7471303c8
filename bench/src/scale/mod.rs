//! A cluster that is not there: daemons without engines, routers without clients, by their own code, on
//! three real nats-servers. How much they say, how soon the slowest router knows, and where that bends.

mod node;
mod routers;
mod traffic;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use lastgasp_router::workers::Key;
use lastgasp_tests::HarnessError;
use lastgasp_tests::distribution::Unit;
use lastgasp_tests::nats::{self, Cluster};
use lastgasp_tests::process::GIVE_UP;
use tempfile::TempDir;
use tokio::sync::mpsc;

use crate::progress::Progress;
use crate::report::{Axis, Line, Plot, Row, Section};
use crate::{BenchError, Options, file};

use node::{LEASE, Ledgers, Node, WORKERS};
use routers::{Router, choice, condemned};
use traffic::{Monitors, Sum};

/// Servers, and copies of each bucket.
const SERVERS: usize = 3;
/// Daemons that start at the same time.
const TOGETHER: usize = 25;
/// How long all of them may take to start: where they take longer, the curve has bent.
const PATIENCE: Duration = Duration::from_secs(75);
/// A rack, of nodes.
const RACK: usize = 40;

/// How much is done.
struct Plan {
    nodes: Vec<usize>,
    /// How many there were in the end.
    reached: usize,
    /// With so many, routers that were all started at once did not list the workers.
    unlisted: Option<usize>,
    routers: usize,
    deaths: usize,
    /// Deaths that only the records tell of.
    untold: usize,
    /// How often the traffic is looked at, and for how long.
    windows: (usize, Duration),
    rack: usize,
    restarts: usize,
    choices: usize,
}

impl Plan {
    fn new(options: &Options) -> Self {
        if options.quick {
            let windows = (1, Duration::from_secs(2));
            return Self {
                nodes: vec![2, 6],
                reached: 0,
                unlisted: None,
                routers: 2,
                deaths: 6,
                untold: 2,
                windows,
                rack: 1,
                restarts: 1,
                choices: 5,
            };
        }
        Self {
            nodes: vec![10, 100, 300, 1000],
            reached: 0,
            unlisted: None,
            routers: 20,
            deaths: 300,
            untold: 60,
            windows: (3, Duration::from_secs(3)),
            rack: RACK,
            restarts: 3,
            choices: 500,
        }
    }
}

/// By number of nodes and by what was measured.
type Found = BTreeMap<(usize, &'static str), Vec<f64>>;

pub(crate) async fn run(options: &Options) -> Result<Vec<Section>, BenchError> {
    let mut plan = Plan::new(options);
    let mut world = World::begin(plan.routers, !options.quick).await?;
    let mut found = Found::new();
    let mut held = Vec::new();
    for nodes in std::mem::take(&mut plan.nodes) {
        eprintln!("  {nodes} nodes");
        if !world.grow(nodes, &mut found).await? {
            break;
        }
        held.push(nodes);
        world.traffic(&plan, &mut found).await?;
        world.deaths(plan.deaths, true, &mut found).await?;
        world.deaths(plan.untold, false, &mut found).await?;
        if let Err(error) = world.restart(plan.restarts, &mut found).await {
            eprintln!("  {error}: it ends here");
            plan.unlisted = Some(nodes);
            break;
        }
        for _ in 0..plan.choices {
            found.entry((nodes, CHOICE)).or_default().extend(choice(world.routers[0].workers()));
        }
    }
    plan.nodes = held;
    plan.reached = world.nodes.len();
    // Of what did not get as far as it should, no rack is taken away too.
    if plan.nodes.last() == Some(&plan.reached) && plan.unlisted.is_none() {
        world.rack(plan.rack, &mut found).await?;
    }
    Ok(sections(&plan, &found))
}

const CHOICE: &str = "a router chooses a worker";
const SLOWEST: &str = "the slowest router knows";
const EVERY: &str = "every router knows";
const GONE: &str = "the record is gone, acknowledged";
const UNSIGNALLED: &str = "the slowest router knows, without a signal";
const JOINED: &str = "all nodes listed, and known to every router";
const WHOLE: &str = "a restarted router has the whole picture";
const SLOWEST_WHOLE: &str = "the slowest of them";
const RACK_DIES: &str = "each worker's death is known to the slowest router";
const RACK_ALL: &str = "all of them are known to every router";
const RACK_LAPSES: &str = "a node's lease has lapsed, for each router";
const RACK_LAPSED: &str = "all leases have lapsed, for every router";

struct World {
    nodes: Vec<Node>,
    routers: Vec<Router>,
    ledgers: Arc<Ledgers>,
    outcomes: mpsc::UnboundedSender<(lastgasp::core::WorkerId, lastgasp::effects::discovery::WriteOutcome)>,
    monitors: Monitors,
    certificates: u64,
    /// Leases are waited for.
    patient: bool,
    cluster: Cluster,
    _folder: TempDir,
}

impl World {
    async fn begin(count: usize, patient: bool) -> Result<Self, BenchError> {
        let folder = tempfile::tempdir().map_err(file(&std::env::temp_dir()))?;
        let ports = (0..SERVERS).map(|_| nats::free_port()).collect::<Result<Vec<_>, _>>()?;
        let options = ports.iter().map(|port| nats::Options {
            arguments: vec!["--http_port".to_owned(), port.to_string()],
            ..nats::Options::default()
        });
        let cluster = Cluster::start_with(folder.path(), options.collect()).await?;
        let urls = ports.iter().map(|port| format!("http://127.0.0.1:{port}")).collect();
        let pids = cluster.servers.iter().filter_map(nats::Nats::pid).collect();
        let (outcomes, results) = mpsc::unbounded_channel();
        let ledgers = Ledgers::keep(results);
        let monitors = Monitors { urls, pids };
        let routers = Vec::new();
        let mut world = Self {
            nodes: Vec::new(),
            routers,
            ledgers,
            patient,
            outcomes,
            monitors,
            certificates: 0,
            cluster,
            _folder: folder,
        };
        world.start_routers(count).await?;
        Ok(world)
    }

    async fn start_routers(&mut self, count: usize) -> Result<(), BenchError> {
        let url = self.cluster.url();
        for index in 0..count {
            self.routers.push(Router::start(index, &url, SERVERS).await?);
        }
        Ok(())
    }

    fn workers(&self) -> usize {
        self.nodes.len() * WORKERS
    }

    /// More daemons start, until there are so many; says whether they could in the time that they have.
    async fn grow(&mut self, to: usize, found: &mut Found) -> Result<bool, BenchError> {
        let (begin, from, url) = (Instant::now(), self.nodes.len(), self.cluster.url());
        let mut progress = Progress::begin("nodes that join", to - from);
        let indices: Vec<u32> = (from..to).filter_map(|index| u32::try_from(index).ok()).collect();
        for together in indices.chunks(TOGETHER) {
            if begin.elapsed() > PATIENCE {
                return Ok(false);
            }
            let starts = together.iter().map(|index| Node::start(*index, &url, SERVERS, self.outcomes.clone()));
            for node in try_join_all(starts).await? {
                self.nodes.push(node);
                progress.step();
            }
            for node in &self.nodes[self.nodes.len() - together.len()..] {
                for worker in &node.workers {
                    self.ledgers.is(worker.id, true).await?;
                }
            }
        }
        drop(progress);
        let count = self.workers();
        try_join_all(self.routers.iter_mut().map(|router| router.knows(count))).await?;
        found.entry((to, JOINED)).or_default().push(micros(begin));
        Ok(true)
    }

    /// What is said while nothing happens.
    async fn traffic(&self, plan: &Plan, found: &mut Found) -> Result<(), BenchError> {
        let (windows, window) = plan.windows;
        let nodes = self.nodes.len();
        let mut progress = Progress::begin("traffic", windows);
        for _ in 0..windows {
            let traffic = self.monitors.measure(window).await?;
            let mut push = |what, value: f64| found.entry((nodes, what)).or_default().push(value);
            for ((messages, bytes), Sum { messages: m, bytes: b }) in TRAFFIC.into_iter().zip([
                traffic.from_daemons,
                traffic.to_daemons,
                traffic.from_routers,
                traffic.to_routers,
                traffic.between,
            ]) {
                push(messages, m);
                push(bytes, b);
            }
            push(SERVERS_CPU, traffic.servers_cpu * 100.0);
            push(OWN_CPU, traffic.own_cpu * 100.0);
            push(SERVERS_MEMORY, traffic.memory);
            progress.step();
        }
        Ok(())
    }

    fn certificate(&mut self) -> String {
        self.certificates += 1;
        format!("bench-{}", self.certificates)
    }

    /// Workers die one after the other, each on another node than the one before.
    async fn deaths(&mut self, count: usize, signalled: bool, found: &mut Found) -> Result<(), BenchError> {
        let nodes = self.nodes.len();
        let mut progress = Progress::begin(if signalled { "deaths" } else { "deaths without a signal" }, count);
        for death in 0..count {
            // A step without a common divisor with the number of nodes comes to all of them.
            let (node, worker) = (death * 7 % nodes, death / nodes % WORKERS);
            let certificate = self.certificate();
            let this = &self.nodes[node];
            let id = this.workers[worker].id;
            self.ledgers.is(id, true).await?;
            let key = Key { node: this.name.clone(), worker: this.workers[worker].name.clone() };
            let life = this.life(worker);
            let listings = self.routers.iter().map(|router| router.listing(&key, &life));
            let waiting: Vec<_> =
                try_join_all(listings).await?.into_iter().map(|listing| tokio::spawn(condemned(listing))).collect();
            let begin = Instant::now();
            self.nodes[node].die(&[worker], certificate, signalled);
            let mut slowest = 0.0f64;
            for waiting in waiting {
                let at = waiting.await.expect("it does not panic");
                let at = at.ok_or_else(|| HarnessError::GaveUp(format!("a router to know of the death of {key}")))?;
                let took = at.duration_since(begin).as_secs_f64() * 1e6;
                slowest = slowest.max(took);
                if signalled {
                    found.entry((nodes, EVERY)).or_default().push(took);
                }
            }
            found.entry((nodes, if signalled { SLOWEST } else { UNSIGNALLED })).or_default().push(slowest);
            let gone = self.ledgers.is(id, false).await?;
            if signalled {
                found.entry((nodes, GONE)).or_default().push(gone.duration_since(begin).as_secs_f64() * 1e6);
            }
            self.nodes[node].begin_life(worker);
            progress.step();
        }
        Ok(())
    }

    /// Every router is started anew at the same time.
    async fn restart(&mut self, times: usize, found: &mut Found) -> Result<(), BenchError> {
        let (nodes, count) = (self.nodes.len(), self.workers());
        // The last deaths' workers are back.
        for worker in self.nodes.iter().flat_map(|node| &node.workers) {
            self.ledgers.is(worker.id, true).await?;
        }
        let mut progress = Progress::begin("restarts of every router", times);
        for _ in 0..times {
            let before = std::mem::take(&mut self.routers);
            let routers = before.len();
            futures_util::future::join_all(before.into_iter().map(Router::stop)).await;
            let begin = Instant::now();
            self.start_routers(routers).await?;
            let knowing = self.routers.iter_mut().map(async |router| {
                router.knows(count).await?;
                Ok::<_, HarnessError>(micros(begin))
            });
            let each = try_join_all(knowing).await?;
            found.entry((nodes, SLOWEST_WHOLE)).or_default().push(each.iter().copied().fold(0.0, f64::max));
            found.entry((nodes, WHOLE)).or_default().extend(each);
            progress.step();
        }
        Ok(())
    }

    /// All nodes of a rack lose all workers at once; then all nodes of another lose their power.
    async fn rack(&mut self, size: usize, found: &mut Found) -> Result<(), BenchError> {
        let nodes = self.nodes.len();
        eprintln!("  a rack of {size} nodes");
        let everything: Vec<usize> = (0..WORKERS).collect();
        let mut waiting = Vec::new();
        for node in &self.nodes[..size] {
            for worker in 0..WORKERS {
                let key = Key { node: node.name.clone(), worker: node.workers[worker].name.clone() };
                let life = node.life(worker);
                let listings = try_join_all(self.routers.iter().map(|router| router.listing(&key, &life))).await?;
                let known = futures_util::future::join_all(listings.into_iter().map(condemned));
                waiting.push(tokio::spawn(known));
            }
        }
        let certificates: Vec<_> = (0..size).map(|_| self.certificate()).collect();
        let begin = Instant::now();
        for (node, certificate) in self.nodes[..size].iter().zip(certificates) {
            node.die(&everything, certificate, true);
        }
        let mut all = 0.0f64;
        for waiting in waiting {
            let times = waiting.await.expect("it does not panic");
            let slowest = times.into_iter().flatten().map(|at| at.duration_since(begin).as_secs_f64() * 1e6);
            let slowest = slowest.fold(0.0, f64::max);
            all = all.max(slowest);
            found.entry((nodes, RACK_DIES)).or_default().push(slowest);
        }
        found.entry((nodes, RACK_ALL)).or_default().push(all);
        for worker in self.nodes[..size].iter().flat_map(|node| &node.workers) {
            self.ledgers.is(worker.id, false).await?;
        }

        if !self.patient {
            return Ok(());
        }
        // A router believes no lapse for two TTLs after it has connected.
        tokio::time::sleep(LEASE * 2).await;
        let dark = &self.nodes[nodes - size..];
        let mut missing = Vec::new();
        for node in dark {
            let key = Key { node: node.name.clone(), worker: node.workers[0].name.clone() };
            for router in &self.routers {
                missing.push((router, router.listing(&key, &node.life(0)).await?));
            }
        }
        let begin = Instant::now();
        dark.iter().for_each(Node::vanish);
        let mut all = 0.0f64;
        while !missing.is_empty() {
            // Leases lapse within seconds: a look every 20 ms is close enough, and costs little.
            tokio::time::sleep(Duration::from_millis(20)).await;
            if begin.elapsed() > LEASE * 10 {
                return Err(HarnessError::GaveUp(format!("{} lapses of leases", missing.len())).into());
            }
            missing.retain(|(router, listing)| {
                let lapsed = router.workers().is_lapsed(listing);
                if lapsed {
                    all = micros(begin);
                    found.entry((nodes, RACK_LAPSES)).or_default().push(all);
                }
                !lapsed
            });
        }
        found.entry((nodes, RACK_LAPSED)).or_default().push(all);
        Ok(())
    }
}

fn micros(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e6
}

/// Messages and bytes a second.
const TRAFFIC: [(&str, &str); 5] = [
    ("daemons → servers, messages", "daemons → servers, bytes"),
    ("servers → daemons, messages", "servers → daemons, bytes"),
    ("routers → servers, messages", "routers → servers, bytes"),
    ("servers → routers, messages", "servers → routers, bytes"),
    ("between servers, messages", "between servers, bytes"),
];
const SERVERS_CPU: &str = "three servers, of one core";
const OWN_CPU: &str = "all daemons and routers, of one core";
const SERVERS_MEMORY: &str = "three servers, memory";

fn sections(plan: &Plan, found: &Found) -> Vec<Section> {
    let rows = |what: &[(&'static str, Unit)]| -> Vec<Row> {
        let of = |nodes: usize| {
            what.iter().filter_map(move |(name, unit)| {
                let values = found.get(&(nodes, *name))?;
                Row::of([&nodes.to_string(), *name], *unit, values.iter().copied())
            })
        };
        plan.nodes.iter().flat_map(|nodes| of(*nodes)).collect()
    };
    let labels = || ["nodes", "what"].map(str::to_owned).to_vec();
    let line = |name: &str, what: &'static str, of: fn(&Row) -> f64| Line {
        name: name.to_owned(),
        points: plan
            .nodes
            .iter()
            .filter_map(|nodes| {
                let values = found.get(&(*nodes, what))?;
                let row = Row::of([what], Unit::Count, values.iter().copied())?;
                Some((*nodes as f64, of(&row)))
            })
            .collect(),
    };
    let plot = |name: &str, title: &str, along: (&str, Unit), lines: Vec<Line>| Plot {
        name: name.to_owned(),
        title: title.to_owned(),
        x: Axis { title: "nodes, 8 workers each".to_owned(), unit: Unit::Count, logarithmic: true },
        y: Axis { title: along.0.to_owned(), unit: along.1, logarithmic: true },
        lines,
    };
    let p50: fn(&Row) -> f64 = |row| row.values.p50;
    let p99: fn(&Row) -> f64 = |row| row.values.p99;
    let per_second = TRAFFIC.iter().flat_map(|(m, b)| [(*m, Unit::PerSecond), (*b, Unit::BytesPerSecond)]);
    let mut traffic: Vec<(&str, Unit)> = per_second.collect();
    traffic.extend([(SERVERS_CPU, Unit::Percent), (OWN_CPU, Unit::Percent), (SERVERS_MEMORY, Unit::Bytes)]);
    let routers = plan.routers;
    let sections = vec![
        Section {
            title: "What is said while nothing happens".to_owned(),
            about: format!(
                "Daemons with {WORKERS} workers each and {routers} routers, by their own code but for engines and clients, all \
                 in one process; {SERVERS} nats-servers with {SERVERS} copies of each bucket, all on this machine. What the \
                 servers count on their connections (`/connz`, `/routez`), by second, in {} windows of {} s. {} nodes were \
                 started; where it was to be more, the machine was too small for it.",
                plan.windows.0,
                plan.windows.1.as_secs_f64(),
                plan.reached
            ),
            labels: labels(),
            compared_with: None,
            rows: rows(&traffic),
            plots: vec![
                plot(
                    "messages",
                    "What is said while nothing happens",
                    ("messages a second", Unit::PerSecond),
                    TRAFFIC.iter().map(|(messages, _)| line(messages, messages, p50)).collect(),
                ),
                plot(
                    "cores",
                    "What it costs",
                    ("percent of one core", Unit::Percent),
                    vec![line(SERVERS_CPU, SERVERS_CPU, p50), line(OWN_CPU, OWN_CPU, p50)],
                ),
            ],
        },
        Section {
            title: "Until every router knows of a death".to_owned(),
            about: format!(
                "{} deaths one after the other, each of a worker on another node: the daemon publishes the signal and deletes \
                 the record, and every router's own code condemns the worker. Times since the daemon has decided. Of {} more \
                 deaths the routers learn from the record alone, as if every signal were lost.",
                plan.deaths, plan.untold
            ),
            labels: labels(),
            compared_with: None,
            rows: rows(&[
                (EVERY, Unit::Microseconds),
                (SLOWEST, Unit::Microseconds),
                (UNSIGNALLED, Unit::Microseconds),
                (GONE, Unit::Microseconds),
            ]),
            plots: vec![plot(
                "deaths",
                "Until the slowest router knows of a death",
                ("since the daemon has decided", Unit::Microseconds),
                vec![
                    line("signal and record, p50", SLOWEST, p50),
                    line("signal and record, p99", SLOWEST, p99),
                    line("record alone, p50", UNSIGNALLED, p50),
                    line("record alone, p99", UNSIGNALLED, p99),
                ],
            )],
        },
        Section {
            title: "Every router restarts at once".to_owned(),
            about: format!(
                "All {routers} routers end and start again, {} times: until each may choose among all workers. And how long a \
                 router then looks for a worker, once a request.{}",
                plan.restarts,
                plan.unlisted.map_or_else(String::new, |nodes| format!(
                    " With {nodes} nodes they did not all list the workers within {} s, and nothing more was measured.",
                    GIVE_UP.as_secs()
                ))
            ),
            labels: labels(),
            compared_with: None,
            rows: rows(&[
                (WHOLE, Unit::Microseconds),
                (SLOWEST_WHOLE, Unit::Microseconds),
                (CHOICE, Unit::Microseconds),
                (JOINED, Unit::Microseconds),
            ]),
            plots: vec![plot(
                "restart",
                "Every router restarts at once",
                ("until it has the whole picture", Unit::Microseconds),
                vec![line("each", WHOLE, p50), line("the slowest", SLOWEST_WHOLE, p99)],
            )],
        },
        Section {
            title: "A whole rack".to_owned(),
            about: format!(
                "First all {} workers of {} nodes die at once and their daemons say so. Then {} other nodes lose their power: \
                 nobody says anything, and their leases of {} s lapse. Looked at every 20 ms.",
                plan.rack * WORKERS,
                plan.rack,
                plan.rack,
                LEASE.as_secs()
            ),
            labels: labels(),
            compared_with: None,
            rows: rows(&[
                (RACK_DIES, Unit::Microseconds),
                (RACK_ALL, Unit::Microseconds),
                (RACK_LAPSES, Unit::Microseconds),
                (RACK_LAPSED, Unit::Microseconds),
            ]),
            plots: Vec::new(),
        },
    ];
    sections.into_iter().filter(|section| !section.rows.is_empty()).collect()
}

//! Two nodes, four workers, two routers and their clients; and, at random, everything that can go
//! wrong with them. After every round all of it is held against what is known to have happened: who
//! was killed, who was only disturbed, and who was left alone.
//!
//! `LASTGASP_SEED=<seed> cargo xtask test --filter history` repeats a run. What is done then is the
//! same; how the processes meet is not, so a rare failure may take several.

mod plan;
mod streams;
mod world;

use std::time::{Duration, Instant};

use lastgasp_tests::matrix;

use plan::Fault;
use streams::{Request, StreamOutcome};
use world::World;

/// How long this goes on, in seconds, where that is not for [`SHORT`] or [`LONG`].
const SECONDS: &str = "LASTGASP_HISTORY_SECONDS";
/// Repeats a run.
const SEED: &str = "LASTGASP_SEED";

const SHORT: u64 = 40;
/// With `cargo xtask test --long`.
const LONG: u64 = 600;

/// Requests in a round.
const REQUESTS: usize = 10;

#[derive(Debug, Default)]
struct Counts {
    rounds: usize,
    engines_killed: usize,
    engines_frozen: usize,
    daemons_killed: usize,
    routers_killed: usize,
    servers_down: usize,
    partitions: usize,
    exact: usize,
    moved: usize,
    visibly_failed: usize,
    had_no_router: usize,
}

impl Counts {
    fn add(&mut self, fault: Fault) {
        *match fault {
            Fault::KillCore(_) | Fault::KillRoot(_) | Fault::KillTree(_) | Fault::Dismiss(_) => {
                &mut self.engines_killed
            }
            Fault::FreezeCore(_) | Fault::FreezeRoot(_) => &mut self.engines_frozen,
            Fault::KillDaemon(_) | Fault::EndDaemon(_) => &mut self.daemons_killed,
            Fault::KillRouter(_) => &mut self.routers_killed,
            Fault::KillNats | Fault::FreezeNats => &mut self.servers_down,
            Fault::CutNode(_) | Fault::CutRouter(_) => &mut self.partitions,
        } += 1;
    }
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{variable}={text} is no number")))
}

#[tokio::test]
async fn random_faults_never_make_a_view_or_a_stream_wrong() {
    let seed = number(SEED).unwrap_or_else(|| fastrand::u64(..));
    let usual = if matrix::is_long() { LONG } else { SHORT };
    let lasts = Duration::from_secs(number(SECONDS).unwrap_or(usual));
    println!("again: {SEED}={seed} cargo xtask test --filter history");
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut world = World::new().await;
    let mut counts = Counts::default();
    let begin = Instant::now();
    while counts.rounds == 0 || begin.elapsed() < lasts {
        let plan = plan::round(&mut rng, &world.cast());
        let requests: Vec<_> = (0..REQUESTS).map(|_| Request::random(&mut rng, world.cast().routers)).collect();
        println!("round {} at {:.1} s: {plan:?}", counts.rounds, begin.elapsed().as_secs_f64());
        let asked = world.ask(requests);
        world.suffer(&plan).await;
        world.heal().await;
        world.converge().await;
        for outcome in asked.join_all().await {
            match outcome {
                None => counts.had_no_router += 1,
                Some(StreamOutcome::Exact { moved }) => {
                    counts.exact += 1;
                    counts.moved += usize::from(moved);
                }
                Some(StreamOutcome::VisiblyFailed(why)) => {
                    println!("    visibly failed: {why}");
                    counts.visibly_failed += 1;
                }
            }
        }
        world.check_history();
        plan.iter().for_each(|planned| counts.add(planned.fault));
        counts.rounds += 1;
    }
    println!("{counts:#?}");
    assert!(counts.exact > counts.visibly_failed, "{counts:#?}");
    let (dead, removals) = world.deaths_and_removals();
    matrix::row(
        "Random faults, several at once: engines, daemons, routers and nats-server killed, stopped and cut off",
        "no dead worker in a router's view after its withdrawal, no living one withdrawn, streams exact or visibly \
         failed",
        &format!(
            "{} rounds: {} engines killed, {} stopped for a while; {} daemons, {} routers killed; nats-server killed or \
             stopped {} times; {} partitions; {dead} lives ended, {removals} withdrawals seen, 0 of workers left alone; \
             streams: {} exact ({} of them moved), {} visibly failed, 0 silently wrong",
            counts.rounds,
            counts.engines_killed,
            counts.engines_frozen,
            counts.daemons_killed,
            counts.routers_killed,
            counts.servers_down,
            counts.partitions,
            counts.exact,
            counts.moved,
            counts.visibly_failed,
        ),
    );
}

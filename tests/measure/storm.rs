//! What the node loses: a storm with the programs and without, in pairs.

use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use crate::harness::{Kernel, Victim, until};
use crate::median;

pub(crate) fn main(rounds: usize, seconds: u64) {
    let time = Duration::from_secs(seconds);
    println!("{:<16} {:>14} {:>14} {:>12}", "per second", "without", "with", "difference");
    for (what, measure) in [("exits", exits as fn(Duration) -> f64), ("TCP connects", connects)] {
        let mut pairs = Vec::new();
        measure(time);
        for round in 0..rounds {
            let with = || {
                let _kernel = Kernel::load();
                measure(time)
            };
            // Now this one first, now that one: the machine may get slower or faster.
            let (without, with) = if round % 2 == 0 {
                let without = measure(time);
                (without, with())
            } else {
                let with = with();
                (measure(time), with)
            };
            pairs.push((without, with));
        }
        let without = median(pairs.iter().map(|(without, _)| *without).collect());
        let with = median(pairs.iter().map(|(_, with)| *with).collect());
        let difference = median(pairs.iter().map(|(without, with)| (with / without - 1.0) * 100.0).collect());
        println!("{what:<16} {without:>14.0} {with:>14.0} {difference:>+11.2}%");
    }
    println!("medians of {rounds} rounds; the difference is the median of the pairs'");
}

fn exits(time: Duration) -> f64 {
    let mut storm = Victim::start(&["storm", "2"]);
    let begin = Instant::now();
    until("the time is over", || {
        std::thread::sleep(Duration::from_millis(10));
        (begin.elapsed() > time).then_some(())
    });
    storm.go();
    let exits = storm.read_number("exits ");
    let took = begin.elapsed();
    storm.wait();
    f64::from(exits) / took.as_secs_f64()
}

fn connects(time: Duration) -> f64 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("it is bound");
    let begin = Instant::now();
    let mut count = 0.0;
    while begin.elapsed() < time {
        let client = TcpStream::connect(address).expect("it listens");
        drop(listener.accept().expect("it is there"));
        drop(client);
        count += 1.0;
    }
    count / begin.elapsed().as_secs_f64()
}

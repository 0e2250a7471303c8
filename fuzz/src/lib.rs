//! Damaged input for everything that parses. A target is an ordinary test, `tests/fuzz.rs` of its
//! crate, that hands its parser to [`run`]; its corpus lies beside it in `tests/corpus/<target>/`.
//!
//! Each run first reads every file of the corpus, findings of former runs among them, then damages
//! what it has for [`SECONDS`]. There is no instrumentation, so no nightly compiler is needed; in its
//! place a target says what became of an input, and an input with an outcome that was not seen before
//! joins the pool. An input that panics, or takes too long, is written into the corpus as
//! `finding-…` and named: commit it with the fix.
//!
//! ```sh
//! LASTGASP_FUZZ_SECONDS=600 cargo test -p lastgasp --test fuzz -- --nocapture
//! ```
#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};
use std::{env, fs};

/// Seconds for each target; 1 by default.
pub const SECONDS: &str = "LASTGASP_FUZZ_SECONDS";
/// A number, to repeat a run that printed it.
pub const SEED: &str = "LASTGASP_FUZZ_SEED";
/// File that the number of inputs is appended to, for docs/faults.md; set by `cargo xtask faults`.
pub const MATRIX: &str = "LASTGASP_MATRIX";

/// Largest input, in bytes: beyond the bounds of everything that has one below it.
const LARGEST: usize = 64 * 1024;
/// Most inputs that are kept to be damaged further.
const POOL: usize = 4096;
/// No parser may take so long for one input, on a machine with other things to do.
const TOO_LONG: Duration = Duration::from_secs(5);

/// Reads the corpus, then damaged input. `folder` is the crate's `tests/corpus`; `seeds` join the
/// corpus; `words` mean something to the parser; `parse` returns what became of an input.
///
/// # Panics
/// `parse` panics or takes too long; or there is neither corpus nor seed.
pub fn run<T: Hash>(folder: &Path, target: &str, seeds: &[Vec<u8>], words: &[&str], parse: impl Fn(&[u8]) -> T) {
    let folder = folder.join(target);
    let mut pool = read(&folder);
    pool.extend_from_slice(seeds);
    assert!(!pool.is_empty(), "{}: no corpus", folder.display());
    let seconds = env::var(SECONDS).ok().map_or(1.0, |text| text.parse().expect("a number of seconds"));
    let seed = env::var(SEED).ok().map_or_else(fresh, |text| text.parse().expect("a number"));
    let mut seen = HashSet::new();
    for input in &pool {
        seen.insert(attempt(&folder, seed, input, &parse));
    }
    let mut random = Random(seed | 1);
    let (begin, mut tried) = (Instant::now(), 0_u64);
    while begin.elapsed().as_secs_f64() < seconds {
        let mut input = pool[random.below(pool.len())].clone();
        for _ in 0..=random.below(4) {
            damage(&mut input, &pool, words, &mut random);
        }
        input.truncate(LARGEST);
        tried += 1;
        if seen.insert(attempt(&folder, seed, &input, &parse)) && pool.len() < POOL {
            pool.push(input);
        }
    }
    println!("{target}: {tried} inputs, {} outcomes, {SEED}={seed}", seen.len());
    if let Some(path) = env::var_os(MATRIX) {
        let line = format!("{{\"count\":\"bad inputs tried\",\"number\":{tried}}}\n");
        let file = fs::OpenOptions::new().create(true).append(true).open(path);
        file.and_then(|mut file| file.write_all(line.as_bytes())).expect("a file of counts that can be written");
    }
}

fn read(folder: &Path) -> Vec<Vec<u8>> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("a readable folder").path()).collect();
    paths.sort();
    paths.iter().map(|path| fs::read(path).expect("a readable file")).collect()
}

fn fresh() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    hash(&(now, std::process::id()))
}

fn hash(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

fn attempt<T: Hash>(folder: &Path, seed: u64, input: &[u8], parse: &impl Fn(&[u8]) -> T) -> u64 {
    let begin = Instant::now();
    let outcome = catch_unwind(AssertUnwindSafe(|| hash(&parse(input))));
    let wrong = match &outcome {
        Err(_) => "panics",
        Ok(_) if begin.elapsed() > TOO_LONG => "takes too long",
        Ok(outcome) => return *outcome,
    };
    let finding = folder.join(format!("finding-{:016x}", hash(&input)));
    let kept = fs::create_dir_all(folder).and_then(|()| fs::write(&finding, input));
    panic!("{}: an input that {wrong} ({kept:?}); {SEED}={seed}", finding.display());
}

/// xorshift64: good enough, and the same on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() >> 33).expect("31 bits") % limit.max(1)
    }
}

/// What is rarely thought of when a parser is written.
const ODD: [&str; 14] = [
    "\n",
    "\r\n",
    "\0",
    "\u{1b}[2J",
    "\u{feff}",
    "\u{202e}",
    "\u{fffd}",
    "-1",
    "0",
    "4294967296",
    "18446744073709551616",
    "1e999",
    "null",
    "é",
];

fn damage(input: &mut Vec<u8>, pool: &[Vec<u8>], words: &[&str], random: &mut Random) {
    let at = random.below(input.len() + 1);
    let end = (at + 1 + random.below(64)).min(input.len());
    match random.below(8) {
        0 => {
            if let Some(byte) = input.get_mut(at) {
                *byte ^= 1 << random.below(8);
            }
        }
        1 => {
            if let Some(byte) = input.get_mut(at) {
                *byte = [0, 0xff, 0x7f, 0x80, b'"', b'\\', b'{', b'[', b':', b' '][random.below(10)];
            }
        }
        2 => drop(input.drain(at.min(end)..end)),
        3 => {
            let piece = input[at.min(end)..end].to_vec();
            for _ in 0..=random.below(8) {
                input.splice(at..at, piece.iter().copied());
            }
        }
        4 => input.truncate(at),
        5 => {
            let other = &pool[random.below(pool.len())];
            let from = random.below(other.len() + 1);
            let to = (from + random.below(256)).min(other.len());
            input.splice(at..at, other[from..to].iter().copied());
        }
        6 if !words.is_empty() => {
            let word = words[random.below(words.len())];
            input.splice(at..at, word.bytes());
        }
        _ => {
            let word = ODD[random.below(ODD.len())];
            input.splice(at..end.max(at), word.bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_panics_is_found_kept_and_read_first_the_next_time() {
        let folder = env::temp_dir().join(format!("lastgasp-fuzz-{}", std::process::id()));
        let parse = |input: &[u8]| {
            assert!(!input.windows(2).any(|pair| pair == b"{{"), "two of them");
            input.len() % 16
        };
        let found = catch_unwind(AssertUnwindSafe(|| {
            for _ in 0..60 {
                run(&folder, "braces", &[b"{\"a\":1}".to_vec()], &["{"], parse);
            }
        }));
        assert!(found.is_err());
        let kept = read(&folder.join("braces"));
        assert_eq!(kept.len(), 1);
        assert!(kept[0].windows(2).any(|pair| pair == b"{{"));
        fs::remove_dir_all(folder).expect("it is ours");
    }
}

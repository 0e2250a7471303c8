//! Many measurements of one thing, shown by a few of them.

use serde::{Deserialize, Serialize};

/// What a number counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// A time.
    Microseconds,
    /// A time of a few instructions.
    Nanoseconds,
    /// A size.
    Bytes,
    /// A rate of bytes.
    BytesPerSecond,
    /// A rate of whatever the row names.
    PerSecond,
    /// A share.
    Percent,
    /// A number of whatever the row names.
    Count,
}

impl Unit {
    /// `value` as people read it, with three digits that count.
    pub fn show(self, value: f64) -> String {
        match self {
            Self::Microseconds => scaled(value, &[(1e6, "s"), (1e3, "ms"), (1.0, "µs")]),
            Self::Nanoseconds => scaled(value, &[(1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns")]),
            Self::Bytes => scaled(value, &[(GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"), (1.0, "B")]),
            Self::BytesPerSecond => scaled(value, &[(GIB, "GiB/s"), (MIB, "MiB/s"), (KIB, "KiB/s"), (1.0, "B/s")]),
            Self::PerSecond => scaled(value, &[(1e6, "M/s"), (1e3, "k/s"), (1.0, "/s")]),
            Self::Percent => format!("{value:.2} %"),
            Self::Count => scaled(value, &[(1e6, "M"), (1e3, "k"), (1.0, "")]),
        }
    }
}

const KIB: f64 = 1024.0;
const MIB: f64 = 1024.0 * KIB;
const GIB: f64 = 1024.0 * MIB;

/// In the largest of these units that is not larger than the value, or else the last.
fn scaled(value: f64, units: &[(f64, &str)]) -> String {
    let fits = units.iter().find(|(size, _)| value.abs() >= *size).or(units.last());
    let &(size, name) = fits.expect("there is a unit");
    let value = value / size;
    let digits = match value.abs() {
        100.0.. => 0,
        _ if value.fract() == 0.0 && size == 1.0 => 0,
        10.0.. => 1,
        _ => 2,
    };
    format!("{value:.digits$} {name}").trim_end().to_owned()
}

/// A distribution. Percentile k is the smallest value that k percent of all values do not exceed (nearest
/// rank), so each is one that was measured; of less than 100 values the 99th is the largest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Distribution {
    /// Of all the numbers.
    pub unit: Unit,
    /// How many values there were.
    pub n: usize,
    /// The median.
    pub p50: f64,
    /// The 99th percentile.
    pub p99: f64,
    /// The largest.
    pub max: f64,
    /// The least, then percentiles 1 to 100.
    pub percentiles: Vec<f64>,
}

impl Distribution {
    /// Of these values; none if there are none.
    pub fn of(unit: Unit, values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let at = |percent: usize| values.get((values.len() * percent).div_ceil(100).saturating_sub(1)).copied();
        let percentiles = (0..=100).map(at).collect::<Option<Vec<f64>>>()?;
        Some(Self { unit, n: values.len(), p50: at(50)?, p99: at(99)?, max: at(100)?, percentiles })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentile_is_a_value_that_was_measured() {
        let values = (1..=300).rev().map(f64::from);
        let found = Distribution::of(Unit::Microseconds, values).unwrap();
        assert_eq!((found.n, found.p50, found.p99, found.max), (300, 150.0, 297.0, 300.0));
        assert_eq!((found.percentiles.len(), found.percentiles[0]), (101, 1.0));
        let few = Distribution::of(Unit::Count, [2.0, 1.0]).unwrap();
        assert_eq!((few.p50, few.p99, few.max), (1.0, 2.0, 2.0));
        assert_eq!(Distribution::of(Unit::Count, []), None);
    }

    #[test]
    fn numbers_are_shown_in_the_unit_that_fits() {
        assert_eq!(Unit::Microseconds.show(412.3), "412 µs");
        assert_eq!(Unit::Microseconds.show(1_530.0), "1.53 ms");
        assert_eq!(Unit::Microseconds.show(9_980_000.0), "9.98 s");
        assert_eq!(Unit::Bytes.show(21.5 * MIB), "21.5 MiB");
        assert_eq!(Unit::PerSecond.show(0.5), "0.50 /s");
        assert_eq!(Unit::Count.show(64.0), "64");
        assert_eq!(Unit::Percent.show(-0.5), "-0.50 %");
    }
}

//! What a bench found, as JSON: `docs/bench/NAME.json` is one [`Report`].

use lastgasp_tests::distribution::{Distribution, Unit};
use serde::{Deserialize, Serialize};

use crate::machine::{Load, Machine};

/// Of the JSON files; higher when a reader of the former would misread it.
pub(crate) const SCHEMA: u32 = 1;

/// One run of one bench.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) schema: u32,
    /// Its name on the command line.
    pub(crate) bench: String,
    pub(crate) title: String,
    /// The command that does it again.
    pub(crate) command: String,
    /// Git revision, with `+changes` where the tree was not clean.
    pub(crate) revision: String,
    /// When it began, RFC 3339.
    pub(crate) at: String,
    pub(crate) took_s: u64,
    /// A few of each, to show that the bench runs: no result.
    pub(crate) quick: bool,
    pub(crate) machine: Machine,
    /// Just before and just after.
    pub(crate) load: [Load; 2],
    pub(crate) sections: Vec<Section>,
}

/// One table, and what is drawn of it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Section {
    pub(crate) title: String,
    /// What was measured, and how: Markdown, above the table.
    pub(crate) about: String,
    /// Headings of the rows' labels.
    pub(crate) labels: Vec<String>,
    /// What the ratios are ratios to, if there are any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) compared_with: Option<String>,
    pub(crate) rows: Vec<Row>,
    pub(crate) plots: Vec<Plot>,
}

/// One line of a table.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Row {
    pub(crate) labels: Vec<String>,
    pub(crate) values: Distribution,
    /// How many times the median with which this is compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ratio: Option<f64>,
}

impl Row {
    /// A row without a ratio; none without values.
    pub(crate) fn of<const N: usize>(
        labels: [&str; N],
        unit: Unit,
        values: impl IntoIterator<Item = f64>,
    ) -> Option<Self> {
        let labels = labels.map(str::to_owned).to_vec();
        Some(Self { labels, values: Distribution::of(unit, values)?, ratio: None })
    }

    /// Compared with the median of another row.
    pub(crate) fn against(mut self, other: Option<&Self>) -> Self {
        self.ratio = other.map(|other| self.values.p50 / other.values.p50).filter(|ratio| ratio.is_finite());
        self
    }
}

/// Lines in one picture.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Plot {
    /// The file is `NAME-<this>.svg`.
    pub(crate) name: String,
    pub(crate) title: String,
    pub(crate) x: Axis,
    pub(crate) y: Axis,
    pub(crate) lines: Vec<Line>,
}

/// What is along one side.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Axis {
    pub(crate) title: String,
    pub(crate) unit: Unit,
    pub(crate) logarithmic: bool,
}

/// One line of a picture.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Line {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
}

impl Plot {
    /// Which share of all values were not above what is along the x axis.
    pub(crate) fn cumulative<'a>(
        name: &str,
        title: &str,
        (along, logarithmic): (&str, bool),
        rows: impl IntoIterator<Item = (String, &'a Row)>,
    ) -> Self {
        let mut unit = Unit::Microseconds;
        let lines = rows.into_iter().map(|(name, row)| {
            unit = row.values.unit;
            let points = row.values.percentiles.iter().enumerate();
            Line { name, points: points.map(|(percent, value)| (*value, percent as f64)).collect() }
        });
        let lines = lines.collect();
        Self {
            name: name.to_owned(),
            title: title.to_owned(),
            x: Axis { title: along.to_owned(), unit, logarithmic },
            y: Axis { title: "share of all".to_owned(), unit: Unit::Percent, logarithmic: false },
            lines,
        }
    }
}

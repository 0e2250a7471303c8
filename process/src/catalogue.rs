//! The metrics of a process: each is registered with what its labels may say, so that documentation, dashboards
//! and alerts are held against the code and not against a copy of it.

use std::sync::{Arc, Mutex, PoisonError};

use prometheus::core::Collector;
use prometheus::proto::MetricType;
use prometheus::{
    GaugeVec, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder,
};
use strum::VariantNames;

/// Names of a closed enum, and which enum that is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct List {
    /// The enum's path, as the compiler names it; empty for words of no enum.
    pub of: &'static str,
    /// Its names, in the order of its variants.
    pub names: &'static [&'static str],
}

impl List {
    /// The names that strum derives.
    #[must_use]
    pub fn of<T: VariantNames>() -> Self {
        Self { of: std::any::type_name::<T>(), names: T::VARIANTS }
    }
}

/// A label, and what it may say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Label {
    /// Its name.
    pub name: &'static str,
    /// Closed names that it may say.
    pub lists: Vec<List>,
    /// What else it says, for people; empty where [`Self::lists`] are all.
    pub open: &'static str,
}

impl Label {
    /// One whose values are names of an enum.
    #[must_use]
    pub fn closed<T: VariantNames>(name: &'static str) -> Self {
        Self { name, lists: vec![List::of::<T>()], open: "" }
    }

    /// The same, or a name of another enum.
    #[must_use]
    pub fn or<T: VariantNames>(mut self) -> Self {
        self.lists.push(List::of::<T>());
        self
    }

    /// The same, or one of these words.
    #[must_use]
    pub fn or_words(mut self, names: &'static [&'static str]) -> Self {
        self.lists.push(List { of: "", names });
        self
    }

    /// One that says one of these words.
    #[must_use]
    pub fn words(name: &'static str, names: &'static [&'static str]) -> Self {
        Self { name, lists: vec![List { of: "", names }], open: "" }
    }

    /// One that says whatever `open` describes.
    #[must_use]
    pub const fn open(name: &'static str, open: &'static str) -> Self {
        Self { name, lists: Vec::new(), open }
    }

    /// Whether it may have this value.
    #[must_use]
    pub fn may_be(&self, value: &str) -> bool {
        !self.open.is_empty() || self.lists.iter().any(|list| list.names.contains(&value))
    }
}

/// What a metric is, whether it has a value or not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Family {
    /// Its full name.
    pub name: String,
    /// What it says, in a sentence.
    pub help: String,
    /// `counter`, `gauge` or `histogram`.
    pub kind: &'static str,
    /// Its labels.
    pub labels: Vec<Label>,
}

/// All metrics of a process. A clone is the same.
#[derive(Debug, Clone)]
pub struct Catalogue {
    prefix: &'static str,
    registry: Registry,
    families: Arc<Mutex<Vec<Family>>>,
}

impl Catalogue {
    /// None yet. Their names will begin with `prefix` and `_`.
    #[must_use]
    pub fn new(prefix: &'static str) -> Self {
        Self { prefix, registry: Registry::new(), families: Arc::default() }
    }

    /// Every metric, also those that have no value yet, in the order in which they are defined.
    #[must_use]
    pub fn families(&self) -> Vec<Family> {
        self.families.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What has a value, for whoever reads it piece by piece.
    #[must_use]
    pub fn gather(&self) -> Vec<prometheus::proto::MetricFamily> {
        self.registry.gather()
    }

    /// What has a value, in the text format of Prometheus, version 0.0.4.
    ///
    /// # Panics
    /// Never: every metric has a name and a value.
    #[must_use]
    pub fn text(&self) -> String {
        TextEncoder::new().encode_to_string(&self.gather()).expect("every metric has a name and a value")
    }

    /// A counter without labels.
    #[must_use]
    pub fn counter(&self, name: &str, help: &str) -> IntCounter {
        self.registered(IntCounter::with_opts(self.options(name, help)), Vec::new())
    }

    /// A gauge without labels.
    #[must_use]
    pub fn gauge(&self, name: &str, help: &str) -> IntGauge {
        self.registered(IntGauge::with_opts(self.options(name, help)), Vec::new())
    }

    /// A counter for each of its labels' values.
    #[must_use]
    pub fn counters<const N: usize>(&self, name: &str, help: &str, labels: [Label; N]) -> IntCounterVec {
        let names = labels.each_ref().map(|label| label.name);
        self.registered(IntCounterVec::new(self.options(name, help), &names), labels.into())
    }

    /// A gauge for each of its labels' values.
    #[must_use]
    pub fn gauges<const N: usize>(&self, name: &str, help: &str, labels: [Label; N]) -> IntGaugeVec {
        let names = labels.each_ref().map(|label| label.name);
        self.registered(IntGaugeVec::new(self.options(name, help), &names), labels.into())
    }

    /// The same for what is no whole number.
    #[must_use]
    pub fn fractions<const N: usize>(&self, name: &str, help: &str, labels: [Label; N]) -> GaugeVec {
        let names = labels.each_ref().map(|label| label.name);
        self.registered(GaugeVec::new(self.options(name, help), &names), labels.into())
    }

    /// A histogram with these upper bounds.
    #[must_use]
    pub fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> Histogram {
        let options = HistogramOpts::from(self.options(name, help)).buckets(buckets.to_vec());
        self.registered(Histogram::with_opts(options), Vec::new())
    }

    fn options(&self, name: &str, help: &str) -> Opts {
        Opts::new(name, help).namespace(self.prefix)
    }

    /// Names are fixed and each is registered once, so this fails for the first test or never.
    fn registered<T: Collector + Clone + 'static>(&self, metric: prometheus::Result<T>, labels: Vec<Label>) -> T {
        let metric = metric.expect("names of metrics are valid");
        self.registry.register(Box::new(metric.clone())).expect("names of metrics differ");
        let kind = match metric.collect().first().map(prometheus::proto::MetricFamily::get_field_type) {
            Some(MetricType::GAUGE) => "gauge",
            Some(MetricType::HISTOGRAM) => "histogram",
            _ => "counter",
        };
        let families = metric.desc().into_iter().map(|desc| Family {
            name: desc.fq_name.clone(),
            help: desc.help.clone(),
            kind,
            labels: labels.clone(),
        });
        self.families.lock().unwrap_or_else(PoisonError::into_inner).extend(families);
        metric
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(strum::VariantNames)]
    #[strum(serialize_all = "snake_case")]
    #[expect(dead_code, reason = "only its names are asked for")]
    enum Colour {
        Red,
        DarkGreen,
    }

    #[test]
    fn a_metric_is_known_with_its_labels_before_it_has_a_value() {
        let catalogue = Catalogue::new("test");
        let labels = [Label::closed::<Colour>("colour"), Label::open("node", "its name")];
        let apples = catalogue.counters("apples_total", "Apples.", labels);
        assert_eq!(catalogue.text(), "");
        let [family] = &catalogue.families()[..] else { panic!("one") };
        assert_eq!(
            (family.name.as_str(), family.kind, family.help.as_str()),
            ("test_apples_total", "counter", "Apples.")
        );
        let [colour, node] = &family.labels[..] else { panic!("two") };
        assert!(colour.may_be("dark_green") && !colour.may_be("blue") && node.may_be("anything"));
        apples.with_label_values(&["red", "a"]).inc();
        assert!(catalogue.text().contains("test_apples_total{colour=\"red\",node=\"a\"} 1"));
    }
}

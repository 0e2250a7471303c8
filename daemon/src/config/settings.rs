//! All settings that were given, by path, each with the place it comes from. The file is read
//! first, the environment over it, the flags over that.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use toml::de::{DeArray, DeTable, DeValue};

use super::error::{Place, Problem, did_you_mean};
use super::schema::{self, ENV_PREFIX, RESERVED, SCHEMA, Setting};
use super::value::SettingValue;

/// Entries of a list that are looked at; more than any node has GPUs.
const MAX_INDEX: usize = 1024;

/// What was given, and what was wrong with it.
#[derive(Debug, Default)]
pub(super) struct Settings {
    values: BTreeMap<String, (SettingValue, Place)>,
    /// Tables and list entries that appeared: `worker[0]`, `worker[0].find`.
    tables: BTreeMap<String, Place>,
    /// Settings that were given and refused, so that they are not called missing too.
    refused: BTreeSet<String>,
    pub(super) problems: Vec<Problem>,
    pub(super) warnings: Vec<Problem>,
}

impl Settings {
    // === reading ===

    /// Reads a TOML document.
    pub(super) fn read_file(&mut self, file: &Path, text: &str) {
        let document = Document { file: file.into(), text };
        let (table, errors) = DeTable::parse_recoverable(text);
        for error in &errors {
            let place = document.place(error.span().map_or(0, |span| span.start));
            let message = format!("is not TOML: {}", error.message().trim().replace('\n', "; "));
            self.problems.push(Problem { place, path: String::new(), message });
        }
        // Half a document would only add complaints about what stands in the other half.
        if errors.is_empty() {
            self.read_table(&document, "", table.get_ref());
        }
    }

    fn read_table(&mut self, document: &Document<'_>, path: &str, table: &DeTable<'_>) {
        let parent = schema::without_indexes(path);
        let children = schema::children(&parent);
        for (key, value) in table {
            let name = key.get_ref().as_ref();
            let place = document.place(key.span().start);
            let child = if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
            // A quoted key may hold what only a path may: `"worker[0].name" = …` names nothing.
            let plain = !name.contains(['.', '[', ']']);
            // A setting may be a word or a table, as `on_lost` is.
            let as_table = matches!(value.get_ref(), DeValue::Table(_))
                && !schema::children(&schema::without_indexes(&child)).is_empty();
            if let Some(setting) = Setting::at(&child).filter(|_| plain && !as_table) {
                self.put(child, setting.kind.read_toml(value.get_ref()), place);
            } else if children.contains(&format!("{name}[]").as_str()) {
                match value.get_ref() {
                    DeValue::Array(array) => self.read_list(document, &child, array),
                    _ => self.refuse(place, &child, format!("is a list of tables; write [[{child}]]")),
                }
            } else if children.contains(&name) {
                match value.get_ref() {
                    DeValue::Table(table) => {
                        self.tables.insert(child.clone(), place);
                        self.read_table(document, &child, table);
                    }
                    _ => self.refuse(place, &child, format!("is a table; write [{child}]")),
                }
            } else {
                let known: Vec<&str> = children.iter().map(|child| child.trim_end_matches("[]")).collect();
                let near = did_you_mean(name, known.iter().copied());
                self.refuse(place, &child, format!("is not a setting; known here: {}{near}", known.join(", ")));
            }
        }
    }

    fn read_list(&mut self, document: &Document<'_>, path: &str, array: &DeArray<'_>) {
        for (index, entry) in array.iter().enumerate() {
            let child = format!("{path}[{index}]");
            let place = document.place(entry.span().start);
            match entry.get_ref() {
                DeValue::Table(table) if index < MAX_INDEX => {
                    self.tables.insert(child.clone(), place);
                    self.read_table(document, &child, table);
                }
                DeValue::Table(_) => {
                    self.refuse(place, &child, format!("is one too many; at most {MAX_INDEX} are read"));
                    break;
                }
                _ => self.refuse(place, &child, format!("is a table; write [[{path}]]")),
            }
        }
    }

    /// Reads environment variables, over what is there.
    pub(super) fn read_env(&mut self, variables: impl IntoIterator<Item = (String, String)>) {
        for (name, text) in variables {
            if !name.starts_with(ENV_PREFIX) || RESERVED.contains(&name.as_str()) {
                continue;
            }
            let Some((setting, path)) = setting_of(&name) else {
                // Kubernetes sets LASTGASP_SERVICE_HOST and more in every pod beside a Service of
                // that name, so an unknown variable cannot be an error.
                let names: Vec<String> = SCHEMA.iter().map(Setting::env).collect();
                let near = did_you_mean(&name, names.iter().map(String::as_str));
                let message = format!("is not a setting and has no effect{near}");
                self.warnings.push(Problem { place: Place::Env(name), path: String::new(), message });
                continue;
            };
            let place = Place::Env(name);
            for (end, _) in path.match_indices(['.']) {
                self.tables.entry(path[..end].to_owned()).or_insert_with(|| place.clone());
            }
            self.put(path, setting.kind.read_text(&text), place);
        }
    }

    /// Takes a setting from a flag of the command line, over what is there.
    pub(super) fn read_flag(&mut self, flag: &'static str, path: &str, text: &str) {
        let setting = Setting::at(path).expect("flags name settings of the schema");
        self.put(path.to_owned(), setting.kind.read_text(text), Place::Flag(flag));
    }

    /// Takes a setting from a variable in another process's environment, which declares a worker.
    pub(super) fn read_declaration(&mut self, variable: &str, path: &str, text: &str) {
        let setting = Setting::at(path).expect("declarations name settings of the schema");
        let place = Place::Env(variable.to_owned());
        for (end, _) in path.match_indices(['.']) {
            self.tables.entry(path[..end].to_owned()).or_insert_with(|| place.clone());
        }
        self.put(path.to_owned(), setting.kind.read_text(text), place);
    }

    fn put(&mut self, path: String, value: Result<SettingValue, String>, place: Place) {
        match value {
            Ok(value) => {
                self.values.insert(path, (value, place));
            }
            Err(message) => self.refuse(place, &path, message),
        }
    }

    /// Notes that something is wrong with a setting or a table.
    pub(super) fn refuse(&mut self, place: Place, path: &str, message: impl Into<String>) {
        self.refused.insert(path.to_owned());
        self.problems.push(Problem { place, path: path.to_owned(), message: message.into() });
    }

    // === asking ===

    /// Entries of the list at `path`; a gap, which only the environment can leave, is a problem.
    pub(super) fn entries(&mut self, path: &str) -> usize {
        let prefix = format!("{path}[");
        let indexes: BTreeSet<usize> = self
            .tables
            .keys()
            .filter_map(|table| table.strip_prefix(&prefix)?.strip_suffix(']')?.parse().ok())
            .collect();
        let whole = indexes.iter().zip(0..).take_while(|(index, expected)| **index == *expected).count();
        if let Some(beyond) = indexes.iter().nth(whole) {
            let place = self.place(&format!("{path}[{beyond}]"));
            self.refuse(
                place,
                &format!("{path}[{whole}]"),
                format!("is missing, but {path}[{beyond}] is there; count from 0 without gaps"),
            );
        }
        whole
    }

    /// Where a setting or table stands, or the table around it.
    pub(super) fn place(&self, path: &str) -> Place {
        if let Some((_, place)) = self.values.get(path) {
            return place.clone();
        }
        let mut path = path;
        loop {
            if let Some(place) = self.tables.get(path) {
                return place.clone();
            }
            match path.rfind('.') {
                Some(end) => path = &path[..end],
                None => return Place::Nowhere,
            }
        }
    }

    /// Whether somebody set it, rightly or wrongly.
    pub(super) fn is_set(&self, path: &str) -> bool {
        self.values.contains_key(path) || self.refused.contains(path)
    }

    fn value(&self, path: &str) -> Option<SettingValue> {
        if let Some((value, _)) = self.values.get(path) {
            return Some(value.clone());
        }
        let setting = Setting::at(path).expect("only settings of the schema are asked for");
        setting.default.map(|default| setting.kind.read_text(default).expect("defaults are tested"))
    }

    /// A text, its default, or `None`.
    pub(super) fn text(&self, path: &str) -> Option<String> {
        match self.value(path)? {
            SettingValue::Text(text) => Some(text),
            other => unreachable!("{path} is {other:?}"),
        }
    }

    /// A number, its default, or `None`.
    pub(super) fn number(&self, path: &str) -> Option<u64> {
        match self.value(path)? {
            SettingValue::Number(number) => Some(number),
            other => unreachable!("{path} is {other:?}"),
        }
    }

    /// A flag that has a default.
    pub(super) fn flag(&self, path: &str) -> bool {
        matches!(self.value(path), Some(SettingValue::Flag(true)))
    }

    /// A list of numbers, empty by default.
    pub(super) fn numbers(&self, path: &str) -> Vec<u64> {
        match self.value(path) {
            Some(SettingValue::Numbers(numbers)) => numbers,
            _ => Vec::new(),
        }
    }

    /// A list, empty by default.
    pub(super) fn texts(&self, path: &str) -> Vec<String> {
        match self.value(path) {
            Some(SettingValue::Texts(texts)) => texts,
            _ => Vec::new(),
        }
    }

    /// A table of texts, empty by default.
    pub(super) fn text_map(&self, path: &str) -> BTreeMap<String, String> {
        match self.value(path) {
            Some(SettingValue::TextMap(map)) => map,
            _ => BTreeMap::new(),
        }
    }
}

/// A TOML text whose byte offsets become lines.
struct Document<'a> {
    file: Arc<Path>,
    text: &'a str,
}

impl Document<'_> {
    fn place(&self, offset: usize) -> Place {
        let before = &self.text.as_bytes()[..offset.min(self.text.len())];
        let line = 1 + before.iter().filter(|byte| **byte == b'\n').count();
        Place::File { file: Arc::clone(&self.file), line }
    }
}

/// The setting of an environment variable, and its path: `LASTGASP_WORKER_0_NAME` is `worker[0].name`.
fn setting_of(name: &str) -> Option<(&'static Setting, String)> {
    SCHEMA.iter().find_map(|setting| {
        let pattern = setting.env();
        let mut rest = name;
        let mut path = setting.path.to_owned();
        for (place, part) in pattern.split('*').enumerate() {
            if place > 0 {
                let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
                let index: usize = rest[..digits].parse().ok().filter(|index| *index < MAX_INDEX)?;
                path = path.replacen("[]", &format!("[{index}]"), 1);
                rest = &rest[digits..];
            }
            rest = rest.strip_prefix(part)?;
        }
        rest.is_empty().then_some((setting, path))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_finds_its_setting() {
        for (name, path) in [
            ("LASTGASP_NATS_URL", "nats.url"),
            ("LASTGASP_WORKER_0_NAME", "worker[0].name"),
            ("LASTGASP_WORKER_12_HEALTH_GRPC", "worker[12].health.grpc"),
            ("LASTGASP_WORKER_3_ON_LOST", "worker[3].on_lost"),
            ("LASTGASP_WORKER_3_ON_LOST_COMMAND", "worker[3].on_lost.command"),
            ("LASTGASP_WORKER_1_HEALTH_SERVICES_2_ROLE", "worker[1].health.services[2].role"),
        ] {
            assert_eq!(setting_of(name).map(|(_, path)| path).as_deref(), Some(path));
        }
        for name in ["LASTGASP_WORKER__NAME", "LASTGASP_WORKER_0_NAMES", "LASTGASP_WORKER_99999_NAME", "LASTGASP_NATS"]
        {
            assert!(setting_of(name).is_none(), "{name}");
        }
    }
}

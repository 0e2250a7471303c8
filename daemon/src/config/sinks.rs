//! `[[notify]]`: what each kind of sink needs, and what it has no use for.

use lastgasp_protocol::ClosedName as _;
use std::path::PathBuf;
use std::time::Duration;

use axum::http::{HeaderName, HeaderValue};
use strum::VariantArray as _;

use super::build::{millis, nats, needed, number, require, text};
use super::schema::{SCHEMA, Setting};
use super::settings::Settings;
use super::{DynamoBackend, DynamoConfig, EtcdConfig, InferaConfig, NotifyConfig, NotifyKind, WebhookConfig};
use crate::notify::NotificationKind;

/// The settings of each kind, besides those of all; with a dot at the end, all of a table.
const KINDS: [(&str, &[&str]); 4] = [
    ("exec", &["command", "on", "timeout_ms", "attempts", "concurrency"]),
    ("webhook", &["url", "token_file", "headers", "tls_ca", "on", "timeout_ms", "attempts", "concurrency"]),
    ("infera", &["nats.", "etcd.", "stand_in", "max_requests", "max_age_s"]),
    ("dynamo", &["backend", "etcd.url", "folder"]),
];

/// The sinks, by kind.
#[derive(Default)]
pub(super) struct Sinks {
    pub(super) notify: Vec<NotifyConfig>,
    pub(super) infera: Vec<InferaConfig>,
    pub(super) dynamo: Vec<DynamoConfig>,
}

pub(super) fn notify(settings: &mut Settings) -> Sinks {
    let mut sinks = Sinks::default();
    for index in 0..settings.entries("notify") {
        let kinds = "\"exec\", \"webhook\", \"infera\" or \"dynamo\"";
        let Some(kind) = needed(settings, &format!("notify[{index}].kind"), kinds) else { continue };
        refuse_of_others(settings, index, &kind);
        match kind.as_str() {
            "infera" => sinks.infera.extend(infera(settings, index)),
            "dynamo" => sinks.dynamo.extend(dynamo(settings, index)),
            _ => sinks.notify.extend(sink(settings, index, &kind)),
        }
    }
    sinks
}

/// Settings that have a meaning with another kind only.
fn refuse_of_others(settings: &mut Settings, index: usize, kind: &str) {
    let others = |setting: &&Setting| {
        let Some(key) = setting.path.strip_prefix("notify[].") else { return false };
        !KINDS.iter().find(|(known, _)| *known == kind).is_some_and(|(_, own)| {
            own.iter().chain(&["kind", "queue"]).any(|own| key == *own || own.ends_with('.') && key.starts_with(own))
        })
    };
    for setting in SCHEMA.iter().filter(others) {
        let path = setting.path.replace("[]", &format!("[{index}]"));
        if settings.is_set(&path) {
            let place = settings.place(&path);
            settings.refuse(place, &path, format!("has no meaning with kind = \"{kind}\"; remove it"));
        }
    }
}

fn infera(settings: &mut Settings, index: usize) -> Option<InferaConfig> {
    let at = |key: &str| format!("notify[{index}].{key}");
    let url_path = at("etcd.url");
    let url = etcd_url(settings, &url_path);
    if url.is_none() && settings.is_set(&at("etcd.prefix")) {
        require(settings, &url_path, "the etcd that etcd.prefix is about");
        return None;
    }
    Some(InferaConfig {
        name: format!("infera-{index}"),
        nats: nats(settings, &at("nats")),
        etcd: url.map(|url| EtcdConfig { url, prefix: text(settings, &at("etcd.prefix")) }),
        max_requests: usize::try_from(number(settings, &at("max_requests"))).expect("within the schema's bounds"),
        max_age: Duration::from_secs(number(settings, &at("max_age_s"))),
        stand_in: settings.flag(&at("stand_in")),
        queue: usize::try_from(number(settings, &at("queue"))).expect("within the schema's bounds"),
    })
}

/// Without TLS only.
fn etcd_url(settings: &mut Settings, path: &str) -> Option<String> {
    let url = settings.text(path)?;
    if !url.starts_with("http://") {
        let place = settings.place(path);
        settings.refuse(place, path, "is not http://, and etcd is reached in no other way here");
    }
    Some(url)
}

fn dynamo(settings: &mut Settings, index: usize) -> Option<DynamoConfig> {
    let at = |key: &str| format!("notify[{index}].{key}");
    let backend = needed(settings, &at("backend"), "\"etcd\" or \"file\", as DYN_DISCOVERY_BACKEND")?;
    let (needed_here, other, what) = match backend.as_str() {
        "etcd" => ("etcd.url", "folder", "the etcd of ETCD_ENDPOINTS, as \"http://10.0.0.1:2379\""),
        _ => ("folder", "etcd.url", "the folder of DYN_FILE_KV; without that variable it is \"/tmp/dynamo_store_kv\""),
    };
    require(settings, &at(needed_here), what);
    if settings.is_set(&at(other)) {
        let place = settings.place(&at(other));
        settings.refuse(place, &at(other), format!("has no meaning with backend = \"{backend}\"; remove it"));
    }
    let backend = match backend.as_str() {
        "etcd" => DynamoBackend::Etcd { url: etcd_url(settings, &at("etcd.url"))? },
        _ => DynamoBackend::Folder(settings.text(&at("folder"))?.into()),
    };
    let queue = usize::try_from(number(settings, &at("queue"))).expect("within the schema's bounds");
    Some(DynamoConfig { name: format!("dynamo-{index}"), backend, queue })
}

fn sink(settings: &mut Settings, index: usize, kind: &str) -> Option<NotifyConfig> {
    let at = |key: &str| format!("notify[{index}].{key}");
    let own = if kind == "exec" { "command" } else { "url" };
    let what = if own == "url" { "where JSON is posted to" } else { "a program, as [\"/usr/local/bin/on-death\"]" };
    require(settings, &at(own), what);
    let on = settings.texts(&at("on")).into_iter().filter_map(|word| {
        let known = NotificationKind::VARIANTS.iter().copied().find(|kind| kind.as_str() == word);
        if known.is_none() {
            let place = settings.place(&at("on"));
            let allowed =
                NotificationKind::VARIANTS.iter().map(NotificationKind::as_str).collect::<Vec<_>>().join(", ");
            settings.refuse(place, &at("on"), format!("{word:?} is unknown; allowed: {allowed}"));
        }
        known
    });
    let on: Vec<NotificationKind> = on.collect();
    let headers = settings.text_map(&at("headers"));
    for (name, value) in &headers {
        if HeaderName::from_bytes(name.as_bytes()).is_err() || HeaderValue::from_str(value).is_err() {
            let place = settings.place(&at("headers"));
            settings.refuse(place, &at("headers"), format!("{name:?} is no header, or its value is none"));
        }
    }
    let command = settings.texts(&at("command"));
    if kind == "exec" && settings.is_set(&at("command")) && command.is_empty() {
        let place = settings.place(&at("command"));
        settings.refuse(place, &at("command"), "is empty; name a program, as [\"/usr/local/bin/on-death\"]");
    }
    let path = |settings: &Settings, key| settings.text(&at(key)).map(PathBuf::from);
    Some(NotifyConfig {
        name: format!("{kind}-{index}"),
        kind: if kind == "exec" {
            NotifyKind::Exec { command }
        } else {
            NotifyKind::Webhook(WebhookConfig {
                url: settings.text(&at("url"))?,
                headers,
                token_file: path(settings, "token_file"),
                tls_ca: path(settings, "tls_ca"),
            })
        },
        on,
        timeout: millis(settings, &at("timeout_ms")),
        attempts: u32::try_from(number(settings, &at("attempts"))).expect("within the schema's bounds"),
        concurrency: usize::try_from(number(settings, &at("concurrency"))).expect("within the schema's bounds"),
        queue: usize::try_from(number(settings, &at("queue"))).expect("within the schema's bounds"),
    })
}

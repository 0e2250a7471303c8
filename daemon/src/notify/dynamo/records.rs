//! Dynamo's records of a worker, as far as they say whose they are.

use std::net::IpAddr;
use std::time::SystemTime;

use serde::Deserialize;

/// Where the records are whose absence keeps new requests away: each endpoint's, and the model's card.
/// What else a worker writes (`v1/event_channels`, `v1/event_sources`) nothing is sent to.
pub(super) const BUCKETS: [&str; 2] = ["v1/instances", "v1/mdc"];

/// One record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Record {
    /// In etcd its key; in a folder its path below that.
    pub(super) key: String,
    /// As it was written. Of an instance that is no worker's of this node it is not kept, and empty.
    pub(super) value: Vec<u8>,
    /// Whose it is.
    pub(super) instance: u64,
    /// Where that listens for requests; only an endpoint says so, and only with requests over TCP.
    pub(super) address: Option<(IpAddr, u16)>,
    /// The revision at which etcd had it last changed.
    pub(super) revision: i64,
    /// The lease in etcd that it ends with.
    pub(super) lease: i64,
    /// In a folder, its file.
    pub(super) file: Option<Mark>,
}

/// What a file is known by, and whose it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mark {
    pub(super) inode: u64,
    /// When it was made: the number of an inode is given away again.
    pub(super) born: Option<SystemTime>,
    /// User and group.
    pub(super) owner: (u32, u32),
    pub(super) mode: u32,
}

#[derive(Deserialize)]
struct RecordValue {
    instance_id: u64,
    #[serde(default)]
    transport: Option<Transport>,
}

/// Externally tagged by what carries the requests.
#[derive(Deserialize)]
struct Transport {
    /// `host:port/<instance>/<namespace>/<component>/<endpoint>`
    #[serde(default)]
    tcp: Option<String>,
}

impl Record {
    /// Reads a record; none if it is not of a kind that matters here, or its key is not about the
    /// instance in its value.
    pub(super) fn read(key: &str, value: &[u8], revision: i64, lease: i64) -> Option<Self> {
        let bucket = BUCKETS.iter().find(|bucket| key.starts_with(**bucket))?;
        let rest = key.strip_prefix(bucket)?.strip_prefix('/')?;
        let RecordValue { instance_id: instance, transport } = serde_json::from_slice(value).ok()?;
        let id = format!("{instance:x}");
        // In a folder the slashes are percent-encoded. A model's card may have another part behind.
        rest.split('/').flat_map(|part| part.split("%2F")).skip(3).find(|part| *part == id)?;
        let address = transport.and_then(|transport| address(&transport.tcp?));
        Some(Self { key: key.to_owned(), value: value.to_owned(), instance, address, revision, lease, file: None })
    }

    /// Whether this is still what `known` was, however often etcd has had it written since: another life
    /// of the same instance has another lease, or another file.
    pub(super) fn is_still(&self, known: &Self) -> bool {
        let file = |record: &Self| record.file.as_ref().map(|mark| (mark.inode, mark.born));
        (&self.key, self.instance, self.address, self.lease) == (&known.key, known.instance, known.address, known.lease)
            && file(self) == file(known)
    }
}

fn address(tcp: &str) -> Option<(IpAddr, u16)> {
    let (host, port) = tcp.split('/').next()?.rsplit_once(':')?;
    let host: IpAddr = host.trim_matches(['[', ']']).parse().ok()?;
    Some((host.to_canonical(), port.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// As ai-dynamo 1.6.1 writes it.
    const ENDPOINT: &str = r#"{"type":"Endpoint","component":"backend","endpoint":"generate","namespace":"dynamo","instance_id":194677504626498835,"transport":{"tcp":"127.0.0.1:33315/2b3a228b5059d13/dynamo/backend/generate"},"device_type":"cuda","request_plane_codec":"msgpack"}"#;

    fn read(key: &str, value: &str) -> Option<(u64, Option<(IpAddr, u16)>)> {
        Record::read(key, value.as_bytes(), 1, 2).map(|record| (record.instance, record.address))
    }

    #[test]
    fn an_endpoint_says_whose_it_is_and_where_that_listens() {
        let address = Some(("127.0.0.1".parse().unwrap(), 33315));
        for key in [
            "v1/instances/dynamo/backend/generate/2b3a228b5059d13",
            "v1/instances/dynamo%2Fbackend%2Fgenerate%2F2b3a228b5059d13",
        ] {
            assert_eq!(read(key, ENDPOINT), Some((194677504626498835, address)));
        }
        let six = ENDPOINT.replace("127.0.0.1", "[fd00::7]");
        let found = read("v1/instances/dynamo/backend/generate/2b3a228b5059d13", &six);
        assert_eq!(found.unwrap().1, Some(("fd00::7".parse().unwrap(), 33315)));
    }

    #[test]
    fn a_card_and_an_endpoint_over_nats_name_no_port() {
        let card = r#"{"type":"Model","namespace":"dynamo","component":"backend","endpoint":"generate","instance_id":10,"card_json":{"display_name":"tiny"}}"#;
        assert_eq!(read("v1/mdc/dynamo/backend/generate/a", card), Some((10, None)));
        assert_eq!(read("v1/mdc/dynamo/backend/generate/a/a-lora", card), Some((10, None)));
        let nats = r#"{"type":"Endpoint","instance_id":10,"transport":{"nats_tcp":"dynamo_backend.generate-a"}}"#;
        assert_eq!(read("v1/instances/dynamo/backend/generate/a", nats), Some((10, None)));
    }

    #[test]
    fn what_is_not_about_the_instance_in_its_value_is_nobodys() {
        for key in [
            "v1/instances/dynamo/backend/generate/2b3a228b5059d14",
            "v1/event_channels/dynamo/backend/generate/2b3a228b5059d13",
            "v1/instances-2/dynamo/backend/generate/2b3a228b5059d13",
            "v1/instances/2b3a228b5059d13/backend/generate/1",
            "v1/instances",
        ] {
            assert_eq!(read(key, ENDPOINT), None, "{key}");
        }
        assert_eq!(read("v1/instances/dynamo/backend/generate/a", "{}"), None);
        assert_eq!(read("v1/instances/dynamo/backend/generate/a", "no JSON"), None);
    }

    #[test]
    fn damaged_ones_are_nobodys_or_say_whose_they_are_twice() {
        let seed = format!("v1/instances/dynamo/backend/generate/2b3a228b5059d13\n{ENDPOINT}");
        let words = ["v1/mdc/", "%2F", "/a/", "\"instance_id\":10,", "[::1]:", "\"transport\":{\"tcp\":", "\\u0031"];
        let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus");
        lastgasp_fuzz::run(&corpus, "dynamo_records", &[seed.into()], &words, |input| {
            let (key, value) = input.split_at(input.iter().position(|byte| *byte == b'\n').unwrap_or(input.len()));
            let record = Record::read(&String::from_utf8_lossy(key), value, 1, 2)?;
            assert!(record.key.contains(&format!("{:x}", record.instance)));
            Some((record.key.starts_with(BUCKETS[0]), record.address.map(|(host, _)| host.is_ipv4())))
        });
    }
}

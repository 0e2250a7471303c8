//! Which addresses pods have, as this node's kubelet says.
//!
//! Where a network plugin joins pods to the host by something else than an interface of the host's (macvlan,
//! ipvlan, SR-IOV, or a route to an interface that all pods share), the host's routes do not tell to which pod an
//! address belongs. Kubelet does: `GET /pods` of its API, which takes the permission `nodes/proxy`, or `nodes/pods`
//! from Kubernetes 1.33 on (KEP-2862).
//!
//! It is asked when a declaration cannot be judged without it, and at most every two seconds.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};

use crate::config::KubeletConfig;
use crate::https;
use crate::log::with_cause;

/// How long kubelet may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// The shortest time between two questions.
const PAUSE: Duration = Duration::from_secs(2);
/// Longest answer that is read, in bytes: some 10 KiB a pod, and a node has hundreds of them.
const MAX_ANSWER: usize = 32 << 20;

/// The addresses of each pod, by its uid.
type Addresses = HashMap<String, HashSet<IpAddr>>;

/// Why kubelet does not vouch for an address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotVouched {
    /// It was not asked before.
    #[error("kubelet has not answered yet")]
    NotAsked,
    /// It gave no answer that can be read.
    #[error("{0}")]
    NoAnswer(String),
    /// Kubelet knows no such pod.
    #[error("the process is in no pod")]
    NoPod,
    /// It has answered, and the pod has other addresses.
    #[error("kubelet does not say that pod {pod_uid} has {address}")]
    Other {
        /// The process's pod.
        pod_uid: String,
        /// What the process declares.
        address: IpAddr,
    },
}

impl NotVouched {
    /// Whether kubelet has yet to say anything about it.
    #[must_use]
    pub const fn is_open(&self) -> bool {
        matches!(self, Self::NotAsked | Self::NoAnswer(_))
    }
}

/// What kubelet has said last, for whoever has to judge an address.
#[derive(Debug, Clone)]
pub struct Pods {
    said: watch::Receiver<Result<Addresses, NotVouched>>,
    wanted: Arc<Notify>,
}

impl Pods {
    /// Asks kubelet whenever somebody wants to know, until the last handle is dropped.
    #[must_use]
    pub fn follow(runtime: &Handle, config: KubeletConfig) -> Self {
        let (saying, said) = watch::channel(Err(NotVouched::NotAsked));
        let wanted = Arc::new(Notify::new());
        let asked = Arc::clone(&wanted);
        runtime.spawn(async move {
            loop {
                tokio::select! {
                    () = asked.notified() => {}
                    () = saying.closed() => return,
                }
                let _ = saying.send_replace(ask(&config).await.map_err(NotVouched::NoAnswer));
                tokio::time::sleep(PAUSE).await;
            }
        });
        Self { said, wanted }
    }

    /// What kubelet says now.
    pub async fn once(config: &KubeletConfig) -> Self {
        let (_, said) = watch::channel(ask(config).await.map_err(NotVouched::NoAnswer));
        Self { said, wanted: Arc::default() }
    }

    /// Whether the pod of this uid has this address.
    ///
    /// # Errors
    /// It has not, or kubelet does not say. It may say so the next time.
    pub fn have(&self, pod_uid: Option<&str>, address: IpAddr) -> Result<(), NotVouched> {
        self.wanted.notify_one();
        let Some(pod_uid) = pod_uid else { return Err(NotVouched::NoPod) };
        match &*self.said.borrow() {
            Err(error) => Err(error.clone()),
            Ok(pods) if pods.get(pod_uid).is_some_and(|addresses| addresses.contains(&address)) => Ok(()),
            Ok(_) => Err(NotVouched::Other { pod_uid: pod_uid.to_owned(), address }),
        }
    }
}

async fn ask(config: &KubeletConfig) -> Result<Addresses, String> {
    let asked = tokio::time::timeout(PATIENCE, get(config)).await;
    let answered = asked.unwrap_or_else(|_| Err(format!("no answer within {} s", PATIENCE.as_secs())));
    answered.and_then(|answer| read(&answer)).map_err(|error| format!("kubelet at {}: {error}", config.url))
}

async fn get(config: &KubeletConfig) -> Result<Vec<u8>, String> {
    let client = https::client(&config.url, config.tls_ca.as_deref())?;
    let mut request = client.get(format!("{}/pods", config.url.trim_end_matches('/')));
    if let Some(file) = &config.token_file {
        // Read every time: kubelet replaces the tokens that it projects.
        let token = tokio::fs::read_to_string(file).await;
        let token = token.map_err(|error| format!("token_file {}: {error}", file.display()))?;
        request = request.bearer_auth(token.trim());
    }
    let said = |error: reqwest::Error| with_cause(&error.without_url());
    let mut response = request.send().await.and_then(reqwest::Response::error_for_status).map_err(said)?;
    let mut answer = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(said)? {
        if answer.len() + chunk.len() > MAX_ANSWER {
            return Err(format!("the answer is longer than {MAX_ANSWER} bytes"));
        }
        answer.extend_from_slice(&chunk);
    }
    Ok(answer)
}

/// A `v1.PodList`, as far as it is needed.
fn read(answer: &[u8]) -> Result<Addresses, String> {
    #[derive(Deserialize)]
    struct PodList {
        #[serde(default)]
        items: Vec<Pod>,
    }
    #[derive(Deserialize)]
    struct Pod {
        metadata: Metadata,
        #[serde(default)]
        status: Status,
    }
    #[derive(Deserialize)]
    struct Metadata {
        uid: String,
    }
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Status {
        #[serde(rename = "podIPs")]
        pod_ips: Vec<PodIp>,
        #[serde(rename = "podIP")]
        pod_ip: Option<IpAddr>,
    }
    #[derive(Deserialize)]
    struct PodIp {
        ip: IpAddr,
    }
    let pods: PodList = serde_json::from_slice(answer).map_err(|error| format!("no list of pods: {error}"))?;
    let addresses = |status: Status| status.pod_ips.into_iter().map(|one| one.ip).chain(status.pod_ip).collect();
    Ok(pods.items.into_iter().map(|pod| (pod.metadata.uid, addresses(pod.status))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_address_of_every_pod_is_read() {
        let answer = br#"{"kind":"PodList","apiVersion":"v1","metadata":{},"items":[
            {"metadata":{"name":"a","uid":"one"},"spec":{},"status":{"phase":"Running","podIP":"10.0.0.7",
             "podIPs":[{"ip":"10.0.0.7"},{"ip":"fd00::7"}]}},
            {"metadata":{"name":"b","uid":"two"},"status":{"phase":"Pending"}}]}"#;
        let pods = read(answer).unwrap();
        assert_eq!(pods["one"], HashSet::from(["10.0.0.7", "fd00::7"].map(|address| address.parse().unwrap())));
        assert!(pods["two"].is_empty());
        assert!(read(b"404 page not found").unwrap_err().starts_with("no list of pods"));
    }
}

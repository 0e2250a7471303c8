//! Node leases: which lapses mean something.
//!
//! A lapse only ever costs a worker new work. It is not believed for two TTLs after the
//! router's own reconnect, nor when more than half of all leases lapse at once: then it was NATS.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use lastgasp_protocol::Name;

/// How long a node that went is remembered.
const FORGOTTEN: Duration = Duration::from_secs(24 * 3600);

/// What is known of the nodes' leases.
#[derive(Debug)]
pub(crate) struct Leases {
    ttl: Duration,
    /// Nodes whose lease was seen; when it lapsed, if it did.
    nodes: HashMap<Name, Option<Instant>>,
    /// Until when nothing is believed.
    blind_until: Option<Instant>,
}

impl Leases {
    pub(crate) fn new(ttl: Duration) -> Self {
        Self { ttl, nodes: HashMap::new(), blind_until: None }
    }

    /// The router has (re)connected.
    pub(crate) fn connected(&mut self, now: Instant) {
        self.blind_until = Some(now + self.ttl * 2);
    }

    pub(crate) fn renewed(&mut self, node: Name) {
        self.nodes.insert(node, None);
    }

    pub(crate) fn lapsed(&mut self, node: Name, now: Instant) {
        self.nodes.retain(|_, lapse| !is_forgotten(*lapse, now));
        self.nodes.entry(node).or_default().get_or_insert(now);
    }

    /// Every known node that is not among `present` has lapsed. Those that went long ago are forgotten.
    pub(crate) fn listed(&mut self, present: &HashSet<Name>, now: Instant) {
        self.nodes.retain(|node, lapse| present.contains(node) || !is_forgotten(*lapse, now));
        for (node, lapse) in &mut self.nodes {
            if !present.contains(node) {
                lapse.get_or_insert(now);
            }
        }
    }

    /// Whether a worker that depends on this node's lease should get new work only as a last resort.
    pub(crate) fn is_lapsed(&self, node: &Name, now: Instant) -> bool {
        if self.blind_until.is_none_or(|until| now < until) {
            return false;
        }
        let Some(lapse) = self.nodes.get(node) else {
            // Listed by a node that had no lease since this router is here.
            return true;
        };
        let Some(at) = lapse else { return false };
        let within = |other: &Instant| at.max(other).duration_since(*at.min(other)) <= self.ttl;
        let together = self.nodes.values().flatten().filter(|other| within(other)).count();
        // Nodes that went long before say nothing about this lapse; those that went later were there.
        let there = |lapse: &&Option<Instant>| lapse.as_ref().is_none_or(|other| other > at || within(other));
        let known = self.nodes.values().filter(there).count();
        together * 2 <= known
    }
}

fn is_forgotten(lapse: Option<Instant>, now: Instant) -> bool {
    lapse.is_some_and(|at| now.saturating_duration_since(at) >= FORGOTTEN)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(6);

    fn name(text: &str) -> Name {
        Name::new(text).unwrap()
    }

    fn leases(nodes: &[&str], start: Instant) -> Leases {
        let mut leases = Leases::new(TTL);
        leases.connected(start);
        nodes.iter().for_each(|node| leases.renewed(name(node)));
        leases
    }

    #[test]
    fn one_node_of_three_is_believed() {
        let start = Instant::now();
        let mut leases = leases(&["a", "b", "c"], start);
        leases.lapsed(name("a"), start + TTL);
        assert!(leases.is_lapsed(&name("a"), start + TTL * 2));
        assert!(!leases.is_lapsed(&name("b"), start + TTL * 2));
        leases.renewed(name("a"));
        assert!(!leases.is_lapsed(&name("a"), start + TTL * 3));
    }

    #[test]
    fn nodes_that_went_long_ago_do_not_outvote_those_that_live() {
        let start = Instant::now();
        let mut leases = leases(&["a", "b", "gone-1", "gone-2", "gone-3"], start);
        for gone in ["gone-1", "gone-2", "gone-3"] {
            leases.lapsed(name(gone), start + TTL * 2);
        }
        leases.lapsed(name("a"), start + TTL * 9);
        leases.lapsed(name("b"), start + TTL * 9);
        assert!(!leases.is_lapsed(&name("a"), start + TTL * 10), "all that live lapsed at once: it was NATS");
    }

    #[test]
    fn one_that_lapsed_alone_stays_lapsed_when_later_all_others_lapse_at_once() {
        let start = Instant::now();
        let mut leases = leases(&["a", "b", "c"], start);
        leases.lapsed(name("a"), start + TTL * 2);
        for later in ["b", "c"] {
            leases.lapsed(name(later), start + TTL * 9);
        }
        assert!(leases.is_lapsed(&name("a"), start + TTL * 10));
        assert!(!leases.is_lapsed(&name("b"), start + TTL * 10));
    }

    #[test]
    fn nothing_is_believed_just_after_the_routers_own_reconnect() {
        let start = Instant::now();
        let mut leases = leases(&["a", "b", "c"], start);
        leases.lapsed(name("a"), start);
        assert!(!leases.is_lapsed(&name("a"), start + TTL));
    }

    #[test]
    fn when_most_lapse_together_it_was_nats() {
        let start = Instant::now();
        let mut leases = leases(&["a", "b", "c"], start);
        leases.listed(&HashSet::from([name("c")]), start + TTL * 2);
        assert!(!leases.is_lapsed(&name("a"), start + TTL * 3));
    }

    #[test]
    fn nodes_that_went_a_day_ago_are_forgotten() {
        let start = Instant::now();
        let mut leases = leases(&["a", "b", "c"], start);
        leases.lapsed(name("a"), start + TTL);
        leases.lapsed(name("b"), start + TTL + FORGOTTEN);
        assert_eq!(leases.nodes.len(), 2, "{leases:?}");
    }
}

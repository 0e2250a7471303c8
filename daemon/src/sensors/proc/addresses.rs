//! The IP addresses of a process's network namespace, without entering it.

use std::collections::HashSet;
use std::fs;
use std::io::{self, BufRead as _, Read as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Most of each table that is read, in bytes. A node with a full routing table has a longer one;
/// its local addresses stand in the table that comes first (`fib_trie_seq_show`, by table id).
const MAX_TABLE: u64 = 8 << 20;

/// The local addresses of that process's network namespace, or of this thread's own: of `/proc/PID/net/fib_trie` and
/// `if_inet6` (proc(5)).
///
/// # Errors
/// Not found: no such process, or a zombie, which has no namespaces any more.
pub fn local(netns_pid: Option<u32>) -> io::Result<HashSet<IpAddr>> {
    let directory = super::net_directory(netns_pid);
    let table = fs::File::open(format!("{directory}/fib_trie"))?;
    let mut addresses = HashSet::new();
    read_v4(io::BufReader::new(table.take(MAX_TABLE)), &mut addresses)?;
    // IPv6 may be switched off.
    if let Ok(table) = fs::File::open(format!("{directory}/if_inet6")) {
        for line in io::BufReader::new(table.take(MAX_TABLE)).lines() {
            addresses.extend(v6(&line?));
        }
    }
    Ok(addresses)
}

/// A leaf is `|-- 10.0.0.7`, and the lines below it say what it is: `/32 host LOCAL` for an
/// address of this host (`net/ipv4/fib_trie.c`).
///
/// # Errors
/// The table cannot be read, or is no text.
pub fn read_v4(table: impl io::BufRead, addresses: &mut HashSet<IpAddr>) -> io::Result<()> {
    let mut leaf: Option<Ipv4Addr> = None;
    for line in table.lines() {
        let line = line?;
        let line = line.trim();
        if let Some(address) = line.strip_prefix("|-- ") {
            leaf = address.parse().ok();
        } else if line == "/32 host LOCAL" {
            addresses.extend(leaf.map(IpAddr::from));
        }
    }
    Ok(())
}

/// 32 hexadecimal digits, then the interface.
#[must_use]
pub fn v6(line: &str) -> Option<IpAddr> {
    let digits = line.split_ascii_whitespace().next().filter(|digits| digits.len() == 32)?;
    u128::from_str_radix(digits, 16).ok().map(|bits| Ipv6Addr::from_bits(bits).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_of_the_host_itself_are_local() {
        let table = b"Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 0.0.0.0
        /0 universe UNICAST
     +-- 10.244.1.0/24 2 0 2
        |-- 10.244.1.0
           /24 link UNICAST
        |-- 10.244.1.7
           /32 host LOCAL
        |-- 10.244.1.255
           /32 link BROADCAST
     |-- 127.0.0.0
        /8 host LOCAL
        |-- 127.0.0.1
           /32 host LOCAL
";
        let mut addresses = HashSet::new();
        read_v4(&table[..], &mut addresses).unwrap();
        let expected = ["10.244.1.7", "127.0.0.1"].map(|address| address.parse().unwrap());
        assert_eq!(addresses, HashSet::from(expected));
        assert_eq!(v6("00000000000000000000000000000001 01 80 10 80       lo"), Some(Ipv6Addr::LOCALHOST.into()));
        assert_eq!(v6("0001 lo"), None);
        assert_eq!(v6(""), None);
    }

    #[test]
    fn this_host_has_its_loopback_address() {
        // A namespace whose loopback interface is down has none.
        let up = std::net::TcpListener::bind("127.0.0.1:0").is_ok();
        let local = local(None).unwrap();
        assert_eq!(local.contains(&IpAddr::from(Ipv4Addr::LOCALHOST)), up);
    }
}

//! How many files may be open (getrlimit(2), `RLIMIT_NOFILE`).

use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Raises the soft limit to the hard one, and returns it. The usual soft limit of 1024 is for programs that
/// use select(2) (systemd.exec(5), `LimitNOFILE=`); the hard one is ours to use.
///
/// # Errors
/// The limit cannot be read or set; it stays as it is.
pub fn raise() -> Result<u64, Errno> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    Ok(hard)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_becomes_the_hard_one() {
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        setrlimit(Resource::RLIMIT_NOFILE, hard - 1, hard).unwrap();
        assert_eq!(raise(), Ok(hard));
        assert_eq!(getrlimit(Resource::RLIMIT_NOFILE).unwrap(), (hard, hard));
    }
}

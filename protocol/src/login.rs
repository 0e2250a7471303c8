//! How daemon and router log in to NATS. Secrets come from files and from nowhere else: a command
//! line or a URL is seen by everybody on the machine, and ends up in logs.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use async_nats::ConnectOptions;
use nkeys::{KeyPair, KeyPairType};
use rustls_pki_types::pem::{self, PemObject as _};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

/// Most that is read of a file, in bytes. A credentials file has about 1 KiB, a bundle of all
/// authorities 250 KiB.
const MAX_FILE: u64 = 4 << 20;
/// Mode bits of a file with a secret that are too many: anything for others, and writing for the
/// group. Reading for the group is how Kubernetes gives a volume to a user (`fsGroup`).
const TOO_OPEN: u32 = 0o027;

/// Who we are for NATS, and whom we trust. At most one of `user`, `token_file`, `nkey_seed_file` and
/// `creds_file` counts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Login {
    /// User name, with `password_file`.
    pub user: Option<String>,
    /// File with the password and nothing else.
    pub password_file: Option<PathBuf>,
    /// File with a token and nothing else.
    pub token_file: Option<PathBuf>,
    /// Credentials file with a JWT and its seed.
    pub creds_file: Option<PathBuf>,
    /// File with an nkey seed.
    pub nkey_seed_file: Option<PathBuf>,
    /// Refuse a server without TLS.
    pub tls_required: bool,
    /// PEM file with the authorities to trust, instead of the system's.
    pub tls_ca: Option<PathBuf>,
    /// PEM file with the client certificate, with `tls_key`.
    pub tls_cert: Option<PathBuf>,
    /// PEM file with the client certificate's key.
    pub tls_key: Option<PathBuf>,
}

/// Why one cannot log in. No variant holds what a file has in it.
#[derive(Debug, thiserror::Error)]
pub enum LoginError {
    /// The file is not there, or may not be read.
    #[error("{what} {}: {source}", path.display())]
    Unreadable {
        /// What the file is for.
        what: &'static str,
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file has something else in it, or nothing.
    #[error("{what} {}: {wrong}", path.display())]
    WrongKind {
        /// What the file is for.
        what: &'static str,
        /// Which file.
        path: PathBuf,
        /// What is wrong with it, and what is expected.
        wrong: &'static str,
    },
}

/// Options to connect with, and what is odd about the files though they can be used.
#[derive(Debug)]
pub struct LoggedIn {
    /// With the login and TLS, and nothing else changed.
    pub options: ConnectOptions,
    /// For a log.
    pub warnings: Vec<String>,
}

impl Login {
    /// Reads the files and checks that each holds what it should.
    ///
    /// # Errors
    /// A file is missing, empty, or of another kind.
    pub fn read(&self) -> Result<LoggedIn, LoginError> {
        let Self { user, password_file, token_file, creds_file, nkey_seed_file, .. } = self;
        let mut files = Files::default();
        let mut options = ConnectOptions::new();
        if let (Some(user), Some(path)) = (user, password_file) {
            options = options.user_and_password(user.clone(), files.word("password file", path)?);
        }
        if let Some(path) = token_file {
            options = options.token(files.word("token file", path)?);
        }
        if let Some(path) = nkey_seed_file {
            const WHAT: &str = "nkey seed file";
            let seed = files.word(WHAT, path)?;
            let user = KeyPair::from_seed(&seed).is_ok_and(|pair| matches!(pair.key_pair_type(), KeyPairType::User));
            if !user {
                return Err(wrong(
                    WHAT,
                    path,
                    "holds no seed of a user; one begins with SU, as `nk -gen user` writes it",
                ));
            }
            options = options.nkey(seed);
        }
        if let Some(path) = creds_file {
            const WHAT: &str = "credentials file";
            let text = files.secret(WHAT, path)?;
            options = options
                .credentials(&text)
                .map_err(|_| wrong(WHAT, path, "holds no JWT with its seed, as `nsc generate creds` writes them"))?;
        }
        options = self.tls(&mut files, options)?;
        Ok(LoggedIn { options: options.require_tls(self.tls_required), warnings: files.warnings })
    }

    /// The files are read again at each connection, by async-nats; here it is seen that they can be.
    fn tls(&self, files: &mut Files, mut options: ConnectOptions) -> Result<ConnectOptions, LoginError> {
        if let Some(path) = &self.tls_ca {
            certificates("TLS authorities", path)?;
            options = options.add_root_certificates(path.clone());
        }
        if let (Some(cert), Some(key)) = (&self.tls_cert, &self.tls_key) {
            const WHAT: &str = "TLS key";
            certificates("TLS certificate", cert)?;
            let text = files.secret(WHAT, key)?;
            PrivateKeyDer::from_pem_slice(text.as_bytes())
                .map_err(|_| wrong(WHAT, key, "holds no private key; a PEM file is expected"))?;
            options = options.add_client_certificate(cert.clone(), key.clone());
        }
        Ok(options)
    }
}

#[derive(Default)]
struct Files {
    warnings: Vec<String>,
}

impl Files {
    /// The text of a file that only we should read.
    fn secret(&mut self, what: &'static str, path: &Path) -> Result<String, LoginError> {
        let (text, mode) = read(what, path)?;
        if mode & TOO_OPEN != 0 {
            let path = path.display();
            self.warnings.push(format!("{what} {path}: mode {mode:04o} lets others at a secret; chmod 600 {path}"));
        }
        Ok(text)
    }

    /// A secret of one line.
    fn word(&mut self, what: &'static str, path: &Path) -> Result<String, LoginError> {
        let text = self.secret(what, path)?;
        let word = text.trim();
        if word.chars().any(char::is_control) {
            return Err(wrong(
                what,
                path,
                "has several lines or control characters; the secret and nothing else is expected",
            ));
        }
        Ok(word.to_owned())
    }
}

fn wrong(what: &'static str, path: &Path, wrong: &'static str) -> LoginError {
    LoginError::WrongKind { what, path: path.to_owned(), wrong }
}

/// The text and the mode of a file.
fn read(what: &'static str, path: &Path) -> Result<(String, u32), LoginError> {
    let unreadable = |source| LoginError::Unreadable { what, path: path.to_owned(), source };
    let file = File::open(path).map_err(unreadable)?;
    let metadata = file.metadata().map_err(unreadable)?;
    if metadata.is_dir() {
        return Err(wrong(what, path, "is a folder; a file is expected"));
    }
    let mut bytes = Vec::new();
    file.take(MAX_FILE).read_to_end(&mut bytes).map_err(unreadable)?;
    let text = String::from_utf8(bytes).map_err(|_| wrong(what, path, "is not a text"))?;
    if text.trim().is_empty() {
        return Err(wrong(what, path, "is empty"));
    }
    Ok((text, metadata.permissions().mode() & 0o777))
}

fn certificates(what: &'static str, path: &Path) -> Result<(), LoginError> {
    let (text, _) = read(what, path)?;
    let found = CertificateDer::pem_slice_iter(text.as_bytes()).collect::<Result<Vec<_>, pem::Error>>();
    if found.is_ok_and(|found| !found.is_empty()) {
        return Ok(());
    }
    Err(wrong(what, path, "holds no certificate; a PEM file is expected"))
}

/// Why a list of servers cannot be used. It never repeats what might be a password.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ServersError {
    /// `user:password@host`.
    #[error(
        "a URL holds credentials, which logs, status and process lists would show; name files with them instead \
         (user and password file, token file, nkey seed file, credentials file)"
    )]
    Credentials,
    /// Not an address.
    #[error("{0:?} is not an address; write nats://host:port, also tls, ws or wss, several separated by commas")]
    NoAddress(String),
}

/// The servers of a list that is separated by commas.
///
/// # Errors
/// One is no address, or holds credentials.
pub fn servers(list: &str) -> Result<Vec<&str>, ServersError> {
    // Before anything that might repeat it.
    if list.contains('@') {
        return Err(ServersError::Credentials);
    }
    let server = |server: &'_ str| {
        // async-nats takes `host:port` too; the scheme then is nats.
        let (scheme, rest) = server.split_once("://").unwrap_or(("nats", server));
        let address = server.parse::<async_nats::ServerAddr>();
        let known = matches!(scheme, "nats" | "tls" | "ws" | "wss") && !rest.is_empty();
        if known && address.is_ok_and(|address| !address.host().is_empty()) {
            Ok(())
        } else {
            Err(ServersError::NoAddress(server.to_owned()))
        }
    };
    let servers: Vec<&str> = list.split(',').map(str::trim).collect();
    servers.iter().try_for_each(|one| server(one))?;
    Ok(servers)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    struct Secrets(tempfile::TempDir);

    impl Secrets {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn file(&self, name: &str, text: &[u8], mode: u32) -> PathBuf {
            let path = self.0.path().join(name);
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            path
        }
    }

    fn password(path: PathBuf) -> Login {
        Login { user: Some("gpu-a".into()), password_file: Some(path), ..Login::default() }
    }

    #[test]
    fn a_file_that_others_may_read_is_warned_of_and_used() {
        let secrets = Secrets::new();
        for (mode, warned) in [(0o600, 0), (0o400, 0), (0o640, 0), (0o660, 1), (0o604, 1), (0o644, 1)] {
            let read = password(secrets.file("password", b"hunter2\n", mode)).read().unwrap();
            assert_eq!(read.warnings.len(), warned, "{mode:o}");
            assert!(read.warnings.iter().all(|text| text.contains("chmod 600") && !text.contains("hunter2")));
        }
    }

    #[test]
    fn a_missing_empty_or_wrong_file_is_named_without_what_it_holds() {
        let secrets = Secrets::new();
        let said = |login: Login| login.read().unwrap_err().to_string();
        let file = |text: &[u8]| Some(secrets.file("file", text, 0o600));
        let missing = said(password(secrets.0.path().join("none")));
        assert!(missing.starts_with("password file ") && missing.contains("none: No such file"), "{missing}");
        assert!(said(password(secrets.0.path().to_owned())).ends_with("is a folder; a file is expected"));
        assert!(said(password(file(b" \n").unwrap())).ends_with("file: is empty"));
        assert!(said(Login { token_file: file(b"one\nhunter2"), ..Login::default() }).contains("several lines"));
        assert!(said(Login { token_file: file(b"\xff\xfe"), ..Login::default() }).ends_with("is not a text"));
        let seed = Login { nkey_seed_file: file(b"hunter2"), ..Login::default() };
        assert!(said(seed).contains("holds no seed of a user"));
        let account = KeyPair::new_account().seed().unwrap();
        let seed = Login { nkey_seed_file: file(account.as_bytes()), ..Login::default() };
        assert!(!said(seed.clone()).contains(&account) && said(seed).contains("holds no seed of a user"));
        let creds = Login { creds_file: file(b"hunter2"), ..Login::default() };
        assert!(said(creds.clone()).contains("holds no JWT") && !said(creds).contains("hunter2"));
        let ca = Login { tls_ca: file(b"hunter2"), ..Login::default() };
        assert!(said(ca).ends_with("holds no certificate; a PEM file is expected"));
    }

    #[test]
    fn a_seed_of_a_user_is_taken() {
        let seed = KeyPair::new_user().seed().unwrap();
        let path = Secrets::new();
        let login = Login { nkey_seed_file: Some(path.file("seed", seed.as_bytes(), 0o600)), ..Login::default() };
        assert!(login.read().unwrap().warnings.is_empty());
    }

    #[test]
    fn credentials_in_a_url_are_refused_without_being_repeated() {
        assert_eq!(servers("nats://a:4222, tls://b,c:1"), Ok(vec!["nats://a:4222", "tls://b", "c:1"]));
        for list in ["nats://u:hunter2@a:4222", "a, hunter2@b", "nats://u:hun ter2@a b"] {
            let error = servers(list).unwrap_err();
            assert_eq!(error, ServersError::Credentials);
            assert!(!error.to_string().contains("ter2"));
        }
        for list in ["", "http://a", "nats://", "a,,b", "nats://a:99999"] {
            assert!(matches!(servers(list), Err(ServersError::NoAddress(_))), "{list:?}: {:?}", servers(list));
        }
    }
}

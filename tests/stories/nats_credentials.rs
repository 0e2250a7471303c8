//! Every way to log in to NATS, for daemon and router, with the secret in a file: it works, and the
//! secret stands nowhere else.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use lastgasp_tests::binaries;
use lastgasp_tests::daemon::{Daemon, DaemonConfig};
use lastgasp_tests::nats::{Nats, Options};
use lastgasp_tests::process::Process;
use lastgasp_tests::router::Router;
use nkeys::KeyPair;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::process::Command;

const SECRET: &str = "open-sesame-7f3a";

/// A server that wants a login, and what a client needs for it.
struct Door {
    folder: TempDir,
    /// Of the server.
    options: Options,
    /// Of the daemon's `[nats]`, and of the router: setting, flag, value.
    login: Vec<(&'static str, &'static str, String)>,
    /// What must not be seen anywhere.
    secrets: Vec<String>,
    scheme: &'static str,
}

impl Door {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self {
            folder,
            options: Options::default(),
            login: Vec::new(),
            secrets: vec![SECRET.to_owned()],
            scheme: "nats",
        }
    }

    fn file(&self, name: &str, text: &str, mode: u32) -> PathBuf {
        let path = self.folder.path().join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        path
    }

    fn server(&mut self, config: &str) {
        let config = self.file("server.conf", config, 0o600);
        self.options.config = Some(config);
    }

    fn give(&mut self, setting: &'static str, flag: &'static str, value: impl AsRef<Path>) {
        self.login.push((setting, flag, value.as_ref().display().to_string()));
    }

    /// A daemon takes its lease and a router lists the workers; neither says a secret.
    async fn opens(self) {
        let path = self.folder.path();
        let nats = Nats::start_with(path, self.options.clone()).await.unwrap();
        let url = format!("{}://{}", self.scheme, nats.address());
        let mut config = DaemonConfig::new("node-a", &url, "off", path);
        let mut flags = vec!["--nats".to_owned(), url.clone()];
        for (setting, flag, value) in &self.login {
            config = config.with_nats(setting, value.as_str());
            flags.extend([(*flag).to_owned(), value.clone()]);
        }
        let daemon = Daemon::start(&config, path).await.unwrap();
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let router = Router::start_with("router-1", &flags, path).await.unwrap();
        let there = |status: &Value| status["lease"] == "held" && status["routers"][0]["router"] == "router-1";
        let status = daemon.status_when("lease and router", there).await.unwrap();

        let processes = [&daemon.process, &router.process];
        let seen = [
            status.to_string(),
            daemon.metrics().await.unwrap(),
            router.metrics().await.unwrap(),
            processes.map(seen_of).concat(),
        ];
        for secret in &self.secrets {
            assert!(!seen.iter().any(|text| text.contains(secret)), "{secret} in {seen:?}");
        }
    }
}

/// What others see of a process: its log, command line and environment.
fn seen_of(process: &Process) -> String {
    let of = |what: &str| {
        String::from_utf8_lossy(&fs::read(format!("/proc/{}/{what}", process.identity.pid)).unwrap()).into_owned()
    };
    [of("cmdline"), of("environ"), process.log_tail()].concat()
}

#[tokio::test]
async fn a_user_with_a_password() {
    let mut door = Door::new();
    door.server(&format!("authorization {{ user: \"lastgasp\", password: \"{SECRET}\" }}"));
    let file = door.file("password", &format!("{SECRET}\n"), 0o600);
    door.login.push(("user", "--nats-user", "lastgasp".to_owned()));
    door.give("password_file", "--nats-password-file", file);
    door.opens().await;
}

#[tokio::test]
async fn a_token() {
    let mut door = Door::new();
    door.server(&format!("authorization {{ token: \"{SECRET}\" }}"));
    let file = door.file("token", SECRET, 0o600);
    door.give("token_file", "--nats-token-file", file);
    door.opens().await;
}

#[tokio::test]
async fn an_nkey() {
    let mut door = Door::new();
    let pair = KeyPair::new_user();
    let seed = pair.seed().unwrap();
    door.server(&format!("authorization {{ users: [ {{ nkey: {} }} ] }}", pair.public_key()));
    let file = door.file("seed", &seed, 0o600);
    door.give("nkey_seed_file", "--nats-nkey-seed-file", file);
    door.secrets = vec![seed];
    door.opens().await;
}

/// A token of NATS' own kind: an operator vouches for an account, and that for a user.
fn jwt(issuer: &KeyPair, subject: &KeyPair, nats: Value) -> String {
    let encode = |bytes: &[u8]| data_encoding::BASE64URL_NOPAD.encode(bytes);
    let claims = json!({"jti": "x", "iat": 1_700_000_000, "iss": issuer.public_key(), "sub": subject.public_key(), "name": "n", "nats": nats});
    let text =
        format!("{}.{}", encode(br#"{"typ":"JWT","alg":"ed25519-nkey"}"#), encode(claims.to_string().as_bytes()));
    let signature = issuer.sign(text.as_bytes()).unwrap();
    format!("{text}.{}", encode(&signature))
}

#[tokio::test]
async fn a_credentials_file() {
    let (operator, account, user) = (KeyPair::new_operator(), KeyPair::new_account(), KeyPair::new_user());
    let limits = json!({"subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "conn": -1, "leaf": -1,
        "wildcards": true, "mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1});
    let operator_jwt = jwt(&operator, &operator, json!({"type": "operator", "version": 2}));
    let account_jwt = jwt(&operator, &account, json!({"type": "account", "version": 2, "limits": limits}));
    // JetStream wants an account for the server's own traffic.
    let system = KeyPair::new_account();
    let system_jwt =
        jwt(&operator, &system, json!({"type": "account", "version": 2, "limits": {"subs": -1, "conn": -1}}));
    let user_jwt = jwt(&account, &user, json!({"type": "user", "version": 2, "subs": -1, "data": -1, "payload": -1}));
    let mut door = Door::new();
    let (key, system) = (account.public_key(), system.public_key());
    door.server(&format!(
        "operator: {operator_jwt}\nsystem_account: {system}\nresolver: MEMORY\n\
         resolver_preload: {{ {key}: {account_jwt}, {system}: {system_jwt} }}"
    ));
    let seed = user.seed().unwrap();
    let creds = format!(
        "-----BEGIN NATS USER JWT-----\n{user_jwt}\n------END NATS USER JWT------\n\n-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    );
    let file = door.file("user.creds", &creds, 0o600);
    door.give("creds_file", "--nats-credentials", file);
    door.secrets = vec![seed];
    door.opens().await;
}

#[tokio::test]
async fn tls_with_an_authority_and_client_certificates() {
    let mut door = Door::new();
    let authority_key = rcgen::KeyPair::generate().unwrap();
    let mut parameters = rcgen::CertificateParams::new(Vec::new()).unwrap();
    parameters.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let authority = parameters.self_signed(&authority_key).unwrap();
    let issuer = rcgen::Issuer::new(parameters, authority_key);
    let ca = door.file("ca.pem", &authority.pem(), 0o644);
    let pair = |name: &str| {
        let key = rcgen::KeyPair::generate().unwrap();
        let parameters = rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned(), "localhost".to_owned()]).unwrap();
        let certificate = parameters.signed_by(&key, &issuer).unwrap();
        let files = (
            door.file(&format!("{name}.pem"), &certificate.pem(), 0o644),
            door.file(&format!("{name}-key.pem"), &key.serialize_pem(), 0o600),
        );
        (files, key.serialize_pem())
    };
    let ((server, server_key), _) = pair("server");
    let ((client, client_key), secret) = pair("client");
    let text = |path: &Path| path.display().to_string();
    door.options.arguments = [
        "--tls",
        "--tlsverify",
        "--tlscert",
        &text(&server),
        "--tlskey",
        &text(&server_key),
        "--tlscacert",
        &text(&ca),
    ]
    .map(str::to_owned)
    .to_vec();
    door.scheme = "tls";
    door.give("tls_ca", "--nats-tls-ca", ca);
    door.give("tls_cert", "--nats-tls-cert", client);
    door.give("tls_key", "--nats-tls-key", client_key);
    door.secrets = secret.lines().filter(|line| !line.starts_with("---")).map(str::to_owned).collect();
    door.opens().await;
}

/// What is printed by a program that will not start, and its exit status.
async fn refused(program: &'static str, arguments: &[&str]) -> (String, Option<i32>) {
    let output = Command::new(binaries::find(program).unwrap()).args(arguments).output().await.unwrap();
    let said = [output.stdout, output.stderr].concat();
    (String::from_utf8_lossy(&said).into_owned(), output.status.code())
}

#[tokio::test]
async fn a_password_in_a_url_is_refused_and_not_repeated() {
    let url = format!("nats://lastgasp:{SECRET}@127.0.0.1:4222");
    for (program, arguments) in [
        ("lastgasp", &["check-config", "--nats", &url][..]),
        ("lastgasp", &["run", "--nats", &url]),
        ("lastgasp", &["doctor", "--nats", &url]),
        ("lastgasp-router", &["--listen", "127.0.0.1:0", "--nats", &url]),
    ] {
        let (said, status) = refused(program, arguments).await;
        assert!(said.contains("holds credentials") && !said.contains(SECRET), "{program}: {said}");
        assert!(status.is_some_and(|status| status != 0), "{program} {arguments:?}: {status:?}");
    }
}

#[tokio::test]
async fn a_file_that_cannot_be_used_ends_the_start_and_one_that_others_can_read_is_warned_of() {
    let door = Door::new();
    let missing = door.folder.path().join("none").display().to_string();
    let empty = door.file("empty", "", 0o600).display().to_string();
    for (file, wrong) in [(&missing, "No such file"), (&empty, "is empty")] {
        let (said, status) = refused("lastgasp-router", &["--listen", "127.0.0.1:0", "--nats-token-file", file]).await;
        assert!(said.contains(file.as_str()) && said.contains(wrong), "{said}");
        assert_eq!(status, Some(78));
        let socket = door.folder.path().join("s").display().to_string();
        let config = format!(
            "node = \"a\"\n[nats]\ntoken_file = \"{file}\"\n[status]\nsocket = \"{socket}\"\nlisten = \"127.0.0.1:0\"\n"
        );
        let config = door.file("config.toml", &config, 0o600).display().to_string();
        let (said, status) = refused("lastgasp", &["run", "--no-ebpf", "--config", &config]).await;
        assert!(said.contains(file.as_str()) && said.contains(wrong), "{said}");
        assert_eq!(status, Some(78));
    }
    let open = door.file("open", SECRET, 0o644).display().to_string();
    let nats = Nats::start(door.folder.path()).await.unwrap();
    let config =
        DaemonConfig::new("node-a", &nats.url(), "off", door.folder.path()).with_nats("token_file", open.as_str());
    let daemon = Daemon::start(&config, door.folder.path()).await.unwrap();
    let url = nats.url();
    let flags = ["--nats", &url, "--nats-token-file", &open];
    let router = Router::start_with("router-1", &flags, door.folder.path()).await.unwrap();
    for said in [seen_of(&daemon.process), seen_of(&router.process)] {
        assert!(said.contains("mode 0644 lets others at a secret") && !said.contains(SECRET), "{said}");
    }
}

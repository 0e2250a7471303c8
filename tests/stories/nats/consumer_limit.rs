//! A stream may have only so many consumers: a thousand, if nobody says otherwise, from nats-server 2.15 on.
//! Each daemon is one, and each router.

use std::path::Path;

use lastgasp_tests::binaries;
use lastgasp_tests::daemon::Said;
use lastgasp_tests::matrix;
use lastgasp_tests::nats::{Nats, Options};
use lastgasp_tests::router::Router;
use tokio::process::Command;

use super::stage::{Record, SERVING, Stage, contract};

/// A stream that says nothing may have a single consumer.
const ONE: &str = "jetstream { limits { default_max_consumers: 1 } }";

/// A server with this configuration.
async fn server(folder: &Path, config: &str) -> Nats {
    let file = folder.join("limited.conf");
    std::fs::write(&file, config).unwrap();
    Nats::start_with(folder, Options { config: Some(file), ..Options::default() }).await.unwrap()
}

#[tokio::test]
async fn that_of_the_server_is_not_that_of_our_buckets() {
    let folder = tempfile::tempdir().unwrap();
    let nats = server(folder.path(), ONE).await;
    let stage = Stage::at(&nats.url()).await;
    for name in ["router-1", "router-2"] {
        let router = Router::start(name, &nats.url(), 3, stage.folder.path()).await.unwrap();
        router.shows(SERVING, 2.0).await.unwrap();
    }
    matrix::row(
        "the server allows a stream one consumer (default_max_consumers)",
        "our buckets say how many they need: a daemon and two routers follow them",
        "both routers list all workers",
    );
}

#[tokio::test]
async fn that_of_the_account_is_gone_along_with() {
    let folder = tempfile::tempdir().unwrap();
    let account =
        "accounts { A { jetstream { max_consumers: 50 }, users: [{ user: a, password: a }] } }, no_auth_user: a";
    let nats = server(folder.path(), account).await;
    let _stage = Stage::at(&nats.url()).await;
    let book = Record::book(&nats.jetstream().await.unwrap()).await;
    for worker in ["alpha", "beta"] {
        book.stands(worker).await;
    }
    matrix::row(
        "the account may have fewer consumers than our buckets ask for",
        "the buckets are made without a number of their own",
        "all workers listed",
    );
}

#[tokio::test]
async fn a_router_too_many_is_told_and_lists_once_create_buckets_was_run() {
    let folder = tempfile::tempdir().unwrap();
    let nats = server(folder.path(), ONE).await;
    let context = nats.jetstream().await.unwrap();
    // As an earlier version made it.
    context.create_key_value(contract()).await.unwrap();
    let stage = Stage::at(&nats.url()).await;
    let book = Record::book(&context).await;
    book.stands("alpha").await;

    let router = Router::start_unready("router-1", &nats.url(), stage.folder.path()).unwrap();
    router.says("lastgasp create-buckets").await.unwrap();
    let mut command = Command::new(binaries::find("lastgasp").unwrap());
    command.args(["create-buckets", "--node", "admin", "--nats", &nats.url()]);
    let said = Said::by(command).await.unwrap();
    assert_eq!(said.code, Some(0), "{said:?}");
    let router = router.ready().await.unwrap();
    router.shows(SERVING, 2.0).await.unwrap();
    matrix::row(
        "the workers' bucket has all the consumers that it may have, and a router starts",
        "said with the fix; it lists once there may be more",
        "consumer_limit in the log, all workers listed after `lastgasp create-buckets`",
    );
}

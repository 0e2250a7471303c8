//! The server comes back and does not let the daemon in any more.

use lastgasp_protocol::WorkerState;
use lastgasp_tests::matrix;
use lastgasp_tests::nats::{Nats, Options};

use super::stage::{Record, Stage};

#[tokio::test]
async fn nobody_is_withdrawn_and_the_death_meanwhile_is_made_up_for() {
    let folder = tempfile::tempdir().unwrap();
    let login = |password: &str| Some(("daemon".to_owned(), password.to_owned()));
    let options = Options { login: login("right"), ..Options::default() };
    let mut nats = Nats::start_with(folder.path(), options).await.unwrap();
    let password = folder.path().join("password");
    std::fs::write(&password, "right").unwrap();
    let mut stage = Stage::configured(&nats.url(), |config| {
        config.with_nats("user", "daemon").with_nats("password_file", password.display().to_string())
    })
    .await;
    let book = Record::book(&nats.jetstream().await.unwrap()).await;
    let (before, _) = book.stands("beta").await;
    book.stands("alpha").await;

    nats.stop();
    nats.options.login = login("another");
    nats.resume().await.unwrap();
    let trouble = stage.daemon.trouble("login_refused").await.unwrap();
    assert!(trouble["fix"].as_str().is_some_and(|fix| fix.contains("credentials")), "{trouble}");
    stage.kill("alpha").await;
    let book = Record::book(&nats.jetstream().await.unwrap()).await;
    assert!(book.stands_now("alpha").await && book.stands_now("beta").await);

    nats.stop();
    nats.options.login = login("right");
    nats.resume().await.unwrap();
    stage.daemon.no_trouble().await.unwrap();
    let book = Record::book(&nats.jetstream().await.unwrap()).await;
    stage.withdrawn(&book, "alpha").await;
    let (after, _) = book.stands("beta").await;
    assert_eq!((after.state, after.incarnation), (WorkerState::Serving, before.incarnation));
    matrix::row(
        "NATS refuses the login after a restart, a worker killed meanwhile",
        "said with the fix, nobody withdrawn until the login works again, then the dead one",
        "login_refused in status and metrics, withdrawn after the login worked, the other worker stayed listed",
    );
}

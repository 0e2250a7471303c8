//! A node with 512 workers, half of which die at the same moment.

use lastgasp_tests::matrix;

use crate::crowd::Crowd;

const WORKERS: usize = 512;

#[tokio::test]
async fn those_that_die_at_once_are_all_withdrawn_and_no_others() {
    let mut crowd = Crowd::of(WORKERS).await;

    crowd.kill(|number| number % 2 == 1).await;

    let wanted: Vec<usize> = (0..WORKERS).map(|number| number % 2).collect();
    assert_eq!(crowd.removals(), wanted);
    let metrics = crowd.daemon.metrics().await.unwrap();
    let lost = |line: &&str| line.starts_with("lastgasp_losses_total") && !line.ends_with(" 0");
    let losses: Vec<&str> = metrics.lines().filter(lost).collect();
    assert_eq!(losses, Vec::<&str>::new());
    matrix::row(
        "512 workers on one node, of which every other one is killed at the same moment",
        "each of them is withdrawn once, and nobody else; no information is lost",
        &format!(
            "{} withdrawals of {} dead workers, 0 of {} living ones; losses counted: {}",
            crowd.removals().iter().sum::<usize>(),
            WORKERS / 2,
            WORKERS / 2,
            losses.len()
        ),
    );
}

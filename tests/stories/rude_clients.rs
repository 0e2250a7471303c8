//! Thousands of clients without manners, which are no fault of the worker's.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Instant;

use lastgasp_tests::matrix;
use nix::sys::socket::{setsockopt, sockopt};

use crate::scene::{Scene, was_moved};

const CLIENTS: usize = 2000;
/// The engines', and at each of them more reasons for a reset than these clients give.
const PORTS: usize = 4;
const REASONS: usize = 10;

#[tokio::test]
async fn nothing_is_withdrawn_and_nothing_is_moved() {
    let mut scene = Scene::new(&[]).await;
    let asked = scene.ask_several().await;
    let engine = scene.engine("alpha");
    let (http, health) = (engine.ready.http, engine.ready.grpc.expect("the harness asks for it"));

    let begin = Instant::now();
    let rude = tokio::task::spawn_blocking(move || {
        for number in 0..CLIENTS {
            match number % 4 {
                // SO_LINGER 0: a reset instead of a FIN.
                0 => rudely(connect(http)),
                // A balancer's check: connects, and that is all.
                1 => drop(connect(http)),
                // Gone in the middle of an answer, with data unread.
                2 => rudely(in_the_middle(http)),
                // Nonsense at the health port.
                _ => {
                    let mut client = connect(health);
                    let _ = client.write_all(b"GET / HTTP/1.0\r\n\r\n");
                    rudely(client);
                }
            }
            // A port scan.
            let closed = SocketAddr::new(http.ip(), 1 + number as u16 % 1000);
            let _ = TcpStream::connect(closed);
        }
    });
    rude.await.expect("rude, but correct");

    for asked in asked {
        assert!(!was_moved(&asked.finish().await));
    }
    assert_eq!((scene.discovery.removals("alpha"), scene.discovery.removals("beta")), (0, 0));
    for worker in ["alpha", "beta"] {
        assert_eq!(scene.discovery.history(worker).len(), 1, "{worker} is listed as it was");
    }
    // They were seen, and cost little: the kernel tells of a port's resets once a second for each reason.
    let counted = scene.daemon.counted("lastgasp_evidence_total{kind=\"tcp_reset\"}").await.unwrap();
    let seconds = begin.elapsed().as_secs_f64() + 1.0;
    let most = seconds * (PORTS * REASONS) as f64;
    assert!(
        counted > 0.0 && counted < most,
        "{counted} pieces of evidence of {CLIENTS} rude clients in {seconds:.0} s"
    );
    matrix::count("bad inputs tried", CLIENTS);
    matrix::row(
        "2000 clients reset, vanish in the middle, scan ports and talk nonsense to an engine",
        "nothing is withdrawn or moved",
        "listed as it was; no stream moved",
    );
}

fn connect(address: SocketAddr) -> TcpStream {
    TcpStream::connect(address).expect("it listens")
}

fn in_the_middle(address: SocketAddr) -> TcpStream {
    let body = r#"{"model":"tiny","prompt":"rude","max_tokens":50,"stream":true}"#;
    let mut client = connect(address);
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    client.write_all(head.as_bytes()).and_then(|()| client.write_all(body.as_bytes())).expect("it is connected");
    client.read_exact(&mut [0; 16]).expect("the answer begins");
    client
}

fn rudely(client: TcpStream) {
    setsockopt(&client, sockopt::Linger, &libc::linger { l_onoff: 1, l_linger: 0 }).expect("a socket option");
}

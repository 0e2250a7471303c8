//! The status page in a real browser, while real engines serve and die.
//!
//! They need root (for eBPF), a nats-server, Chromium and the binaries; `cargo xtask test` sees to
//! all of it. `cargo xtask screenshots` runs them for the pictures in `docs/`.

mod scene;

use scene::{Look, Scene};

/// What a person sees when a worker dies in the middle of two answers.
#[tokio::test]
async fn a_death_is_seen_as_it_happens() {
    let mut scene = Scene::new(&[("vllm-0", "tiny"), ("vllm-1", "tiny"), ("vllm-2", "tiny")]).await;
    let browser = &mut scene.browser;
    browser.until("document.querySelectorAll('.worker.serving').length === 3").await.unwrap();
    assert_eq!(browser.value("document.querySelector('h1').textContent").await.unwrap(), "gpu-a");
    assert_eq!(browser.value("document.title").await.unwrap(), "3/3 serving · gpu-a · lastgasp");
    browser.until("document.querySelector('.link').textContent.includes('live')").await.unwrap();
    browser
        .until("[...document.querySelectorAll('.chip')].some(chip => chip.textContent === 'NATSconnected')")
        .await
        .unwrap();
    browser.until("document.querySelector('#deaths').textContent.includes('Nobody has died here')").await.unwrap();
    browser.until("document.querySelectorAll('.program').length > 5").await.unwrap();

    // A router that the daemon does not know yet is not waited for.
    scene
        .browser
        .until("[...document.querySelectorAll('.chip')].some(chip => chip.textContent === 'routersrouter-1')")
        .await
        .unwrap();
    let asked = scene.ask_everybody().await;
    let victim = asked[0].transcript.worker.clone().expect("the router says which worker it chose");
    let victim = victim.strip_prefix("gpu-a/").expect("<node>/<worker>").to_owned();
    scene.kill_core_of(&victim).await;

    let browser = &mut scene.browser;
    browser.until(&format!("document.querySelector('.worker.lost h3').textContent === '{victim}'")).await.unwrap();
    browser.until("document.querySelector('.death[open] .words').textContent.includes('VLLM::EngineCore was killed by signal 9 (SIGKILL), by ')").await.unwrap();
    browser
        .until(&format!(
            "document.querySelector('#announce').textContent.startsWith('{victim}: VLLM::EngineCore was killed')"
        ))
        .await
        .unwrap();
    browser
        .until("/([1-9]) of \\1 streams moved/.test(document.querySelector('.death .score').textContent)")
        .await
        .unwrap();
    browser.until("document.querySelector('.edge-name').textContent.startsWith('withdrawn after ')").await.unwrap();
    browser
        .until("document.querySelectorAll('figure .mark').length === document.querySelectorAll('.moments li').length")
        .await
        .unwrap();
    browser.until("document.querySelectorAll('.moments li').length >= 6").await.unwrap();
    browser
        .until("[...document.querySelectorAll('#log li')].some(line => line.textContent.includes('serving -> lost'))")
        .await
        .unwrap();
    browser.until("document.querySelector('#counters').textContent.includes('deaths process_killed1')").await.unwrap();
    drop(asked);

    let drained = if victim == "vllm-1" { "vllm-2" } else { "vllm-1" };
    let said = scene.daemon.tell(&["drain", drained, "--reason", "new driver"]).await.unwrap();
    assert_eq!(said.code, Some(0), "{said:?}");
    let browser = &mut scene.browser;
    browser
        .until("document.querySelector('.worker.draining .why').textContent.endsWith(': new driver')")
        .await
        .unwrap();
    for look in [Look::DESKTOP, Look::DARK, Look::PHONE, Look::NARROWEST] {
        scene.pictured(look).await;
    }
    scene.nothing_was_wrong().await;
}

/// A daemon that goes away is said to be away, and the page finds its successor by itself.
#[tokio::test]
async fn a_restart_of_the_daemon_is_survived() {
    let mut scene = Scene::new(&[("vllm-0", "tiny")]).await;
    scene.browser.until("document.querySelectorAll('.worker.serving').length === 1").await.unwrap();
    scene.nothing_was_wrong().await;

    scene.kill_daemon().await;
    scene.browser.until("document.querySelector('.link.off').textContent.includes('not connected')").await.unwrap();
    scene.start_daemon().await;
    scene.browser.until("document.querySelector('.link.on').textContent.includes('live')").await.unwrap();
    scene.kill_core_of("vllm-0").await;
    scene.browser.until("document.querySelector('.worker.lost')").await.unwrap();
}

/// Names, titles and reasons come from anywhere. None of them becomes markup.
#[tokio::test]
async fn hostile_text_stays_text() {
    const MODEL: &str = "</script><script>window.owned = 'model'</script>";
    const REASON: &str = "<img src=x onerror=\"window.owned = 'reason'\"><svg onload=alert(1)>";
    let mut scene = Scene::new(&[("vllm-0", MODEL)]).await;
    scene.browser.until("document.querySelectorAll('.worker.serving').length === 1").await.unwrap();
    let said = scene.daemon.tell(&["withdraw", "vllm-0", "--yes", "--reason", REASON]).await.unwrap();
    assert_eq!(said.code, Some(0), "{said:?}");
    let reason = serde_json::to_string(REASON).unwrap();
    scene
        .browser
        .until(&format!("document.querySelector('.worker.lost .why').textContent.endsWith({reason})"))
        .await
        .unwrap();
    scene
        .browser
        .until(&format!("document.querySelector('.death .words').textContent.endsWith({reason})"))
        .await
        .unwrap();
    scene.browser.until(&format!("document.querySelector('.moments').textContent.includes({reason})")).await.unwrap();
    let model = serde_json::to_string(MODEL).unwrap();
    scene.browser.until(&format!("document.querySelector('.worker').textContent.includes({model})")).await.unwrap();
    let scripts = scene.browser.value("document.querySelectorAll('script, img, iframe').length").await.unwrap();
    assert_eq!(scripts, 1, "the page's own script");
    assert_eq!(scene.browser.value("typeof window.owned").await.unwrap(), "undefined");
    scene.nothing_was_wrong().await;
}

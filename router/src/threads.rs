//! One thread for each core, and a client's connection, its requests and their connections to workers
//! stay on one of them.
//!
//! A chunk is read by one task, continued by a second and written by a third. Between threads each of
//! these steps wakes another core, which costs more than all that is done with the chunk.

use std::future::Future;
use std::io;
use std::sync::Arc;

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

/// Threads that serve connections. When it is dropped they end, and what they serve.
#[derive(Debug)]
pub struct Threads<S> {
    each: Vec<Thread<S>>,
}

#[derive(Debug)]
struct Thread<S> {
    runtime: Handle,
    /// What it serves with. Every connection that it has holds one more.
    served: Arc<S>,
    _end: oneshot::Sender<()>,
}

impl<S: Send + Sync + 'static> Threads<S> {
    /// Starts a thread for each of `served`.
    ///
    /// # Errors
    /// A runtime or a thread cannot be had.
    pub fn start(served: impl IntoIterator<Item = S>) -> io::Result<Self> {
        let start = |(number, served)| {
            let runtime = Builder::new_current_thread().enable_all().build()?;
            let handle = runtime.handle().clone();
            let (end, ended) = oneshot::channel::<()>();
            std::thread::Builder::new().name(format!("serving-{number}")).spawn(move || {
                // It is never sent anything: an error says that it is time.
                _ = runtime.block_on(ended);
                runtime.shutdown_background();
            })?;
            Ok(Thread { runtime: handle, served: Arc::new(served), _end: end })
        };
        Ok(Self { each: served.into_iter().enumerate().map(start).collect::<io::Result<_>>()? })
    }

    /// Runs a task on the thread that has the fewest.
    pub fn spawn<F: Future<Output = ()> + Send + 'static>(&self, task: impl FnOnce(Arc<S>) -> F) {
        let Some(thread) = self.each.iter().min_by_key(|thread| Arc::strong_count(&thread.served)) else { return };
        thread.runtime.spawn(task(Arc::clone(&thread.served)));
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn a_task_goes_to_the_thread_that_has_the_fewest() {
        let threads = Threads::start(["a", "b"]).unwrap();
        let (told, mut telling) = mpsc::unbounded_channel();
        let mut places = Vec::new();
        for _ in 0..4 {
            let told = told.clone();
            threads.spawn(async move |served| {
                let thread = std::thread::current().name().map(str::to_owned);
                told.send((*served, thread, served)).unwrap();
            });
            places.push(telling.recv().await.unwrap());
        }
        let on = |wanted: &str| places.iter().filter(|(name, ..)| *name == wanted).count();
        assert_eq!((on("a"), on("b")), (2, 2));
        for (name, thread, _) in &places {
            assert_eq!(thread.as_deref(), Some(if *name == "a" { "serving-0" } else { "serving-1" }));
        }
        let freed = places.remove(0).0;
        threads.spawn(async move |served| drop(told.send((*served, None, served))));
        assert_eq!(telling.recv().await.unwrap().0, freed);
    }

    #[tokio::test]
    async fn what_they_serve_ends_with_them() {
        let threads = Threads::start([()]).unwrap();
        let (held, ended) = oneshot::channel::<()>();
        threads.spawn(async move |_served| {
            let _held = held;
            std::future::pending().await
        });
        drop(threads);
        assert!(ended.await.is_err());
    }
}

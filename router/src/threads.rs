//! Threads that each serve some clients: a client's connection, its requests and their connections to workers
//! stay on one of them.
//!
//! A chunk is read by one task, continued by a second and written by a third. Between threads each of
//! these steps wakes another core, which costs more than all that is done with the chunk.

use std::future::Future;
use std::io;
use std::sync::mpsc::sync_channel;

use lastgasp_process::priority;
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;
use tracing::debug;

/// Threads that serve connections. When it is dropped they end, and what they serve.
#[derive(Debug)]
pub struct Threads<S> {
    each: Vec<Thread<S>>,
}

#[derive(Debug)]
struct Thread<S> {
    runtime: Handle,
    /// What it serves with.
    served: S,
    _end: oneshot::Sender<()>,
}

impl<S: Clone> Threads<S> {
    /// Starts a thread for each of `served`.
    ///
    /// # Errors
    /// A runtime or a thread cannot be had.
    pub fn start(served: impl IntoIterator<Item = S>) -> io::Result<Self> {
        let start = |(number, served)| {
            let (runtime, end) = thread(number)?;
            Ok(Thread { runtime, served, _end: end })
        };
        Ok(Self { each: served.into_iter().enumerate().map(start).collect::<io::Result<_>>()? })
    }

    /// Runs a task on the thread that has the fewest. A stream is three of them there: who reads it, who
    /// continues it and who writes it; a connection that waits for the next request is one.
    pub fn spawn<F: Future<Output = ()> + Send + 'static>(&self, task: impl FnOnce(S) -> F) {
        let Some(thread) = self.each.iter().min_by_key(|thread| thread.runtime.metrics().num_alive_tasks()) else {
            return;
        };
        thread.runtime.spawn(task(thread.served.clone()));
    }
}

/// A thread with a runtime of its own, until the sender is dropped.
fn thread(number: usize) -> io::Result<(Handle, oneshot::Sender<()>)> {
    let (end, ended) = oneshot::channel::<()>();
    let (begun, beginning) = sync_channel(1);
    std::thread::Builder::new().name(format!("serving-{number}")).spawn(move || {
        // Among those that never sleep, a thread that does need not wait until they have had their turns.
        if let Err(error) = priority::short_slice() {
            debug!(%error, "the kernel does not give a short scheduler slice");
        }
        // Here, since it may not be dropped where another one runs.
        let runtime = match Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => return drop(begun.send(Err(error))),
        };
        if begun.send(Ok(runtime.handle().clone())).is_ok() {
            // It is never sent anything: an error says that it is time.
            _ = runtime.block_on(ended);
        }
        runtime.shutdown_background();
    })?;
    let handle = beginning.recv().map_err(io::Error::other)??;
    Ok((handle, end))
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn a_task_goes_to_the_thread_that_has_the_fewest() {
        let threads = Threads::start(["a", "b"]).unwrap();
        let (served_by, mut telling) = mpsc::unbounded_channel();
        let mut ends: Vec<_> = (0..4)
            .map(|_| {
                let (end, ended) = oneshot::channel::<()>();
                let served_by = served_by.clone();
                threads.spawn(async move |served| {
                    served_by.send((served, std::thread::current().name().map(str::to_owned))).unwrap();
                    _ = ended.await;
                    // Until it is gone, it counts.
                    served_by.send((served, None)).unwrap();
                });
                end
            })
            .collect();
        let mut places = Vec::new();
        for _ in 0..4 {
            places.push(telling.recv().await.unwrap());
        }
        places.sort();
        let place = |name, thread: &str| (name, Some(thread.to_owned()));
        assert_eq!(
            places,
            [place("a", "serving-0"), place("a", "serving-0"), place("b", "serving-1"), place("b", "serving-1")]
        );
        drop(ends.remove(0));
        let (freed, _) = telling.recv().await.unwrap();
        while threads.each.iter().map(|thread| thread.runtime.metrics().num_alive_tasks()).sum::<usize>() > 3 {
            tokio::task::yield_now().await;
        }
        threads.spawn(async move |served| drop(served_by.send((served, None))));
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

//! The thread that sends requests to one back end. Only this thread waits for the back end without a limit.
//!
//! Jobs are executed in the order of their submission. A caller waits for its job's result for a limited time
//! and then gets an error, but the job stays in the queue. A back end that was paused and resumes therefore
//! finds no partial request. The jobs that undo a migration are executed then.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::error::VhostUserError;
use parking_lot::Mutex;

/// Time that the thread gets to become idle on a connection that another process shares.
const LEAVE_LIMIT: Duration = Duration::from_secs(1);

type Job<S> = Box<dyn FnOnce(&mut S) + Send>;

/// Name of the request that the back end has not answered.
#[derive(Debug, Clone)]
pub(super) struct Asking(Arc<Mutex<&'static str>>);

impl Asking {
    pub(super) fn new() -> Self {
        Self(Arc::new(Mutex::new("the connection")))
    }

    pub(super) fn set(&self, request: &'static str) {
        *self.0.lock() = request;
    }

    fn get(&self) -> &'static str {
        *self.0.lock()
    }
}

/// Handle of the thread. Dropping it closes the connection, or only this process's descriptors.
pub(super) struct Worker<S> {
    device: Arc<str>,
    asking: Asking,
    limit: Duration,
    socket: UnixStream,
    jobs: Option<Sender<Job<S>>>,
    thread: Option<JoinHandle<()>>,
    /// Whether another process has descriptors of the same connection, which must stay open.
    is_shared: AtomicBool,
}

impl<S: Send + 'static> Worker<S> {
    /// Starts a thread for `session`, which uses `socket` and records its present request in `asking`.
    pub(super) fn start(
        device: Arc<str>,
        asking: Asking,
        limit: Duration,
        socket: UnixStream,
        mut session: S,
    ) -> Result<Self, VhostUserError> {
        let (jobs, todo) = channel::<Job<S>>();
        let thread = thread::Builder::new()
            .name(format!("vhost {device}"))
            .spawn(move || todo.into_iter().for_each(|job| job(&mut session)))
            .map_err(|source| VhostUserError::System {
                device: Arc::clone(&device),
                what: "starting a thread",
                source,
            })?;
        Ok(Self {
            device,
            asking,
            limit,
            socket,
            jobs: Some(jobs),
            thread: Some(thread),
            is_shared: AtomicBool::default(),
        })
    }

    /// Runs `job` and waits for its result. [`VhostUserError::NoAnswer`] after the time limit.
    pub(super) fn call<T: Send + 'static>(
        &self,
        job: impl FnOnce(&mut S) -> Result<T, VhostUserError> + Send + 'static,
    ) -> Result<T, VhostUserError> {
        let (done, result) = sync_channel(1);
        let job: Job<S> = Box::new(move |session| {
            // The send fails if the caller has stopped waiting.
            let _ = done.send(job(session));
        });
        let (device, limit) = (Arc::clone(&self.device), self.limit);
        let sent = self.jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok());
        match result.recv_timeout(limit) {
            Ok(result) => result,
            Err(RecvTimeoutError::Timeout) if sent => {
                Err(VhostUserError::NoAnswer { device, request: self.asking.get(), limit })
            }
            Err(_) => Err(VhostUserError::Gone { device, request: self.asking.get() }),
        }
    }

    /// Sets whether another process has descriptors of the same connection.
    pub(super) fn set_shared(&self, is_shared: bool) {
        self.is_shared.store(is_shared, Ordering::Release);
    }

    /// Whether another process has descriptors of the same connection ([`Worker::set_shared`]).
    pub(super) fn is_shared(&self) -> bool {
        self.is_shared.load(Ordering::Acquire)
    }

    /// Queues `job` after all earlier jobs, without waiting for it.
    pub(super) fn post(&self, job: impl FnOnce(&mut S) + Send + 'static) {
        if let Some(jobs) = &self.jobs {
            // Fails only if the thread has panicked, which was reported.
            let _ = jobs.send(Box::new(job));
        }
    }
}

impl<S> Worker<S> {
    /// Whether the thread has finished all its jobs. Shutting the connection down would wake it, but would
    /// also end the other process's connection.
    fn is_idle(&self) -> bool {
        let (done, idle) = sync_channel(1);
        let job: Job<S> = Box::new(move |_| {
            let _ = done.send(());
        });
        let sent = self.jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok());
        !sent || idle.recv_timeout(LEAVE_LIMIT).is_ok()
    }
}

impl<S> Drop for Worker<S> {
    fn drop(&mut self) {
        if !self.is_shared.load(Ordering::Acquire) {
            // Wakes the thread if it waits for the back end. Its remaining jobs fail immediately. An error
            // means that the back end has already closed the connection.
            let _ = self.socket.shutdown(Shutdown::Both);
        } else if !self.is_idle() {
            // The thread ends when the back end answers or ends.
            self.thread = None;
        }
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // The panic message was already printed to standard error.
            let _ = thread.join();
        }
    }
}

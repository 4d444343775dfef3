//! The thread that talks to one back end, so that nobody else waits for it without a limit.
//!
//! Jobs are done in the order in which they were given. Who gave one waits for its result for a limited time and then
//! goes away with an error; the job itself stays where it is. So a back end that was stopped for a while and goes on
//! finds no request half made, and what was given to undo a migration is done then.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::error::VhostUserError;
use parking_lot::Mutex;

/// How long the thread may still be at work on a connection that another process has, too.
const LEAVE_LIMIT: Duration = Duration::from_secs(1);

type Job<S> = Box<dyn FnOnce(&mut S) + Send>;

/// What the back end owes an answer to.
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

/// The thread, and the way to it. Dropping it closes the connection, or only this process's descriptors of it.
pub(super) struct Worker<S> {
    device: Arc<str>,
    asking: Asking,
    limit: Duration,
    socket: UnixStream,
    jobs: Option<Sender<Job<S>>>,
    thread: Option<JoinHandle<()>>,
    /// Another process has descriptors of the same connection, which must outlive these.
    is_shared: AtomicBool,
}

impl<S: Send + 'static> Worker<S> {
    /// Starts the thread with `session` on it, which talks over `socket` and notes in `asking` what it waits for.
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

    /// Has `job` done and waits for its result; [`VhostUserError::NoAnswer`] if that takes too long.
    pub(super) fn call<T: Send + 'static>(
        &self,
        job: impl FnOnce(&mut S) -> Result<T, VhostUserError> + Send + 'static,
    ) -> Result<T, VhostUserError> {
        let (done, result) = sync_channel(1);
        let job: Job<S> = Box::new(move |session| {
            // Nobody listens any more if it took too long.
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

    /// Whether another process has descriptors of the same connection, too.
    pub(super) fn set_shared(&self, is_shared: bool) {
        self.is_shared.store(is_shared, Ordering::Release);
    }

    /// See [`Worker::set_shared`].
    pub(super) fn is_shared(&self) -> bool {
        self.is_shared.load(Ordering::Acquire)
    }

    /// Has `job` done after those that were given before, and does not wait for it.
    pub(super) fn post(&self, job: impl FnOnce(&mut S) + Send + 'static) {
        if let Some(jobs) = &self.jobs {
            // The thread ends with the worker, or by a panic that was told.
            let _ = jobs.send(Box::new(job));
        }
    }
}

impl<S> Worker<S> {
    /// Whether the thread has done all that it was told. To shut the connection down would wake it, and end the other process's.
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
            // Wakes the thread if it waits for the back end; jobs that are left fail at once. An error means that the
            // back end was faster.
            let _ = self.socket.shutdown(Shutdown::Both);
        } else if !self.is_idle() {
            // It ends when the back end answers, or ends.
            self.thread = None;
        }
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // A panic was told on standard error already.
            let _ = thread.join();
        }
    }
}

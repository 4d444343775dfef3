//! Destinations that come to an address of this side.
//!
//! A QEMU itself only listens. What connects here is its manager, which hands the connection on (`fd:`), or a relay.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sterna_transport::{Address, CancelFlag, Channel, Listener, TransportError};

use super::link::Accepted;
use super::served::ServedImage;
use super::serving::{ServeOptions, Serving};
use crate::error::MigrationError;
use crate::settings_error::SettingsError;
use crate::start_error::StartError;
use crate::threads;

/// How often somebody who waits for a connection looks whether it is to end.
const LOOK: Duration = Duration::from_millis(50);

/// Serves everybody who connects to an address. Dropped, it ends with all whom it serves.
pub struct Reception {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    image: Arc<ServedImage>,
    listener: Listener,
    options: ServeOptions,
    cancel: CancelFlag,
    served: Mutex<Vec<Arc<Serving>>>,
    /// Those whose connection broke: the next connection is for the first of them.
    waiting: Mutex<VecDeque<mpsc::Sender<Channel>>>,
}

impl Reception {
    /// Listens at `address`. While somebody's connection is broken, the next one that comes is taken for his.
    ///
    /// # Errors
    /// [`StartError::Settings`] with [`ServeOptions::preempt`], as nobody could tell whose a second connection is;
    /// [`StartError::System`] if the address cannot be listened at.
    pub fn listen(
        image: Arc<ServedImage>,
        address: &Address,
        options: ServeOptions,
    ) -> Result<Self, StartError> {
        if options.preempt {
            return Err(StartError::Settings(SettingsError::PreemptNeedsDial));
        }
        let system = |error: &dyn std::fmt::Display| StartError::System(error.to_string());
        let listener = Listener::bind(address).map_err(|error| system(&error))?;
        let shared = Arc::new(Shared {
            image,
            listener,
            options,
            cancel: CancelFlag::new(),
            served: Mutex::default(),
            waiting: Mutex::default(),
        });
        let ours = Arc::clone(&shared);
        // Should it die, nobody new is served.
        let thread =
            threads::spawn("reception", move || accept(&ours), |_| ()).map_err(|error| system(&error))?;
        Ok(Self { shared, thread: Mutex::new(Some(thread)) })
    }

    /// Where it listens.
    pub fn address(&self) -> Address {
        self.shared.listener.local_address()
    }

    /// All who came, in order.
    pub fn served(&self) -> Vec<Arc<Serving>> {
        self.shared.served.lock().clone()
    }

    /// Takes nobody any more. Those who are served go on.
    pub fn close(&self) {
        self.shared.cancel.cancel();
        let thread = self.thread.lock().take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}

impl Drop for Reception {
    fn drop(&mut self) {
        self.close();
    }
}

fn accept(shared: &Arc<Shared>) {
    loop {
        let channel = match shared.listener.accept(None, &shared.cancel) {
            Ok(channel) => channel,
            Err(error) if error.is_cancelled() => return,
            Err(error) => {
                tracing::warn!("{error}");
                // Such as no descriptor for it now.
                std::thread::sleep(LOOK);
                continue;
            }
        };
        if let Err(error) = shared.take(channel) {
            tracing::warn!("a destination was not served: {error}");
        }
    }
}

impl Shared {
    fn take(self: &Arc<Self>, mut channel: Channel) -> Result<(), MigrationError> {
        while let Some(waits) = self.waiting.lock().pop_front() {
            match waits.send(channel) {
                Ok(()) => return Ok(()),
                // He has given up meanwhile.
                Err(mpsc::SendError(back)) => channel = back,
            }
        }
        let shared = Arc::downgrade(self);
        let next = move |limit: Duration, cancel: &CancelFlag| match shared.upgrade() {
            Some(shared) => shared.wait_for_next(limit, cancel),
            None => Err(TransportError::Cancelled { channel: "a reception that has ended".to_owned() }),
        };
        let link = Arc::new(Accepted::new(channel, next));
        let serving = Serving::start(Arc::clone(&self.image), link, self.options.clone())?;
        self.served.lock().push(Arc::new(serving));
        Ok(())
    }

    fn wait_for_next(&self, limit: Duration, cancel: &CancelFlag) -> Result<Channel, TransportError> {
        let address = self.listener.local_address().to_string();
        let (waits, comes) = mpsc::channel();
        self.waiting.lock().push_back(waits);
        let deadline = Instant::now() + limit;
        loop {
            match comes.recv_timeout(LOOK) {
                Ok(channel) => return Ok(channel),
                Err(_) if cancel.is_cancelled() || self.cancel.is_cancelled() => {
                    return Err(TransportError::Cancelled { channel: address });
                }
                Err(_) if Instant::now() >= deadline => {
                    return Err(TransportError::TimedOut { what: "accepting on", address, after: limit });
                }
                Err(_) => {}
            }
        }
    }
}

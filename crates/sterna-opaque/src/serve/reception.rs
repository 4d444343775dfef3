//! Serves destinations that connect to an address of this side.
//!
//! A QEMU itself only listens. Therefore the connecting peer is its manager, which hands the connection on
//! (`fd:`), or a relay.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sterna::SettingsError;
use sterna::StartError;
use sterna::error::MigrationError;
use sterna::internals::threads::{self, ThreadRole};
use sterna_transport::{Address, CancelFlag, Channel, Listener, TransportError, shortage_advice};

use super::link::Accepted;
use super::served::ServedImage;
use super::serving::{ServeOptions, Serving};

/// Interval at which a thread that waits for a connection checks whether it must end.
const LOOK: Duration = Duration::from_millis(50);

/// Serves every destination that connects to an address. Dropping it ends the service for all of them.
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
    /// Destinations whose connection broke, oldest first. The next connection is given to the first.
    waiting: Mutex<VecDeque<mpsc::Sender<Channel>>>,
}

impl Reception {
    /// Listens at `address`. While a destination's connection is broken, the next connection is assigned to
    /// that destination.
    ///
    /// Its threads have the hook of the calling thread ([`sterna_ram::threads::hooked`]).
    ///
    /// # Errors
    /// [`StartError::Settings`] with [`ServeOptions::preempt`], because a second connection could not be
    /// assigned to a destination; [`StartError::System`] if the address cannot be bound.
    pub fn listen(
        image: Arc<ServedImage>,
        address: &Address,
        options: ServeOptions,
    ) -> Result<Self, StartError> {
        if options.preempt {
            return Err(StartError::Settings(SettingsError::PreemptNeedsDial));
        }
        let listener = Listener::bind(address).map_err(StartError::system)?;
        let shared = Arc::new(Shared {
            image,
            listener,
            options,
            cancel: CancelFlag::new(),
            served: Mutex::default(),
            waiting: Mutex::default(),
        });
        let ours = Arc::clone(&shared);
        // If the thread dies, no new destination is served.
        let thread = threads::spawn(ThreadRole::Reception, move || accept(&ours), |_| ())
            .map_err(StartError::system)?;
        Ok(Self { shared, thread: Mutex::new(Some(thread)) })
    }

    /// The address of the listener.
    pub fn address(&self) -> Address {
        self.shared.listener.local_address()
    }

    /// All destinations that have connected, in this order.
    pub fn served(&self) -> Vec<Arc<Serving>> {
        self.shared.served.lock().clone()
    }

    /// Accepts no further destination. Destinations that are being served continue.
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
    let mut was_refused = false;
    loop {
        let channel = match shared.listener.accept(None, &shared.cancel) {
            Ok(channel) => channel,
            Err(error) if error.is_cancelled() => return,
            // For example, no descriptor is free. Reported once, because a destination that ends frees
            // descriptors.
            Err(error) => {
                if !std::mem::replace(&mut was_refused, true) {
                    let advice = match &error {
                        TransportError::System { source, .. } => shortage_advice(source),
                        _ => String::new(),
                    };
                    tracing::warn!("{error}{advice}");
                }
                std::thread::sleep(LOOK);
                continue;
            }
        };
        was_refused = false;
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
                // That destination has stopped waiting meanwhile.
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

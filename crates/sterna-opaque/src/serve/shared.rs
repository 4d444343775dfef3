//! State that the threads of one destination share.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use sterna::error::{Awaited, MigrationError};
use sterna::internals::postcopy::Answers;
use sterna::internals::postcopy::PageOrder;
use sterna_image::Shape;
use sterna_transport::Channel;
use sterna_wire::received_pages::ReceivedPages;

use super::served::ServedImage;
use super::statistics::{ServeStatistics, Stage};

/// State of one destination that is served.
pub(crate) struct Shared {
    pub(crate) image: Arc<ServedImage>,
    pub(crate) state: Mutex<State>,
    pub(crate) changed: Condvar,
}

/// The part of the state that changes, under one lock.
pub(crate) struct State {
    pub(crate) order: PageOrder,
    pub(crate) connection: Connection,
    pub(crate) statistics: ServeStatistics,
    /// An operator has requested the end.
    pub(crate) is_stopped: bool,
}

/// The state of one connection. The next connection starts with a new one.
pub(crate) struct Connection {
    pub(crate) answers: Answers,
    /// Channels that are shut down when the connection ends.
    pub(crate) channels: Vec<Arc<Channel>>,
    /// Values of the PONGs that have arrived.
    pub(crate) pongs: Vec<u32>,
    /// Bitmaps of received pages that have arrived, by block.
    pub(crate) bitmaps: Vec<(usize, ReceivedPages)>,
    pub(crate) has_resumed: bool,
    pub(crate) is_done: bool,
    /// Runs of requested pages that were taken and are not written yet.
    pub(crate) on_their_way: u64,
    /// Everything was sent, so the connection's threads must end.
    pub(crate) is_over: bool,
    /// The first error of the connection.
    pub(crate) error: Option<MigrationError>,
}

impl Connection {
    fn new(shape: &Shape) -> Self {
        Self {
            answers: Answers::new(shape.ram.blocks.iter().map(|block| block.name.clone()).collect()),
            channels: Vec::new(),
            pongs: Vec::new(),
            bitmaps: Vec::new(),
            has_resumed: false,
            is_done: false,
            on_their_way: 0,
            is_over: false,
            error: None,
        }
    }
}

impl Shared {
    pub(crate) fn new(image: Arc<ServedImage>) -> Self {
        let shape = image.shape();
        let pages: Vec<u64> =
            (0..shape.ram.blocks.len()).map(|block| image.cache().store().held(block).pages()).collect();
        let mut order = PageOrder::new(&pages, image.cache().store().sequence());
        order.begin_with(image.cache().store().working_set());
        let statistics = ServeStatistics::of(pages.iter().sum());
        let connection = Connection::new(shape);
        let state = State { order, connection, statistics, is_stopped: false };
        Self { image, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Resets the state for a new connection.
    pub(crate) fn begin_connection(&self) -> Result<(), MigrationError> {
        let mut state = self.state.lock();
        state.connection = Connection::new(self.image.shape());
        if state.is_stopped { Err(MigrationError::Cancelled) } else { Ok(()) }
    }

    /// Registers `channel`, which is shut down when the connection fails.
    pub(crate) fn adopt(&self, channel: &Arc<Channel>) {
        let mut state = self.state.lock();
        state.connection.channels.push(Arc::clone(channel));
        if state.connection.error.is_some() || state.is_stopped {
            channel.shutdown();
        }
    }

    pub(crate) fn stage(&self, stage: Stage) {
        let mut state = self.state.lock();
        state.statistics.enter(stage);
        drop(state);
        self.changed.notify_all();
    }

    /// Fails the connection. The first error is kept.
    pub(crate) fn fail(&self, error: MigrationError) {
        let mut state = self.state.lock();
        state.connection.error.get_or_insert(error);
        state.connection.channels.iter().for_each(|channel| channel.shutdown());
        drop(state);
        self.changed.notify_all();
    }

    /// Stops serving on an operator's request.
    pub(crate) fn stop(&self) {
        self.state.lock().is_stopped = true;
        self.fail(MigrationError::Cancelled);
    }

    /// Ends the threads of a connection that is complete.
    pub(crate) fn finish_connection(&self) {
        let mut state = self.state.lock();
        state.connection.is_over = true;
        state.connection.channels.iter().for_each(|channel| channel.shutdown());
        drop(state);
        self.changed.notify_all();
    }

    /// Changes the state, and wakes all waiting threads.
    pub(crate) fn change<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        let result = act(&mut self.state.lock());
        self.changed.notify_all();
        result
    }

    /// Waits until `is_so`, for at most `limit`.
    ///
    /// # Errors
    /// The connection's error, or [`MigrationError::Limit`] about `what`.
    pub(crate) fn wait(
        &self,
        what: Awaited,
        limit: Duration,
        mut is_so: impl FnMut(&mut State) -> bool,
    ) -> Result<(), MigrationError> {
        let deadline = Instant::now() + limit;
        let mut state = self.state.lock();
        loop {
            if let Some(error) = &state.connection.error {
                return Err(error.clone());
            }
            if is_so(&mut state) {
                return Ok(());
            }
            if self.changed.wait_until(&mut state, deadline).timed_out() && Instant::now() >= deadline {
                return Err(MigrationError::Limit { what, after: limit });
            }
        }
    }

    /// Waits for `time`, or until an operator requests the end.
    pub(crate) fn sleep(&self, time: Duration) {
        let deadline = Instant::now() + time;
        let mut state = self.state.lock();
        while !state.is_stopped && Instant::now() < deadline {
            self.changed.wait_until(&mut state, deadline);
        }
    }
}

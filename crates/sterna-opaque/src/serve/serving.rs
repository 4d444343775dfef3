//! Serves an image to one destination.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sterna::error::{Awaited, Difference, MigrationError};
use sterna::internals::postcopy::{DEVICES_PING, HELLO_PING, LISTED_PING, PACKAGE_PING};
use sterna::internals::threads::{self, ThreadRole};
use sterna::params::WaitLimits;
use sterna_transport::{CancelFlag, Channel};
use sterna_wire::received_pages::ReceivedPages;

use super::link::{Link, Purpose};
use super::listener;
use super::sender::{self, Channels};
use super::served::ServedImage;
use super::shared::{Shared, State};
use super::statistics::{ServeStatistics, Silence, Stage};
use super::stream;

/// Delay before each attempt to reconnect. A QEMU that has not detected the break refuses the connection as a
/// surplus one.
const RETRY: Duration = Duration::from_secs(1);

/// A destination that sends nothing for this long may wait for a channel that this side does not open.
const SILENCE: Duration = Duration::from_millis(1500);

/// How a destination is served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServeOptions {
    /// The destination has the capability `postcopy-preempt`: requested pages use a separate channel.
    pub preempt: bool,
    /// The destination was served before and its connection broke: continue with the pages that it lacks.
    pub recover: bool,
    /// How long this side tries to reconnect after the connection broke (default 0: not at all).
    pub reconnect_window: Duration,
    /// Limits of all other waits.
    pub limits: WaitLimits,
}

impl Default for ServeOptions {
    fn default() -> Self {
        Self {
            preempt: false,
            recover: false,
            reconnect_window: Duration::ZERO,
            limits: WaitLimits::default(),
        }
    }
}

/// Which part of the guest a destination has when serving has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum GuestState {
    /// No part. The image can be restored without restrictions.
    Nowhere,
    /// The devices were being sent, and the destination may have started the guest. A QEMU exits when it
    /// detects the closed connection. A QEMU that waits for another channel does not detect it.
    Uncertain,
    /// The destination runs the guest until it touches a missing page. From then on the guest is blocked. The
    /// image must be kept, because it can be served again.
    NeedsImage,
}

/// Why serving ended before the destination had all pages.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{error}")]
pub struct ServeFailure {
    /// The error that ended it.
    #[source]
    pub error: MigrationError,
    /// The resulting state of the guest.
    pub guest: GuestState,
}

/// Serves one destination on its own threads. Dropping it stops the service.
pub struct Serving {
    shared: Arc<Shared>,
    cancel: CancelFlag,
    control: Mutex<Option<JoinHandle<()>>>,
    result: Arc<Mutex<Option<Result<(), ServeFailure>>>>,
}

impl Serving {
    /// Begins to serve `image` to the destination that `link` reaches.
    ///
    /// Its threads have the hook of the calling thread ([`sterna_ram::threads::hooked`]).
    ///
    /// # Errors
    /// [`MigrationError::System`] if the thread cannot be started.
    pub fn start(
        image: Arc<ServedImage>,
        link: Arc<dyn Link>,
        options: ServeOptions,
    ) -> Result<Self, MigrationError> {
        let shared = Arc::new(Shared::new(image));
        let (cancel, result) = (CancelFlag::new(), Arc::new(Mutex::new(None)));
        let control = Control { shared: Arc::clone(&shared), link, options, cancel: cancel.clone() };
        let (end, died) = (Arc::clone(&result), (Arc::clone(&shared), Arc::clone(&result)));
        let thread = threads::spawn(
            ThreadRole::Serve,
            move || {
                let result = control.run();
                let stage = if result.is_ok() { Stage::Completed } else { Stage::Failed };
                *end.lock() = Some(result);
                control.shared.stage(stage);
            },
            move |error| {
                let (shared, end) = died;
                let guest = guest_state(&shared);
                *end.lock() = Some(Err(ServeFailure { error: error.clone(), guest }));
                shared.fail(error);
                shared.stage(Stage::Failed);
            },
        )?;
        Ok(Self { shared, cancel, control: Mutex::new(Some(thread)), result })
    }

    /// A snapshot of the progress.
    pub fn statistics(&self) -> ServeStatistics {
        self.shared.state.lock().statistics
    }

    /// Closes the connection. A guest that lacks pages stays paused at the destination, and can be served
    /// again.
    pub fn stop(&self) {
        self.cancel.cancel();
        self.shared.stop();
    }

    /// The result, or `None` while the destination is being served.
    pub fn result(&self) -> Option<Result<(), ServeFailure>> {
        self.result.lock().clone()
    }

    /// Blocks until serving has ended.
    ///
    /// # Errors
    /// [`ServeFailure`]: why the destination does not have all pages, and the state of the guest.
    pub fn wait(&self) -> Result<(), ServeFailure> {
        let thread = self.control.lock().take();
        if let Some(thread) = thread {
            // An error of the join is ignored: a thread that panicked has stored its result.
            let _ = thread.join();
        }
        self.result().unwrap_or_else(|| {
            let error = MigrationError::Internal("a destination's thread left no result".into());
            Err(ServeFailure { error, guest: guest_state(&self.shared) })
        })
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.stop();
        let _ = self.wait();
    }
}

fn guest_state(shared: &Shared) -> GuestState {
    match shared.state.lock().statistics.furthest {
        Stage::Connecting => GuestState::Nowhere,
        Stage::Loading => GuestState::Uncertain,
        _ => GuestState::NeedsImage,
    }
}

/// The state of the control thread.
struct Control {
    shared: Arc<Shared>,
    link: Arc<dyn Link>,
    options: ServeOptions,
    cancel: CancelFlag,
}

impl Control {
    fn run(&self) -> Result<(), ServeFailure> {
        let mut served = match self.options.recover {
            true => {
                self.shared.stage(Stage::Paused);
                self.again()
            }
            false => self.first(),
        };
        while let Err(error) = served {
            let was_active = self.shared.state.lock().statistics.stage == Stage::Active;
            if !was_active || !is_break(&error) || self.options.reconnect_window.is_zero() {
                return Err(ServeFailure { error, guest: guest_state(&self.shared) });
            }
            tracing::warn!("{}: {error}; connecting again", self.link.name());
            self.shared.stage(Stage::Paused);
            self.shared.sleep(RETRY);
            served = self.again();
        }
        Ok(())
    }

    /// Serves a destination that has no part of the guest yet.
    fn first(&self) -> Result<(), MigrationError> {
        self.shared.begin_connection()?;
        let limits = &self.options.limits;
        let main = self.open(Purpose::First, limits.setup)?;
        self.with_threads(main, |main| {
            let shape = self.shared.image.shape();
            let wire = MigrationError::wire("main channel");
            self.shared.change(|state| {
                state.connection.answers.pinged(HELLO_PING);
                state.connection.answers.pinged(LISTED_PING);
            });
            main.write_all(&stream::opening(shape).map_err(&wire)?)?;
            let what = Awaited::Answer;
            self.wait_silently(Silence::ReadsNothing, what, limits.setup, |state| {
                state.connection.pongs.contains(&HELLO_PING)
            })?;
            // The destination has accepted machine and memory. Before that, no part of the guest is sent.
            self.wait_for(LISTED_PING, Awaited::Blocks, limits.setup)?;
            let channels = self.channels(main)?;
            let package = stream::package(shape).map_err(&wire)?;
            self.shared.change(|state| {
                state.connection.answers.pinged(PACKAGE_PING);
                state.connection.answers.packaged();
                state.statistics.enter(Stage::Loading);
            });
            main.write_all(&package)?;
            Ok(channels)
        })
    }

    /// Reconnects to a destination whose connection broke, until the window ends.
    fn again(&self) -> Result<(), MigrationError> {
        let deadline = Instant::now() + self.options.reconnect_window;
        loop {
            let left = deadline.saturating_duration_since(Instant::now()).max(RETRY);
            let result = self.shared.begin_connection().and_then(|()| self.recover(left));
            let Err(error) = result else { return Ok(()) };
            let goes_on = self.shared.state.lock().statistics.stage == Stage::Active;
            if goes_on || !is_break(&error) || Instant::now() >= deadline {
                return Err(error);
            }
            self.shared.stage(Stage::Paused);
            self.shared.sleep(RETRY);
        }
    }

    fn recover(&self, limit: Duration) -> Result<(), MigrationError> {
        let main = self.open(Purpose::Again, limit.min(self.options.limits.setup))?;
        self.with_threads(main, |main| {
            let limit = self.options.limits.setup;
            let bitmaps = self.ask_bitmaps(main, limit)?;
            let channels = self.channels(main)?;
            self.shared.change(|state| {
                state.order.forget_requests();
                for (block, received) in bitmaps {
                    state.order.received(block, &received);
                }
                state.statistics.missing_pages = state.order.unsent_pages();
                state.connection.answers.resumed();
            });
            main.write_all(&stream::resume().map_err(MigrationError::wire("main channel"))?)?;
            let what = Awaited::Recovery;
            self.shared.wait(what, limit, |state| state.connection.has_resumed)?;
            self.shared.change(|state| {
                state.statistics.recoveries += 1;
                state.statistics.enter(Stage::Active);
            });
            Ok(channels)
        })
    }

    /// Runs `begin` and sends all pages, while another thread reads the destination's messages.
    fn with_threads(
        &self,
        main: Arc<Channel>,
        begin: impl FnOnce(&Arc<Channel>) -> Result<Channels, MigrationError>,
    ) -> Result<(), MigrationError> {
        let (shared, channel) = (Arc::clone(&self.shared), Arc::clone(&main));
        let died = Arc::clone(&self.shared);
        let hearing = threads::spawn(
            ThreadRole::ReturnPath,
            move || listener::listen(&shared, &channel),
            move |e| died.fail(e),
        )?;
        let result = begin(&main).and_then(|channels| self.send_all(&channels));
        match &result {
            Ok(()) => self.shared.finish_connection(),
            Err(error) => self.shared.fail(error.clone()),
        }
        // An error of the join is ignored: a thread that panicked has failed the connection.
        let _ = hearing.join();
        // The first error of any thread is the cause of the others.
        let first = self.shared.state.lock().connection.error.clone();
        result.map_err(|error| first.unwrap_or(error))
    }

    fn send_all(&self, channels: &Channels) -> Result<(), MigrationError> {
        let (shared, theirs) = (Arc::clone(&self.shared), channels.clone());
        let died = Arc::clone(&self.shared);
        let answering = threads::spawn(
            ThreadRole::RequestedPages,
            move || sender::send_requested(&shared, &theirs),
            move |error| died.fail(error),
        )?;
        let result = self.send_to_the_end(channels);
        match &result {
            Ok(()) => self.shared.finish_connection(),
            Err(error) => self.shared.fail(error.clone()),
        }
        let _ = answering.join();
        result
    }

    fn send_to_the_end(&self, channels: &Channels) -> Result<(), MigrationError> {
        let limits = &self.options.limits;
        // The devices may need pages. These are sent on request while the devices load.
        let is_loaded = |state: &mut State| state.statistics.stage != Stage::Loading;
        self.wait_silently(Silence::LoadsNothing, Awaited::Devices, limits.prepare, |state| {
            let has_begun = state.statistics.requests > 0 || state.connection.pongs.contains(&DEVICES_PING);
            has_begun || is_loaded(state)
        })?;
        if self.options.preempt {
            self.wait_while_it_asks();
            self.publish(Silence::LoadsNothing, Awaited::Devices, limits.prepare, limits.prepare, is_loaded)?;
        } else {
            self.shared.wait(Awaited::Devices, limits.prepare, is_loaded)?;
        }
        sender::send_background(&self.shared, channels)?;
        let what = Awaited::RequestedPages;
        self.shared.wait(what, limits.stall, |state| {
            state.connection.on_their_way == 0 && sender::has_nothing_left(&mut state.order)
        })?;
        // The end may arrive before pages on the preempt channel. This is allowed, because only requested pages
        // use that channel, and a destination waits for them (specs/postcopy.md §4).
        self.shared.change(|state| state.connection.answers.ended());
        channels.write(&stream::ending(self.shared.image.shape().ram.section_id))?;
        self.shared.wait(Awaited::Confirmation, limits.prepare, |state| state.connection.is_done)
    }

    /// Asks which pages of each block the destination has.
    fn ask_bitmaps(
        &self,
        main: &Channel,
        limit: Duration,
    ) -> Result<Vec<(usize, ReceivedPages)>, MigrationError> {
        let blocks = &self.shared.image.shape().ram.blocks;
        for (index, block) in blocks.iter().enumerate() {
            let question =
                stream::bitmap_question(&block.name).map_err(MigrationError::wire("main channel"))?;
            self.shared.change(|state| state.connection.answers.asked_bitmap(index));
            let _turn = main.turn();
            main.write_all(&question)?;
        }
        let what = Awaited::ReceivedPages;
        self.shared.wait(what, limit, |state| state.connection.bitmaps.len() == blocks.len())?;
        Ok(self.shared.change(|state| std::mem::take(&mut state.connection.bitmaps)))
    }

    /// Waits for at most `limit`. After [`SILENCE`], publishes the possible cause of the silence.
    fn wait_silently(
        &self,
        silence: Silence,
        what: Awaited,
        limit: Duration,
        mut is_so: impl FnMut(&mut State) -> bool,
    ) -> Result<(), MigrationError> {
        let first = SILENCE.min(limit);
        match self.shared.wait(what.clone(), first, &mut is_so) {
            Err(MigrationError::Limit { .. }) => {}
            ended => return ended,
        }
        self.publish(silence, what, limit, limit - first, is_so)
    }

    /// Publishes the possible cause of a lasting silence, and waits for the remaining `left` of `limit`.
    fn publish(
        &self,
        silence: Silence,
        what: Awaited,
        limit: Duration,
        left: Duration,
        mut is_so: impl FnMut(&mut State) -> bool,
    ) -> Result<(), MigrationError> {
        self.shared.change(|state| state.statistics.silence = (!is_so(state)).then_some(silence));
        let ended = self.shared.wait(what, left, is_so);
        if ended.is_ok() {
            self.shared.change(|state| state.statistics.silence = None);
        }
        ended.map_err(|error| match error {
            MigrationError::Limit { what, .. } => MigrationError::Limit { what, after: limit },
            error => error,
        })
    }

    /// Waits until the devices are loaded, the connection has failed, or no page was requested for [`SILENCE`].
    /// A QEMU that does not read the preempt channel requests a page only once.
    fn wait_while_it_asks(&self) {
        let mut seen = self.shared.state.lock().statistics.requests;
        let mut is_loading = true;
        while is_loading {
            let asks = |state: &mut State| {
                state.statistics.stage != Stage::Loading || state.statistics.requests != seen
            };
            if self.shared.wait(Awaited::Devices, SILENCE, asks).is_err() {
                return;
            }
            let state = self.shared.state.lock();
            (seen, is_loading) = (state.statistics.requests, state.statistics.stage == Stage::Loading);
        }
    }

    fn wait_for(&self, ping: u32, what: Awaited, limit: Duration) -> Result<(), MigrationError> {
        self.shared.wait(what, limit, |state| state.connection.pongs.contains(&ping))
    }

    /// Opens the other channels of a connection whose main channel was accepted.
    fn channels(&self, main: &Arc<Channel>) -> Result<Channels, MigrationError> {
        let preempt = match self.options.preempt {
            true => Some(self.open(Purpose::Preempt, self.options.limits.setup)?),
            false => None,
        };
        Ok(Channels { main: Arc::clone(main), preempt })
    }

    fn open(&self, purpose: Purpose, limit: Duration) -> Result<Arc<Channel>, MigrationError> {
        let channel = Arc::new(self.link.open(purpose, limit, &self.cancel)?);
        let stall = self.options.limits.stall;
        // The limit is for writing. A return path may be silent without limit.
        channel.set_own_stall_limit(Some(stall));
        channel.probe_peer(stall);
        self.shared.adopt(&channel);
        Ok(channel)
    }
}

/// Whether the network or the destination's process broke the connection, as opposed to a violated rule.
fn is_break(error: &MigrationError) -> bool {
    matches!(
        error,
        MigrationError::Transport(_)
            | MigrationError::Ended(_)
            | MigrationError::PeerIncompatible(Difference::PreemptClosed { .. })
    )
}

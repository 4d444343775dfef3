//! Serves an image to one destination.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sterna_transport::{CancelFlag, Channel};
use sterna_wire::received_pages::ReceivedPages;

use super::answers::{HELLO_PING, LISTED_PING, PACKAGE_PING};
use super::link::{Link, Purpose};
use super::listener;
use super::sender::{self, Channels};
use super::served::ServedImage;
use super::shared::Shared;
use super::statistics::{ServeStatistics, Stage};
use super::stream;
use crate::error::MigrationError;
use crate::params::WaitLimits;
use crate::threads;

/// Before each attempt to connect again: a QEMU that has not noticed the break takes the connection for one too many.
const RETRY: Duration = Duration::from_secs(1);

/// How a destination is served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServeOptions {
    /// The destination has the capability `postcopy-preempt`: requested pages get a channel of their own.
    pub preempt: bool,
    /// The destination was served before and its connection broke: go on with the pages that it lacks.
    pub recover: bool,
    /// How long it is tried to connect again after the connection broke.
    pub reconnect_window: Duration,
    /// Every other wait.
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

/// What a destination has of the guest when it is not served any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum GuestState {
    /// Nothing: the image can be restored as if nothing had happened.
    Nowhere,
    /// Its devices were on their way, and it may have started the guest. It ends by itself, as its connection is gone.
    Uncertain,
    /// It runs the guest until that needs a page which is missing, and keeps it paused from then on. The image must be
    /// kept: it can be served again.
    NeedsImage,
}

/// Why a destination is not served any more, before it had everything.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{error}")]
pub struct ServeFailure {
    /// What happened.
    #[source]
    pub error: MigrationError,
    /// Where it leaves the guest.
    pub guest: GuestState,
}

/// One destination that is served, on threads of its own. Dropped, it is stopped.
pub struct Serving {
    shared: Arc<Shared>,
    cancel: CancelFlag,
    control: Mutex<Option<JoinHandle<()>>>,
    result: Arc<Mutex<Option<Result<(), ServeFailure>>>>,
}

impl Serving {
    /// Begins to serve `image` to the destination behind `link`.
    ///
    /// # Errors
    /// [`MigrationError::System`]: there is no thread for it.
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
            "serve",
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

    /// How it goes.
    pub fn statistics(&self) -> ServeStatistics {
        self.shared.state.lock().statistics
    }

    /// Closes the connection. A guest that lacks pages stays paused at the destination, and can be served again.
    pub fn stop(&self) {
        self.cancel.cancel();
        self.shared.stop();
    }

    /// How it ended; `None` as long as it goes on.
    pub fn result(&self) -> Option<Result<(), ServeFailure>> {
        self.result.lock().clone()
    }

    /// Waits for the end.
    ///
    /// # Errors
    /// [`ServeFailure`]: why the destination does not have everything, and what becomes of the guest.
    pub fn wait(&self) -> Result<(), ServeFailure> {
        let thread = self.control.lock().take();
        if let Some(thread) = thread {
            // One that panicked has left its result.
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

/// The thread that decides.
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

    /// A destination that has nothing.
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
            // It has accepted machine and memory: before that, nothing is given away.
            self.wait_for(LISTED_PING, "the destination to accept the machine's memory", limits.setup)?;
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

    /// A destination whose connection broke: until the window is over.
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
            let what = "the destination to go on";
            self.shared.wait(what, limit, |state| state.connection.has_resumed)?;
            self.shared.change(|state| {
                state.statistics.recoveries += 1;
                state.statistics.enter(Stage::Active);
            });
            Ok(channels)
        })
    }

    /// Does `begin` and sends all pages, while a thread hears the destination.
    fn with_threads(
        &self,
        main: Arc<Channel>,
        begin: impl FnOnce(&Arc<Channel>) -> Result<Channels, MigrationError>,
    ) -> Result<(), MigrationError> {
        let (shared, channel) = (Arc::clone(&self.shared), Arc::clone(&main));
        let died = Arc::clone(&self.shared);
        let hearing = threads::spawn(
            "return path",
            move || listener::listen(&shared, &channel),
            move |e| died.fail(e),
        )?;
        let result = begin(&main).and_then(|channels| self.send_all(&channels));
        match &result {
            Ok(()) => self.shared.finish_connection(),
            Err(error) => self.shared.fail(error.clone()),
        }
        // One that panicked has failed the connection.
        let _ = hearing.join();
        // What failed first, in whatever thread.
        let first = self.shared.state.lock().connection.error.clone();
        result.map_err(|error| first.unwrap_or(error))
    }

    fn send_all(&self, channels: &Channels) -> Result<(), MigrationError> {
        let (shared, theirs) = (Arc::clone(&self.shared), channels.clone());
        let died = Arc::clone(&self.shared);
        let answering = threads::spawn(
            "requested pages",
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
        // The devices may need pages, which go out meanwhile as they are asked for.
        self.shared.wait("the destination to load the devices", limits.prepare, |state| {
            state.statistics.stage != Stage::Loading
        })?;
        sender::send_background(&self.shared, channels)?;
        let what = "the last requested pages to be written";
        self.shared.wait(what, limits.stall, |state| {
            state.connection.on_their_way == 0 && sender::has_nothing_left(&mut state.order)
        })?;
        // The end may overtake pages on the preempt channel: a destination waits for what it has asked for, and nothing
        // else goes out there (specs/postcopy.md §4).
        self.shared.change(|state| state.connection.answers.ended());
        channels.write(&stream::ending(self.shared.image.shape().ram.section_id))?;
        self.shared
            .wait("the destination to confirm the end", limits.prepare, |state| state.connection.is_done)
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
        let what = "the destination to say which pages it has";
        self.shared.wait(what, limit, |state| state.connection.bitmaps.len() == blocks.len())?;
        Ok(self.shared.change(|state| std::mem::take(&mut state.connection.bitmaps)))
    }

    fn wait_for(&self, ping: u32, what: &str, limit: Duration) -> Result<(), MigrationError> {
        self.shared.wait(what, limit, |state| state.connection.pongs.contains(&ping))
    }

    /// The channels of a connection whose main channel has been accepted.
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
        // For writing; a return path may be silent for ever.
        channel.set_own_stall_limit(Some(stall));
        channel.probe_peer(stall);
        self.shared.adopt(&channel);
        Ok(channel)
    }
}

/// Whether the network or the destination's process broke the connection, not a rule of the format.
fn is_break(error: &MigrationError) -> bool {
    matches!(error, MigrationError::Transport(..))
}

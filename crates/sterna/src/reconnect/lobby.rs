//! Admits reconnecting sources to a destination, one session at a time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use sterna_transport::Channel;

use crate::error::BadLane;

/// Collects the channels of one session after the other. Callers have authenticated the migration's source
/// before.
pub(crate) struct Lobby {
    state: Mutex<LobbyState>,
    changed: Condvar,
    lanes: usize,
}

#[derive(Default)]
struct LobbyState {
    /// The highest session number so far.
    last: u32,
    /// The number of the current session, or of the last one.
    begun: u32,
    /// The last session's channels are no longer read, and no other session has begun.
    is_open: bool,
    is_over: bool,
    coming: Option<Coming>,
}

/// The channels of a session that have connected so far.
struct Coming {
    session: u32,
    main: Arc<Channel>,
    lanes: Vec<Option<Arc<Channel>>>,
    is_answered: bool,
}

/// All channels of a session.
pub(crate) struct Assembled {
    pub(crate) session: u32,
    pub(crate) main: Arc<Channel>,
    pub(crate) lanes: Vec<Arc<Channel>>,
}

/// The answer to a source that wants to begin a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Admission {
    /// The last session has ended, so this one may begin.
    Open,
    /// A newer session was announced, or no session is accepted any more.
    TooLate,
    /// The last session has not ended within the limit.
    NotYet,
}

impl Lobby {
    /// For sessions with `lanes` multifd channels.
    pub(crate) fn new(lanes: usize) -> Self {
        Self { state: Mutex::default(), changed: Condvar::new(), lanes }
    }

    /// Announces session `session`, whose main channel has connected. False: the number is not new, or no
    /// session is accepted any more.
    pub(crate) fn announce(&self, session: u32) -> bool {
        self.take(session, |state| !state.is_over)
    }

    /// Announces session `session` in postcopy, when no precopy session is accepted any more. False: the number
    /// is not new.
    ///
    /// Both kinds share one sequence of numbers, so that an old connection of either kind is refused.
    #[cfg(feature = "postcopy")]
    pub(crate) fn supersede(&self, session: u32) -> bool {
        self.take(session, |_| true)
    }

    fn take(&self, session: u32, may_come: impl FnOnce(&LobbyState) -> bool) -> bool {
        let mut state = self.state.lock();
        if !may_come(&state) || session <= state.last {
            return false;
        }
        state.last = session;
        state.drop_coming();
        drop(state);
        self.changed.notify_all();
        true
    }

    /// The highest session number so far.
    #[cfg(feature = "postcopy")]
    pub(crate) fn last(&self) -> u32 {
        self.state.lock().last
    }

    /// Waits at most `limit` until the announced session `session` may begin.
    pub(crate) fn admit(&self, session: u32, limit: Duration) -> Admission {
        let until = Instant::now() + limit;
        let mut state = self.state.lock();
        loop {
            if state.is_over || state.last != session {
                return Admission::TooLate;
            }
            if state.is_open {
                return Admission::Open;
            }
            if self.changed.wait_until(&mut state, until).timed_out() {
                return Admission::NotYet;
            }
        }
    }

    /// Stores the main channel of an admitted session. False: too late.
    pub(crate) fn put_main(&self, session: u32, main: &Arc<Channel>) -> bool {
        let mut state = self.state.lock();
        if !state.is_open || state.is_over || state.last != session {
            return false;
        }
        let lanes = vec![None; self.lanes];
        state.coming = Some(Coming { session, main: Arc::clone(main), lanes, is_answered: false });
        true
    }

    /// Records that the main channel has received the answer. Returns the session if it is complete.
    pub(crate) fn answered(&self, session: u32) -> Option<Assembled> {
        let mut state = self.state.lock();
        state.coming_as(session)?.is_answered = true;
        state.assemble()
    }

    /// Stores a multifd channel of a session. Returns the session if it is complete.
    ///
    /// # Errors
    /// The session or the channel's number does not exist, or the channel has connected before.
    pub(crate) fn put_lane(
        &self,
        session: u32,
        id: u8,
        channel: &Arc<Channel>,
    ) -> Result<Option<Assembled>, BadLane> {
        let mut state = self.state.lock();
        let coming = state.coming_as(session).ok_or(BadLane::UnknownSession)?;
        let place = coming.lanes.get_mut(usize::from(id)).ok_or(BadLane::UnknownNumber)?;
        if place.is_some() {
            return Err(BadLane::Again);
        }
        *place = Some(Arc::clone(channel));
        Ok(state.assemble())
    }

    /// Lets another session begin, because the last session's channels are no longer read.
    pub(crate) fn open(&self) {
        self.state.lock().is_open = true;
        self.changed.notify_all();
    }

    /// Whether the last session's channels are no longer read, and no other session has begun.
    #[cfg(feature = "postcopy")]
    pub(crate) fn is_open(&self) -> bool {
        self.state.lock().is_open
    }

    /// Whether session `session` is current. `None`: it may become current soon, because its main channel has
    /// connected.
    #[cfg(feature = "postcopy")]
    pub(crate) fn is_read(&self, session: u32) -> Option<bool> {
        let state = self.state.lock();
        let may_begin = state.begun < session && state.last == session && !state.is_over;
        (!may_begin).then_some(state.begun == session && !state.is_open)
    }

    /// Refuses all further sessions.
    pub(crate) fn end(&self) {
        let mut state = self.state.lock();
        state.is_over = true;
        state.drop_coming();
        drop(state);
        self.changed.notify_all();
    }

    /// The number of the current session, or of the last one.
    pub(crate) fn session(&self) -> u32 {
        self.state.lock().begun
    }
}

impl LobbyState {
    fn coming_as(&mut self, session: u32) -> Option<&mut Coming> {
        self.coming.as_mut().filter(|coming| coming.session == session)
    }

    fn assemble(&mut self) -> Option<Assembled> {
        let is_whole = |coming: &mut Coming| coming.is_answered && coming.lanes.iter().all(Option::is_some);
        let Coming { session, main, lanes, .. } = self.coming.take_if(is_whole)?;
        self.begun = session;
        self.is_open = false;
        Some(Assembled { session, main, lanes: lanes.into_iter().flatten().collect() })
    }

    fn drop_coming(&mut self) {
        if let Some(coming) = self.coming.take() {
            coming.main.shutdown();
            coming.lanes.iter().flatten().for_each(|lane| lane.shutdown());
        }
    }
}

#[cfg(test)]
#[path = "lobby/tests.rs"]
mod tests;

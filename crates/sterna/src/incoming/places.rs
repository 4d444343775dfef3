//! Assigns connections to the channels of the migration (specs/stream.md §3.1).
//!
//! Until all channels are connected, the first bytes cannot distinguish a stranger's connection from the
//! source's. Therefore a place has several candidates, and no candidate excludes another. A main channel
//! becomes a candidate by a fitting header and configuration, a multifd channel by a fitting initial packet. A
//! multifd place goes to the candidate that sends its first packet first.
//!
//! A source connects its main channel first, and writes the configuration when all other channels are
//! connected. Once all places have candidates, the newest main channel is taken in one of two cases. Either no
//! unassigned connection is left that could fit a place, or none of them sends anything within [`GRACE`].
//!
//! A main channel whose peer has closed may be the remains of an abandoned source, or a replayed recording. It
//! is taken only if no other connection is left.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use sterna_transport::Channel;

use crate::error::MigrationError;
use crate::interruption::Break;

/// How long other connections are awaited once every place has a candidate. Each later main channel restarts the
/// time.
const GRACE: Duration = Duration::from_millis(200);
/// Interval at which a candidate checks whether its wait is over. Other connections open and close without a
/// notification.
const LOOK: Duration = Duration::from_millis(20);

pub(super) type Uuid = [u8; 16];

pub(super) struct Places {
    state: Mutex<PlacesState>,
    changed: Condvar,
    lanes: usize,
    grace: Duration,
}

#[derive(Default)]
struct PlacesState {
    /// Candidates for the main channel, oldest first.
    mains: Vec<Arc<Channel>>,
    /// The multifd places, by id.
    lanes: Vec<Lane>,
    main: Option<Arc<Channel>>,
    /// Since when every multifd place has a candidate and no new main channel has connected.
    ready_since: Option<Instant>,
    /// Set once all channels are connected: the UUID that the multifd channels stated.
    complete: Option<Uuid>,
    /// No multifd channel is received any more.
    lanes_over: bool,
    /// The migration is over, or was given up before it began.
    over: bool,
}

#[derive(Default)]
struct Lane {
    candidates: Vec<(Uuid, Arc<Channel>)>,
    taken: Option<Arc<Channel>>,
    /// Why and when the last candidate was dropped.
    dropped: Option<(MigrationError, Instant)>,
}

/// The result of offering a connection that fits a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Offer {
    /// The connection waits for the other channels.
    Waits,
    /// With this connection all channels are connected.
    Completes,
    /// The place is taken, or the migration is over.
    TooLate,
}

/// The result of a main channel candidate's wait.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Taken,
    /// With this candidate all channels are connected.
    Completes,
    /// Another candidate was taken.
    Displaced,
    /// Some channels did not connect in time. Contains their names.
    Alone(String),
    /// The migration is over, or this connection was closed.
    Over,
}

impl Places {
    pub(super) fn new(lanes: usize) -> Self {
        let state =
            PlacesState { lanes: (0..lanes).map(|_| Lane::default()).collect(), ..PlacesState::default() };
        Self { state: Mutex::new(state), changed: Condvar::new(), lanes, grace: GRACE }
    }

    /// Number of multifd channels of the migration.
    pub(super) fn lanes(&self) -> usize {
        self.lanes
    }

    /// Offers a main channel. `others`: whether there are connections without an offered place that may be the
    /// right one.
    pub(super) fn offer_main(&self, channel: &Arc<Channel>, others: &dyn Fn() -> bool) -> Offer {
        let mut state = self.state.lock();
        if state.over || state.complete.is_some() {
            return Offer::TooLate;
        }
        state.mains.push(Arc::clone(channel));
        // Initial packets alone prove nothing: they may be a stranger's, and the source's may still be on their
        // way. Therefore the grace period starts again.
        state.ready_since = None;
        self.check(&mut state, &|| self.lanes > 0 && others())
    }

    pub(super) fn offer_lane(
        &self,
        id: usize,
        uuid: Uuid,
        channel: &Arc<Channel>,
        others: &dyn Fn() -> bool,
    ) -> Offer {
        let mut state = self.state.lock();
        let fits = state.complete.is_none_or(|known| known == uuid);
        let over = state.lanes_over;
        match state.lanes.get_mut(id) {
            Some(lane) if lane.taken.is_none() && fits && !over => {
                lane.candidates.push((uuid, Arc::clone(channel)));
            }
            _ => return Offer::TooLate,
        }
        self.changed.notify_all();
        if state.complete.is_some() { Offer::Waits } else { self.check(&mut state, others) }
    }

    /// Checks whether all channels are connected, and chooses them if so.
    fn check(&self, state: &mut PlacesState, others: &dyn Fn() -> bool) -> Offer {
        let has = |lane: &Lane, uuid: &Uuid| lane.candidates.iter().any(|(stated, _)| stated == uuid);
        let stated: Vec<Uuid> = match state.lanes.first() {
            Some(lane) => lane.candidates.iter().rev().map(|(uuid, _)| *uuid).collect(),
            None => vec![Uuid::default()],
        };
        let Some(uuid) = stated.into_iter().find(|uuid| state.lanes.iter().all(|lane| has(lane, uuid)))
        else {
            state.ready_since = None;
            return Offer::Waits;
        };
        let since = *state.ready_since.get_or_insert_with(Instant::now);
        let has_others = others();
        if since.elapsed() < self.grace && has_others {
            return Offer::Waits;
        }
        let newest_open = state.mains.iter().rposition(|main| !main.peer_has_closed());
        let newest = || state.mains.len().checked_sub(1).filter(|_| !has_others);
        let Some(chosen) = newest_open.or_else(newest) else { return Offer::Waits };
        state.main = Some(state.mains.remove(chosen));
        state.complete = Some(uuid);
        for lane in &mut state.lanes {
            lane.candidates.retain(|(stated, channel)| {
                let fits = *stated == uuid;
                if !fits {
                    channel.shutdown();
                }
                fits
            });
        }
        self.changed.notify_all();
        Offer::Completes
    }

    /// Waits at most `limit` for the result of a main channel candidate.
    pub(super) fn wait_main(
        &self,
        channel: &Arc<Channel>,
        limit: Duration,
        others: &dyn Fn() -> bool,
    ) -> Fate {
        let until = Instant::now() + limit;
        let mut state = self.state.lock();
        loop {
            if state.main.as_ref().is_some_and(|main| Arc::ptr_eq(main, channel)) {
                return Fate::Taken;
            }
            if state.over || channel.is_shut_down() {
                state.mains.retain(|other| !Arc::ptr_eq(other, channel));
                return Fate::Over;
            }
            if state.complete.is_some() {
                state.mains.retain(|other| !Arc::ptr_eq(other, channel));
                return Fate::Displaced;
            }
            let is_newest = state.mains.last().is_some_and(|newest| Arc::ptr_eq(newest, channel));
            // Only the newest candidate checks. The one that is taken may be another.
            if is_newest && state.ready_since.is_some() && self.check(&mut state, others) == Offer::Completes
            {
                state.mains.retain(|other| !Arc::ptr_eq(other, channel));
                return Fate::Completes;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                state.mains.retain(|other| !Arc::ptr_eq(other, channel));
                return Fate::Alone(state.missing());
            }
            self.changed.wait_for(&mut state, left.min(LOOK));
        }
    }

    /// Waits at most `limit` until every place has a candidate. False: not in time, or the migration is over.
    pub(super) fn wait_for_all(&self, limit: Duration) -> bool {
        let mut state = self.state.lock();
        let waits = |state: &mut PlacesState| state.complete.is_none() && !state.lanes_over;
        self.changed.wait_while_for(&mut state, waits, limit);
        state.complete.is_some()
    }

    /// Gives a multifd place to the candidate that sends a packet after all channels are connected. The other
    /// candidates are closed. False: the place is not available.
    pub(super) fn take_lane(&self, id: usize, channel: &Arc<Channel>) -> bool {
        let mut state = self.state.lock();
        let over = state.lanes_over || state.complete.is_none();
        let Some(lane) = state.lanes.get_mut(id) else { return false };
        if over || lane.taken.is_some() {
            return false;
        }
        lane.taken = Some(Arc::clone(channel));
        for (_, other) in lane.candidates.drain(..) {
            if !Arc::ptr_eq(&other, channel) {
                other.shutdown();
            }
        }
        self.changed.notify_all();
        true
    }

    /// Removes a candidate of a multifd place, and records why.
    pub(super) fn drop_lane(&self, id: usize, channel: &Arc<Channel>, why: &MigrationError) {
        let mut state = self.state.lock();
        if let Some(lane) = state.lanes.get_mut(id) {
            lane.candidates.retain(|(_, other)| !Arc::ptr_eq(other, channel));
            lane.dropped = Some((why.clone(), Instant::now()));
            if lane.candidates.is_empty() {
                state.ready_since = None;
            }
        }
        self.changed.notify_all();
    }

    /// Waits until a multifd place is taken, and returns its channel.
    ///
    /// # Errors
    /// The error of the last candidate, if all candidates were dropped and no other has connected for
    /// `patience`.
    pub(super) fn lane(&self, id: usize, patience: Duration) -> Result<Arc<Channel>, Break> {
        let mut state = self.state.lock();
        loop {
            let over = state.lanes_over;
            let Some(lane) = state.lanes.get_mut(id) else { return Err(Break::Interrupted) };
            if let Some(taken) = &lane.taken {
                return Ok(Arc::clone(taken));
            }
            if over {
                return Err(Break::Interrupted);
            }
            let gone = lane.dropped.as_ref().filter(|_| lane.candidates.is_empty());
            if let Some((why, since)) = gone {
                let left = patience.saturating_sub(since.elapsed());
                if left.is_zero() {
                    return Err(why.clone().into());
                }
                self.changed.wait_for(&mut state, left);
            } else {
                self.changed.wait(&mut state);
            }
        }
    }

    /// Replaces the main channel after all channels were closed.
    #[cfg(feature = "postcopy")]
    pub(super) fn put_main(&self, channel: &Arc<Channel>) {
        self.state.lock().main = Some(Arc::clone(channel));
    }

    pub(super) fn main(&self) -> Option<Arc<Channel>> {
        self.state.lock().main.clone()
    }

    pub(super) fn is_complete(&self) -> bool {
        self.state.lock().complete.is_some()
    }

    /// Whether multifd channels are no longer accepted.
    pub(super) fn is_over(&self) -> bool {
        self.state.lock().lanes_over
    }

    /// Whether another connection has the multifd place.
    pub(super) fn is_taken(&self, id: usize) -> bool {
        self.state.lock().lanes.get(id).is_some_and(|lane| lane.taken.is_some())
    }

    /// Whether a connection waits for other channels.
    pub(super) fn has_candidates(&self) -> bool {
        let state = self.state.lock();
        !state.mains.is_empty() || state.lanes.iter().any(|lane| !lane.candidates.is_empty())
    }

    /// Names the channels that have not connected.
    pub(super) fn missing(&self) -> String {
        self.state.lock().missing()
    }

    /// The multifd channels that own a place.
    pub(super) fn taken_lanes(&self) -> Vec<Arc<Channel>> {
        self.state.lock().lanes.iter().filter_map(|lane| lane.taken.clone()).collect()
    }

    /// Closes all multifd channels and their candidates, and accepts none from now on.
    pub(super) fn shut_lanes(&self) {
        let mut state = self.state.lock();
        state.lanes_over = true;
        for lane in &mut state.lanes {
            for channel in lane.candidates.drain(..).map(|(_, channel)| channel).chain(lane.taken.clone()) {
                channel.shutdown();
            }
        }
        self.changed.notify_all();
    }

    /// Closes all channels after a loss. Strangers cannot take their places.
    pub(super) fn suspend(&self) {
        self.shut_lanes();
        let mut state = self.state.lock();
        if let Some(main) = state.main.take() {
            main.shutdown();
        }
        state.lanes.iter_mut().for_each(|lane| lane.taken = None);
    }

    /// Assigns the channels of the session that resumes the migration.
    pub(super) fn resume(&self, main: &Arc<Channel>, lanes: &[Arc<Channel>]) {
        let mut state = self.state.lock();
        if state.over {
            return lanes.iter().chain([main]).for_each(|channel| channel.shutdown());
        }
        state.main = Some(Arc::clone(main));
        for (place, channel) in state.lanes.iter_mut().zip(lanes) {
            (place.taken, place.dropped) = (Some(Arc::clone(channel)), None);
        }
        state.lanes_over = false;
        drop(state);
        self.changed.notify_all();
    }

    /// Closes all channels and candidates, and accepts none from now on.
    pub(super) fn end(&self) {
        self.shut_lanes();
        let mut state = self.state.lock();
        state.over = true;
        let state = &mut *state;
        for channel in state.mains.drain(..).chain(state.main.take()) {
            channel.shutdown();
        }
        for lane in &mut state.lanes {
            lane.taken = None;
        }
        self.changed.notify_all();
    }
}

impl PlacesState {
    fn missing(&self) -> String {
        let main = (self.mains.is_empty() && self.main.is_none()).then(|| "the main channel".to_owned());
        let lanes = self.lanes.iter().enumerate();
        let lanes = lanes.filter(|(_, lane)| lane.candidates.is_empty() && lane.taken.is_none());
        let names = main.into_iter().chain(lanes.map(|(id, _)| format!("multifd channel {id}")));
        names.collect::<Vec<_>>().join(", ")
    }
}

#[cfg(test)]
mod tests;

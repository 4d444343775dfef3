//! Registers connections that have not identified themselves yet, and reads their first bytes with a deadline.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sterna_transport::{Channel, TransportError};

use crate::error::{BadConnection, Ending, MigrationError, Misbehaviour};

/// Most unidentified connections, in addition to a migration's channels. Beyond this number, a new connection
/// replaces an old one.
const GREETINGS: usize = 300;
/// How long a connection may take for all its first bytes, after a TLS handshake.
const GREETING: Duration = Duration::from_secs(10);
/// Interval at which a connection is checked after that time. It stays while a migration's channels are
/// connecting.
const LOOK: Duration = Duration::from_millis(200);

/// The connections whose greeting is being read, oldest first.
pub(super) struct Greetings {
    list: Mutex<Vec<Greeted>>,
    room: usize,
    /// When the most recent multifd channel connected.
    lane_came: Mutex<Option<Instant>>,
    /// How long after that time further channels are expected.
    patience: Duration,
}

struct Greeted {
    channel: Arc<Channel>,
    /// The connection was offered a place among the migration's channels.
    is_placed: bool,
    /// The TLS handshake has not ended yet.
    is_shaking_hands: bool,
}

impl Greetings {
    /// Room for unidentified connections in addition to those of a migration with `channels` channels.
    pub(super) fn beside(channels: usize) -> Self {
        Self {
            list: Mutex::default(),
            room: GREETINGS + channels,
            lane_came: Mutex::default(),
            patience: GREETING,
        }
    }

    /// Records that a connection's TLS handshake begins or has ended.
    pub(super) fn set_shaking_hands(&self, channel: &Arc<Channel>, is_so: bool) {
        let mut list = self.list.lock();
        if let Some(greeted) = list.iter_mut().find(|greeted| Arc::ptr_eq(&greeted.channel, channel)) {
            greeted.is_shaking_hands = is_so;
        }
    }

    /// Records that a multifd channel was offered a place.
    pub(super) fn lane_came(&self) {
        *self.lane_came.lock() = Some(Instant::now());
    }

    /// Whether a migration's channels are connecting. A source's main channel is silent until all others are
    /// connected.
    fn are_arriving(&self) -> bool {
        self.lane_came.lock().is_some_and(|at| at.elapsed() < self.patience)
            || self.list.lock().iter().any(|greeted| greeted.is_shaking_hands)
    }

    /// Registers a connection. If there is no room, returns the connection to close: the oldest without an
    /// offered place, or the oldest of all.
    ///
    /// The first bytes prove nothing. A source's main channel is silent until all other channels are connected,
    /// while a stranger can send bytes. Therefore every connection stays while there is room for it.
    #[must_use]
    pub(super) fn enter(&self, channel: &Arc<Channel>) -> Option<Arc<Channel>> {
        let mut list = self.list.lock();
        let gone = (list.len() >= self.room).then(|| {
            let unplaced = list.iter().position(|greeted| !greeted.is_placed);
            list.remove(unplaced.unwrap_or(0)).channel
        });
        list.push(Greeted { channel: Arc::clone(channel), is_placed: false, is_shaking_hands: false });
        gone
    }

    /// Marks a connection that was offered a place. Call it after the offer: otherwise the connection would
    /// count neither here nor as a candidate in between.
    pub(super) fn place(&self, channel: &Arc<Channel>) {
        let mut list = self.list.lock();
        if let Some(greeted) = list.iter_mut().find(|greeted| Arc::ptr_eq(&greeted.channel, channel)) {
            greeted.is_placed = true;
        }
    }

    /// Whether there are connections without an offered place, apart from `channel`.
    pub(super) fn has_others_than(&self, channel: &Arc<Channel>) -> bool {
        let list = self.list.lock();
        list.iter().any(|greeted| !greeted.is_placed && !Arc::ptr_eq(&greeted.channel, channel))
    }

    pub(super) fn leave(&self, channel: &Arc<Channel>) {
        self.list.lock().retain(|greeted| !Arc::ptr_eq(&greeted.channel, channel));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.list.lock().is_empty()
    }

    /// Closes all registered connections.
    pub(super) fn end(&self) {
        for greeted in self.list.lock().iter() {
            greeted.channel.shutdown();
        }
    }
}

/// Reads first bytes with one deadline for all of them, so that a slow sender cannot keep its registration.
pub(super) struct Greeting<'a> {
    pub channel: &'a Arc<Channel>,
    until: Instant,
    /// A later deadline, which applies while the migration's channels are connecting.
    longer: Option<(&'a Greetings, Instant)>,
}

impl<'a> Greeting<'a> {
    pub(super) fn new(channel: &'a Arc<Channel>, setup: Duration) -> Self {
        Self { channel, until: Instant::now() + Self::limit_of(setup), longer: None }
    }

    /// As [`Greeting::new`], for a connection that may be a source's main channel. It may take all of `setup`
    /// while the source connects its multifd channels.
    pub(super) fn among(channel: &'a Arc<Channel>, setup: Duration, others: &'a Greetings) -> Self {
        Self { longer: Some((others, Instant::now() + setup)), ..Self::new(channel, setup) }
    }

    /// The limit of a greeting if the setup limit is `setup`.
    pub(super) fn limit_of(setup: Duration) -> Duration {
        GREETING.min(setup)
    }

    /// Gives the next call on the channel the remaining time as its stall limit.
    pub(super) fn limit(&self) -> Result<(), MigrationError> {
        let now = Instant::now();
        let mut left = self.until.saturating_duration_since(now);
        if let Some((others, most)) = self.longer
            && left.is_zero()
            && others.are_arriving()
        {
            left = most.saturating_duration_since(now).min(LOOK);
        }
        if left.is_zero() {
            let peer = self.channel.peer().to_owned();
            return Err(Misbehaviour::Connection { peer, why: BadConnection::Silent }.into());
        }
        self.channel.set_stall_limit(Some(left));
        Ok(())
    }

    /// Returns the first `count` bytes without consuming them. `known`: the number of bytes that an earlier
    /// call has returned.
    pub(super) fn peek(&self, known: usize, count: usize) -> Result<Vec<u8>, MigrationError> {
        let mut bytes = Vec::new();
        for count in (known + 1).min(count)..=count {
            bytes = self.waiting(|channel| channel.peek(count))?;
        }
        Ok(bytes)
    }

    pub(super) fn read_exact(&self, mut to: &mut [u8]) -> Result<(), MigrationError> {
        while !to.is_empty() {
            let got = self.waiting(|channel| channel.read_some(to))?;
            if got == 0 {
                return Err(Ending::BeforeGreeting { peer: self.channel.peer().to_owned() }.into());
            }
            to = &mut to[got..];
        }
        Ok(())
    }

    /// Repeats a call that timed out, until the deadline has passed.
    fn waiting<T>(
        &self,
        mut act: impl FnMut(&Channel) -> Result<T, TransportError>,
    ) -> Result<T, MigrationError> {
        loop {
            self.limit()?;
            match act(self.channel) {
                Err(TransportError::Stalled { .. }) => {}
                other => return Ok(other?),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A limit that no case reaches, however busy the machine is.
    const FAR: Duration = Duration::from_secs(60);

    /// How long a silent connection is kept, with a limit of 100 ms, or `setup` while channels connect.
    fn kept(greetings: &Greetings, setup: Duration) -> Duration {
        let (ours, _theirs) = Channel::pair().unwrap();
        let (ours, began) = (Arc::new(ours), Instant::now());
        let mut greeting = Greeting::among(&ours, setup, greetings);
        greeting.until = began + Duration::from_millis(100);
        let error = greeting.peek(0, 4).unwrap_err();
        let MigrationError::PeerMisbehaved(Misbehaviour::Connection { why, .. }) = error else {
            panic!("{error}")
        };
        assert!(matches!(why, BadConnection::Silent), "{why}");
        began.elapsed()
    }

    #[test]
    fn silent_connection_is_kept_as_long_as_channels_arrive_and_setting_up_may_last() {
        // In each case the other limits are far away, so the time shows which one has ended the wait.
        let greetings = Greetings { patience: FAR, ..Greetings::beside(2) };
        assert!(kept(&greetings, FAR) < FAR, "none arrives");

        let patience = Duration::from_millis(250);
        let greetings = Greetings { patience, ..Greetings::beside(2) };
        let began = Instant::now();
        greetings.lane_came();
        assert!(kept(&greetings, FAR) < FAR && began.elapsed() >= patience, "one has arrived: {began:?}");

        let (ours, _theirs) = Channel::pair().unwrap();
        let handshaking = Arc::new(ours);
        assert!(greetings.enter(&handshaking).is_none());
        greetings.set_shaking_hands(&handshaking, true);
        let setup = Duration::from_millis(600);
        let long = kept(&greetings, setup);
        assert!(long >= setup, "one has not ended its handshake: {long:?}");
        greetings.set_shaking_hands(&handshaking, false);
        assert!(kept(&greetings, FAR) < FAR, "it has");
    }

    #[test]
    fn oldest_without_a_place_goes_for_one_that_is_new() {
        let greetings = Greetings { room: 3, ..Greetings::beside(0) };
        let peers: Vec<_> = (0..6).map(|_| Channel::pair().unwrap()).collect();
        let (ours, _theirs): (Vec<_>, Vec<_>) = peers.into_iter().map(|(a, b)| (Arc::new(a), b)).unzip();
        let enter = |at: usize| {
            let gone = greetings.enter(&ours[at]);
            gone.map(|gone| ours.iter().position(|other| Arc::ptr_eq(other, &gone)).unwrap())
        };
        assert_eq!((enter(0), enter(1), enter(2)), (None, None, None));
        // A lane that connected first, and the main channel, which is silent so far.
        greetings.place(&ours[0]);
        assert_eq!(enter(3), Some(1));
        greetings.place(&ours[3]);
        assert_eq!(enter(4), Some(2));
        assert!(greetings.has_others_than(&ours[0]));
        assert!(!greetings.has_others_than(&ours[4]), "the one that asks, before it is placed");
        greetings.place(&ours[4]);
        assert!(!greetings.has_others_than(&ours[0]));
        assert_eq!(enter(5), Some(0), "all have a place");
    }
}

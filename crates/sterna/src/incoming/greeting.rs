//! Connections that have not said yet what they are for, and reading what they say.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sterna_transport::Channel;

use crate::error::MigrationError;

/// Connections that may be saying what they are for, beside those of a migration; for each that is new an old one goes.
const GREETINGS: usize = 300;
/// How long a connection has for all of its first bytes together, once a TLS handshake has ended.
const GREETING: Duration = Duration::from_secs(10);

/// The connections that are being greeted, oldest first.
pub(super) struct Greetings {
    list: Mutex<Vec<Greeted>>,
    room: usize,
}

struct Greeted {
    channel: Arc<Channel>,
    /// It was offered a place among the migration's channels.
    is_placed: bool,
}

impl Greetings {
    /// Beside those of a migration with so many channels.
    pub(super) fn beside(channels: usize) -> Self {
        Self { list: Mutex::default(), room: GREETINGS + channels }
    }

    /// Takes one in. Gives the one that has to go for it: the oldest of those that were not offered a place, or the
    /// oldest of all.
    ///
    /// A few bytes prove nothing: a source's main channel is silent until all the others are connected, and a stranger
    /// need not be. So each that comes may stay for as many as there is room for.
    #[must_use]
    pub(super) fn enter(&self, channel: &Arc<Channel>) -> Option<Arc<Channel>> {
        let mut list = self.list.lock();
        let gone = (list.len() >= self.room).then(|| {
            let unplaced = list.iter().position(|greeted| !greeted.is_placed);
            list.remove(unplaced.unwrap_or(0)).channel
        });
        list.push(Greeted { channel: Arc::clone(channel), is_placed: false });
        gone
    }

    /// One was offered a place. Not before it was: in between it would count neither here nor as a candidate.
    pub(super) fn place(&self, channel: &Arc<Channel>) {
        let mut list = self.list.lock();
        if let Some(greeted) = list.iter_mut().find(|greeted| Arc::ptr_eq(&greeted.channel, channel)) {
            greeted.is_placed = true;
        }
    }

    /// Whether there are others than this one and those that were offered a place.
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

    /// Ends them all.
    pub(super) fn end(&self) {
        for greeted in self.list.lock().iter() {
            greeted.channel.shutdown();
        }
    }
}

/// First bytes with one deadline for all of them, so that nobody holds a place byte by byte.
pub(super) struct Greeting<'a> {
    pub channel: &'a Arc<Channel>,
    until: Instant,
}

impl<'a> Greeting<'a> {
    pub(super) fn new(channel: &'a Arc<Channel>, setup: Duration) -> Self {
        Self { channel, until: Instant::now() + Self::limit_of(setup) }
    }

    /// How long one may last where setting up may last `setup`.
    pub(super) fn limit_of(setup: Duration) -> Duration {
        GREETING.min(setup)
    }

    /// The next call on the channel may take what is left.
    pub(super) fn limit(&self) -> Result<(), MigrationError> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let what = format!("{}: did not identify itself in time", self.channel.peer());
            return Err(MigrationError::PeerMisbehaved { what });
        }
        self.channel.set_stall_limit(Some(left));
        Ok(())
    }

    /// The first `count` bytes, which later reads give again. `known`: so many were asked for before.
    pub(super) fn peek(&self, known: usize, count: usize) -> Result<Vec<u8>, MigrationError> {
        let mut bytes = Vec::new();
        for count in (known + 1).min(count)..=count {
            self.limit()?;
            bytes = self.channel.peek(count)?;
        }
        Ok(bytes)
    }

    pub(super) fn read_exact(&self, mut to: &mut [u8]) -> Result<(), MigrationError> {
        while !to.is_empty() {
            self.limit()?;
            let got = self.channel.read_some(to)?;
            if got == 0 {
                let what = format!("{}: closed before it identified itself", self.channel.peer());
                return Err(MigrationError::Transport(what, None));
            }
            to = &mut to[got..];
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oldest_without_a_place_goes_for_one_that_is_new() {
        let greetings = Greetings { list: Mutex::default(), room: 3 };
        let peers: Vec<_> = (0..6).map(|_| Channel::pair().unwrap()).collect();
        let (ours, _theirs): (Vec<_>, Vec<_>) = peers.into_iter().map(|(a, b)| (Arc::new(a), b)).unzip();
        let enter = |at: usize| {
            let gone = greetings.enter(&ours[at]);
            gone.map(|gone| ours.iter().position(|other| Arc::ptr_eq(other, &gone)).unwrap())
        };
        assert_eq!((enter(0), enter(1), enter(2)), (None, None, None));
        // A lane that came first, and the main channel, which says nothing yet.
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

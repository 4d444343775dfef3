//! The carriers of a session: which exist, which are ready, and which are too silent.

use std::collections::VecDeque;
use std::time::Duration;

use super::settings::{GIVE_UP_AFTER, PROBE_AFTER};

/// A connection between the relays. No two carriers of a session have the same id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CarrierId(u64);

/// The state of one carrier.
#[derive(Debug)]
pub(super) struct Carrier {
    pub(super) id: CarrierId,
    pub(super) lane: u8,
    /// Flows whose state has to be acknowledged before SYNC.
    pub(super) greetings: VecDeque<u32>,
    pub(super) is_sync_sent: bool,
    pub(super) is_sync_received: bool,
    pub(super) is_over_sent: bool,
    /// Values of PINGs that have to be answered.
    pub(super) pongs: VecDeque<u64>,
    /// A PING has to be sent, or was sent at this time.
    pub(super) ping: Ping,
    pub(super) read_at: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ping {
    None,
    Due(Duration),
    Sent(Duration, u64),
}

/// PINGs of the peer that wait for their answer; more are dropped, because each answer proves the same.
const MOST_PONGS: usize = 4;

#[derive(Debug, Default)]
pub(super) struct Carriers {
    all: Vec<Carrier>,
    next: u64,
}

impl Carriers {
    /// Adds a carrier. Also returns the one of the same lane, which it replaces.
    pub(super) fn add(
        &mut self,
        lane: u8,
        flows: VecDeque<u32>,
        now: Duration,
    ) -> (CarrierId, Option<CarrierId>) {
        let older = self.all.iter().find(|carrier| carrier.lane == lane).map(|carrier| carrier.id);
        self.next += 1;
        let id = CarrierId(self.next);
        self.all.push(Carrier {
            id,
            lane,
            greetings: flows,
            is_sync_sent: false,
            is_sync_received: false,
            is_over_sent: false,
            pongs: VecDeque::new(),
            ping: Ping::None,
            read_at: now,
        });
        self.all.sort_by_key(|carrier| carrier.lane);
        (id, older)
    }

    pub(super) fn remove(&mut self, id: CarrierId) -> bool {
        let before = self.all.len();
        self.all.retain(|carrier| carrier.id != id);
        self.all.len() < before
    }

    pub(super) fn get(&mut self, id: CarrierId) -> Option<&mut Carrier> {
        self.all.iter_mut().find(|carrier| carrier.id == id)
    }

    pub(super) fn find(&self, id: CarrierId) -> Option<&Carrier> {
        self.all.iter().find(|carrier| carrier.id == id)
    }

    pub(super) fn lane(&self, id: CarrierId) -> u8 {
        self.all.iter().find(|carrier| carrier.id == id).map_or(u8::MAX, |carrier| carrier.lane)
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    /// The carriers on which both sides have said how far they are, the lowest lane first.
    pub(super) fn ready(&self) -> impl DoubleEndedIterator<Item = CarrierId> {
        self.all.iter().filter(|carrier| carrier.is_ready()).map(|carrier| carrier.id)
    }

    /// Whether a probe has to be sent, and the carriers to give up.
    pub(super) fn tick(&mut self, now: Duration) -> (bool, Vec<CarrierId>) {
        let (mut send, mut close) = (false, Vec::new());
        for carrier in &mut self.all {
            match carrier.ping {
                Ping::None if now >= carrier.read_at + PROBE_AFTER => {
                    carrier.ping = Ping::Due(now);
                    send = true;
                }
                Ping::Due(since) | Ping::Sent(since, _)
                    if now >= since.max(carrier.read_at) + GIVE_UP_AFTER =>
                {
                    close.push(carrier.id);
                }
                _ => {}
            }
        }
        (send, close)
    }

    pub(super) fn next_tick(&self) -> Option<Duration> {
        let due = |carrier: &Carrier| match carrier.ping {
            Ping::None => carrier.read_at + PROBE_AFTER,
            Ping::Due(since) | Ping::Sent(since, _) => since.max(carrier.read_at) + GIVE_UP_AFTER,
        };
        self.all.iter().map(due).min()
    }
}

impl Carrier {
    pub(super) fn is_ready(&self) -> bool {
        self.is_sync_sent && self.is_sync_received
    }

    pub(super) fn asked(&mut self, value: u64) {
        if self.pongs.len() < MOST_PONGS {
            self.pongs.push_back(value);
        }
    }
}

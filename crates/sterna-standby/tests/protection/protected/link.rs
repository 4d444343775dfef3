//! The network between primary and standby. A test can cut it, stop it or slow it down while the two run.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sterna::Address;

use crate::support::proxy::{Line, Proxy, Verdict, Way as Direction};

/// Number of bytes that identify a place in the guest's state.
pub const CHUNK: usize = 16;

/// Settings of the network.
#[derive(Debug)]
pub struct Knobs {
    /// After this number of pieces, every connection is closed.
    pub cut: AtomicI64,
    /// Whether the standby's bytes on the contact's connection are delayed after all others.
    pub words_are_late: AtomicBool,
    /// Whether the guest's state is withheld from the standby.
    pub holds_back: AtomicBool,
    /// Bytes per second at which the guest's state is forwarded to the standby; 0 for no limit.
    pub bytes_per_second: AtomicU64,
    /// Whether the standby's answers about the guest's state are withheld.
    pub holds_answers: AtomicBool,
    /// The first of these bytes that passes to the standby is changed. Their number is a multiple of [`CHUNK`].
    pub changes: Mutex<Vec<u8>>,
}

impl Knobs {
    fn verdict(&self, line: Line, direction: Direction, piece: &mut [u8], next: &mut Instant) -> Verdict {
        let is_on = |knob: &AtomicBool| knob.load(Ordering::SeqCst);
        let (is_state, is_forward) = (line != Line::Other, direction == Direction::Forward);
        if is_state && is_on(if is_forward { &self.holds_back } else { &self.holds_answers }) {
            return Verdict::Later;
        }
        let rate = self.bytes_per_second.load(Ordering::SeqCst);
        if is_state && is_forward && rate > 0 {
            let now = Instant::now();
            if now < *next {
                return Verdict::Later;
            }
            *next = now + Duration::from_secs(1) * piece.len() as u32 / rate as u32;
        }
        if is_state && is_forward {
            self.change(piece);
        }
        if (is_state, is_forward) == (false, false) && is_on(&self.words_are_late) {
            std::thread::sleep(Duration::from_millis(300));
        }
        match self.cut.fetch_sub(1, Ordering::SeqCst) {
            ..=0 => Verdict::Cut,
            _ => Verdict::Pass,
        }
    }

    fn change(&self, piece: &mut [u8]) {
        let mut wanted = self.changes.lock();
        // Wherever the stream is cut into pieces, one piece has a chunk of these bytes.
        let is_there = |chunk| piece.windows(CHUNK).position(|window| window == chunk);
        if let Some(at) = wanted.chunks(CHUNK).find_map(is_there) {
            piece[at] ^= 1;
            wanted.clear();
        }
    }
}

pub struct Link {
    proxy: Proxy,
    pub knobs: Arc<Knobs>,
}

impl Link {
    pub fn new(standby: &Address) -> Self {
        let knobs = Arc::new(Knobs {
            cut: AtomicI64::new(i64::MAX),
            words_are_late: AtomicBool::new(false),
            holds_back: AtomicBool::new(false),
            bytes_per_second: AtomicU64::new(0),
            holds_answers: AtomicBool::new(false),
            changes: Mutex::default(),
        });
        let (turned, mut next) = (Arc::clone(&knobs), Instant::now());
        let filter =
            move |line, direction, _, piece: &mut Vec<u8>| turned.verdict(line, direction, piece, &mut next);
        Self { proxy: Proxy::new(standby, Box::new(filter)), knobs }
    }

    /// Address of the standby, through the network.
    pub fn address(&self) -> Address {
        self.proxy.address()
    }

    pub fn cut(&self) {
        self.proxy.cut();
    }

    pub fn hold_back(&self, is_held_back: bool) {
        self.knobs.holds_back.store(is_held_back, Ordering::SeqCst);
    }
}

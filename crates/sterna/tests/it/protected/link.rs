//! The network between primary and standby, which a test cuts, holds or slows down while they go on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sterna::Address;

use crate::support::proxy::{Line, Proxy, Verdict, Way as Direction};

/// Bytes by which a place in the guest's state is known.
pub const CHUNK: usize = 16;

/// What becomes of what passes.
#[derive(Debug)]
pub struct Knobs {
    /// After so many pieces every connection ends.
    pub cut: AtomicI64,
    /// What the standby says by the contact's connection comes later than all else.
    pub words_are_late: AtomicBool,
    /// Nothing of the guest's state goes on to the standby.
    pub holds_back: AtomicBool,
    /// The guest's state goes to the standby with so many bytes a second; 0: as fast as it can.
    pub bytes_per_second: AtomicU64,
    /// The standby's answers about the guest's state do not come back.
    pub holds_answers: AtomicBool,
    /// The first of these bytes of the guest's state that passes to the standby is changed. They are a multiple of [`CHUNK`].
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
        // However the bytes are cut into pieces, one has some of them.
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

    /// Where the standby is to be found.
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

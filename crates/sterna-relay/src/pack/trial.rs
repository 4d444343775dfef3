//! Whether the bytes of a flow are worth compressing: the first half of `auto`.

/// Bytes of a frame that are tried while the flow is sent plain.
const SAMPLE: usize = 16 << 10;
/// Plain bytes between two tries: at first, and at most.
const FIRST_PAUSE: u64 = 4 << 20;
const LONGEST_PAUSE: u64 = 256 << 20;
/// Plain bytes over which a ratio is judged.
const JUDGED: u64 = 512 << 10;

/// What one flow gets.
#[derive(Debug)]
pub struct Trial {
    state: State,
    pause: u64,
}

#[derive(Debug)]
enum State {
    /// It is compressed: plain bytes and sent bytes since the last judgement.
    Packs { plain: u64, sent: u64 },
    /// It is sent plain, for so many bytes more.
    Pauses(u64),
}

impl Default for Trial {
    fn default() -> Self {
        Self { state: State::Pauses(0), pause: FIRST_PAUSE }
    }
}

impl Trial {
    /// Whether this frame is packed. `try_sample` compresses a sample and returns its new length.
    pub fn packs(&mut self, bytes: &[u8], try_sample: impl FnOnce(&[u8]) -> usize) -> bool {
        let State::Pauses(left) = &mut self.state else { return true };
        *left = left.saturating_sub(bytes.len() as u64);
        if *left > 0 {
            return false;
        }
        let sample = &bytes[..bytes.len().min(SAMPLE)];
        if is_worth(sample.len() as u64, try_sample(sample) as u64) {
            self.state = State::Packs { plain: 0, sent: 0 };
            return true;
        }
        // Tiny frames say little.
        if sample.len() >= 1024 {
            self.give_up();
        }
        false
    }

    /// A frame was packed.
    pub fn packed(&mut self, plain: usize, sent: usize) {
        let State::Packs { plain: all_plain, sent: all_sent } = &mut self.state else { return };
        (*all_plain, *all_sent) = (*all_plain + plain as u64, *all_sent + sent as u64);
        if *all_plain < JUDGED {
            return;
        }
        if is_worth(*all_plain, *all_sent) {
            (*all_plain, *all_sent) = (0, 0);
            self.pause = FIRST_PAUSE;
        } else {
            self.give_up();
        }
    }

    fn give_up(&mut self) {
        self.state = State::Pauses(self.pause);
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
    }
}

/// At least 6 % fewer bytes.
fn is_worth(plain: u64, sent: u64) -> bool {
    sent * 100 <= plain * 94
}

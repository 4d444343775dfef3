//! Finds where a stream may end, in the devices after RAM, without keeping them.
//!
//! Device bodies have no length (`specs/stream.md §1.6`), and a guest controls some of their bytes. The scan is
//! therefore one-sided: it reports an end that is none rather than miss one. A byte `00` may be the end if it follows
//! a footer or a PING. The bytes that follow refute it, unless they are a description.
//!
//! A false end costs this: if the relays lose each other just then, the source is kept waiting although its guest
//! could run. A missed end could let two guests run.

/// Length of a PING command: type, number, length, value.
const PING_BYTES: usize = 9;
const PING: [u8; 5] = [0x08, 0, 2, 0, 4];
const DESCRIPTION: u8 = 0x06;

/// The scan. Its first byte begins a device's section, or is the end.
#[derive(Debug, Clone)]
pub(super) struct EndScan {
    /// The last bytes, the newest last.
    last: [u8; PING_BYTES],
    /// Offset of the next byte in the stream.
    at: u64,
    first: u64,
    state: State,
    /// An end that cannot be refuted any more.
    certain: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Devices,
    /// The byte at this offset may be the end.
    Ended(u64),
    /// Bytes of the description's length that were read, and the value.
    Length(u64, u32, u32),
    /// Bytes of the description that are missing.
    Description(u64, u32),
    /// The description is complete.
    Complete(u64),
}

impl EndScan {
    pub(super) fn new(at: u64) -> Self {
        Self { last: [0; PING_BYTES], at, first: at, state: State::Devices, certain: None }
    }

    pub(super) fn feed(&mut self, mut bytes: &[u8]) {
        while let Some((&byte, rest)) = bytes.split_first() {
            if let State::Description(end, left) = self.state {
                let here = bytes.len().min(left as usize);
                self.at += here as u64;
                self.state = match left - here as u32 {
                    0 => State::Complete(end),
                    left => State::Description(end, left),
                };
                bytes = &bytes[here..];
                continue;
            }
            self.step(byte);
            bytes = rest;
        }
    }

    /// The offset of the byte that may be the end.
    pub(super) fn end(&self) -> Option<u64> {
        self.certain.or(match self.state {
            State::Devices => None,
            State::Ended(end)
            | State::Length(end, ..)
            | State::Description(end, _)
            | State::Complete(end) => Some(end),
        })
    }

    fn step(&mut self, byte: u8) {
        let may_end = byte == 0 && (self.at == self.first || self.follows_footer() || self.follows_ping());
        self.state = match self.state {
            State::Ended(end) if byte == DESCRIPTION => State::Length(end, 0, 0),
            State::Length(end, 3, value) => match value << 8 | u32::from(byte) {
                0 => State::Complete(end),
                length => State::Description(end, length),
            },
            State::Length(end, count, value) => State::Length(end, count + 1, value << 8 | u32::from(byte)),
            State::Complete(end) => {
                // The end was none, and a real one may have been among the bytes that passed for a description.
                self.certain = self.certain.or(Some(end));
                State::Devices
            }
            _ if may_end => State::Ended(self.at),
            _ => State::Devices,
        };
        self.last.rotate_left(1);
        self.last[PING_BYTES - 1] = byte;
        self.at += 1;
    }

    /// Whether the last bytes are a footer. Sections have small ids.
    fn follows_footer(&self) -> bool {
        let [.., mark, high, low, _, _] = self.last;
        self.at >= self.first + 5 && (mark, high, low) == (0x7e, 0, 0)
    }

    fn follows_ping(&self) -> bool {
        self.at >= self.first + PING_BYTES as u64 && self.last.starts_with(&PING)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn section(id: u8, body: &[u8]) -> Vec<u8> {
        [&[4, 0, 0, 0, id, 1, b'x', 0, 0, 0, 0, 0, 0, 0, 1][..], body, &[0x7e, 0, 0, 0, id]].concat()
    }

    /// The end that is reported after each byte.
    fn ends(bytes: &[u8]) -> Vec<Option<u64>> {
        let mut scan = EndScan::new(100);
        let step = |byte: &u8| {
            scan.feed(&[*byte]);
            scan.end()
        };
        let ends: Vec<_> = bytes.iter().map(step).collect();
        let mut whole = EndScan::new(100);
        whole.feed(bytes);
        assert_eq!(whole.end(), *ends.last().unwrap(), "pieces do not matter");
        ends
    }

    #[test]
    fn end_with_and_without_devices_and_description_is_found_at_its_byte() {
        let devices = [section(1, b"abc"), section(9, &[0; 40])].concat();
        for description in [&[][..], &[6, 0, 0, 0, 2, b'{', b'}'], &[6, 0, 0, 0, 0]] {
            for devices in [&devices[..], &[]] {
                let ends = ends(&[devices, &[0], description].concat());
                let at = 100 + devices.len() as u64;
                assert!(ends[..devices.len()].iter().all(Option::is_none), "{ends:?}");
                assert!(ends[devices.len()..].iter().all(|end| *end == Some(at)), "{ends:?}");
            }
        }
    }

    #[test]
    fn end_after_the_question_of_a_sterna_is_found() {
        let bytes = [&section(1, b"a")[..], &[8, 0, 2, 0, 4, 0x53, 0x54, 0x4e, 3], &[0]].concat();
        assert_eq!(ends(&bytes).last().unwrap(), &Some(99 + bytes.len() as u64));
    }

    #[test]
    fn false_end_is_refuted_by_the_next_byte() {
        let body = [0x7e, 0, 0, 0, 5, 0, 1];
        let bytes = section(1, &body);
        let ends = ends(&bytes);
        assert_eq!(ends[15 + 5], Some(100 + 15 + 5));
        assert_eq!(ends[15 + 6], None);
    }

    #[test]
    fn false_description_is_not_forgotten() {
        let body = [0x7e, 0, 0, 0, 5, 0, 6, 0, 0, 0, 1, b'{', 9];
        let ends = ends(&section(1, &body));
        assert_eq!(ends.last().unwrap(), &Some(100 + 15 + 5));
    }
}

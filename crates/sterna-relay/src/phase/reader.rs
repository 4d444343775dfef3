//! Reads a QEMU's main channel while it passes, to know how far the migration is.
//!
//! No page is copied: the decoder says where a page's bytes are, and the reader skips them. The bytes of devices
//! after RAM are scanned and not kept ([`EndScan`]).

use std::fmt;

use sterna_wire::limits::MAIN_STEP_BYTES;
use sterna_wire::main::{BodyKind, Command, Expectations, MainDecoder, MainItem, SectionKind, Step};
use sterna_wire::ram;
use sterna_wire::{PAGE_SIZE, WireError};

use super::end_scan::EndScan;
use super::progress::RamProgress;

/// Most bytes before RAM that are kept until its START shows whether there are multifd channels.
const SETUP_BYTES: usize = 4 << 20;
/// Most bytes of sections before RAM that are kept, one at a time.
const EARLY_BYTES: u64 = 64 << 20;
/// The PING that a QEMU of 10.2 and later puts into a package; it resumes its guest until the answer.
const PACKAGE_PING: [u8; 9] = [0x08, 0, 2, 0, 4, 0, 0, 0, 0x42];

/// How far a migration is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Phase {
    /// Before RAM.
    Setup,
    /// RAM, while the guest runs at the source. Rounds count from 1.
    Ram {
        /// The round.
        round: u32,
    },
    /// The guest is stopped; the last pages.
    Switchover,
    /// The devices.
    Devices,
    /// The end of the stream.
    Ended,
    /// Postcopy: the guest runs at the destination, and pages follow.
    Postcopy,
    /// The stream cannot be read any more, and may have ended.
    Unread {
        /// The reason.
        why: String,
    },
}

impl Phase {
    /// The phase in one word.
    pub fn word(&self) -> &'static str {
        match self {
            Phase::Setup => "setup",
            Phase::Ram { .. } => "ram",
            Phase::Switchover => "switchover",
            Phase::Devices => "devices",
            Phase::Ended => "ended",
            Phase::Postcopy => "postcopy",
            Phase::Unread { .. } => "unread",
        }
    }

    /// Whether the guest is stopped in this phase, because it changes hands.
    pub fn is_switchover(&self) -> bool {
        matches!(self, Phase::Switchover | Phase::Devices | Phase::Ended)
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Phase::Setup => f.write_str("setup"),
            Phase::Ram { round } => write!(f, "RAM, round {round}"),
            Phase::Switchover => f.write_str("switchover: the guest is stopped"),
            Phase::Devices => f.write_str("devices"),
            Phase::Ended => f.write_str("end of the stream"),
            Phase::Postcopy => f.write_str("postcopy: the guest runs at the destination"),
            Phase::Unread { why } => write!(f, "the stream is relayed without phases: {why}"),
        }
    }
}

/// The stream reached RAM and has no return path: its source would not learn whether the destination has the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the source's VMM asks for no confirmation (its stream has no OPEN_RETURN_PATH): set the capability return-path \
     at the source, or let the relay accept it (--unconfirmed)"
)]
pub struct Unconfirmed;

/// Reads one main channel, from its first byte on.
pub struct StreamReader {
    decoder: MainDecoder,
    mode: Mode,
    phase: Phase,
    /// Offset of the next byte that is fed.
    at: u64,
    /// Bytes that the decoder has not taken yet, and how many it needs.
    pending: Vec<u8>,
    wanted: usize,
    has_return_path: bool,
    requires_return_path: bool,
    /// Place of the last page: block and offset.
    place: (usize, u64),
    /// The last bytes of a package, and whether it has [`PACKAGE_PING`].
    window: [u8; PACKAGE_PING.len()],
    has_package_ping: bool,
    /// Offset of the last byte of the package.
    package_end: Option<u64>,
    progress: RamProgress,
    /// The bytes so far, until RAM's START is over.
    setup: Option<Vec<u8>>,
    /// Offsets at which pages begin, since the last call of [`take_pages`](Self::take_pages).
    starts: Option<Vec<u64>>,
}

enum Mode {
    Elements,
    /// The decoder waits for the rest of a page.
    Page(usize),
    Package(u64),
    Tail(EndScan),
    /// Nothing more is read.
    Deaf,
}

impl StreamReader {
    /// A reader of a stream that begins with the header.
    pub fn new(requires_return_path: bool) -> Self {
        Self {
            decoder: decoder(true),
            mode: Mode::Elements,
            phase: Phase::Setup,
            at: 0,
            pending: Vec::new(),
            wanted: 0,
            has_return_path: false,
            requires_return_path,
            place: (0, 0),
            window: [0; PACKAGE_PING.len()],
            has_package_ping: false,
            package_end: None,
            progress: RamProgress::default(),
            setup: Some(Vec::new()),
            starts: None,
        }
    }

    /// A reader of a recovered main channel, which has no header: the guest runs at the destination.
    pub fn recovered() -> Self {
        let mut reader = Self::new(false);
        (reader.mode, reader.phase) = (Mode::Deaf, Phase::Postcopy);
        reader
    }

    /// A reader of a stream that cannot be read.
    pub fn unread(why: &str) -> Self {
        let mut reader = Self::new(false);
        (reader.mode, reader.phase) = (Mode::Deaf, Phase::Unread { why: why.to_owned() });
        reader
    }

    /// The phase after the last byte that was fed.
    pub fn phase(&self) -> &Phase {
        &self.phase
    }

    /// Pages that the main channel carried so far.
    pub fn pages(&self) -> u64 {
        self.progress.pages()
    }

    /// How much RAM has passed, and how much is left.
    pub fn progress(&self) -> &RamProgress {
        &self.progress
    }

    /// Collects the offsets at which pages begin.
    pub fn collect_pages(&mut self) {
        self.starts = Some(Vec::new());
    }

    /// The offsets at which pages begin, since the last call. Empty without [`collect_pages`](Self::collect_pages).
    pub fn take_pages(&mut self) -> Vec<u64> {
        self.starts.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Offset of the byte with which the stream may have ended, in precopy. From this byte on the destination's VMM
    /// may start the guest. 0 if the stream cannot be read.
    pub fn end(&self) -> Option<u64> {
        match (&self.phase, &self.mode) {
            (Phase::Unread { .. }, _) => Some(0),
            (Phase::Postcopy, _) => None,
            (_, Mode::Tail(scan)) => scan.end(),
            _ => None,
        }
    }

    /// Offset of the last byte of the package, after which the guest runs at the destination; and whether the source
    /// resumes its guest if the connection breaks before PONG `42`.
    pub fn package(&self) -> Option<(u64, bool)> {
        self.package_end.map(|end| (end, self.has_package_ping))
    }

    /// Reads the next bytes of the stream.
    ///
    /// # Errors
    /// RAM begins and there is no return path.
    pub fn feed(&mut self, mut bytes: &[u8]) -> Result<(), Unconfirmed> {
        let until = self.at + bytes.len() as u64;
        if let Some(setup) = &mut self.setup {
            setup.extend_from_slice(bytes);
            if setup.len() > SETUP_BYTES {
                self.setup = None;
            }
        }
        loop {
            match &mut self.mode {
                Mode::Deaf => break,
                Mode::Tail(scan) => {
                    scan.feed(&self.pending);
                    scan.feed(bytes);
                    self.pending.clear();
                    if scan.end().is_some() {
                        self.phase = Phase::Ended;
                    } else if self.phase == Phase::Ended {
                        self.phase = Phase::Devices;
                    }
                    break;
                }
                Mode::Page(left) => {
                    let waiting = self.pending.len().min(*left);
                    self.pending.drain(..waiting);
                    let here = bytes.len().min(*left - waiting);
                    bytes = &bytes[here..];
                    *left -= waiting + here;
                    if *left > 0 {
                        break;
                    }
                    self.decoder.payload_consumed();
                    self.mode = Mode::Elements;
                }
                Mode::Package(_) => {
                    let waiting = std::mem::take(&mut self.pending);
                    let used = self.package_bytes(&waiting);
                    self.pending = waiting[used..].to_vec();
                    if self.pending.is_empty() {
                        let used = self.package_bytes(bytes);
                        bytes = &bytes[used..];
                    }
                    if let Mode::Package(1..) = self.mode {
                        break;
                    }
                    self.package_end = Some(until - bytes.len() as u64 - self.pending.len() as u64 - 1);
                    self.in_postcopy();
                }
                Mode::Elements => match self.element(&mut bytes, until) {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(Stop::Unconfirmed) => return Err(Unconfirmed),
                    Err(Stop::Unreadable(error)) => self.give_up(&error),
                },
            }
        }
        self.at = until;
        Ok(())
    }

    /// Decodes one element. False: more bytes are needed.
    fn element(&mut self, bytes: &mut &[u8], until: u64) -> Result<bool, Stop> {
        let is_direct = self.pending.is_empty();
        if !is_direct && self.pending.len() < self.wanted {
            let here = (self.wanted - self.pending.len()).min(bytes.len());
            self.pending.extend_from_slice(&bytes[..here]);
            *bytes = &bytes[here..];
        }
        let window: &[u8] = if is_direct { bytes } else { &self.pending };
        let step = self.decoder.next(window);
        let (item, consumed) = match step.map_err(Stop::Unreadable)? {
            Step::NeedMore(needed) => {
                debug_assert!(needed <= MAIN_STEP_BYTES, "the decoder keeps to its limit");
                self.wanted = needed;
                if is_direct {
                    self.pending.extend_from_slice(bytes);
                    *bytes = &[];
                }
                return Ok(self.pending.len() >= needed || !bytes.is_empty());
            }
            Step::Partial { consumed } => (None, consumed),
            Step::Item { item, consumed } => (Some(item), consumed),
            Step::End => {
                self.mode = Mode::Deaf;
                return Ok(true);
            }
        };
        if is_direct {
            *bytes = &bytes[consumed..];
        } else {
            self.pending.drain(..consumed);
            self.wanted = 1;
        }
        if let Some(item) = item {
            let next = until - bytes.len() as u64 - self.pending.len() as u64;
            self.note(item, next)?;
        }
        Ok(true)
    }

    /// Notes an item. `next`: offset of the byte after it.
    fn note(&mut self, item: MainItem, next: u64) -> Result<(), Stop> {
        match item {
            MainItem::Command(Command::OpenReturnPath) => self.has_return_path = true,
            MainItem::Command(Command::SwitchoverStart) => self.phase = Phase::Switchover,
            MainItem::Command(Command::Packaged(length)) => {
                self.phase = Phase::Devices;
                self.mode = Mode::Package(u64::from(length));
            }
            MainItem::Command(Command::PostcopyDiscard { ranges, .. }) => self.progress.discard(&ranges),
            MainItem::RamStart(list) => {
                if self.requires_return_path && !self.has_return_path {
                    return Err(Stop::Unconfirmed);
                }
                self.progress.begin(&list);
                self.phase = Phase::Ram { round: 1 };
            }
            // Up to QEMU 8.0 every section is also a flush.
            MainItem::MultifdFlush if self.setup.is_none() && !self.decoder.flushes_silently() => {
                self.place = (0, 0);
                self.next_round();
            }
            MainItem::PagePayloadFollows { block, offset } => {
                self.mode = Mode::Page(PAGE_SIZE);
                self.starts.iter_mut().for_each(|starts| starts.push(next));
                self.page((block, offset));
            }
            MainItem::Zero { block, offset } | MainItem::Xbzrle { block, offset, .. } => {
                self.page((block, offset));
            }
            MainItem::RamEnd { kind: SectionKind::Start } => return self.after_start(next),
            MainItem::RamEnd { kind: SectionKind::Part } => self.progress.part_is_over(),
            MainItem::RamEnd { kind: SectionKind::End } => {
                self.progress.end();
                if self.phase != Phase::Postcopy {
                    self.phase = Phase::Devices;
                }
            }
            MainItem::Tail if self.phase == Phase::Postcopy => self.mode = Mode::Deaf,
            MainItem::Tail => {
                self.phase = Phase::Devices;
                self.mode = Mode::Tail(EndScan::new(next));
            }
            MainItem::Eof => self.mode = Mode::Deaf,
            _ => {}
        }
        Ok(())
    }

    /// RAM's START is over. Without MULTIFD_FLUSH in it, no later section has one, and pages may be differences. The
    /// decoder that permits those reads the same bytes.
    fn after_start(&mut self, next: u64) -> Result<(), Stop> {
        let Some(setup) = self.setup.take().filter(|_| self.decoder.flushes_silently()) else {
            return Ok(());
        };
        let mut plain = decoder(false);
        let mut rest = &setup[..setup.len().min(usize::try_from(next).unwrap_or(usize::MAX))];
        while !rest.is_empty() {
            match plain.next(rest).map_err(Stop::Unreadable)? {
                Step::Partial { consumed } | Step::Item { consumed, .. } => rest = &rest[consumed..],
                Step::NeedMore(_) | Step::End => return Ok(()),
            }
        }
        self.decoder = plain;
        Ok(())
    }

    /// Counts a page. A page before the last one begins a round: a source sends a round in the order of addresses.
    fn page(&mut self, place: (usize, u64)) {
        if matches!(self.phase, Phase::Ram { .. }) {
            if place < self.place {
                self.next_round();
            }
            self.place = place;
        }
        self.progress.page(place);
    }

    fn next_round(&mut self) {
        if let Phase::Ram { round } = &mut self.phase {
            *round += 1;
            self.progress.next_round();
        }
    }

    /// Takes bytes of the package, and returns how many.
    fn package_bytes(&mut self, bytes: &[u8]) -> usize {
        let Mode::Package(left) = &mut self.mode else { return 0 };
        let here = bytes.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
        *left -= here as u64;
        for byte in &bytes[..here] {
            self.window.rotate_left(1);
            self.window[PACKAGE_PING.len() - 1] = *byte;
            self.has_package_ping |= self.window == PACKAGE_PING;
        }
        here
    }

    /// The package is over. The decoder learns it from the command that the package contained.
    fn in_postcopy(&mut self) {
        (self.mode, self.phase) = (Mode::Elements, Phase::Postcopy);
        self.progress.in_postcopy();
        let mut listen = Vec::new();
        let known = Command::PostcopyListen.encode(&mut listen).and_then(|()| self.decoder.next(&listen));
        if let Err(error) = known {
            self.give_up(&error);
        }
    }

    fn give_up(&mut self, error: &WireError) {
        self.mode = Mode::Deaf;
        self.pending = Vec::new();
        // In postcopy the phase does not change any more.
        if self.phase != Phase::Postcopy {
            self.phase = Phase::Unread { why: error.to_string() };
        }
    }
}

/// A decoder that takes device bodies as they come.
fn decoder(multifd: bool) -> MainDecoder {
    let expect = Expectations {
        multifd,
        accept_legacy_flush: true,
        postcopy: true,
        opaque_tail: true,
        device_state_bytes: EARLY_BYTES,
        ..Expectations::default()
    };
    let body = |name: &str, instance: u32, _: u32, _: SectionKind| {
        if name == ram::SECTION_NAME && instance == ram::SECTION_INSTANCE {
            BodyKind::Ram
        } else {
            BodyKind::OpaqueByFooter
        }
    };
    MainDecoder::new(Box::new(body), expect)
}

enum Stop {
    Unconfirmed,
    Unreadable(WireError),
}

impl std::fmt::Debug for StreamReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StreamReader")
            .field("phase", &self.phase)
            .field("at", &self.at)
            .finish_non_exhaustive()
    }
}

//! Virtio devices of the reference machine, whose drivers do what they like: they write rings, descriptors and registers, and
//! load states. No device may panic, hang or leave RAM; what it has become can be saved and loaded; and after a reset it answers.
//!
//! The first byte chooses the device, then come [actions](Action). An action is its number and a fixed number of bytes, but for
//! those that carry bytes with their length.

mod driver;

use std::os::unix::net::UnixDatagram;

use driver::Driver;

/// A device is started so often at most: each time takes a thread.
const MOST_STARTS: u32 = 24;
/// The status, by its number.
const STATUS_REGISTER: u8 = 0x70 / 4;
/// And so many actions are done.
const MOST_ACTIONS: usize = 512;

/// Which device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// A raw disk.
    Disk,
    /// One that cannot be written.
    ReadOnlyDisk,
    /// A network card.
    Card,
    /// One with two pairs of queues.
    LargeCard,
    /// A console.
    Console,
    /// Random bytes.
    Entropy,
    /// Free page reporting.
    Reporting,
    /// Free page reporting and hinting.
    Hinting,
}

impl Kind {
    /// All of them, by their numbers.
    pub const ALL: [Self; 8] = [
        Self::Disk,
        Self::ReadOnlyDisk,
        Self::Card,
        Self::LargeCard,
        Self::Console,
        Self::Entropy,
        Self::Reporting,
        Self::Hinting,
    ];
}

/// What a driver, an operator or a source does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action<'a> {
    /// Bytes at 8 times this address.
    Memory(u16, &'a [u8]),
    /// A descriptor of a queue's table: queue, index, 16 times this address, length, flags and next.
    Descriptor(u8, u8, u16, u16, u8, u8),
    /// A register, by its number, gets a value.
    Register(u8, u32),
    /// Sets the device up by the rules: reset, these features, so many queues, of 2 to this power entries, and the driver is ready.
    SetUp(u64, u8, u8),
    /// The chain that begins at this descriptor is made available in a queue.
    Offer(u8, u8),
    /// A request by the rules: queue, bytes to read, bytes to write.
    Request(u8, u16, u16),
    /// The header of the requests that follow: type and sector of a disk, or whatever it is.
    Header(u8, u8, u16),
    /// The guest runs, or stands.
    Run(bool),
    /// What comes from outside: typed bytes, a packet, or a question for free pages.
    Outside(&'a [u8]),
    /// A state is loaded.
    Load(&'a [u8]),
    /// The device's state is changed at a place, and loaded: after how many of its last bytes, and what is there.
    Change(u16, u8),
    /// The device's state is saved and loaded.
    Move,
    /// So many bytes at this register are read.
    Read(u8, u8),
}

impl<'a> Action<'a> {
    /// Takes the next one.
    fn take(bytes: &mut &'a [u8]) -> Option<Self> {
        let [number] = array(bytes)?;
        Some(match number % 13 {
            0 => Self::Memory(u16::from_le_bytes(array(bytes)?), counted(bytes)?),
            1 => {
                let [queue, index, low, high, few, many, flags, next] = array(bytes)?;
                let (at, length) = (u16::from_le_bytes([low, high]), u16::from_le_bytes([few, many]));
                Self::Descriptor(queue, index, at, length, flags, next)
            }
            2 => Self::Register(byte(bytes)?, u32::from_le_bytes(array(bytes)?)),
            3 => Self::SetUp(u64::from_le_bytes(array(bytes)?), byte(bytes)?, byte(bytes)?),
            4 => Self::Offer(byte(bytes)?, byte(bytes)?),
            5 => {
                let queue = byte(bytes)?;
                Self::Request(queue, u16::from_le_bytes(array(bytes)?), u16::from_le_bytes(array(bytes)?))
            }
            6 => Self::Header(byte(bytes)?, byte(bytes)?, u16::from_le_bytes(array(bytes)?)),
            7 => Self::Run(byte(bytes)? & 1 == 1),
            8 => Self::Outside(counted(bytes)?),
            9 => Self::Load(counted(bytes)?),
            10 => Self::Change(u16::from_le_bytes(array(bytes)?), byte(bytes)?),
            11 => Self::Move,
            _ => Self::Read(byte(bytes)?, byte(bytes)?),
        })
    }

    /// Writes it as an input has it.
    pub fn put(&self, to: &mut Vec<u8>) {
        let mut one = |number: u8, parts: &[&[u8]]| {
            to.push(number);
            parts.iter().for_each(|part| to.extend(*part));
        };
        let count = |bytes: &[u8]| [bytes.len().min(255) as u8];
        match *self {
            Self::Memory(at, bytes) => one(0, &[&at.to_le_bytes(), &count(bytes), bytes]),
            Self::Descriptor(queue, index, at, length, flags, next) => {
                one(1, &[&[queue, index], &at.to_le_bytes(), &length.to_le_bytes(), &[flags, next]]);
            }
            Self::Register(number, value) => one(2, &[&[number], &value.to_le_bytes()]),
            Self::SetUp(features, queues, size) => one(3, &[&features.to_le_bytes(), &[queues, size]]),
            Self::Offer(queue, head) => one(4, &[&[queue, head]]),
            Self::Request(queue, read, written) => {
                one(5, &[&[queue], &read.to_le_bytes(), &written.to_le_bytes()]);
            }
            Self::Header(kind, sector, more) => one(6, &[&[kind, sector], &more.to_le_bytes()]),
            Self::Run(does) => one(7, &[&[does.into()]]),
            Self::Outside(bytes) => one(8, &[&count(bytes), bytes]),
            Self::Load(bytes) => one(9, &[&count(bytes), bytes]),
            Self::Change(before_end, value) => one(10, &[&before_end.to_le_bytes(), &[value]]),
            Self::Move => one(11, &[]),
            Self::Read(number, bytes) => one(12, &[&[number, bytes]]),
        }
    }
}

fn array<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (first, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(*first)
}

fn byte(bytes: &mut &[u8]) -> Option<u8> {
    array::<1>(bytes).map(|[byte]| byte)
}

/// Bytes with their number before them.
fn counted<'a>(bytes: &mut &'a [u8]) -> Option<&'a [u8]> {
    let count = byte(bytes)?;
    let (counted, rest) = bytes.split_at_checked(count.into())?;
    *bytes = rest;
    Some(counted)
}

/// Takes one input.
pub fn target(data: &[u8]) {
    let Some((kind, mut rest)) = data.split_first() else { return };
    let kind = Kind::ALL[usize::from(*kind) % Kind::ALL.len()];
    let mut driver = Driver::new(kind);
    let mut starts = MOST_STARTS;
    for _ in 0..MOST_ACTIONS {
        let Some(action) = Action::take(&mut rest) else { break };
        let may_start = matches!(
            action,
            Action::Register(STATUS_REGISTER, _) | Action::SetUp(..) | Action::Run(true) | Action::Outside(_)
        );
        if may_start {
            let Some(left) = starts.checked_sub(1) else { break };
            starts = left;
        }
        driver.act(&action);
    }
    driver.bench.pause();
    driver.move_state();
    driver.assert_works_after_reset();
}

/// The host's ends of a card.
type Network = Vec<UnixDatagram>;

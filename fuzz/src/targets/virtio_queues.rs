//! Virtio devices of the reference machine, with drivers that break the rules: they write rings, descriptors
//! and registers, and load states. No device may panic, hang or access memory outside RAM. Its resulting state
//! can be saved and loaded. After a reset, it answers requests.
//!
//! The first byte chooses the device; [actions](Action) follow. An action is its number and a fixed number of
//! bytes. Only actions that carry bytes include a length.

mod driver;

use std::os::unix::net::UnixDatagram;

use driver::Driver;

/// Limit of actions that may start the device, because each start takes a thread.
const MOST_STARTS: u32 = 24;
/// Number of the status register.
const STATUS_REGISTER: u8 = 0x70 / 4;
/// Limit of actions of one input.
const MOST_ACTIONS: usize = 512;

/// The device under test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// A raw disk, writable.
    Disk,
    /// A raw disk that is read-only.
    ReadOnlyDisk,
    /// A network card with one pair of queues.
    Card,
    /// A network card with two pairs of queues.
    LargeCard,
    /// A console that the host can type into.
    Console,
    /// A source of random bytes.
    Entropy,
    /// A balloon with free page reporting.
    Reporting,
    /// A balloon with free page reporting and hinting.
    Hinting,
}

impl Kind {
    /// All kinds, indexed by the first byte of an input.
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

/// An action of the driver, the operator or the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action<'a> {
    /// Writes bytes to guest memory at 8 times this address.
    Memory(u16, &'a [u8]),
    /// Writes a descriptor of a queue's table: queue, index, address divided by 16, length, flags and next.
    Descriptor(u8, u8, u16, u16, u8, u8),
    /// Writes a value to the register with this number.
    Register(u8, u32),
    /// Sets the device up by the rules: features, number of queues, log2 of their size. It resets the device
    /// first, and sets DRIVER_OK last.
    SetUp(u64, u8, u8),
    /// Makes the chain that starts at this descriptor available in a queue.
    Offer(u8, u8),
    /// Offers a request by the rules: queue, bytes that the device reads, bytes that it writes.
    Request(u8, u16, u16),
    /// Writes the header of the following requests: for a disk, its type and sector.
    Header(u8, u8, u16),
    /// Runs the device (`true`) or pauses it.
    Run(bool),
    /// Delivers outside input: typed bytes, a packet, or a request for free pages.
    Outside(&'a [u8]),
    /// Pauses the device and loads this state.
    Load(&'a [u8]),
    /// Changes one byte of the device's state and loads the state: the byte's distance from the end, and its
    /// new value.
    Change(u16, u8),
    /// Saves and loads the device's state.
    Move,
    /// Reads from the register with this number; the second value chooses how many bytes.
    Read(u8, u8),
}

impl<'a> Action<'a> {
    /// Decodes the next action and removes its bytes from `bytes`.
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

    /// Encodes the action as part of an input.
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

/// Reads a length byte and that many bytes.
fn counted<'a>(bytes: &mut &'a [u8]) -> Option<&'a [u8]> {
    let count = byte(bytes)?;
    let (counted, rest) = bytes.split_at_checked(count.into())?;
    *bytes = rest;
    Some(counted)
}

/// Performs the actions of one input on a device; panics if a check fails.
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

/// The host's ends of a card's sockets.
type Network = Vec<UnixDatagram>;

//! The VMM's side of vfio-user: a connection to a device's process.

mod port;

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};
use std::{fmt, io};

use parking_lot::{Mutex, MutexGuard};
use sterna_ram::GuestRam;
use sterna_ram::dirty::LoggedRange;

use super::connection::{Connection, Trouble};
use super::wire::{
    Capabilities, Command, DMA_READ, DMA_WRITE, DeviceInfo, DmaLogRange, DmaLogReport, DmaLogStart, DmaMap,
    DmaUnmap, FeatureRequest, HEADER_BYTES, Header, Kind, MAX_DATA_BYTES, MAX_MESSAGE_FDS,
    MigrationCapability, Payload, RegionAccess, RegionInfo, UNMAP_ALL, Version, WireError, decode_flags,
    message_limit,
};
use crate::connect;
use crate::vfio::{MigrationFeatures, PortError, feature, keep};

const PAGE_BYTES: u64 = sterna_ram::PAGE_SIZE as u64;
/// Highest number of messages other than the answer during one request. A server that sends more counts as
/// flooding. Late answers are few, and a device whose requests are refused sends few.
const FOREIGN_MESSAGES: u32 = 4096;

/// Settings of a client.
#[derive(Debug, Clone)]
pub struct ClientOptions {
    /// Time limit of a request. After it the server counts as hung. A later answer is skipped.
    pub timeout: Duration,
}

impl Default for ClientOptions {
    /// A time limit of 10 seconds.
    fn default() -> Self {
        Self { timeout: Duration::from_secs(10) }
    }
}

/// A connection to the process of a vfio-user device.
pub struct Client {
    name: String,
    timeout: Duration,
    connection: Mutex<Talk>,
    /// Locked while a thread waits for the connection. A thread with many requests, such as a reader, thereby
    /// gives others a turn.
    turn: Mutex<()>,
    info: DeviceInfo,
    features: Option<MigrationFeatures>,
    /// Highest number of data bytes that the server accepts in one message.
    data_bytes: u32,
    /// The server's migration capability. `None` if it cannot migrate.
    migration: Option<MigrationCapability>,
    /// Whether the server reports what can be read while it runs: unknown, yes, or no.
    tells_precopy: AtomicU32,
}

struct Talk {
    connection: Connection,
    next_id: u16,
}

impl Client {
    /// Connects to the server at `path` and queries its device.
    ///
    /// # Errors
    /// No server listens there, it does not accept in time, or it gives no valid description of its device.
    pub fn connect(path: &Path, options: &ClientOptions) -> Result<Self, PortError> {
        let stream = connect::within(options.timeout, path).map_err(|source| PortError::System {
            request: "connecting",
            call: "connect",
            source: io::Error::new(source.kind(), format!("{}: {source}", path.display())),
        })?;
        Self::over(stream, format!("vfio-user at {}", path.display()), options)
    }

    /// Like [`Client::connect`], over an existing connection. `name` is the device's name in messages.
    ///
    /// # Errors
    /// The server gives no valid description of its device.
    pub fn over(stream: UnixStream, name: String, options: &ClientOptions) -> Result<Self, PortError> {
        let connection = Connection::new(stream, message_limit(MAX_DATA_BYTES));
        let mut client = Self {
            name,
            timeout: options.timeout,
            connection: Mutex::new(Talk { connection, next_id: 1 }),
            turn: Mutex::default(),
            info: DeviceInfo::default(),
            features: None,
            data_bytes: MAX_DATA_BYTES,
            migration: None,
            tells_precopy: AtomicU32::new(port::UNKNOWN),
        };
        client.negotiate()?;
        client.info = client.ask_info()?;
        if client.migration.is_some() {
            client.features = client.ask_features()?;
        }
        Ok(client)
    }

    /// The device's description, read when the client connected.
    pub fn info(&self) -> DeviceInfo {
        self.info
    }

    /// The device's optional migration states. `None` if it cannot migrate.
    pub fn migration_features(&self) -> Option<MigrationFeatures> {
        self.features
    }

    /// Whether the server's process still has the connection open. True for a process that hangs.
    pub fn is_connected(&self) -> bool {
        self.talk().connection.is_open()
    }

    /// Maps the guest's RAM in `ranges` into the device.
    ///
    /// # Errors
    /// A range is outside `ram`, RAM is not a file and cannot be shared, or the server refuses.
    pub fn map_ram(&self, ram: &GuestRam, ranges: &[LoggedRange]) -> Result<(), PortError> {
        let request = Command::DmaMap.name();
        for range in ranges {
            let lack = |lack: String| PortError::Unsupported { request, lack };
            let block = ram.blocks().get(range.block);
            let block = block.ok_or_else(|| lack(format!("the guest has no RAM block {}", range.block)))?;
            let end = range.first_page.checked_add(range.pages);
            if end.is_none_or(|end| end > block.pages()) {
                return Err(lack(format!("RAM block {:?} ends inside the range", block.name())));
            }
            let shared = block.shared_file().ok_or_else(|| {
                lack(format!("RAM block {:?} is private memory; use a memfd or huge pages", block.name()))
            })?;
            let map = DmaMap {
                flags: DMA_READ | DMA_WRITE,
                offset: shared.offset + range.first_page * PAGE_BYTES,
                address: range.guest_address,
                size: range.pages * PAGE_BYTES,
            };
            self.dma_map(&map, shared.file.as_fd())?;
        }
        Ok(())
    }

    /// Maps one region of `file` into the device.
    ///
    /// # Errors
    /// The server refuses, or does not answer.
    pub fn dma_map(&self, map: &DmaMap, file: BorrowedFd<'_>) -> Result<(), PortError> {
        self.ask(Command::DmaMap, &map.encode(), &[], &[file])?.finish()
    }

    /// Withdraws a region from the device.
    ///
    /// # Errors
    /// The server refuses or does not answer. It may then still use the memory.
    pub fn dma_unmap(&self, address: u64, size: u64) -> Result<(), PortError> {
        let unmap = DmaUnmap { flags: 0, address, size };
        self.ask(Command::DmaUnmap, &unmap.encode(), &[], &[])?.skip()
    }

    /// Withdraws all regions from the device.
    ///
    /// # Errors
    /// The same as for [`Client::dma_unmap`].
    pub fn dma_unmap_all(&self) -> Result<(), PortError> {
        let unmap = DmaUnmap { flags: UNMAP_ALL, address: 0, size: 0 };
        self.ask(Command::DmaUnmap, &unmap.encode(), &[], &[])?.skip()
    }

    /// Queries the description of region `index`.
    ///
    /// # Errors
    /// There is no such region, or the server does not answer.
    pub fn region_info(&self, index: u32) -> Result<RegionInfo, PortError> {
        let question = RegionInfo { index, ..RegionInfo::default() };
        let mut answer = self.ask(Command::DeviceGetRegionInfo, &question.encode(), &[], &[])?;
        let bytes = answer.all()?;
        RegionInfo::decode(answer.payload(&bytes)).map_err(|error| answer.misbehaved(error))
    }

    /// Reads `to.len()` bytes of a region from byte `offset` on.
    ///
    /// # Errors
    /// The server refuses, or does not answer.
    pub fn region_read(&self, region: u32, offset: u64, to: &mut [u8]) -> Result<(), PortError> {
        for (index, part) in to.chunks_mut(self.data_bytes as usize).enumerate() {
            let offset = offset + index as u64 * u64::from(self.data_bytes);
            let access = RegionAccess { offset, region, count: part.len() as u32 };
            let mut answer = self.ask(Command::RegionRead, &access.encode(), &[], &[])?;
            let mut head = [0; RegionAccess::BYTES];
            answer.read(&mut head)?;
            let came = RegionAccess::decode(answer.payload(&head), access.count);
            let came = came.map_err(|error| answer.misbehaved(error))?;
            if came != access || answer.left() != part.len() {
                return Err(answer.misbehaved(WireError::Trailing {
                    message: Command::RegionRead.name(),
                    at: HEADER_BYTES + RegionAccess::BYTES,
                    left: answer.left() as u64,
                }));
            }
            answer.read(part)?;
        }
        Ok(())
    }

    /// Writes `from` into a region from byte `offset` on.
    ///
    /// # Errors
    /// The server refuses, or does not answer.
    pub fn region_write(&self, region: u32, offset: u64, from: &[u8]) -> Result<(), PortError> {
        for (index, part) in from.chunks(self.data_bytes as usize).enumerate() {
            let offset = offset + index as u64 * u64::from(self.data_bytes);
            let access = RegionAccess { offset, region, count: part.len() as u32 };
            self.ask(Command::RegionWrite, &access.encode(), part, &[])?.skip()?;
        }
        Ok(())
    }

    /// Whether the device can log the pages that it writes.
    ///
    /// # Errors
    /// The server does not answer.
    pub fn can_log_dma(&self) -> Result<bool, PortError> {
        if self.migration.as_ref().is_some_and(|migration| migration.pgsize > PAGE_BYTES) {
            return Ok(false);
        }
        let method = feature::PROBE | feature::SET;
        let probe = FeatureRequest { feature: feature::DMA_LOGGING_START, method, data: &[] };
        match self.feature(&probe, 0) {
            Ok(_) => Ok(true),
            Err(PortError::Refused { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Begins to log the pages that the device writes in `ranges`.
    ///
    /// # Errors
    /// The server refuses, or does not answer.
    pub fn start_logging(&self, ranges: &[DmaLogRange]) -> Result<(), PortError> {
        let data = DmaLogStart { page_size: PAGE_BYTES, ranges: ranges.to_vec() }.encode();
        let (feature, method) = (feature::DMA_LOGGING_START, feature::SET);
        self.feature(&FeatureRequest { feature, method, data: &data }, 0).map(drop)
    }

    /// Stops logging of the device's writes.
    ///
    /// # Errors
    /// The server refuses, or does not answer.
    pub fn stop_logging(&self) -> Result<(), PortError> {
        let (feature, method) = (feature::DMA_LOGGING_STOP, feature::SET);
        self.feature(&FeatureRequest { feature, method, data: &[] }, 0).map(drop)
    }

    /// Pages of a range that were written since the last report, or since logging began. Bit `n` is the
    /// range's page `n`. The range must not be longer than [`Client::longest_report`].
    ///
    /// # Errors
    /// The server refuses, does not answer, or its answer is invalid.
    pub fn report_logged(&self, range: DmaLogRange) -> Result<Vec<u64>, PortError> {
        let report = DmaLogReport { range, page_size: PAGE_BYTES };
        let head = report.encode();
        let question =
            FeatureRequest { feature: feature::DMA_LOGGING_REPORT, method: feature::GET, data: &head };
        let room = head.len() + usize::try_from(report.bitmap_bytes()).unwrap_or(usize::MAX);
        let answer = self.feature(&question, room)?;
        let name = "DMA_LOGGING_REPORT";
        let misbehaved = |error: WireError| PortError::Misbehaved { request: name, source: error.into() };
        let (came, bitmap) = DmaLogReport::decode(name, &answer).map_err(misbehaved)?;
        let at = HEADER_BYTES + FeatureRequest::BYTES;
        if came != report {
            let (field, value) = ("iova", came.range.address);
            let rule = "another range was requested";
            return Err(misbehaved(WireError::Value { message: name, at, field, value, rule }));
        }
        if bitmap.len() as u64 != report.bitmap_bytes() {
            let (needed, left) = (report.bitmap_bytes(), bitmap.len() as u64);
            let at = at + DmaLogReport::BYTES;
            return Err(misbehaved(WireError::Truncated {
                message: name,
                at,
                field: "bitmap",
                needed,
                left,
            }));
        }
        let word = |bytes: &[u8]| bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
        let mut words: Vec<u64> = bitmap.chunks(8).map(word).collect();
        keep(&mut words, range.length / PAGE_BYTES);
        Ok(words)
    }

    /// Longest range of one report in bytes, a multiple of 64 pages.
    pub fn longest_report(&self) -> u64 {
        let fits = u64::from(self.data_bytes).saturating_sub(DmaLogReport::BYTES as u64);
        let taken = self.migration.as_ref().map_or(fits, |migration| migration.max_bitmap_size);
        (fits.min(taken) / 8 * 8).max(8) * 8 * PAGE_BYTES
    }

    fn negotiate(&mut self) -> Result<(), PortError> {
        let capabilities = Capabilities {
            max_msg_fds: MAX_MESSAGE_FDS as u32,
            migration: Some(MigrationCapability::default()),
            ..Capabilities::default()
        };
        let ours = Version { major: Version::MAJOR, minor: Version::MINOR, capabilities };
        let mut answer = self.ask(Command::Version, &ours.encode(), &[], &[])?;
        let bytes = answer.all()?;
        let theirs = Version::decode(answer.payload(&bytes)).map_err(|error| answer.misbehaved(error))?;
        let bad = |at, field, value: u64, rule| WireError::Value {
            message: Command::Version.name(),
            at,
            field,
            value,
            rule,
        };
        if theirs.major != ours.major {
            return Err(answer.misbehaved(bad(
                16,
                "major",
                theirs.major.into(),
                "a different one was proposed",
            )));
        }
        if theirs.minor > ours.minor {
            return Err(answer.misbehaved(bad(18, "minor", theirs.minor.into(), "a lower one was proposed")));
        }
        let most = theirs.capabilities.max_data_xfer_size;
        if most < 4096 {
            let rule = "at least 4096 are needed for migrations";
            return Err(answer.misbehaved(bad(20, "max_data_xfer_size", most.into(), rule)));
        }
        if let Some(migration) = &theirs.capabilities.migration {
            let (size, most) = (migration.pgsize, migration.max_bitmap_size);
            if !size.is_power_of_two() {
                return Err(answer.misbehaved(bad(
                    20,
                    "pgsize",
                    size,
                    "the page size must be a power of two",
                )));
            }
            if most < 8 {
                let rule = "a bitmap must have at least one word of 64 bits";
                return Err(answer.misbehaved(bad(20, "max_bitmap_size", most, rule)));
            }
        }
        drop(answer);
        self.data_bytes = most.min(MAX_DATA_BYTES);
        self.migration = theirs.capabilities.migration;
        Ok(())
    }

    fn ask_info(&self) -> Result<DeviceInfo, PortError> {
        let question = DeviceInfo::default().encode();
        let mut answer = self.ask(Command::DeviceGetInfo, &question, &[], &[])?;
        let bytes = answer.all()?;
        DeviceInfo::decode(answer.payload(&bytes)).map_err(|error| answer.misbehaved(error))
    }

    fn ask_features(&self) -> Result<Option<MigrationFeatures>, PortError> {
        let question = FeatureRequest { feature: feature::MIGRATION, method: feature::GET, data: &[] };
        match self.feature(&question, 8) {
            Ok(data) => decode_flags("MIGRATION", &data)
                .map(Some)
                .map_err(|error| PortError::Misbehaved { request: "MIGRATION", source: error.into() }),
            Err(PortError::Refused { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Sends a feature request and returns the answer's data.
    fn feature(&self, question: &FeatureRequest<'_>, room: usize) -> Result<Vec<u8>, PortError> {
        let mut answer = self.ask(Command::DeviceFeature, &question.encode(room), &[], &[])?;
        answer.request = feature_name(question.feature);
        let bytes = answer.all()?;
        let came =
            FeatureRequest::decode(answer.payload(&bytes)).map_err(|error| answer.misbehaved(error))?;
        if (came.feature, came.method) != (question.feature, question.method) {
            let (message, field, value) = (answer.request, "flags", u64::from(came.feature));
            let rule = "the answer is for another feature";
            return Err(answer.misbehaved(WireError::Value { message, at: 20, field, value, rule }));
        }
        Ok(came.data.to_vec())
    }

    /// Sends a request of `head` and `data`, and waits for its answer's header.
    fn ask(
        &self,
        command: Command,
        head: &[u8],
        data: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<Answer<'_>, PortError> {
        let mut talk = self.talk();
        let id = talk.next_id;
        talk.next_id = id.wrapping_add(1);
        let size = HEADER_BYTES + head.len() + data.len();
        let header = Header {
            id,
            command: command.number(),
            size: u32::try_from(size).unwrap_or(u32::MAX),
            kind: Kind::Command { no_reply: false },
        };
        let (limit, deadline) = (self.timeout, Instant::now() + self.timeout);
        let mut answer = Answer { talk, request: command.name(), limit, deadline };
        let sent = answer.talk.connection.send([&header.encode(), head, data], fds, Some(deadline));
        sent.map_err(|trouble| answer.trouble(trouble))?;
        for _ in 0..=FOREIGN_MESSAGES {
            let header = answer.talk.connection.receive_header(Some(deadline));
            let header = header.map_err(|trouble| answer.trouble(trouble))?;
            match header.kind {
                Kind::Command { no_reply } => answer.refuse(&header, no_reply)?,
                // A late answer to a request that timed out.
                _ if header.id != id => {}
                _ if header.command != command.number() => {
                    let (got, expected) = (header.command, command.number());
                    let message = command.name();
                    return Err(answer.misbehaved(WireError::WrongReply { message, at: 2, got, expected }));
                }
                Kind::ErrorReply(errno) => {
                    let source = match i32::try_from(errno) {
                        Ok(1..) => io::Error::from_raw_os_error(errno as i32),
                        _ => io::Error::other("it gives no reason"),
                    };
                    return Err(PortError::Refused { request: answer.request, source });
                }
                Kind::Reply => return Ok(answer),
            }
        }
        // The connection is closed, so that later requests do not search a flood of messages again.
        answer.talk.connection.give_up();
        let (message, field, value) = (command.name(), "messages", u64::from(FOREIGN_MESSAGES) + 1);
        let rule = "this many messages arrived that are not its answer";
        Err(answer.misbehaved(WireError::Value { message, at: 0, field, value, rule }))
    }

    fn talk(&self) -> MutexGuard<'_, Talk> {
        let _turn = self.turn.lock();
        self.connection.lock()
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("name", &self.name).finish_non_exhaustive()
    }
}

impl AsFd for Talk {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }
}

/// An answer whose payload is not received yet. The rest is skipped before the next message.
struct Answer<'a> {
    talk: MutexGuard<'a, Talk>,
    request: &'static str,
    limit: Duration,
    deadline: Instant,
}

impl Answer<'_> {
    fn left(&self) -> usize {
        self.talk.connection.left()
    }

    /// Receives the payload's next `to.len()` bytes.
    fn read(&mut self, to: &mut [u8]) -> Result<(), PortError> {
        if to.len() > self.left() {
            let (message, at, field) = (self.request, HEADER_BYTES, "payload");
            let (needed, left) = (to.len() as u64, self.left() as u64);
            return Err(self.misbehaved(WireError::Truncated { message, at, field, needed, left }));
        }
        let received = self.talk.connection.receive_body(to, Some(self.deadline));
        received.map_err(|trouble| self.trouble(trouble))
    }

    /// Receives the rest of the payload. Its length was checked against the limit of a message.
    fn all(&mut self) -> Result<Vec<u8>, PortError> {
        let mut bytes = vec![0; self.left()];
        self.read(&mut bytes)?;
        Ok(bytes)
    }

    /// Fails if bytes remain.
    fn finish(self) -> Result<(), PortError> {
        match self.left() {
            0 => Ok(()),
            left => {
                let error =
                    WireError::Trailing { message: self.request, at: HEADER_BYTES, left: left as u64 };
                Err(self.misbehaved(error))
            }
        }
    }

    /// Skips the remaining bytes.
    fn skip(mut self) -> Result<(), PortError> {
        let skipped = self.talk.connection.skip_body(Some(self.deadline));
        skipped.map_err(|trouble| self.trouble(trouble))
    }

    fn payload<'p>(&self, bytes: &'p [u8]) -> Payload<'p> {
        Payload::new(self.request, bytes)
    }

    /// Refuses a request of the server. None is expected, because all RAM is mapped and interrupts use
    /// eventfds.
    fn refuse(&mut self, header: &Header, no_reply: bool) -> Result<(), PortError> {
        if no_reply {
            return Ok(());
        }
        let errno = rustix::io::Errno::OPNOTSUPP.raw_os_error().unsigned_abs();
        let reply = Header { size: HEADER_BYTES as u32, kind: Kind::ErrorReply(errno), ..*header };
        let sent = self.talk.connection.send([&reply.encode(), &[], &[]], &[], Some(self.deadline));
        sent.map_err(|trouble| self.trouble(trouble))
    }

    fn misbehaved(&self, error: WireError) -> PortError {
        PortError::Misbehaved { request: self.request, source: error.into() }
    }

    fn trouble(&self, trouble: Trouble) -> PortError {
        let request = self.request;
        match trouble {
            Trouble::Late => PortError::Silent { request, limit: self.limit },
            Trouble::Closed => {
                let source = io::Error::new(io::ErrorKind::UnexpectedEof, "it closed the connection");
                PortError::Gone { request, source }
            }
            Trouble::Broken(source) => PortError::Gone { request, source },
            Trouble::Wire(error) => self.misbehaved(error),
            Trouble::System(call, source) => PortError::System { request, call, source },
        }
    }
}

fn feature_name(number: u16) -> &'static str {
    match number {
        feature::MIGRATION => "MIGRATION",
        feature::MIG_DEVICE_STATE => "MIG_DEVICE_STATE",
        feature::DMA_LOGGING_START => "DMA_LOGGING_START",
        feature::DMA_LOGGING_STOP => "DMA_LOGGING_STOP",
        feature::DMA_LOGGING_REPORT => "DMA_LOGGING_REPORT",
        feature::MIG_DATA_SIZE => "MIG_DATA_SIZE",
        super::wire::PRECOPY_INFO => "PRECOPY_INFO",
        _ => "DEVICE_FEATURE",
    }
}

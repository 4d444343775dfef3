//! One connection of a server: decodes requests, calls the device, encodes replies.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use rustix::io::Errno;

use super::end::ServerEnd;
use crate::vfio::feature;
use crate::vfio_user::backend::{Backend, BackendError, DmaRegion};
use crate::vfio_user::connection::{Connection, Trouble};
use crate::vfio_user::wire::{
    Capabilities, Command, DeviceInfo, DeviceState, DmaLogReport, DmaLogStart, DmaMap, DmaUnmap,
    FeatureRequest, HEADER_BYTES, Header, IrqInfo, IrqSet, Kind, MAX_DATA_BYTES, MAX_MESSAGE_FDS, MigData,
    MigrationCapability, PRECOPY_INFO, Payload, RegionAccess, RegionInfo, UNMAP_ALL, Version, WireError,
    message_limit,
};

pub(super) struct Session<'a> {
    connection: Connection,
    backend: &'a dyn Backend,
    /// Whether VERSION was answered.
    greeted: bool,
    /// Highest number of data bytes that the client accepts in one message.
    client_bytes: u32,
    /// Data of the reply. The buffer is reused, because allocating it costs more than serving a request.
    data: Vec<u8>,
    bitmap: Vec<u64>,
}

/// The part of a reply before its data. The data are the first `data` bytes of [`Session::data`].
struct Reply {
    head: Vec<u8>,
    data: usize,
}

impl From<Vec<u8>> for Reply {
    fn from(head: Vec<u8>) -> Self {
        Reply { head, data: 0 }
    }
}

/// Why a request is refused.
enum Refusal {
    Backend(BackendError),
    Wire(WireError),
}

impl From<BackendError> for Refusal {
    fn from(error: BackendError) -> Self {
        Refusal::Backend(error)
    }
}

impl From<Errno> for Refusal {
    fn from(errno: Errno) -> Self {
        Refusal::Backend(errno.into())
    }
}

impl From<WireError> for Refusal {
    fn from(error: WireError) -> Self {
        Refusal::Wire(error)
    }
}

impl<'a> Session<'a> {
    pub(super) fn new(stream: UnixStream, backend: &'a dyn Backend) -> Self {
        Self {
            connection: Connection::new(stream, message_limit(MAX_DATA_BYTES)),
            backend,
            greeted: false,
            client_bytes: MAX_DATA_BYTES,
            data: Vec::new(),
            bitmap: Vec::new(),
        }
    }

    /// Serves requests until the connection ends.
    pub(super) fn run(&mut self) -> ServerEnd {
        let mut body = Vec::new();
        loop {
            match self.turn(&mut body) {
                Ok(true) => {}
                Ok(false) => {
                    self.connection.give_up();
                    return ServerEnd::HungUp;
                }
                Err(Trouble::Closed) => return ServerEnd::Disconnected,
                Err(Trouble::Wire(error)) => return ServerEnd::Misbehaved(error),
                Err(Trouble::Broken(error) | Trouble::System(_, error)) => return ServerEnd::Broken(error),
                Err(Trouble::Late) => return ServerEnd::Broken(std::io::ErrorKind::TimedOut.into()),
            }
        }
    }

    /// Serves one request. False if the device closes the connection.
    fn turn(&mut self, body: &mut Vec<u8>) -> Result<bool, Trouble> {
        let header = self.connection.receive_header(None)?;
        let Kind::Command { no_reply } = header.kind else {
            self.connection.give_up();
            let (message, field, rule) = ("reply", "flags", "nothing was asked");
            return Err(Trouble::Wire(WireError::Value { message, at: 8, field, value: 1, rule }));
        };
        body.resize(header.payload_bytes(), 0);
        self.connection.receive_body(body, None)?;
        let fds = self.connection.take_fds();
        let reply = match header.command() {
            // An unknown command, or a command that only a server may send.
            None | Some(Command::DmaRead | Command::DmaWrite) => Err(Errno::OPNOTSUPP.into()),
            Some(Command::Version) if self.greeted => Err(Errno::INVAL.into()),
            Some(command) if !self.greeted && command != Command::Version => {
                self.connection.give_up();
                let (message, field, value) = (command.name(), "command", u64::from(header.command));
                let rule = "VERSION must be the first message";
                return Err(Trouble::Wire(WireError::Value { message, at: 2, field, value, rule }));
            }
            Some(command) => self.answer(command, Payload::new(command.name(), body), fds),
        };
        let (reply, kind) = match reply {
            Ok(reply) => (reply, Kind::Reply),
            Err(Refusal::Backend(BackendError::HangUp)) => return Ok(false),
            Err(Refusal::Backend(BackendError::Refused(errno))) => {
                (Vec::new().into(), Kind::ErrorReply(errno.raw_os_error().unsigned_abs()))
            }
            Err(Refusal::Wire(error)) => {
                tracing::warn!(%error, "a vfio-user client sent a malformed message");
                (Vec::new().into(), Kind::ErrorReply(Errno::INVAL.raw_os_error().unsigned_abs()))
            }
        };
        if !no_reply {
            let size = HEADER_BYTES + reply.head.len() + reply.data;
            let header = Header { size: u32::try_from(size).unwrap_or(u32::MAX), kind, ..header };
            self.connection.send([&header.encode(), &reply.head, &self.data[..reply.data]], &[], None)?;
        }
        Ok(true)
    }

    fn answer(
        &mut self,
        command: Command,
        payload: Payload<'_>,
        fds: Vec<OwnedFd>,
    ) -> Result<Reply, Refusal> {
        let backend = self.backend;
        match command {
            Command::Version => self.greet(payload),
            Command::DmaMap => {
                let (message, map) = (command.name(), DmaMap::decode(payload)?);
                let got = fds.len();
                let [file] = <[OwnedFd; 1]>::try_from(fds).map_err(|_| WireError::Descriptors {
                    message,
                    got,
                    rule: "exactly one is needed, for the region",
                })?;
                backend.dma_map(DmaRegion { map, file })?;
                Ok(Vec::new().into())
            }
            Command::DmaUnmap => {
                let unmap = DmaUnmap::decode(payload)?;
                if unmap.flags == UNMAP_ALL {
                    backend.dma_unmap_all();
                } else {
                    backend.dma_unmap(unmap.address, unmap.size)?;
                }
                Ok(unmap.encode().into())
            }
            Command::DeviceGetInfo => {
                DeviceInfo::decode(payload)?;
                Ok(backend.info().encode().into())
            }
            Command::DeviceGetRegionInfo => {
                let index = RegionInfo::decode(payload)?.index;
                Ok(backend.region_info(index)?.encode().into())
            }
            Command::DeviceGetIrqInfo => {
                let index = IrqInfo::decode(payload)?.index;
                Ok(backend.irq_info(index)?.encode().into())
            }
            Command::DeviceSetIrqs => {
                backend.set_irqs(IrqSet::decode(payload)?, fds)?;
                Ok(Vec::new().into())
            }
            Command::RegionRead => {
                let access = RegionAccess::decode(payload, self.client_bytes)?;
                let to = room(&mut self.data, access.count as usize);
                backend.region_read(access.region, access.offset, to)?;
                Ok(Reply { head: access.encode(), data: access.count as usize })
            }
            Command::RegionWrite => {
                let (access, data) = RegionAccess::decode_with_data(payload, MAX_DATA_BYTES)?;
                backend.region_write(access.region, access.offset, data)?;
                Ok(access.encode().into())
            }
            Command::DeviceReset => {
                backend.reset()?;
                Ok(Vec::new().into())
            }
            Command::DeviceFeature => self.feature(&FeatureRequest::decode(payload)?),
            Command::MigDataRead => {
                let wanted = MigData::decode(payload, self.client_bytes)?;
                let to = room(&mut self.data, wanted.size as usize);
                let data = backend.read_data(to)?.min(to.len());
                Ok(Reply { head: MigData { size: data as u32 }.encode().to_vec(), data })
            }
            Command::MigDataWrite => {
                let (_, data) = MigData::decode_with_data(payload, MAX_DATA_BYTES)?;
                backend.write_data(data)?;
                Ok(Vec::new().into())
            }
            Command::DmaRead | Command::DmaWrite => Err(Errno::OPNOTSUPP.into()),
        }
    }

    fn greet(&mut self, payload: Payload<'_>) -> Result<Reply, Refusal> {
        let theirs = Version::decode(payload)?;
        if theirs.major != Version::MAJOR || theirs.capabilities.max_data_xfer_size == 0 {
            return Err(Errno::INVAL.into());
        }
        self.client_bytes = theirs.capabilities.max_data_xfer_size.min(MAX_DATA_BYTES);
        self.greeted = true;
        let capabilities = Capabilities {
            max_msg_fds: MAX_MESSAGE_FDS as u32,
            max_data_xfer_size: MAX_DATA_BYTES,
            migration: Some(MigrationCapability::default()),
            ..Capabilities::default()
        };
        let minor = theirs.minor.min(Version::MINOR);
        Ok(Version { major: Version::MAJOR, minor, capabilities }.encode().into())
    }

    fn feature(&mut self, request: &FeatureRequest<'_>) -> Result<Reply, Refusal> {
        let backend = self.backend;
        if request.method & feature::PROBE != 0 {
            let methods = methods(request.feature);
            let asked = request.method & !feature::PROBE;
            let has = methods != 0 && asked & !methods == 0;
            return if has { Ok(request.encode(0).into()) } else { Err(Errno::NOTTY.into()) };
        }
        if request.method & methods(request.feature) == 0 {
            return Err(Errno::NOTTY.into());
        }
        let data = match (request.feature, request.method) {
            (feature::MIGRATION, _) => backend.features().flags().to_le_bytes().to_vec(),
            (feature::MIG_DEVICE_STATE, feature::GET) => DeviceState(backend.state()).encode(),
            (feature::MIG_DEVICE_STATE, _) => {
                let to = DeviceState::decode("MIG_DEVICE_STATE", request.data)?;
                backend.set_state(to.0)?;
                to.encode()
            }
            (feature::MIG_DATA_SIZE, _) => backend.data_size()?.to_le_bytes().to_vec(),
            (PRECOPY_INFO, _) => backend.precopy_sizes()?.encode(),
            (feature::DMA_LOGGING_START, _) => {
                let start = DmaLogStart::decode("DMA_LOGGING_START", request.data)?;
                backend.start_logging(start.page_size, &start.ranges)?;
                start.encode()
            }
            (feature::DMA_LOGGING_STOP, _) => {
                backend.stop_logging();
                Vec::new()
            }
            (feature::DMA_LOGGING_REPORT, _) => return self.report(request),
            _ => return Err(Errno::NOTTY.into()),
        };
        Ok(FeatureRequest { data: &data, ..*request }.encode(0).into())
    }

    fn report(&mut self, request: &FeatureRequest<'_>) -> Result<Reply, Refusal> {
        let (report, _) = DmaLogReport::decode("DMA_LOGGING_REPORT", request.data)?;
        let bytes = usize::try_from(report.bitmap_bytes()).map_err(|_| Errno::TOOBIG)?;
        if bytes + DmaLogReport::BYTES > self.client_bytes as usize {
            return Err(Errno::TOOBIG.into());
        }
        self.bitmap.clear();
        self.bitmap.resize(bytes / 8, 0);
        self.backend.report_logged(report.range, report.page_size, &mut self.bitmap)?;
        let to = room(&mut self.data, bytes);
        for (to, word) in to.chunks_exact_mut(8).zip(&self.bitmap) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        let head = FeatureRequest { data: &report.encode(), ..*request }.encode(DmaLogReport::BYTES + bytes);
        Ok(Reply { head, data: bytes })
    }
}

/// Methods that a feature supports; 0 for an unknown feature.
fn methods(number: u16) -> u32 {
    match number {
        feature::MIGRATION | feature::MIG_DATA_SIZE | feature::DMA_LOGGING_REPORT | PRECOPY_INFO => {
            feature::GET
        }
        feature::MIG_DEVICE_STATE => feature::GET | feature::SET,
        feature::DMA_LOGGING_START | feature::DMA_LOGGING_STOP => feature::SET,
        _ => 0,
    }
}

fn room(data: &mut Vec<u8>, bytes: usize) -> &mut [u8] {
    if data.len() < bytes {
        data.resize(bytes, 0);
    }
    &mut data[..bytes]
}

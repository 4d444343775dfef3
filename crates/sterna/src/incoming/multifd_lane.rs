//! One multifd channel at the destination: checks each packet, then reads its payload directly to the place
//! that the sink names.

use std::sync::atomic::Ordering;

use sterna_ram::{PAGE_SIZE, RamSlice};
use sterna_transport::{Channel, TransportError};
use sterna_wire::WireError;
use sterna_wire::limits::PACKET_PAGES;
use sterna_wire::multifd::{
    DEVICE_STATE_PACKET_BYTES, DeviceStatePacket, Differences, HEADER_BYTES, Method, PacketHeader,
    PacketKind, RAM_PACKET_BYTES, RamPacketView,
};
use sterna_wire::xbzrle;

use super::shared::Shared;
use super::target::Layout;
use crate::codec::{self, Decoder};
use crate::error::MigrationError;
use crate::interruption::Break;
use crate::order::PageRun;
use crate::pages::PageSink;

/// Receives as lane number `index`, on the channel that gets this place, until the channel ends or loading
/// stops.
pub(super) fn receive(shared: &Shared, index: usize) {
    match run(shared, index).and_then(|()| Ok(shared.rounds.ended(index)?)) {
        Ok(()) | Err(Break::Interrupted) => {}
        Err(Break::Failed(error)) => shared.fail(error),
    }
}

fn run(shared: &Shared, index: usize) -> Result<(), Break> {
    // Shorter than any wait for a packet of this lane, so that the error names the reason of the missing
    // channel.
    let patience = shared.params.limits.setup.min(shared.params.limits.stall) / 2;
    let channel = shared.places.lane(index, patience)?;
    shared.rounds.wait_for_blocks()?;
    Lane::new(shared, index, &channel)?.run()
}

struct Lane<'a> {
    shared: &'a Shared,
    index: usize,
    name: String,
    channel: &'a Channel,
    layout: &'a Layout,
    sink: &'a dyn PageSink,
    method: Method,
    codec: Option<Box<dyn Decoder>>,
    payload: Vec<u8>,
    pages: Vec<u8>,
}

/// The start of the next packet, read together with a payload. Its length is common to all packets.
struct Ahead {
    bytes: [u8; DEVICE_STATE_PACKET_BYTES],
    count: usize,
}

impl Default for Ahead {
    fn default() -> Self {
        Self { bytes: [0; DEVICE_STATE_PACKET_BYTES], count: 0 }
    }
}

impl<'a> Lane<'a> {
    fn new(shared: &'a Shared, index: usize, channel: &'a Channel) -> Result<Self, MigrationError> {
        let compression = shared.params.multifd_compression;
        let name = format!("multifd channel {index}");
        Ok(Self {
            layout: shared.layout()?,
            sink: shared.sink(index)?.as_ref(),
            method: codec::method(compression),
            codec: codec::decoder(compression)?,
            payload: Vec::new(),
            pages: Vec::new(),
            shared,
            index,
            name,
            channel,
        })
    }

    fn run(&mut self) -> Result<(), Break> {
        let mut header = Box::new([0; RAM_PACKET_BYTES]);
        let mut next = Ahead::default();
        while let Some(kind) = self.read_header(&mut header, &next)? {
            if kind == PacketKind::DeviceState {
                next = Ahead::default();
                self.take_chunk(&header[..DEVICE_STATE_PACKET_BYTES])?;
                continue;
            }
            let base = self.channel.bytes_read() - RAM_PACKET_BYTES as u64;
            let view = RamPacketView::decode(&header, &self.layout.table, self.method)
                .map_err(|error| MigrationError::wire(&self.name)(error.at(base)))?;
            let follows = self.shared.rounds.packet(view.packet_number())?;
            next = Ahead::default();
            if follows {
                self.take_following(&view)?;
            } else {
                // A SYNC may be the last packet for a long time, so no header is read ahead of it.
                self.take(&view, if view.is_sync() { None } else { Some(&mut next) })?;
            }
            let received = RAM_PACKET_BYTES + view.payload_bytes();
            self.shared.received_bytes.fetch_add(received as u64, Ordering::Relaxed);
            if view.is_sync() {
                self.sink.settle()?;
                self.shared.rounds.sync(self.index)?;
            }
        }
        Ok(())
    }

    /// Reads a packet's header and returns its kind. `None`: the channel ended between two packets, which is
    /// allowed.
    fn read_header(
        &self,
        header: &mut [u8; RAM_PACKET_BYTES],
        ahead: &Ahead,
    ) -> Result<Option<PacketKind>, MigrationError> {
        let mut got = ahead.count;
        header[..got].copy_from_slice(&ahead.bytes[..got]);
        while got == 0 {
            match self.channel.read_some(&mut header[..HEADER_BYTES]) {
                Ok(0) => return Ok(None),
                Ok(count) => got = count,
                // Between packets a lane may be silent while the main channel lives.
                Err(TransportError::Stalled { .. }) => {
                    if self.shared.stopping.load(Ordering::Acquire) {
                        return Ok(None);
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
        if got < HEADER_BYTES {
            self.channel.read_exact(&mut header[got..HEADER_BYTES])?;
            got = HEADER_BYTES;
        }
        let base = self.channel.bytes_read() - got as u64;
        let known = PacketHeader::peek(&header[..HEADER_BYTES])
            .map_err(|error| MigrationError::wire(&self.name)(error.at(base)))?;
        // `HEADER_BYTES` bytes were read, so the decoder always finds a header.
        let Some(PacketHeader { kind }) = known else { return Ok(None) };
        let bytes =
            if kind == PacketKind::DeviceState { DEVICE_STATE_PACKET_BYTES } else { RAM_PACKET_BYTES };
        if got < bytes {
            self.channel.read_exact(&mut header[got..bytes])?;
        }
        Ok(Some(kind))
    }

    /// Reads a chunk of a device's stream into its inbox.
    fn take_chunk(&self, header: &[u8]) -> Result<(), MigrationError> {
        let base = self.channel.bytes_read() - header.len() as u64;
        let packet = DeviceStatePacket::decode(header)
            .map_err(|error| MigrationError::wire(&self.name)(error.at(base)))?;
        let Some((packet, _)) = packet else {
            return Err(MigrationError::Internal(
                "a device-state packet of full length is incomplete".to_owned(),
            ));
        };
        let inbox = self.shared.streams.find(&packet.name, packet.instance)?;
        let mut payload = inbox.buffer(packet.payload_bytes)?;
        self.channel.read_exact(&mut payload)?;
        let received = (header.len() + payload.len()) as u64;
        inbox.put(payload)?;
        self.shared.rounds.device_packet();
        self.shared.received_bytes.fetch_add(received, Ordering::Relaxed);
        Ok(())
    }

    /// Reads a payload in place and, in the same call, the start of the next packet.
    ///
    /// After a SYNC no packet need follow, so `next` is `None`. Otherwise at least the round's SYNC follows. If
    /// it is late or missing, [`Lane::read_header`] handles that.
    fn read_raw(&self, places: &[RamSlice<'_>], next: Option<&mut Ahead>) -> Result<(), MigrationError> {
        let Some(next) = next else { return Ok(self.channel.read_into_ram(places)?) };
        let bytes: usize = places.iter().map(RamSlice::len).sum();
        let end = self.channel.bytes_read() + bytes as u64;
        match self.channel.read_into_ram_then(places, &mut next.bytes) {
            Ok(()) => {
                next.count = next.bytes.len();
                Ok(())
            }
            Err(TransportError::Stalled { .. } | TransportError::Closed { .. })
                if self.channel.bytes_read() >= end =>
            {
                next.count = (self.channel.bytes_read() - end) as usize;
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }

    fn take(&mut self, view: &RamPacketView<'_>, next: Option<&mut Ahead>) -> Result<(), MigrationError> {
        let Some(block) = view.block() else { return Ok(()) };
        if view.holds_differences() {
            return self.take_differences(view, block);
        }
        let shared = self.shared;
        let has_payload = !shared.carrier.writes_pages();
        let run = |part| run_of(block, part);
        let mut normal: [Option<PageRun>; PACKET_PAGES] = [None; PACKET_PAGES];
        let mut places: Vec<RamSlice<'_>> = Vec::with_capacity(PACKET_PAGES);
        let mut count = 0;
        for (place, part) in normal.iter_mut().zip(view.normal_runs()) {
            let part = run(part);
            shared.rounds.enter(part)?;
            if has_payload {
                places.push(self.sink.prepare(part)?);
            }
            count += part.count;
            *place = Some(part);
        }
        if count > 0 && has_payload {
            self.read_pages(view, count as usize, &places, next)?;
            for part in normal.iter().flatten() {
                self.sink.commit(*part)?;
                shared.rounds.came(*part);
            }
        }
        shared.normal_pages.fetch_add(count, Ordering::Relaxed);
        for part in view.zero_runs() {
            let part = run(part);
            shared.rounds.enter(part)?;
            self.sink.zero(part)?;
            shared.rounds.came(part);
            shared.zero_pages.fetch_add(part.count, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Takes pages that arrive while the guest runs. Each page is placed as a whole, so none is read directly
    /// into guest memory.
    fn take_following(&mut self, view: &RamPacketView<'_>) -> Result<(), MigrationError> {
        let (shared, Some(block)) = (self.shared, view.block()) else { return Ok(()) };
        if view.holds_differences() {
            return Err(self.unannounced());
        }
        let Some(arriving) = shared.postcopy.arriving() else {
            return Err(MigrationError::Internal("pages follow, and none are missing".to_owned()));
        };
        let (normal, zero) = (view.normal().len(), view.zero().len());
        if normal > 0 {
            self.pages.resize(normal * PAGE_SIZE, 0);
            match &mut self.codec {
                Some(codec) => {
                    self.payload.resize(view.payload_bytes(), 0);
                    self.channel.read_exact(&mut self.payload)?;
                    codec.decode(&self.payload, &mut self.pages)?;
                }
                None => self.channel.read_exact(&mut self.pages)?,
            }
        }
        let mut content = &self.pages[..];
        for run in view.normal_runs().map(|part| run_of(block, part)) {
            let (pages, others) = content.split_at(run.count as usize * PAGE_SIZE);
            arriving.on_lane(run, Some(pages))?;
            content = others;
        }
        for run in view.zero_runs().map(|part| run_of(block, part)) {
            arriving.on_lane(run, None)?;
        }
        shared.normal_pages.fetch_add(normal as u64, Ordering::Relaxed);
        shared.zero_pages.fetch_add(zero as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Takes pages that arrive as differences to stored pages, and checks each (specs/extension.md §10).
    fn take_differences(&mut self, view: &RamPacketView<'_>, block: usize) -> Result<(), MigrationError> {
        let wire = MigrationError::wire(&self.name);
        let begin = self.channel.bytes_read();
        let Some(checkpoint) = self.sink.differences()? else { return Err(self.unannounced()) };
        let mut payload = std::mem::take(&mut self.payload);
        payload.resize(view.payload_bytes(), 0);
        self.channel.read_exact(&mut payload)?;
        let name = self.layout.table.name(block);
        let mut content = [0; PAGE_SIZE];
        let pages = view.normal();
        for (offset, delta) in pages.clone().zip(Differences::new(&payload, pages.len())) {
            let run = PageRun { block, first: offset / PAGE_SIZE as u64, count: 1 };
            let about = |error: WireError| {
                let page = format!("page {offset:#x} of block {name:?} in checkpoint {checkpoint}");
                wire(error.at(begin).about(page))
            };
            let delta = delta.map_err(about)?;
            self.shared.rounds.enter(run)?;
            self.sink.current(run, &mut content)?;
            xbzrle::apply(delta, &mut content).map_err(about)?;
            self.sink.prepare(run)?.copy_from(&content)?;
            self.sink.commit(run)?;
        }
        self.payload = payload;
        self.shared.normal_pages.fetch_add(pages.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    fn unannounced(&self) -> MigrationError {
        let rule = "pages as differences, which the source has not announced";
        let begin = self.channel.bytes_read();
        let error = WireError::misbehaved("multifd packet", begin, "specs/extension.md §10", rule);
        MigrationError::wire(&self.name)(error)
    }

    fn read_pages(
        &mut self,
        view: &RamPacketView<'_>,
        count: usize,
        places: &[RamSlice<'_>],
        next: Option<&mut Ahead>,
    ) -> Result<(), MigrationError> {
        let Some(codec) = &mut self.codec else {
            return self.read_raw(places, next);
        };
        self.payload.resize(view.payload_bytes(), 0);
        self.channel.read_exact(&mut self.payload)?;
        self.pages.resize(count * PAGE_SIZE, 0);
        codec.decode(&self.payload, &mut self.pages)?;
        let mut decoded = &self.pages[..];
        for place in places {
            let (pages, others) = decoded.split_at(place.len());
            place.copy_from(pages)?;
            decoded = others;
        }
        Ok(())
    }
}

fn run_of(block: usize, part: sterna_wire::multifd::PageRun) -> PageRun {
    PageRun { block, first: part.offset / PAGE_SIZE as u64, count: part.pages as u64 }
}

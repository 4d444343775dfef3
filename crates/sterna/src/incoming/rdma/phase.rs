//! A phase of an RDMA migration: the commands between a hook of the stream and REGISTER_FINISHED (specs/rdma.md
//! §5.3).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use sterna_transport::rdma::{Access, Adapter, Memory, RdmaError};
use sterna_transport::{Channel, Direction, StreamError};
use sterna_wire::multifd::BlockTable;
use sterna_wire::ram::BlockList;
use sterna_wire::rdma::session::Arrival;
use sterna_wire::rdma::{
    BlockPlace, BlockPlaces, BlockRange, Message, MessageType, Record, Records, RegisterRequest,
    RegisterResult, UnregisterRequest, ZeroRange, encode_empty, encode_records,
};

use super::source_chunk::SourceChunk;
use super::state::Rdma;
use crate::error::{MigrationError, RdmaDifference};
use crate::incoming::carrier::{Hooks, Receiver};
use crate::pages::RamSink;
use crate::rdma::{DestinationStream, register, register_on_demand};

const CHANNEL: &str = "commands over RDMA";

/// Runs the phases of one migration, on its loader's thread.
pub(in crate::incoming) struct Phases<'a> {
    receiver: &'a dyn Receiver,
    rdma: &'a Rdma,
    channel: Arc<Channel>,
    /// For each block of the source's list, its index in this side's RAM.
    blocks: Vec<usize>,
    /// The blocks' places, once the source has requested them.
    places: Option<BlockPlaces>,
    source_chunk: SourceChunk,
    /// The operator was warned that windows are smaller than they should be.
    has_warned: bool,
    /// Whether memory is registered without pinning. `None`: the adapter was not asked yet. Becomes false when
    /// the adapter refuses.
    is_on_demand: Option<bool>,
}

impl<'a> Phases<'a> {
    pub(in crate::incoming) fn new(
        receiver: &'a dyn Receiver,
        rdma: &'a Rdma,
        channel: Arc<Channel>,
    ) -> Self {
        let (blocks, source_chunk) = (Vec::new(), SourceChunk::default());
        Self {
            receiver,
            rdma,
            channel,
            blocks,
            places: None,
            source_chunk,
            has_warned: false,
            is_on_demand: None,
        }
    }
}

impl Hooks for Phases<'_> {
    fn blocks_came(&mut self, list: &BlockList, table: &BlockTable) -> Result<(), MigrationError> {
        let own = list.blocks.iter().map(|block| table.find(block.name.as_bytes()));
        let unknown = || MigrationError::Internal("a block that passed is not in the table".to_owned());
        self.blocks = own.collect::<Option<_>>().ok_or_else(unknown)?;
        Ok(())
    }

    /// Runs commands until the source continues the stream.
    fn run(&mut self) -> Result<(), MigrationError> {
        let stream = self.rdma.stream()?;
        stream.begin_phase().map_err(|error| self.broken(error))?;
        let limit = Some(self.receiver.stall_limit());
        loop {
            let (arrival, message) = stream.next_command(limit).map_err(|error| self.broken(error))?;
            self.rdma.commands.fetch_add(1, Ordering::Relaxed);
            match (arrival, Message::decode(&message).map_err(MigrationError::wire(CHANNEL))?) {
                (Arrival::PhaseOver, _) => return Ok(()),
                (Arrival::Blocks, _) => self.state_blocks(&stream)?,
                (Arrival::Clear, Message::Compress(ranges)) => self.clear(&ranges)?,
                (Arrival::Register, Message::RegisterRequest(requests)) => {
                    self.register(&stream, &requests)?;
                }
                (Arrival::Unregister, Message::UnregisterRequest(requests)) => {
                    self.unregister(&stream, &requests)?;
                }
                (arrival, message) => {
                    let what = format!("{arrival:?} with {:?}", message.kind());
                    return Err(MigrationError::Internal(what));
                }
            }
        }
    }
}

impl Phases<'_> {
    /// Answers RAM_BLOCKS_REQUEST with the blocks' places, and with their keys if pin-all is on. A Sterna
    /// source also gets the keys of blocks that are registered on demand, and needs no others.
    fn state_blocks(&mut self, stream: &DestinationStream) -> Result<(), MigrationError> {
        let adapter = stream.main().connection().adapter();
        let pins_all = stream.pins_all();
        if pins_all || self.rdma.introduction().is_some() {
            for own in self.blocks.clone() {
                self.whole_block(&*adapter, own)?;
            }
        }
        let ram = self.receiver.ram()?;
        if pins_all {
            let of_block = |own: &usize| ram.block(*own).len_bytes();
            let pinned = self.blocks.iter().filter(|own| self.on_demand_key(**own).is_none());
            self.check_room_for_all(&*adapter, pinned.map(of_block).sum())?;
        }
        let mut places = Vec::with_capacity(self.blocks.len());
        for own in self.blocks.clone() {
            let (host_address, length_bytes) =
                (ram.block(own).host_address() as u64, ram.block(own).len_bytes());
            let key = match self.on_demand_key(own) {
                Some(key) if pins_all || self.rdma.introduction().is_some() => key,
                _ if pins_all => self.open(&*adapter, own, 0, length_bytes)?,
                _ => 0,
            };
            places.push(BlockPlace { host_address, offset: 0, length_bytes, key });
        }
        self.answer(stream, &places)?;
        self.places = Some(BlockPlaces::new(places).map_err(MigrationError::wire(CHANNEL))?);
        Ok(())
    }

    /// Checks whether `wanted` bytes can be pinned for `rdma-pin-all`.
    fn check_room_for_all(&self, adapter: &dyn Adapter, wanted: u64) -> Result<(), MigrationError> {
        let limit = self.rdma.pinned_limit_bytes.filter(|_| self.rdma.introduction().is_some());
        if let Some(limit) = limit.filter(|limit| wanted > *limit) {
            return Err(RdmaDifference::PinAll { wanted, limit }.into());
        }
        check_room(adapter, wanted).map_err(|error| registration("all of RAM", 0, error))
    }

    /// The key of a whole block, if the adapter supports on-demand paging instead of pinning. The block is
    /// registered at its first request, and stays registered.
    fn whole_block(&mut self, adapter: &dyn Adapter, own: usize) -> Result<Option<u32>, MigrationError> {
        if let Some(key) = self.on_demand_key(own) {
            return Ok(Some(key));
        }
        if !*self.is_on_demand.get_or_insert_with(|| adapter.has_on_demand_paging()) {
            return Ok(None);
        }
        let block = self.receiver.ram()?.block(own);
        if block.len_bytes() == 0 {
            return Ok(None);
        }
        match register_on_demand(adapter, block, Access::REMOTE_WRITE) {
            Ok(registration) => {
                self.sink()?.follow(own)?;
                let key = registration.rkey();
                self.rdma.windows.lock().add_on_demand(own, registration);
                Ok(Some(key))
            }
            Err(text) => {
                self.is_on_demand = Some(false);
                self.receiver.warn(text);
                Ok(None)
            }
        }
    }

    fn on_demand_key(&self, own: usize) -> Option<u32> {
        self.rdma.windows.lock().on_demand_key(own)
    }

    /// Handles COMPRESS: clears ranges that are zero at the source.
    fn clear(&self, ranges: &Records<'_, ZeroRange>) -> Result<(), MigrationError> {
        for (at, range) in ranges.iter() {
            let BlockRange { block, start, length } =
                self.places()?.cleared(&range, at).map_err(MigrationError::wire(CHANNEL))?;
            let pages = self.sink()?.zero_range(self.own(block)?, start, length)?;
            self.receiver.count_zero_pages(pages);
            self.rdma.zero_ranges.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Handles REGISTER_REQUEST: registers memory that the source is about to write.
    fn register(
        &mut self,
        stream: &DestinationStream,
        requests: &Records<'_, RegisterRequest>,
    ) -> Result<(), MigrationError> {
        let adapter = stream.main().connection().adapter();
        let mut results = Vec::with_capacity(requests.len());
        for (at, request) in requests.iter() {
            let places = self.places()?;
            let asked = places.requested(&request, self.rdma.chunk, at);
            let asked = asked.map_err(MigrationError::wire(CHANNEL))?;
            let place = places.blocks()[asked.block];
            let range = BlockRange { block: self.own(asked.block)?, ..asked };
            let first = request.key - place.offset;
            let key = match (self.whole_block(&*adapter, range.block)?, self.rdma.introduction()) {
                (Some(key), _) => key,
                (None, Some(_)) => self.window_of_sterna(&*adapter, range)?,
                (None, None) => self.window_of_qemu(&*adapter, range, first)?,
            };
            results.push(RegisterResult { key, host_address: place.host_address });
        }
        self.answer(stream, &results)
    }

    /// The key of a window for a Sterna source. A Sterna requests the whole range that it writes with the key,
    /// and returns the window by its first chunk.
    fn window_of_sterna(&self, adapter: &dyn Adapter, range: BlockRange) -> Result<u32, MigrationError> {
        let (known, bytes) = {
            let windows = self.rdma.windows.lock();
            (windows.key_for(range, true), windows.bytes())
        };
        if let Some(key) = known {
            return Ok(key);
        }
        if let Some(limit) = self.rdma.pinned_limit_bytes
            && bytes + range.length > limit
        {
            let wanted = range.length;
            return Err(RdmaDifference::PinnedLimit { wanted, registered: bytes, limit }.into());
        }
        self.open(adapter, range.block, range.start, range.length)
    }

    /// The key of a window for a QEMU source. A QEMU writes anywhere in its chunk around the requested byte.
    fn window_of_qemu(
        &mut self,
        adapter: &dyn Adapter,
        asked: BlockRange,
        first: u64,
    ) -> Result<u32, MigrationError> {
        let (block, end) = (asked.block, asked.start + asked.length);
        let block_bytes = self.receiver.ram()?.block(block).len_bytes();
        let mut piece = self.source_chunk.asked_for(block, first).max(self.rdma.chunk).bytes();
        let around = |piece: u64| {
            let start = asked.start.min(first / piece * piece);
            let end = end.max((first / piece + 1).saturating_mul(piece)).min(block_bytes);
            BlockRange { block, start, length: end - start }
        };
        if let Some(key) = self.rdma.windows.lock().key_for(around(piece), false) {
            return Ok(key);
        }
        let (wanted, locked) = (piece, adapter.locked_memory());
        while piece > self.rdma.chunk.bytes() && !locked.has_room(around(piece).length) {
            piece /= 2;
        }
        if piece < wanted && !std::mem::replace(&mut self.has_warned, true) {
            let (limit, pinned) = (locked.limit_bytes.unwrap_or(u64::MAX), locked.pinned_bytes);
            self.receiver.warn(format!(
                "the locked-memory limit is {limit} bytes and {pinned} are locked, so memory is registered in windows of \
                 {piece} bytes: a QEMU source with a larger x-rdma-chunk-size fails with a remote access error. Raise the \
                 limit (ulimit -l, LimitMEMLOCK= of the service)"
            ));
        }
        let BlockRange { start, length, .. } = around(piece);
        self.open(adapter, block, start, length)
    }

    /// Handles UNREGISTER_REQUEST: releases windows that the source no longer writes. A block that is
    /// registered on demand stays registered.
    fn unregister(
        &self,
        stream: &DestinationStream,
        requests: &Records<'_, UnregisterRequest>,
    ) -> Result<(), MigrationError> {
        let places = self.places()?;
        for (at, request) in requests.iter() {
            let own = self.blocks.get(request.block as usize).copied();
            let begins = |range: BlockRange| {
                own.is_some_and(|own| self.rdma.windows.lock().begins_at(own, range.start))
            };
            let range = places.given_back(&request, self.rdma.chunk, begins, at);
            let range = range.map_err(MigrationError::wire(CHANNEL))?;
            let taken = self.rdma.windows.lock().take(self.own(range.block)?, range.start);
            // Deregistering takes time, so it happens without the lock.
            drop(taken);
        }
        let mut message = Vec::new();
        let kind = MessageType::UnregisterFinished;
        encode_empty(kind, requests.len() as u32, &mut message).map_err(MigrationError::wire(CHANNEL))?;
        self.say(stream, kind, &message)
    }

    /// Registers a part of a block for the source's writes, and returns the key.
    ///
    /// Exactly that part is registered, even if the backing memory has larger pages. The source counts its
    /// requests against the limits of both sides.
    fn open(
        &self,
        adapter: &dyn Adapter,
        own: usize,
        start: u64,
        length: u64,
    ) -> Result<u32, MigrationError> {
        let block = self.receiver.ram()?.block(own);
        self.sink()?.open(own, start, length)?;
        let memory = Memory::of_block(block, start, length as usize)?;
        let window = register(adapter, memory, Access::REMOTE_WRITE);
        let window = window.map_err(|error| registration(block.name(), start, error))?;
        let key = window.rkey();
        self.rdma.windows.lock().add((own, start), window);
        Ok(key)
    }

    fn answer<T: Record>(&self, stream: &DestinationStream, records: &[T]) -> Result<(), MigrationError> {
        let mut message = Vec::new();
        encode_records(records, &mut message).map_err(MigrationError::wire(CHANNEL))?;
        self.say(stream, T::TYPE, &message)
    }

    fn say(
        &self,
        stream: &DestinationStream,
        kind: MessageType,
        message: &[u8],
    ) -> Result<(), MigrationError> {
        let limit = Some(self.receiver.stall_limit());
        stream.answer(kind, message, limit).map_err(|error| self.broken(error))
    }

    fn places(&self) -> Result<&BlockPlaces, MigrationError> {
        let missing = || MigrationError::Internal("a command came before the blocks".to_owned());
        self.places.as_ref().ok_or_else(missing)
    }

    fn sink(&self) -> Result<&RamSink, MigrationError> {
        let missing = || MigrationError::Internal("RDMA into something that is no memory".to_owned());
        self.receiver.ram_sink().ok_or_else(missing)
    }

    /// The index in this side's RAM of a block that was checked before.
    fn own(&self, block: usize) -> Result<usize, MigrationError> {
        let missing = || MigrationError::Internal(format!("block {block} passed and is unknown"));
        self.blocks.get(block).copied().ok_or_else(missing)
    }

    fn broken(&self, error: StreamError) -> MigrationError {
        self.channel.stream_error(Direction::Read, error).into()
    }
}

fn check_room(adapter: &dyn Adapter, wanted: u64) -> Result<(), RdmaError> {
    let locked = adapter.locked_memory();
    match locked.limit_bytes {
        Some(limit) if !locked.has_room(wanted) => {
            Err(RdmaError::LockedMemory { wanted, pinned: locked.pinned_bytes, limit })
        }
        _ => Ok(()),
    }
}

/// The error for memory of this side that could not be registered.
fn registration(block: &str, offset: u64, error: RdmaError) -> MigrationError {
    MigrationError::system(format!("RAM block {block:?} from {offset:#x} on: {error}"), error)
}

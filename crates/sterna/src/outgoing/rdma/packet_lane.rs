//! A lane between two Sternas: multifd packets on its own queue pair (`specs/rdma.md §9`).
//!
//! Each packet is sent after its pages.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use sterna_ram::{GuestRam, PAGE_SIZE};
use sterna_transport::{Channel, IoPart, StreamError};
use sterna_wire::limits::PACKET_PAGES;
use sterna_wire::multifd::{RAM_PACKET_BYTES, RamPacketEncoder};
use sterna_wire::rdma::BlockRange;

use super::super::lanes::MultifdShared;
use super::work::Work;
use crate::error::MigrationError;
use crate::order::PageRun;
use crate::pages::PageWriter;
use crate::rdma::LaneSourceStream;

/// The most bytes that all lanes together take ahead of their WRITEs. Memory is registered this far ahead.
const AHEAD_BYTES: u64 = 1 << 30;
/// The most bytes in flight on one lane.
const IN_FLIGHT_BYTES: u64 = 8 << 20;

/// Writes pages into the destination's memory, and then the packet that names them.
pub(in crate::outgoing) struct PacketLane {
    work: Arc<Work>,
    _end: Arc<EndOfLanes>,
    stream: Arc<LaneSourceStream>,
    channel: Arc<Channel>,
    name: String,
    ram: GuestRam,
    shared: Arc<MultifdShared>,
    packets: RamPacketEncoder,
    /// The block and ranges of the packet that is being filled.
    open: Option<usize>,
    ranges: Vec<BlockRange>,
    /// Filled packets whose pages are not all posted.
    filled: VecDeque<Packet>,
    filled_bytes: u64,
    most_filled: u64,
    /// Posted packets that may be incomplete: the number of WRITEs, and their ranges.
    posted: VecDeque<(usize, Vec<BlockRange>)>,
    posted_bytes: u64,
    /// The number of complete WRITEs of the oldest packet in `posted`.
    complete: usize,
    /// `Some` while bytes are in flight: the time up to which that was counted.
    moving_since: Option<Instant>,
}

/// Ends the work when the last lane is dropped, because no more pages follow.
struct EndOfLanes(Arc<Work>);

impl Drop for EndOfLanes {
    fn drop(&mut self) {
        self.0.end();
    }
}

struct Packet {
    header: Vec<u8>,
    /// Pages that are not posted yet.
    left: Vec<BlockRange>,
    normal: u64,
    zero: u64,
}

/// The condition on which the lane stops posting.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Until {
    /// More pages may be taken.
    Room,
    /// All pages that were taken are at the destination.
    Done,
}

impl PacketLane {
    /// Creates one lane for each connection.
    pub(in crate::outgoing) fn all(
        work: &Arc<Work>,
        ram: &GuestRam,
        shared: &Arc<MultifdShared>,
    ) -> Vec<Self> {
        let end = Arc::new(EndOfLanes(Arc::clone(work)));
        let lanes = work.rdma.lanes.len();
        let lane = |index| Self::new(work, (index, lanes), ram, shared, &end);
        (0..lanes).map(lane).collect()
    }

    fn new(
        work: &Arc<Work>,
        (index, lanes): (usize, usize),
        ram: &GuestRam,
        shared: &Arc<MultifdShared>,
        end: &Arc<EndOfLanes>,
    ) -> Self {
        let (stream, channel) = work.rdma.lanes[index].clone();
        Self {
            work: Arc::clone(work),
            _end: Arc::clone(end),
            stream,
            channel,
            name: format!("lane {index}"),
            ram: ram.clone(),
            shared: Arc::clone(shared),
            packets: RamPacketEncoder::new(crate::codec::method(crate::params::Compression::None)),
            open: None,
            ranges: Vec::new(),
            filled: VecDeque::new(),
            filled_bytes: 0,
            most_filled: AHEAD_BYTES / lanes.max(1) as u64,
            posted: VecDeque::new(),
            posted_bytes: 0,
            complete: 0,
            moving_since: None,
        }
    }

    /// Splits a run into parts that fit the open packet. Full packets wait until their pages are posted.
    fn each_part(
        &mut self,
        run: PageRun,
        add: impl Fn(&mut Self, PageRun) -> Result<(), MigrationError>,
    ) -> Result<(), MigrationError> {
        if self.open.is_some_and(|block| block != run.block) {
            self.fill()?;
        }
        let mut rest = Some(run);
        while let Some(run) = rest {
            if self.packets.is_full() && self.open.is_some() {
                self.fill()?;
            }
            if self.open.is_none() {
                let name = self.name.clone();
                let wire = |error| MigrationError::Wire { channel: name, error };
                self.packets.begin(self.ram.block(run.block).name()).map_err(wire)?;
                self.open = Some(run.block);
            }
            let (part, left) = run.split((PACKET_PAGES - self.packets.pages()) as u64);
            add(self, part)?;
            rest = left;
        }
        self.go_on(Until::Room)
    }

    /// Completes the open packet: its pages may be registered and written.
    fn fill(&mut self) -> Result<(), MigrationError> {
        if self.open.take().is_none() {
            return Ok(());
        }
        let normal = self.packets.normal_pages();
        let zero = self.packets.pages() - normal;
        let number = self.shared.packet_number.fetch_add(1, Ordering::Relaxed);
        let header = self.packets.finish(number, (normal * PAGE_SIZE) as u32).to_vec();
        let ranges = std::mem::take(&mut self.ranges);
        self.work.add_packet(&ranges)?;
        self.filled_bytes += (normal * PAGE_SIZE) as u64;
        self.filled.push_back(Packet { header, left: ranges, normal: normal as u64, zero: zero as u64 });
        Ok(())
    }

    /// Posts packets until the state `until` is reached.
    fn go_on(&mut self, until: Until) -> Result<(), MigrationError> {
        loop {
            let completed = self.stream.completed_writes().map_err(|error| self.broken(error))?;
            self.completed(completed)?;
            let mut has_posted = false;
            while self.posted_bytes < IN_FLIGHT_BYTES && self.post()? {
                has_posted = true;
            }
            let is_reached = match until {
                Until::Room => self.filled_bytes <= self.most_filled,
                Until::Done => self.filled.is_empty() && self.posted.is_empty(),
            };
            if is_reached {
                return Ok(());
            }
            if has_posted {
                continue;
            }
            // With no WRITE in flight, the connection itself does not report its end. This lane may wait for
            // memory that WRITEs of another lane use, and that lane may have ended.
            if self.channel.is_shut_down() {
                return Err(self.work.rdma.cancelled());
            }
            let in_flight = self.writes_in_flight();
            if in_flight > 0 {
                let waited = self
                    .shared
                    .counters
                    .waiting(|| self.stream.wait_for_writes(in_flight - 1, Some(self.work.rdma.stall)));
                let completed = waited.map_err(|error| self.broken(error))?;
                self.completed(completed)?;
            } else {
                let left = self.filled.front().map(|packet| &packet.left[..]).unwrap_or_default();
                self.shared.counters.idle(|| self.work.wait_for_memory(left))?;
            }
        }
    }

    /// Posts the pages of the oldest packet that are registered on both sides. Gives whether anything was posted.
    ///
    /// Sends the packet after all of its pages are posted.
    fn post(&mut self) -> Result<bool, MigrationError> {
        let Some(packet) = self.filled.front_mut() else { return Ok(false) };
        let (writes, taken) = self.work.take_packet(&mut packet.left)?;
        let is_whole = packet.left.is_empty();
        if writes.is_empty() && !is_whole {
            return Ok(false);
        }
        let bytes: u64 = taken.iter().map(|range| range.length).sum();
        let counters = &self.shared.counters;
        if !writes.is_empty() {
            counters.throttled(self.shared.limiter.take(bytes));
            let written = self.stream.write_memory(&writes, Some(self.work.rdma.stall));
            written.map_err(|error| self.work.rdma.failed()(error))?;
            self.moving_since.get_or_insert_with(Instant::now);
            self.work.rdma.counts.posted(writes.len() as u64, bytes);
            self.posted_bytes += bytes;
            self.posted.push_back((writes.len(), taken));
        }
        if is_whole && let Some(packet) = self.filled.pop_front() {
            let header_bytes = packet.header.len() as u64;
            counters.throttled(self.shared.limiter.take(header_bytes));
            // A save thread of a stopped device may write its whole packet in between.
            let turn = self.channel.turn();
            self.channel.write_parts(&[IoPart::Bytes(&packet.header)])?;
            drop(turn);
            counters.multifd(header_bytes);
            counters.pages(0, packet.zero);
            self.filled_bytes -= packet.normal * PAGE_SIZE as u64;
        }
        Ok(true)
    }

    /// Records that `writes` more WRITEs are complete.
    fn completed(&mut self, writes: usize) -> Result<(), MigrationError> {
        self.look_at_clock();
        self.complete += writes;
        while let Some((count, _)) = self.posted.front()
            && *count <= self.complete
        {
            let Some((count, ranges)) = self.posted.pop_front() else { break };
            self.complete -= count;
            let bytes: u64 = ranges.iter().map(|range| range.length).sum();
            self.posted_bytes -= bytes;
            self.work.packet_is_complete(&ranges)?;
            // Pages are counted when they have arrived, as their time is.
            self.shared.counters.multifd(bytes);
            self.shared.counters.pages(bytes / PAGE_SIZE as u64, 0);
        }
        if self.posted.is_empty() {
            self.moving_since = None;
        }
        Ok(())
    }

    fn writes_in_flight(&self) -> usize {
        self.posted.iter().map(|(count, _)| count).sum::<usize>() - self.complete
    }

    /// Counts the time with bytes in flight as time in which bytes move.
    fn look_at_clock(&mut self) {
        if let Some(since) = &mut self.moving_since {
            let now = Instant::now();
            self.shared.counters.moved(now - *since);
            *since = now;
        }
    }

    fn broken(&self, error: StreamError) -> MigrationError {
        self.work.rdma.failed()(error)
    }

    fn range(run: PageRun) -> BlockRange {
        let page = PAGE_SIZE as u64;
        BlockRange { block: run.block, start: run.first * page, length: run.count * page }
    }
}

impl PageWriter for PacketLane {
    fn write_run(&mut self, run: PageRun) -> Result<(), MigrationError> {
        self.each_part(run, |lane, part| {
            for page in part.first..part.end() {
                push(lane.packets.push_normal(page * PAGE_SIZE as u64))?;
            }
            let range = Self::range(part);
            match lane.ranges.last_mut() {
                Some(last) if last.block == range.block && last.end() == range.start => {
                    last.length += range.length;
                }
                _ => lane.ranges.push(range),
            }
            Ok(())
        })
    }

    fn zero_run(&mut self, run: PageRun) -> Result<(), MigrationError> {
        self.each_part(run, |lane, part| {
            (part.first..part.end())
                .try_for_each(|page| push(lane.packets.push_zero(page * PAGE_SIZE as u64)))
        })
    }

    fn device_packet(&mut self, packet: &[u8]) -> Result<(), MigrationError> {
        let bytes = packet.len() as u64;
        self.shared.counters.throttled(self.shared.limiter.take(bytes));
        self.shared.counters.moving(|| {
            let _turn = self.channel.turn();
            self.channel.write_parts(&[IoPart::Bytes(packet)])
        })?;
        self.shared.counters.multifd(bytes);
        Ok(())
    }

    /// Waits until every WRITE of this lane is complete before SYNC is sent.
    fn barrier(&mut self) -> Result<(), MigrationError> {
        self.fill()?;
        self.go_on(Until::Done)?;
        let number = self.shared.packet_number.fetch_add(1, Ordering::Relaxed);
        let packet = self.packets.sync(number).to_vec();
        self.shared.counters.moving(|| {
            let _turn = self.channel.turn();
            self.channel.write_parts(&[IoPart::Bytes(&packet)])
        })?;
        self.shared.counters.multifd(RAM_PACKET_BYTES as u64);
        Ok(())
    }

    fn abort(&mut self) {
        self.channel.shutdown();
    }
}

fn push(taken: bool) -> Result<(), MigrationError> {
    if taken {
        return Ok(());
    }
    Err(MigrationError::Internal("a multifd packet took more pages than it holds".to_owned()))
}

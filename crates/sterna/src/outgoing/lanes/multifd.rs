//! A lane that sends multifd packets of up to 128 pages (specs/stream.md §3.4).
//!
//! Each packet is one vectored write.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use sterna_ram::{GuestRam, PAGE_SIZE};
use sterna_transport::{Channel, IoPart};
use sterna_wire::limits::PACKET_PAGES;
use sterna_wire::multifd::{RAM_PACKET_BYTES, RamPacketEncoder};

use super::super::guest_source::PageReader;
use super::super::main_stream::MainStream;
use super::super::measure::Counters;
use super::super::protection::{Coded, PageSums, SentPages, add_bytes, add_copied};
use super::changes::{Changes, DifferencePacket, SharedDeltas};
use super::limiter::Limiter;
use crate::codec::Encoder;
use crate::error::MigrationError;
use crate::order::PageRun;
use crate::pages::PageWriter;

/// Writes pages to one multifd channel.
pub(in crate::outgoing) struct MultifdLane {
    pub channel: Arc<Channel>,
    pub name: String,
    pub reader: Arc<dyn PageReader>,
    pub ram: GuestRam,
    pub packets: RamPacketEncoder,
    pub codec: Option<Box<dyn Encoder>>,
    pub shared: Arc<MultifdShared>,
    /// The block and the runs with content of the packet that is being filled.
    pub open: Option<usize>,
    pub normal: Vec<PageRun>,
    pub pages: Vec<u8>,
    pub payload: Vec<u8>,
    /// Zero pages are sent in packets, independently of `zeros_to`.
    pub keeps_zeros: bool,
    /// Created when the first checkpoint is sent with differences.
    pub changes: Option<Box<Changes>>,
}

/// Shared by the multifd lanes of a migration.
pub(in crate::outgoing) struct MultifdShared {
    /// One packet count for all channels.
    pub packet_number: AtomicU64,
    pub counters: Arc<Counters>,
    pub limiter: Arc<Limiter>,
    /// The main channel for zero pages, with `zero-page-detection=legacy`.
    pub zeros_to: Option<Arc<Mutex<MainStream>>>,
    /// `Some` if checkpoints send differences.
    pub deltas: Option<SharedDeltas>,
    /// The sums of the pages of checkpoints.
    pub sent: Option<Arc<SentPages>>,
}

impl MultifdShared {
    fn next_number(&self) -> u64 {
        self.packet_number.fetch_add(1, Ordering::Relaxed)
    }

    /// The sums to add pages to; `None` in the seeding.
    fn sent(&self) -> Option<&SentPages> {
        self.sent.as_deref().filter(|sent| sent.is_counting())
    }
}

impl PageWriter for MultifdLane {
    fn write_run(&mut self, run: PageRun) -> Result<(), MigrationError> {
        match self.shared.deltas.as_ref().and_then(SharedDeltas::checkpoint) {
            Some(number) => self.write_changes(number, run),
            None => self.write_whole(run),
        }
    }

    fn zero_run(&mut self, run: PageRun) -> Result<(), MigrationError> {
        if let Some(deltas) = &self.shared.deltas
            && let Some(number) = deltas.checkpoint()
        {
            deltas.cache.zero(number, run);
        }
        if let Some(sent) = self.shared.sent() {
            let mut sums = PageSums::default();
            sums.zeros(run.block, run.first, run.count);
            sent.add(&sums);
        }
        if let Some(main) = self.shared.zeros_to.clone().filter(|_| !self.keeps_zeros) {
            return self.zero_records(&main, run);
        }
        self.each_part(run, |lane, part| {
            for page in part.first..part.end() {
                push(lane.packets.push_zero(page * PAGE_SIZE as u64))?;
            }
            Ok(())
        })
    }

    fn device_packet(&mut self, packet: &[u8]) -> Result<(), MigrationError> {
        let bytes = packet.len() as u64;
        self.shared.counters.throttled(self.shared.limiter.take(bytes));
        write(&self.shared.counters, &self.channel, &[IoPart::Bytes(packet)])?;
        self.shared.counters.multifd(bytes);
        Ok(())
    }

    fn barrier(&mut self) -> Result<(), MigrationError> {
        self.flush()?;
        self.flush_differences()?;
        self.sync()
    }

    #[cfg(feature = "postcopy")]
    fn keep_to_itself(&mut self) {
        self.keeps_zeros = true;
    }

    #[cfg(feature = "postcopy")]
    fn channel(&self) -> Option<&Channel> {
        Some(&self.channel)
    }

    fn abort(&mut self) {
        self.channel.shutdown();
    }
}

impl MultifdLane {
    fn write_whole(&mut self, run: PageRun) -> Result<(), MigrationError> {
        self.each_part(run, |lane, part| {
            for page in part.first..part.end() {
                push(lane.packets.push_normal(page * PAGE_SIZE as u64))?;
            }
            lane.normal.push(part);
            Ok(())
        })
    }

    /// Sends pages of checkpoint `number`, as differences where they are shorter.
    fn write_changes(&mut self, number: u64, run: PageRun) -> Result<(), MigrationError> {
        let (reader, shared) = (Arc::clone(&self.reader), Arc::clone(&self.shared));
        let Some(SharedDeltas { cache, .. }) = &shared.deltas else { return self.write_whole(run) };
        if !reader.is_copy() {
            // A whole page is read when its packet is sent. The guest may write it after the comparison here.
            cache.forget(run);
            return self.write_whole(run);
        }
        let content = reader.content(run)?;
        let mut changes = self.changes.take().unwrap_or_else(Changes::new);
        let mut whole = PageRun { count: 0, ..run };
        let mut sums = PageSums::default();
        for page in run.first..run.end() {
            let at = (page - run.first) as usize * PAGE_SIZE;
            let Some(content) = content.part(at, PAGE_SIZE) else {
                return Err(MigrationError::Internal(format!("{run:?} came without its last pages")));
            };
            let Changes { scratch, packet } = &mut *changes;
            let coded =
                shared.counters.encoding(|| cache.send(number, (run.block, page), &content, scratch))?;
            if matches!(coded, Coded::Whole(_) | Coded::Uncached) {
                if whole.count == 0 {
                    whole.first = page;
                }
                whole.count += 1;
                continue;
            }
            if whole.count > 0 {
                self.write_whole(whole)?;
                whole.count = 0;
            }
            if let Coded::Delta(delta, becomes) = coded {
                sums.page(run.block, page, becomes);
                if !packet.has_room(run.block) {
                    self.send_differences(packet)?;
                }
                let block = (run.block, self.ram.block(run.block).name());
                push(packet.push(block, page, delta).map_err(self.wire())?)?;
            }
        }
        if whole.count > 0 {
            self.write_whole(whole)?;
        }
        self.changes = Some(changes);
        if let Some(sent) = shared.sent() {
            sent.add(&sums);
        }
        Ok(())
    }

    /// Sends the open packet of differences, if there is one.
    fn flush_differences(&mut self) -> Result<(), MigrationError> {
        let Some(mut changes) = self.changes.take() else { return Ok(()) };
        self.send_differences(&mut changes.packet)?;
        self.changes = Some(changes);
        Ok(())
    }

    fn send_differences(&self, packet: &mut DifferencePacket) -> Result<(), MigrationError> {
        let Some((pages, payload_bytes)) = packet.waiting() else { return Ok(()) };
        let bytes = (RAM_PACKET_BYTES + payload_bytes) as u64;
        self.shared.counters.throttled(self.shared.limiter.take(bytes));
        let (header, payload) = packet.finish(self.shared.next_number());
        write(&self.shared.counters, &self.channel, &[IoPart::Bytes(header), IoPart::Bytes(payload)])?;
        packet.clear();
        self.shared.counters.multifd(bytes);
        self.shared.counters.pages(pages as u64, 0);
        Ok(())
    }

    /// Splits a run into parts that fit the open packet, and sends full packets.
    fn each_part(
        &mut self,
        run: PageRun,
        add: impl Fn(&mut Self, PageRun) -> Result<(), MigrationError>,
    ) -> Result<(), MigrationError> {
        if self.open.is_some_and(|block| block != run.block) {
            self.flush()?;
        }
        let mut rest = Some(run);
        while let Some(run) = rest {
            if self.packets.is_full() && self.open.is_some() {
                self.flush()?;
            }
            if self.open.is_none() {
                self.packets.begin(self.ram.block(run.block).name()).map_err(self.wire())?;
                self.open = Some(run.block);
            }
            let (part, left) = run.split((PACKET_PAGES - self.packets.pages()) as u64);
            add(self, part)?;
            rest = left;
        }
        Ok(())
    }

    /// Sends the open packet, if there is one.
    fn flush(&mut self) -> Result<(), MigrationError> {
        let Some(block) = self.open.take() else { return Ok(()) };
        let normal = self.packets.normal_pages();
        let zero = self.packets.pages() - normal;
        self.payload.clear();
        let is_read = self.read_pages(normal)?;
        if let (Some(codec), true) = (&mut self.codec, normal > 0) {
            self.shared.counters.encoding(|| codec.encode(&self.pages, &mut self.payload))?;
        }
        let raw = self.codec.is_none();
        let payload_bytes = if raw { normal * PAGE_SIZE } else { self.payload.len() };
        let bytes = (RAM_PACKET_BYTES + payload_bytes) as u64;
        self.shared.counters.throttled(self.shared.limiter.take(bytes));
        let number = self.shared.next_number();
        let header = self.packets.finish(number, payload_bytes as u32);
        let mut parts = Vec::with_capacity(self.normal.len() + 1);
        parts.push(IoPart::Bytes(&header[..]));
        if raw && is_read {
            parts.push(IoPart::Bytes(&self.pages));
        } else if raw {
            for run in &self.normal {
                debug_assert_eq!(run.block, block);
                parts.push(IoPart::Ram(self.reader.content(*run)?));
            }
        } else {
            parts.push(IoPart::Bytes(&self.payload));
        }
        write(&self.shared.counters, &self.channel, &parts)?;
        self.normal.clear();
        self.shared.counters.multifd(bytes);
        self.shared.counters.pages(normal as u64, zero as u64);
        Ok(())
    }

    /// Adds the packet's pages to the sums. Copies them if they must be read only once.
    ///
    /// False: they were not read.
    fn read_pages(&mut self, count: usize) -> Result<bool, MigrationError> {
        let sent = self.shared.sent();
        // The sums must cover the bytes that are sent, even if the guest changes the memory meanwhile.
        let is_read = self.codec.is_some() || sent.is_some() && !self.reader.is_copy();
        if count == 0 || !is_read && sent.is_none() {
            return Ok(false);
        }
        if is_read {
            self.pages.resize(count * PAGE_SIZE, 0);
        }
        let (mut sums, mut at) = (PageSums::default(), 0);
        for run in &self.normal {
            let content = self.reader.content(*run)?;
            if !is_read {
                add_copied(&mut sums, *run, &content)?;
                continue;
            }
            let place = &mut self.pages[at..at + content.len()];
            content.copy_to(place)?;
            if sent.is_some() {
                add_bytes(&mut sums, *run, place);
            }
            at += content.len();
        }
        if let Some(sent) = sent {
            sent.add(&sums);
        }
        Ok(is_read)
    }

    fn sync(&mut self) -> Result<(), MigrationError> {
        let number = self.shared.next_number();
        let packet = self.packets.sync(number);
        write(&self.shared.counters, &self.channel, &[IoPart::Bytes(packet)])?;
        self.shared.counters.multifd(RAM_PACKET_BYTES as u64);
        Ok(())
    }

    fn zero_records(&self, main: &Mutex<MainStream>, run: PageRun) -> Result<(), MigrationError> {
        self.shared.counters.throttled(self.shared.limiter.take(9 * run.count));
        let name = self.ram.block(run.block).name();
        self.shared.counters.moving(|| {
            main.lock().ram_records(|records, out| {
                (run.first..run.end())
                    .try_for_each(|page| records.zero(run.block, name, page * PAGE_SIZE as u64, out))
            })
        })?;
        self.shared.counters.pages(0, run.count);
        Ok(())
    }

    fn wire(&self) -> impl Fn(sterna_wire::WireError) -> MigrationError + 'static {
        let name = self.name.clone();
        move |error| MigrationError::Wire { channel: name.clone(), error }
    }
}

fn push(taken: bool) -> Result<(), MigrationError> {
    if taken {
        return Ok(());
    }
    Err(MigrationError::Internal("a multifd packet took more pages than it holds".to_owned()))
}

/// Writes a packet when the channel is free.
///
/// Save threads of stopped devices also write packets on any channel.
fn write(counters: &Counters, channel: &Channel, packet: &[IoPart<'_>]) -> Result<(), MigrationError> {
    counters.moving(|| {
        let _turn = channel.turn();
        channel.write_parts(packet)
    })?;
    Ok(())
}

//! A save thread: reads one device's stream, chunk by chunk.

use std::time::{Duration, Instant};

use sterna_wire::multifd::{DEVICE_STATE_PACKET_BYTES, DeviceChunk, DeviceChunkKind, DeviceStatePacket};

use super::super::shared::Shared;
use super::{Chunk, LITTLE_BYTES, Order, Point, Progress, Streams, TELLING_BYTES};
use crate::device_stream::{DeviceStream, RemainingState};
use crate::error::{MigrationError, VmError};
use crate::interruption::Break;
use crate::streams::{CHUNK_BYTES, CONFIGURATION_BYTES, Streamed};
use crate::threads::call;

/// The size in bytes of the head of a chunk with data.
const HEAD: usize = 12;
/// The offset of a chunk's data in its packet.
const DATA_AT: usize = DEVICE_STATE_PACKET_BYTES + HEAD;
/// Lack of credit makes no chunk smaller than this, unless the total credit is smaller.
const LEAST_CHUNK: u64 = 64 << 10;

/// Works until the stream is read, or the migration ends.
pub(super) fn run(shared: &Shared, streams: &Streams, index: usize, device: &Streamed) {
    let Point { next, data_bytes, initial_is_told } = streams.point(index);
    let mut saver = Saver {
        shared,
        streams,
        index,
        device,
        chunk_bytes: CHUNK_BYTES,
        next,
        data_bytes,
        tells_initial: streams.while_running && !initial_is_told,
        is_at_end: false,
        waited_for_credit: Duration::ZERO,
        waited_for_network: Duration::ZERO,
    };
    if let Err(error) = Break::failure(saver.run()) {
        shared.fail(error);
    }
    shared.driver.nudge();
}

struct Saver<'a> {
    shared: &'a Shared,
    streams: &'a Streams,
    index: usize,
    device: &'a Streamed,
    /// The largest number of data bytes in a chunk.
    chunk_bytes: usize,
    /// The index of the next chunk.
    next: u32,
    data_bytes: u64,
    /// The end of the initial bytes is not sent yet.
    tells_initial: bool,
    /// The stopped device has reported the end of its stream.
    is_at_end: bool,
    /// The time that the next chunk has waited for credit.
    waited_for_credit: Duration,
    waited_for_network: Duration,
}

/// The result of reading a chunk.
enum Read {
    Sent {
        bytes: u64,
        /// Whether the device ran.
        runs: bool,
    },
    /// The device has no data, or no call may be made now.
    Nothing,
}

impl Saver<'_> {
    fn run(&mut self) -> Result<(), Break> {
        let expected = call("DeviceStream::expected_bytes_per_second", || {
            self.device.stream.expected_bytes_per_second()
        });
        self.note(|progress| progress.bytes_per_second = expected);
        // The time counts from the start, also if nothing is read before the stop.
        self.ask_remaining()?;
        if self.streams.while_running {
            let granted = self.streams.outbox.first_grant(self.index)?;
            let payload = (granted / 4).max(LEAST_CHUNK).min(granted).min((CHUNK_BYTES + HEAD) as u64);
            self.chunk_bytes = (payload as usize).saturating_sub(HEAD).max(1);
            self.send_again()?;
        }
        let mut round = None;
        loop {
            match self.streams.await_order(round) {
                None => {
                    self.ask_remaining()?;
                }
                Some(Order::Run(number)) => {
                    round = Some(number);
                    self.read_running()?;
                }
                Some(Order::Finish) => return self.finish(),
                Some(Order::Park | Order::End) => return Ok(()),
            }
        }
    }

    /// Sends chunks again that the destination may lack after a lost session.
    fn send_again(&mut self) -> Result<(), Break> {
        let mut from = 0;
        while let Some((index, packet)) = self.streams.outbox.kept_from(self.index, from) {
            let mut buffer = self.streams.outbox.buffer(self.index)?;
            buffer.clear();
            buffer.extend_from_slice(&packet);
            self.put_out(buffer, true)?;
            from = index + 1;
        }
        Ok(())
    }

    /// Reads the bytes that remain now, once per round. A device that keeps changing would otherwise occupy the
    /// lanes.
    fn read_running(&mut self) -> Result<(), Break> {
        let Some(remaining) = self.ask_remaining()? else { return Ok(()) };
        if !self.streams.while_running {
            // The stream is read only in the pause, so the switchover need not wait for a first reading.
            self.note(|progress| progress.is_tried = true);
            return Ok(());
        }
        if remaining.initial_bytes == 0 && self.tells_initial {
            self.tell_initial()?;
        }
        let before = remaining.running_bytes();
        let mut budget = before;
        while budget > 0 {
            match self.chunk(budget.min(self.chunk_bytes as u64) as usize)? {
                Read::Sent { bytes, runs: true } => budget = budget.saturating_sub(bytes),
                Read::Sent { runs: false, .. } | Read::Nothing => break,
            }
        }
        let left = self.ask_remaining()?.map_or(0, |remaining| remaining.running_bytes());
        self.note(|progress| {
            progress.is_tried = true;
            progress.is_shrinking = left > LITTLE_BYTES && left < before / 4 * 3;
        });
        Ok(())
    }

    /// Sends an empty chunk as the end mark of the initial bytes.
    ///
    /// It is needed if no initial bytes are left to read.
    fn tell_initial(&mut self) -> Result<(), Break> {
        self.tells_initial = false;
        let mut packet = self.streams.outbox.buffer(self.index)?;
        self.head(&mut packet, DeviceChunkKind::Data { initial_ends: true }, 0)?;
        self.send(packet, true)
    }

    /// Reads the rest of the stopped device's stream, then its configuration.
    fn finish(&mut self) -> Result<(), Break> {
        while let Read::Sent { .. } = self.chunk(self.chunk_bytes)? {}
        let Some((configuration, _)) =
            self.call("read its configuration", |device| device.configuration())?
        else {
            return Ok(());
        };
        if configuration.len() > CONFIGURATION_BYTES {
            return Err(MigrationError::Internal(format!(
                "{}: a configuration of {} bytes, more than {CONFIGURATION_BYTES}",
                self.device,
                configuration.len()
            ))
            .into());
        }
        let mut packet = self.streams.outbox.buffer(self.index)?;
        let total_bytes = self.streams.while_running.then_some(self.data_bytes);
        self.head(&mut packet, DeviceChunkKind::Configuration { total_bytes }, configuration.len())?;
        packet.extend_from_slice(&configuration);
        self.send(packet, false)?;
        let took = self.streams.finishing();
        self.note(|progress| {
            progress.is_done = true;
            progress.remaining = Some(RemainingState::default());
            progress.statistics.took = took;
        });
        Ok(())
    }

    /// Reads one chunk of at most `most` bytes and sends it.
    fn chunk(&mut self, most: usize) -> Result<Read, Break> {
        let began = Instant::now();
        let mut packet = self.streams.outbox.buffer(self.index)?;
        self.waited_for_network += began.elapsed();
        packet.resize(DATA_AT + most, 0);
        let began = Instant::now();
        let (mut count, mut runs) = (0, false);
        // Small reads of a stopped device are combined, because each chunk costs a packet and a place at the
        // destination.
        while count < most && !self.is_at_end {
            let Some((got, is_running)) =
                self.call("read", |stream| stream.read(&mut packet[DATA_AT + count..]))?
            else {
                break;
            };
            if got > most - count {
                let text = format!("{}: read {got} of {} bytes", self.device, most - count);
                return Err(MigrationError::Internal(text).into());
            }
            count += got;
            runs = is_running;
            self.is_at_end = got == 0 && !runs;
            if got == 0 || runs {
                break;
            }
        }
        let reading = began.elapsed();
        if count == 0 {
            self.streams.outbox.give_back(self.index, packet);
            return Ok(Read::Nothing);
        }
        packet.truncate(DATA_AT + count);
        self.data_bytes += count as u64;
        // The device is asked, but the answer is not noted: the noted value includes this chunk until it is sent.
        let initial_ends = runs
            && self.tells_initial
            && self.remaining()?.is_some_and(|remaining| remaining.initial_bytes == 0);
        self.tells_initial &= !initial_ends;
        let mut head = Vec::with_capacity(DATA_AT);
        self.head(&mut head, DeviceChunkKind::Data { initial_ends }, count)?;
        packet[..DATA_AT].copy_from_slice(&head);
        // A kept chunk counts as read, although this session may be lost before it is sent.
        let sent = self.send(packet, runs);
        self.count(count as u64, reading, runs);
        sent?;
        Ok(Read::Sent { bytes: count as u64, runs })
    }

    /// Notes the remaining bytes for the control thread.
    fn ask_remaining(&self) -> Result<Option<RemainingState>, MigrationError> {
        let remaining = self.remaining()?;
        if remaining.is_some() {
            self.note(|progress| progress.remaining = remaining);
        }
        Ok(remaining)
    }

    fn remaining(&self) -> Result<Option<RemainingState>, MigrationError> {
        Ok(self.call("ask what is remaining", |device| device.remaining())?.map(|(remaining, _)| remaining))
    }

    /// Makes a call to the device, unless none is permitted now. Gives the result and whether the device runs.
    fn call<T>(
        &self,
        doing: &str,
        act: impl FnOnce(&dyn DeviceStream) -> Result<T, VmError>,
    ) -> Result<Option<(T, bool)>, MigrationError> {
        let Some(runs) = self.streams.begin_call(self.index) else { return Ok(None) };
        let result = self.device.call(doing, act);
        if self.streams.end_call(self.index) {
            self.shared.driver.nudge();
        }
        result.map(|result| Some((result, runs)))
    }

    /// Appends the packet header and the head of the next chunk, which has `data` bytes.
    fn head(&mut self, out: &mut Vec<u8>, kind: DeviceChunkKind, data: usize) -> Result<(), MigrationError> {
        let mut head = Vec::with_capacity(DeviceChunk::MAX_BYTES);
        DeviceChunk { index: self.next, kind }.encode(&mut head);
        self.next = self
            .next
            .checked_add(1)
            .ok_or_else(|| MigrationError::Internal(format!("{}: too many chunks", self.device)))?;
        out.clear();
        let packet = DeviceStatePacket {
            name: self.device.name.clone(),
            instance: self.device.instance,
            payload_bytes: (head.len() + data) as u32,
        };
        packet.encode(out).map_err(MigrationError::wire("device's stream"))?;
        out.extend_from_slice(&head);
        Ok(())
    }

    /// Sends a chunk of a running (`runs`) or stopped device.
    ///
    /// The stream of a stopped device starts again from its beginning after a lost connection, so its chunks are
    /// not kept.
    fn send(&mut self, packet: Vec<u8>, runs: bool) -> Result<(), Break> {
        if runs {
            self.streams.outbox.keep(self.index, self.next - 1, &packet);
            let (next, data_bytes, initial_is_told) = (self.next, self.data_bytes, !self.tells_initial);
            self.note(|progress| progress.point = Point { next, data_bytes, initial_is_told });
        }
        self.put_out(packet, runs)
    }

    fn put_out(&mut self, packet: Vec<u8>, runs: bool) -> Result<(), Break> {
        let payload = (packet.len() - DEVICE_STATE_PACKET_BYTES) as u64;
        let began = Instant::now();
        self.streams.outbox.spend(self.index, payload)?;
        self.waited_for_credit += began.elapsed();
        if !runs && self.streams.while_running {
            let began = Instant::now();
            self.streams.channels.write(self.shared, self.index, &packet)?;
            self.waited_for_network += began.elapsed();
            self.streams.outbox.give_back(self.index, packet);
            return Ok(());
        }
        self.streams.outbox.push(Chunk { device: self.index, packet });
        if self.streams.is_serial {
            self.shared.driver.nudge();
        } else {
            self.shared.session.lanes.queue.wake(self.streams.outbox.is_for_any());
        }
        Ok(())
    }

    fn count(&mut self, bytes: u64, reading: Duration, running: bool) {
        let for_credit = std::mem::take(&mut self.waited_for_credit);
        let for_network = std::mem::take(&mut self.waited_for_network);
        self.note(|progress| {
            // The read bytes are subtracted here, because asking the device before each chunk would cost one call
            // each.
            if let Some(remaining) = &mut progress.remaining {
                let initial = if running { remaining.initial_bytes.min(bytes) } else { 0 };
                remaining.initial_bytes -= initial;
                let part = if running { &mut remaining.dirty_bytes } else { &mut remaining.stopped_bytes };
                *part = part.saturating_sub(bytes - initial);
            }
            let statistics = &mut progress.statistics;
            statistics.bytes += bytes;
            statistics.running_bytes += if running { bytes } else { 0 };
            statistics.working += reading;
            statistics.waiting += for_credit + for_network;
            // Credit arrives as the destination loads. The network's time is estimated for all bytes together
            // elsewhere.
            let seen = &mut progress.seen;
            *seen = (seen.0 + bytes, seen.1 + reading + for_credit);
            if seen.0 >= TELLING_BYTES {
                let time = seen.1.as_secs_f64().max(1e-6);
                progress.bytes_per_second = Some((seen.0 as f64 / time) as u64);
            }
            if seen.0 >= 4 * TELLING_BYTES {
                *seen = (seen.0 / 2, seen.1 / 2);
            }
        });
    }

    fn note(&self, note: impl FnOnce(&mut Progress)) {
        note(&mut self.streams.state.lock().savers[self.index]);
    }
}

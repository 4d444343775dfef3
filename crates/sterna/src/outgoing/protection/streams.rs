//! Disks of a protected guest: streams in the seeding, changes in epochs (`specs/replica.md §5`).

use sterna_wire::replica::EpochSection;

use crate::device_stream::AskCheckpoint;
use crate::error::{MigrationError, VmError};
use crate::outgoing::main_channel::MainChannel;
use crate::outgoing::main_stream::MainStream;
use crate::streams::{CHUNK_BYTES, Streamed, failed_in_parallel, in_parallel};

/// A device stream with less remaining is not read again while the guest runs.
const WORTH_BYTES: u64 = 1 << 20;
/// The most passes in a row over a device stream.
///
/// The guest may write as fast as the stream is read.
const MOST_PASSES: u32 = 16;
/// The largest limit of an epoch's changes, over all devices. At the limit the guest's writes block.
///
/// A standby accepts twice this size in one checkpoint, because changes may already be in flight at the limit.
const MOST_LIMIT_BYTES: u64 = 64 << 20;

/// The device streams of a guest that a standby protects.
pub(crate) struct EpochStreams {
    devices: Vec<Streamed>,
    /// The section ids in the seeding, after the sections are open.
    sections: Vec<u32>,
}

impl EpochStreams {
    /// Devices begin to save, and their sections are opened on the main channel. `None`: no device has a stream.
    pub(in crate::outgoing) fn begin(
        devices: Vec<Streamed>,
        main: &MainChannel,
    ) -> Result<Option<Self>, MigrationError> {
        if devices.is_empty() {
            return Ok(None);
        }
        let mut this = Self { devices, sections: Vec::new() };
        if let Err(error) = this.open(main) {
            this.end();
            return Err(error);
        }
        Ok(Some(this))
    }

    fn open(&mut self, main: &MainChannel) -> Result<(), MigrationError> {
        in_parallel(&self.devices, "begin to save", |device| device.begin_save())?;
        for device in &self.devices {
            let section = main.with(|stream| stream.stream_section(&device.name, device.instance))?;
            self.sections.push(section);
        }
        Ok(())
    }

    /// Sends most of the streams while the guest runs. Calls `before` with the size of each piece before it is
    /// sent.
    pub(in crate::outgoing) fn send_most<E: From<MigrationError>>(
        &self,
        main: &MainChannel,
        mut before: impl FnMut(u64) -> Result<(), E>,
    ) -> Result<(), E> {
        for index in 0..self.devices.len() {
            for _ in 0..MOST_PASSES {
                let due = self.remaining(index)?;
                self.send(index, due, main, &mut before)?;
                if due < WORTH_BYTES {
                    break;
                }
            }
        }
        Ok(())
    }

    /// The guest is paused: sends the rest of the streams and ends the sections.
    pub(in crate::outgoing) fn send_rest(&self, main: &MainChannel) -> Result<(), MigrationError> {
        for (index, section) in self.sections.iter().enumerate() {
            self.send(index, u64::MAX, main, &mut |_| Ok::<_, MigrationError>(()))?;
            main.with(|stream| stream.stream_part(*section, &[], true))?;
        }
        Ok(())
    }

    /// Call it after the seeding. Limits the bytes that may change in one epoch.
    pub(in crate::outgoing) fn limit(
        &self,
        limit_bytes: u64,
        ask: &AskCheckpoint,
    ) -> Result<(), MigrationError> {
        let limit_bytes = limit_bytes.min(MOST_LIMIT_BYTES) / self.devices.len() as u64;
        for device in &self.devices {
            device.call("limit its changes", |stream| {
                if let Some(epochs) = stream.epochs() {
                    epochs.limit(limit_bytes.max(1), ask.clone());
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Writes a section for each device with the changes since the last call. The guest is paused.
    ///
    /// With `is_seeding`, the sections are empty.
    pub(in crate::outgoing) fn write_epoch(
        &self,
        stream: &mut MainStream,
        is_seeding: bool,
    ) -> Result<(), MigrationError> {
        let mut left = EpochSection::MOST_BYTES;
        for device in &self.devices {
            let name = EpochSection::name_of(&device.name);
            stream.long_section((&name, device.instance, EpochSection::VERSION), |body| {
                if !is_seeding {
                    left -= read_epoch(device, left, body)?;
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Ends saving at all devices.
    pub(in crate::outgoing) fn end(&self) {
        for error in failed_in_parallel(&self.devices, "end saving", |device| device.end_save()) {
            tracing::warn!(%error, "a device's stream");
        }
    }

    fn remaining(&self, index: usize) -> Result<u64, MigrationError> {
        Ok(self.devices[index].call("say what remains", |stream| stream.remaining())?.total_bytes())
    }

    /// Sends up to `most` bytes of a device's stream. The last piece may exceed this number.
    fn send<E: From<MigrationError>>(
        &self,
        index: usize,
        most: u64,
        main: &MainChannel,
        before: &mut impl FnMut(u64) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut piece = vec![0; CHUNK_BYTES];
        let mut sent = 0;
        while sent < most {
            before(CHUNK_BYTES as u64)?;
            let read = self.devices[index].call("read", |stream| stream.read(&mut piece))?;
            if read == 0 {
                break;
            }
            main.with(|stream| stream.stream_part(self.sections[index], &piece[..read], false))?;
            sent += read as u64;
        }
        Ok(())
    }
}

/// Appends at most `most` bytes of changes of an epoch. Gives the number of bytes.
fn read_epoch(device: &Streamed, most: usize, body: &mut Vec<u8>) -> Result<usize, MigrationError> {
    let begin = body.len();
    loop {
        let at = body.len();
        body.resize(at + CHUNK_BYTES, 0);
        let read = device.call("read", |stream| stream.read(&mut body[at..]))?;
        body.truncate(at + read);
        if read == 0 {
            return Ok(at - begin);
        }
        if body.len() - begin > most {
            let why = format!(
                "disks have changed by more than {} bytes in one epoch, the most that a checkpoint brings",
                EpochSection::MOST_BYTES
            );
            return Err(device.named("read", VmError::new("its changes", why)));
        }
    }
}

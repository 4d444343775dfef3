//! Saves a guest into a file instead of sending it to a peer (specs/mapped-ram.md).
//!
//! Rounds, lanes and the order of pages are the same. The differences:
//!
//! - The file is a staging file until it is complete ([`PageFile`]). A failure or a cancel deletes it: the place
//!   is unchanged, and the guest continues to run.
//! - A file sends no answers, so there is neither *prepare* nor an acknowledgement. Instead, each step that can
//!   fail is done **before** the commit: the last pages, the devices, EOF, the description, the bitmaps, and
//!   writing all of it to the disk ([`Carrier::store`]). The commit is the rename ([`Carrier::end`]). Its result
//!   is certain: if the file is not in its place afterwards, the guest was not saved and continues to run. This
//!   migration is never undecided.
//! - A round begins after the pages of the last one are written, so that two I/O requests for one page are never
//!   in flight at the same time.
//!
//! After completion the guest stays stopped here, as with QEMU. Unlike a guest that has moved, it may run again
//! ([`resume`]). The file is then a snapshot of an earlier state.

pub(super) mod stream;

use std::sync::Arc;

use sterna_proto::source::Event as Fed;
use sterna_ram::Custody;
use sterna_transport::{Address, CreateOptions, Direct, PageFile};
use sterna_wire::extension;
use sterna_wire::main::SectionHeader;
use sterna_wire::mapped_ram::MappedHeader;
use sterna_wire::ram::BlockList;

use super::carrier::facts::Facts;
use super::carrier::interface::Carrier;
use super::carrier::stream::{begin_ram, greet};
use super::carrier::transport::Transport;
use super::carrier::writers::{Writers, main_lane};
use super::lanes::LaneEnds;
use super::lanes::limiter::Limiter;
use super::main_channel::MainChannel;
use super::main_stream::{MainStream, Sink};
use super::measure::Counters;
use super::shared::Shared;
use crate::error::{MigrationError, VmError};
use crate::events::Event;
use crate::order::PageRun;
use crate::pages::{FileWriter, MappedFile, PageWriter};
use crate::threads::{call, tried};
use stream::FileStream;

const PAGE: u64 = sterna_ram::PAGE_SIZE as u64;
const RESUMING: &str = "resuming a saved guest";

/// The transport of `file:`.
pub(super) static TRANSPORT: Transport = Transport {
    facts: Facts {
        stores: true,
        can_ask: false,
        can_reconnect: false,
        gains_by_multifd: false,
        takes_device_packets: false,
        gains_by_hints: true,
        counts_rdma: false,
    },
    open: |shared| Ok(Box::new(SaveFile::open(shared)?)),
    ask: |question| Err(MigrationError::Internal(format!("{} answers no question", question.to))),
};

/// The file of a migration that goes into one.
pub(super) struct SaveFile {
    shared: Arc<Shared>,
    main: Arc<MainChannel>,
    file: Arc<PageFile>,
    stream: Arc<FileStream>,
    /// The mapped-ram image with the places of pages; `None` for a legacy stream.
    mapped: Option<Arc<MappedFile>>,
}

impl SaveFile {
    /// Creates the staging file, and the stream into it.
    fn open(shared: &Arc<Shared>) -> Result<Self, MigrationError> {
        let Address::File { path, offset } = &shared.session.to else {
            return Err(MigrationError::Internal(format!("{} is not a file", shared.session.to)));
        };
        let params = shared.params();
        for left in PageFile::stale_staging_files(path) {
            let text = format!("{} was left by a killed save: remove it", left.display());
            shared.tell(&Event::Warning(text));
        }
        let options = CreateOptions {
            direct: params.direct_io,
            // An operator who gives an offset wants the beginning of an existing file to stay.
            replace: params.replace_file || *offset > 0,
            keep_bytes: *offset,
        };
        let file = Arc::new(PageFile::create(path, options).map_err(MigrationError::storage)?);
        if params.direct_io != Direct::Off && !file.is_direct() {
            let text = format!("{}: no direct I/O here, so this goes through the page cache", path.display());
            shared.tell(&Event::Warning(text));
        }
        let stream = Arc::new(FileStream::new(&file, *offset));
        let sink: Arc<dyn Sink> = stream.clone();
        let main =
            MainStream::new(sink, Arc::clone(&shared.measures.counters), shared.guest.source.section_ids());
        let main = MainChannel::new(None, main);
        Ok(Self { shared: Arc::clone(shared), main, file, stream, mapped: None })
    }

    fn is_mapped(&self) -> bool {
        self.shared.capabilities.mapped_ram
    }

    /// The lanes of a mapped-ram file.
    fn mapped_lanes(&self) -> Result<Vec<LaneEnds>, MigrationError> {
        let Some(image) = &self.mapped else {
            return Err(MigrationError::Internal("the file's layout is not made".to_owned()));
        };
        let shared = &self.shared;
        let count = if shared.capabilities.multifd { shared.params().multifd_channels } else { 1 };
        let lane = |_| -> Result<LaneEnds, MigrationError> {
            let lane = FileLane {
                // RAM is not registered with the I/O ring. Each page is written about once, and mapping it for
                // that costs no more than registering it, which would also populate all of RAM.
                writer: FileWriter::new(Arc::clone(image), &shared.guest.ram),
                shared: Arc::clone(shared),
                counters: Arc::clone(&shared.measures.counters),
                limiter: Arc::clone(&shared.session.limiter),
            };
            Ok(LaneEnds { writer: Box::new(lane), reader: shared.guest.source.reader()? })
        };
        (0..count).map(lane).collect()
    }

    /// Writes the file's data from the page cache to the disk.
    fn sync(&self) -> Result<(), MigrationError> {
        self.file.sync().map_err(MigrationError::storage)
    }
}

impl Carrier for SaveFile {
    fn main(&self) -> &Arc<MainChannel> {
        &self.main
    }

    fn greet(&self) -> Result<(), MigrationError> {
        if !self.is_mapped() {
            greet(&self.shared, &self.main)?;
        } else {
            let mut configuration = self.shared.guest.source.configuration();
            configuration.capabilities.push("mapped-ram".to_owned());
            self.main.with(|stream| stream.greet(configuration))?;
        }
        record_compatibility(&self.shared, &self.main)
    }

    fn begins_ram_before_lanes(&self) -> bool {
        // Lanes must know the places of pages.
        self.is_mapped()
    }

    fn begin_ram(&mut self) -> Result<(), MigrationError> {
        if !self.is_mapped() {
            return begin_ram(&self.shared, &self.main);
        }
        let blocks = self.shared.guest.source.blocks();
        let headers = self.main.with(|main| place_blocks(main, &self.stream, &blocks))?;
        self.mapped =
            Some(Arc::new(MappedFile::new(Arc::clone(&self.file), headers, &self.shared.guest.ram)));
        Ok(())
    }

    fn lanes(&mut self) -> Result<Writers, MigrationError> {
        Ok(match self.is_mapped() {
            true => Writers::new(&self.shared, self.mapped_lanes()?, true),
            false => Writers::new(&self.shared, vec![main_lane(&self.shared, &self.main)?], false),
        })
    }

    fn end_round(&self, is_last: bool) -> Result<(), MigrationError> {
        // The data are written to the disk while the guest runs, so that little remains for its downtime. In the
        // last round they are written in one step, after the devices.
        if is_last {
            return Ok(());
        }
        self.stream.drain()?;
        self.sync()
    }

    fn end_ram(&self) -> Result<(), MigrationError> {
        self.main.with(|stream| stream.ram_part(true, false))
    }

    fn store(&self) -> Option<Result<(), MigrationError>> {
        let store = || {
            self.main.with(|stream| self.shared.guest.source.send_end(stream))?;
            self.stream.drain()?;
            if let Some(mapped) = &self.mapped {
                mapped.write_bitmaps()?;
            }
            self.sync()
        };
        Some(store())
    }

    /// The commit: the rename. After an error it is certain that the guest was not saved.
    fn end(&self) -> Result<(), MigrationError> {
        self.file.publish().map_err(MigrationError::storage)
    }

    fn end_failed(&self) -> Fed {
        // The event is the same as from a destination that does not run the guest and never will.
        Fed::Shut(1)
    }
}

/// Writes the record of compatibility.
///
/// A Sterna destination compares it before any RAM is sent. For a file, the loading side compares it.
pub(super) fn record_compatibility(shared: &Shared, main: &MainChannel) -> Result<(), MigrationError> {
    let Some(record) = shared.guest.vm.compatibility() else { return Ok(()) };
    let body = call("Device::save of the compatibility record", || record.save())?;
    let header = (extension::COMPATIBILITY_SECTION, 0, record.version());
    main.with(|stream| stream.full_section(header, &body, true))
}

/// Writes the START section of RAM, and gives the place of each block's pages.
fn place_blocks(
    main: &mut MainStream,
    stream: &FileStream,
    blocks: &BlockList,
) -> Result<Vec<MappedHeader>, MigrationError> {
    let mut whole = Vec::new();
    blocks.encode(&mut whole).map_err(MigrationError::wire("file"))?;
    let id = main.ram_section();
    main.send(|out| {
        SectionHeader { id, name: "ram", instance: 0, version: 4 }.encode_start(out)?;
        // The list's total precedes its entries. Each entry follows the pages of the previous one.
        out.extend_from_slice(&whole[..size_of::<u64>()]);
        Ok(())
    })?;
    let mut headers = Vec::new();
    for block in &blocks.blocks {
        let mut header = None;
        main.send(|out| {
            block.encode(out)?;
            let placed = MappedHeader::place(stream.position() + out.len() as u64, block.length_bytes)?;
            placed.encode(out);
            header = Some(placed);
            Ok(())
        })?;
        let Some(header) = header else {
            return Err(MigrationError::Internal("a block has no place".to_owned()));
        };
        stream.go_to(header.end_of_pages(block.length_bytes))?;
        headers.push(header);
    }
    main.end_ram_section(false)?;
    Ok(headers)
}

/// Whether the guest was saved to a file, and is still stopped here.
pub(super) fn is_saved(shared: &Shared) -> bool {
    shared.handover.custody.now() == Some(Custody::Saved)
}

/// Resumes a guest that was saved: acquires its hooks again, then runs it.
pub(super) fn resume(shared: &Shared) -> Result<(), VmError> {
    let refused = |why: &str| VmError::new(RESUMING, why);
    let not_saved = "this migration has not saved it to a file, or another migration has it now";
    if !is_saved(shared) {
        return Err(refused(not_saved));
    }
    // The control thread may still have to stop the tracking of writes. Nothing may claim the guest before that.
    shared.wait();
    let resuming = Custody::Leaving { is_free: false };
    if !shared.handover.custody.exchange(Custody::Saved, resuming) {
        return Err(refused(not_saved));
    }
    let resumed = tried(RESUMING, || take_back_and_run(shared)).map_err(|error| match error {
        MigrationError::Vm(error) => error,
        error => VmError::new(RESUMING, error),
    });
    let now = if resumed.is_ok() { shared.handover.custody.before() } else { Custody::Saved };
    if !shared.handover.custody.exchange(resuming, now) {
        return Err(refused("another call has decided meanwhile who has it"));
    }
    resumed
}

fn take_back_and_run(shared: &Shared) -> Result<(), VmError> {
    loop {
        // The hook counts as released until it is certainly acquired. The lock is not locked during the VMM's
        // call.
        let Some(hook) = shared.handover.released.lock().last().cloned() else { break };
        call(format!("Hook::take_back of {}", hook.name()), || hook.take_back())?;
        shared.handover.released.lock().pop();
    }
    shared.run_devices();
    call("SourceVm::resume", || shared.guest.vm.resume())
}

/// One lane's writer, with the counters and limits of the whole migration.
struct FileLane {
    writer: FileWriter,
    shared: Arc<Shared>,
    counters: Arc<Counters>,
    limiter: Arc<Limiter>,
}

impl FileLane {
    /// A file has no channel to shut down, so a lane checks the flag.
    fn check(&self) -> Result<(), MigrationError> {
        if self.shared.session.connecting.is_cancelled() { Err(MigrationError::Cancelled) } else { Ok(()) }
    }
}

impl PageWriter for FileLane {
    fn write_run(&mut self, run: PageRun) -> Result<(), MigrationError> {
        self.check()?;
        self.counters.throttled(self.limiter.take(run.count * PAGE));
        self.counters.moving(|| self.writer.write_run(run))?;
        self.counters.multifd(run.count * PAGE);
        self.counters.pages(run.count, 0);
        Ok(())
    }

    fn zero_run(&mut self, run: PageRun) -> Result<(), MigrationError> {
        self.check()?;
        self.writer.zero_run(run)?;
        self.counters.pages(0, run.count);
        Ok(())
    }

    fn absent_run(&mut self, run: PageRun) -> Result<(), MigrationError> {
        self.check()?;
        self.writer.absent_run(run)?;
        self.counters.pages(0, run.count);
        Ok(())
    }

    fn barrier(&mut self) -> Result<(), MigrationError> {
        self.counters.moving(|| self.writer.barrier())
    }

    fn abort(&mut self) {
        self.writer.abort();
    }
}

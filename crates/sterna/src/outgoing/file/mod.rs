//! A guest goes into a file instead of to a peer (specs/mapped-ram.md).
//!
//! Rounds, lanes and the order of pages are the same. What differs:
//!
//! - The file is a staging file until it is complete ([`PageFile`]). A failure or a cancel drops it: the place is as it was,
//!   and the guest runs on.
//! - A file does not answer. So there is neither *prepare* nor an acknowledgement; instead, everything that can fail
//!   is done **before** the commit: the last pages, the devices, EOF, the description, the bitmaps, and putting all
//!   of it on the disk ([`SaveFile::finish`]). The commit itself is the rename ([`SaveFile::publish`]). Whether that has happened is no
//!   question of belief: if the file is not in its place afterwards, the guest was not saved and runs on; nothing is
//!   ever undecided.
//! - A round begins when the last one is with the disk: two pieces of I/O that write one page are never on their way
//!   at once.
//!
//! After completion the guest stays stopped here, as QEMU leaves it. Unlike one that has moved it may be let run
//! again ([`resume`]): what was saved is then a snapshot of its past.

mod stream;

use std::sync::Arc;

use sterna_proto::source::Event as Fed;
use sterna_ram::Custody;
use sterna_transport::{Address, CreateOptions, Direct, PageFile};
use sterna_wire::extension;
use sterna_wire::main::SectionHeader;
use sterna_wire::mapped_ram::MappedHeader;
use sterna_wire::ram::BlockList;

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

/// The file of a migration that goes into one.
pub(super) struct SaveFile {
    file: Arc<PageFile>,
    stream: Arc<FileStream>,
    /// Where pages lie; none in a legacy stream.
    mapped: Option<Arc<MappedFile>>,
}

impl SaveFile {
    /// Makes the staging file, and the stream into it.
    pub(super) fn open(shared: &Shared) -> Result<(Self, Arc<MainChannel>), MigrationError> {
        let Address::File { path, offset } = &shared.to else {
            return Err(MigrationError::Internal(format!("{} is not a file", shared.to)));
        };
        let params = shared.params();
        for left in PageFile::stale_staging_files(path) {
            let text = format!("{} was left by a killed save: remove it", left.display());
            shared.tell(&Event::Warning(text));
        }
        let options = CreateOptions {
            direct: params.direct_io,
            // Who names an offset means the file whose beginning is to stay.
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
        let main = MainStream::new(sink, Arc::clone(&shared.counters), shared.guest_source.section_ids());
        Ok((Self { file, stream, mapped: None }, MainChannel::new(None, main)))
    }

    /// Writes the START section of RAM with a place for every page.
    pub(super) fn start_ram(&mut self, shared: &Shared, main: &MainChannel) -> Result<(), MigrationError> {
        let blocks = shared.guest_source.blocks();
        let headers = main.with(|main| place_blocks(main, &self.stream, &blocks))?;
        self.mapped = Some(Arc::new(MappedFile::new(Arc::clone(&self.file), headers, &shared.ram)));
        Ok(())
    }

    /// The lanes of a mapped-ram file.
    pub(super) fn lanes(&self, shared: &Arc<Shared>) -> Result<Vec<LaneEnds>, MigrationError> {
        let Some(image) = &self.mapped else {
            return Err(MigrationError::Internal("the file's layout is not made".to_owned()));
        };
        let count = if shared.capabilities.multifd { shared.params().multifd_channels } else { 1 };
        let lane = |_| -> Result<LaneEnds, MigrationError> {
            let lane = FileLane {
                // RAM is not registered with the ring: each page is written about once, and mapping it for that costs
                // no more than registering does, which would populate all of it besides.
                writer: FileWriter::new(Arc::clone(image), &shared.ram),
                shared: Arc::clone(shared),
                counters: Arc::clone(&shared.counters),
                limiter: Arc::clone(&shared.limiter),
            };
            Ok(LaneEnds { writer: Box::new(lane), reader: shared.guest_source.reader()? })
        };
        (0..count).map(lane).collect()
    }

    /// After a round: what lies in the page cache goes to the disk while the guest runs, so that little remains for its
    /// downtime.
    pub(super) fn settle(&self) -> Result<(), MigrationError> {
        self.stream.drain()?;
        self.file.sync().map_err(MigrationError::storage)
    }

    /// Everything that can fail before the commit: EOF, the description, the bitmaps, all on the disk.
    pub(super) fn finish(&self, shared: &Shared, main: &MainChannel) -> Result<(), MigrationError> {
        main.with(|stream| shared.guest_source.send_end(stream))?;
        self.stream.drain()?;
        if let Some(mapped) = &self.mapped {
            mapped.write_bitmaps()?;
        }
        self.file.sync().map_err(MigrationError::storage)
    }

    /// The commit: the file takes its place. What went wrong is certain, and so is that the guest was not saved.
    pub(super) fn publish(&self, shared: &Shared) {
        match self.file.publish() {
            Ok(()) => shared.report(Fed::EofSent),
            Err(error) => {
                shared.note_error(MigrationError::storage(error));
                // What a destination says that does not run the guest and never will.
                shared.report(Fed::Shut(1));
            }
        }
    }
}

/// Writes what a Sterna destination compares before any RAM moves; here it is compared when the file is loaded.
pub(super) fn record_compatibility(shared: &Shared, main: &MainChannel) -> Result<(), MigrationError> {
    let Some(record) = shared.vm.compatibility() else { return Ok(()) };
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
        // The list's total stands before its entries; each entry follows the pages of the one before.
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

/// Whether the guest was saved to a file, and stands here.
pub(super) fn is_saved(shared: &Shared) -> bool {
    shared.custody.now() == Some(Custody::Saved)
}

/// Lets a guest run again that was saved: takes its hooks back first.
pub(super) fn resume(shared: &Shared) -> Result<(), VmError> {
    let refused = |why: &str| VmError::new(RESUMING, why);
    let not_saved = "this migration has not saved it to a file, or another migration has it now";
    if !is_saved(shared) {
        return Err(refused(not_saved));
    }
    // The control thread may still have to stop the tracking of writes. Nobody may claim the guest before.
    shared.wait();
    let resuming = Custody::Leaving { is_free: false };
    if !shared.custody.exchange(Custody::Saved, resuming) {
        return Err(refused(not_saved));
    }
    let resumed = tried(RESUMING, || take_back_and_run(shared)).map_err(|error| match error {
        MigrationError::Vm(error) => error,
        error => VmError::new(RESUMING, error),
    });
    let now = if resumed.is_ok() { shared.custody.before() } else { Custody::Saved };
    if !shared.custody.exchange(resuming, now) {
        return Err(refused("another call has decided meanwhile who has it"));
    }
    resumed
}

fn take_back_and_run(shared: &Shared) -> Result<(), VmError> {
    let mut released = shared.released.lock();
    while let Some(hook) = released.last() {
        call(format!("Hook::take_back of {}", hook.name()), || hook.take_back())?;
        released.pop();
    }
    drop(released);
    shared.run_devices();
    call("SourceVm::resume", || shared.vm.resume())
}

/// One lane's writer, with what the whole migration counts and limits.
struct FileLane {
    writer: FileWriter,
    shared: Arc<Shared>,
    counters: Arc<Counters>,
    limiter: Arc<Limiter>,
}

impl FileLane {
    /// There is no channel whose shutting down would end a lane.
    fn check(&self) -> Result<(), MigrationError> {
        if self.shared.connecting.is_cancelled() { Err(MigrationError::Cancelled) } else { Ok(()) }
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

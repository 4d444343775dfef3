//! Reads the main channel element by element, in order.
//!
//! Because elements are loaded in order, a PING is answered after everything before it was loaded. The answer
//! to *prepare* therefore proves that all earlier elements were loaded.

#[cfg(feature = "postcopy")]
pub(super) mod following;
#[cfg(not(feature = "postcopy"))]
#[path = "loader/following/off.rs"]
pub(super) mod following;
mod section;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use sterna_proto::destination::Event as Fed;
use sterna_ram::PAGE_SIZE;
use sterna_transport::{Channel, PageFile};
use sterna_wire::WireError;
use sterna_wire::extension;
use sterna_wire::main::{Command, Configuration, MainDecoder, MainItem, SectionKind, Step};
use sterna_wire::ram::BlockList;
use sterna_wire::return_path::ReturnMessage;

use super::acks::Acks;
use super::carrier::Hooks;
use super::memory_files;
use super::postcopy;
use super::reader::{Filled, Reader};
use super::shared::Shared;
use super::target::RamStart;
use crate::error::{Difference, Ending, MigrationError, ProtectionDifference, Untimely};
use crate::events::Event;
use crate::order::PageRun;

pub(super) const CHANNEL: &str = "main channel";

/// Loads until the end of the stream, or until loading stops.
pub(super) fn load(shared: &Arc<Shared>, channel: &Arc<Channel>) {
    read_to_the_end(Loader::new(shared, channel));
}

fn read_to_the_end(mut loader: Loader<'_>) {
    let result = loader.run();
    let shared = loader.shared;
    loader.keep_reading();
    if let Err(error) = result {
        shared.fail(error);
    }
}

/// The result of one read from the stream.
pub(super) enum Read {
    Item(MainItem),
    /// The stream has ended.
    End,
    /// Loading is to stop.
    Stopped,
}

pub(super) struct Loader<'a> {
    pub(super) shared: &'a Arc<Shared>,
    pub(super) reader: Reader,
    decoder: MainDecoder,
    /// Set once the configuration was read.
    acks: Option<Acks>,
    /// Number of multifd channels.
    lanes: usize,
    /// The source has sent a handover section, so it is a Sterna.
    pub(super) is_sterna: bool,
    /// The source is a Sterna that receives this side's answers, so it sends keep-alive messages.
    keeps_alive: bool,
    /// The source has opened the return path and waits for SHUT.
    pub(super) has_return_path: bool,
    /// The source has requested *prepare*.
    pub(super) was_asked: bool,
    /// The source observes the grants of device streams.
    has_stream_credit: bool,
    /// The handler of the stream's hooks, if the transport has hooks.
    hooks: Option<Box<dyn Hooks + 'a>>,
    /// True inside a checkpoint after the seeding: the primary must send the rest and may not be silent.
    pub(super) in_checkpoint: bool,
}

impl<'a> Loader<'a> {
    fn new(shared: &'a Arc<Shared>, channel: &Arc<Channel>) -> Self {
        let decoder = MainDecoder::new(shared.target.knowledge(), shared.expectations());
        let mut loader = Self::with(shared, Reader::new(Arc::clone(channel)), decoder);
        loader.hooks = shared.carrier.hooks(shared.as_ref(), channel);
        loader
    }

    /// A loader of the stream in a file, from byte `offset` on.
    pub(super) fn of_file(shared: &'a Arc<Shared>, file: &Arc<PageFile>, offset: u64) -> Self {
        let decoder = MainDecoder::new(shared.target.knowledge(), shared.expectations()).starting_at(offset);
        Self::with(shared, Reader::of_file(file, offset), decoder)
    }

    fn with(shared: &'a Arc<Shared>, reader: Reader, decoder: MainDecoder) -> Self {
        // A source that has reconnected has proved that it is the migration's Sterna source.
        let is_back = shared.lobby.session() > 0;
        Self {
            shared,
            reader,
            decoder,
            acks: None,
            lanes: shared.places.lanes(),
            is_sterna: is_back,
            keeps_alive: is_back,
            has_return_path: false,
            was_asked: false,
            has_stream_credit: false,
            hooks: None,
            in_checkpoint: false,
        }
    }

    fn run(&mut self) -> Result<(), MigrationError> {
        loop {
            match self.read()? {
                Read::Item(item) => self.take(item)?,
                Read::End | Read::Stopped => return Ok(()),
            }
        }
    }

    /// Reads until the next item is complete.
    pub(super) fn read(&mut self) -> Result<Read, MigrationError> {
        // 0: an item may be followed by another that needs no further byte.
        let mut due = 0;
        while !self.shared.stopping.load(Ordering::Acquire) {
            match self.reader.fill_or_silence(due)? {
                Filled::Full => {}
                Filled::End => return self.end_of_file().map(|()| Read::End),
                Filled::Silence(_) if self.may_be_silent() => continue,
                Filled::Silence(stalled) => return Err(stalled.into()),
            }
            match self.decoder.next(self.reader.bytes()).map_err(MigrationError::wire(CHANNEL))? {
                Step::NeedMore(count) => due = count,
                Step::Partial { consumed } => {
                    self.consume(consumed);
                    due = 1;
                }
                Step::Item { item, consumed } => {
                    self.consume(consumed);
                    return Ok(Read::Item(item));
                }
                Step::End => return Ok(Read::End),
            }
        }
        Ok(Read::Stopped)
    }

    /// Whether the source may be silent without limit now (specs/stream.md §5.4). A source that asked for
    /// extensions, or is known to be a Sterna, sends keep-alive messages.
    fn may_be_silent(&self) -> bool {
        !self.keeps_alive && !self.in_checkpoint && self.decoder.may_rest(self.reader.bytes().len())
    }

    /// Prepares the decoder for a checkpoint's RAM at byte `position` of the channel.
    #[cfg(feature = "standby")]
    pub(super) fn begin_checkpoint(&mut self, position: u64) -> Result<(), MigrationError> {
        self.decoder.begin_checkpoint(position).map_err(MigrationError::wire(CHANNEL))
    }

    /// The index of the block `name` in this side's RAM.
    pub(super) fn block_index(&self, name: &str) -> Option<usize> {
        self.decoder.blocks()?.find(name.as_bytes())
    }

    pub(super) fn consume(&mut self, count: usize) {
        self.reader.consume(count);
        self.shared.received_bytes.fetch_add(count as u64, Ordering::Relaxed);
    }

    /// The source has closed the channel. This is allowed after EOF (specs/stream.md §9).
    fn end_of_file(&mut self) -> Result<(), MigrationError> {
        if self.shared.stopping.load(Ordering::Acquire) {
            return Ok(());
        }
        // No rule was broken as far as this side can tell: the source died, or cancelled (specs/stream.md
        // §5.2).
        self.decoder.end_of_file(self.reader.bytes().len()).map_err(|error| {
            let (message, offset) = (error.message, error.offset);
            MigrationError::from(match &self.shared.file {
                Some(_) => Ending::FileEndsEarly { file: self.shared.address.to_string(), message, offset },
                None => Ending::EarlyEnd { message, offset },
            })
        })
    }

    pub(super) fn take(&mut self, item: MainItem) -> Result<(), MigrationError> {
        match item {
            MainItem::Command(command) => self.command(command),
            MainItem::Zero { block, offset } if self.shared.postcopy.arriving().is_some() => {
                self.following_zero(block, offset)
            }
            MainItem::Zero { block, offset } => {
                self.shared.zero_pages.fetch_add(1, Ordering::Relaxed);
                let run = page(block, offset);
                if self.shared.capabilities.multifd {
                    self.shared.rounds.enter(run)?;
                }
                self.shared.sink(self.lanes)?.zero(run)?;
                self.shared.rounds.came(run);
                Ok(())
            }
            MainItem::PagePayloadFollows { block, offset } if self.shared.postcopy.arriving().is_some() => {
                self.following_page(block, offset)
            }
            MainItem::Xbzrle { .. } if self.shared.postcopy.arriving().is_some() => Err(postcopy::unfit()),
            // In postcopy, only the flush after the last page of the lanes is allowed.
            MainItem::MultifdFlush
                if self.shared.postcopy.arriving().is_some() && !self.shared.rounds.is_following() =>
            {
                Err(postcopy::unfit())
            }
            MainItem::PagePayloadFollows { block, offset } => self.page(page(block, offset)),
            MainItem::Xbzrle { block, offset, delta } => self.delta(page(block, offset), &delta),
            MainItem::MultifdFlush => {
                if let Ok(sink) = self.shared.sink(self.lanes) {
                    sink.settle()?;
                }
                if self.decoder.flushes_silently() {
                    self.shared.rounds.trust();
                }
                let silence = self.shared.group.watch();
                self.shared.rounds.flush(silence, self.shared.params.limits.stall)
            }
            MainItem::Hook { .. } => match &mut self.hooks {
                Some(hooks) => hooks.run(),
                // The decoder accepts hooks only if the transport has hooks.
                None => {
                    let rule = "a hook of RDMA, and this connection is none";
                    let error =
                        WireError::local("RAM record", self.decoder.position(), "specs/rdma.md §5.2", rule);
                    Err(MigrationError::wire(CHANNEL)(error))
                }
            },
            MainItem::RamEnd { kind } => {
                self.shared.target.ram_section_ended(kind);
                // A source that observes grants has written a barrier after the last chunk.
                if kind == SectionKind::End && self.has_stream_credit {
                    self.shared.streams.all_came()?;
                }
                if kind == SectionKind::End {
                    self.shared.check_that_all_came()?;
                    if self.shared.postcopy.arriving().is_some() {
                        self.shared.rounds.end_following()?;
                    }
                }
                let streams = &self.shared.streams;
                let due = self.acks.as_mut().map_or(0, |acks| acks.at_section(streams));
                self.acknowledge(due)
            }
            MainItem::Section { name, instance, version, kind, body } => {
                self.section(&name, instance, version, kind, &body)
            }
            MainItem::Tail => self.tail(),
            MainItem::Eof => {
                self.shared.postcopy.end_is_read()?;
                self.shared.report(Fed::EofRead);
                Ok(())
            }
            // The block's pages are already in RAM, so reading continues after them.
            MainItem::MappedBlock { resume_at, .. } => self.reader.go_to(resume_at),
            MainItem::RamStart(blocks) => self.ram_starts(&blocks),
            MainItem::Configuration(configuration) => self.configuration(&configuration),
            // A checkpoint is taken by the code that reads checkpoints (`follow`).
            MainItem::Header | MainItem::VmDescription(_) | MainItem::CheckpointRam => Ok(()),
        }
    }

    fn command(&mut self, command: Command) -> Result<(), MigrationError> {
        match command {
            Command::OpenReturnPath => {
                self.shared.carrier.await_return_path(self.shared.params.limits.setup)?;
                self.has_return_path = true;
                self.shared.report(Fed::ReturnPathOpened);
                let streams = &self.shared.streams;
                let due = self.acks.as_mut().map_or(0, |acks| acks.at_opening(streams));
                self.acknowledge(due)
            }
            Command::Ping(extension::PREPARE_PING) => {
                self.was_asked = true;
                self.shared.report(Fed::PrepareRead);
                Ok(())
            }
            Command::Ping(ping @ (extension::DEVICE_STREAMS_PING | extension::STREAMS_ANEW_PING)) => {
                self.begin_streams(ping)
            }
            Command::Ping(extension::MEMORY_PING) => {
                memory_files::expect(self.shared)?;
                self.pong(extension::MEMORY_PING)
            }
            Command::Ping(extension::POSTCOPY_STARTED_PING) => postcopy::asked_for_start(self.shared),
            Command::Ping(extension::RECONNECT_PING) => {
                self.shared.expect_comeback()?;
                self.pong(extension::RECONNECT_PING)
            }
            Command::Ping(extension::ROUND_PING) => {
                if !self.shared.capabilities.multifd {
                    self.shared.rounds.round_ended();
                }
                self.pong(extension::ROUND_PING)
            }
            Command::Ping(value) => {
                // Only a Sterna sends this PING.
                self.keeps_alive |= value == extension::EXTENSION_PING;
                self.pong(value)
            }
            Command::SwitchoverStart => {
                let mut bytes = Vec::new();
                command.encode(&mut bytes).map_err(MigrationError::wire(CHANNEL))?;
                self.shared.target.command(&bytes)
            }
            command @ (Command::PostcopyAdvise(_)
            | Command::PostcopyDiscard { .. }
            | Command::Packaged(_)
            | Command::ReceivedBitmap(_)
            | Command::PostcopyResume
            | Command::PostcopyRun) => self.postcopy_command(command),
            other => Err(Difference::Command(Box::new(other)).into()),
        }
    }

    /// Grants credit to device streams: the source observes grants from now on.
    fn begin_streams(&mut self, ping: u32) -> Result<(), MigrationError> {
        if ping == extension::STREAMS_ANEW_PING {
            if self.has_stream_credit || self.shared.lobby.session() == 0 {
                return Err(Untimely::StreamsAgain.into());
            }
            self.shared.streams.begin_anew()?;
        }
        self.has_stream_credit = true;
        // The answer follows the grants: a device without a grant by then has no counterpart here.
        self.shared.streams.begin_credit(|message| self.shared.say(message))?;
        self.pong(ping)
    }

    /// Answers a PING. The PING that asks for extensions gets a second answer with this side's features.
    pub(super) fn pong(&self, value: u32) -> Result<(), MigrationError> {
        self.shared.say(&ReturnMessage::Pong(value))?;
        if value == extension::EXTENSION_PING {
            self.shared.say(&ReturnMessage::Pong(self.shared.features().to_pong()))?;
        }
        Ok(())
    }

    fn configuration(&mut self, configuration: &Configuration) -> Result<(), MigrationError> {
        let shared = self.shared;
        let machine_type = &configuration.machine_type;
        self.acks = Some(Acks::new(shared.target.devices(), machine_type, &shared.capabilities));
        shared.target.configuration(configuration)
    }

    fn ram_starts(&mut self, blocks: &BlockList) -> Result<(), MigrationError> {
        let shared = self.shared;
        memory_files::check_that_it_came(shared)?;
        if shared.target.follower().is_some() {
            self.check_primary()?;
        }
        let table = self.decoder.blocks();
        let Some(table) = table else {
            return Err(MigrationError::Internal("a block list without a table of blocks".to_owned()));
        };
        if let Some(hooks) = &mut self.hooks {
            hooks.blocks_came(blocks, table)?;
        }
        let started = shared.target.ram_starts(&RamStart {
            section_id: self.decoder.section_id(),
            blocks,
            table,
            lanes: self.lanes,
            is_sterna: self.is_sterna,
        })?;
        if let Some(warning) = started.warning {
            shared.tell(&Event::Warning(warning));
        }
        if let Some(layout) = started.layout {
            shared.set_layout(layout);
        }
        Ok(())
    }

    /// Checks that a standby can follow this source: only a source that keeps its guest sends checkpoints.
    /// Checked while the source's guest still runs.
    fn check_primary(&self) -> Result<(), MigrationError> {
        if self.is_sterna {
            Err(ProtectionDifference::HandsOver.into())
        } else if !self.has_return_path {
            Err(ProtectionDifference::NoReturnPath.into())
        } else {
            Ok(())
        }
    }

    fn acknowledge(&self, due: usize) -> Result<(), MigrationError> {
        (0..due).try_for_each(|_| self.shared.say(&ReturnMessage::SwitchoverAck))
    }

    fn page(&mut self, run: PageRun) -> Result<(), MigrationError> {
        let shared = self.shared;
        if shared.capabilities.multifd {
            shared.rounds.enter(run)?;
        }
        let sink = shared.sink(self.lanes)?;
        let place = sink.prepare(run)?;
        if !self.reader.fill_ram(place)? {
            return Err(Ending::InsidePage { offset: self.decoder.position() }.into());
        }
        sink.commit(run)?;
        shared.rounds.came(run);
        self.decoder.payload_consumed();
        shared.normal_pages.fetch_add(1, Ordering::Relaxed);
        shared.received_bytes.fetch_add(PAGE_SIZE as u64, Ordering::Relaxed);
        Ok(())
    }

    fn delta(&self, run: PageRun, delta: &[u8]) -> Result<(), MigrationError> {
        let sink = self.shared.sink(self.lanes)?;
        let mut content = [0; PAGE_SIZE];
        sink.current(run, &mut content)?;
        sterna_wire::xbzrle::apply(delta, &mut content).map_err(MigrationError::wire(CHANNEL))?;
        sink.prepare(run)?.copy_from(&content)?;
        self.shared.normal_pages.fetch_add(1, Ordering::Relaxed);
        sink.commit(run)
    }
}

fn page(block: usize, offset: u64) -> PageRun {
    PageRun { block, first: offset / PAGE_SIZE as u64, count: 1 }
}

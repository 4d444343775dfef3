//! Reads the main channel, element by element, in order.
//!
//! Because it loads in order, a PING is answered after everything before it was loaded: that is what
//! makes *prepare* a proof.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use sterna_proto::MigrationId;
use sterna_proto::destination::Event as Fed;
use sterna_ram::PAGE_SIZE;
use sterna_transport::Channel;
use sterna_wire::extension::{self, Features, Handover};
use sterna_wire::global_state::{self, GlobalState};
use sterna_wire::main::{Command, MainDecoder, MainItem, Step};
use sterna_wire::return_path::ReturnMessage;

use super::acks::Acks;
use super::reader::Reader;
use super::sections::{Sections, expectations};
use super::shared::{Shared, lock};
use crate::error::MigrationError;
use crate::events::Event;
use crate::order::PageRun;
use crate::pages::PageSink;

const CHANNEL: &str = "main channel";

/// Loads until the end of the stream, or until told to stop.
pub(super) fn load(shared: &Shared, channel: &Arc<Channel>) {
    let result = Loader::new(shared, channel).run();
    if let Err(error) = result {
        shared.fail(error);
    }
}

struct Loader<'a> {
    shared: &'a Shared,
    reader: Reader,
    decoder: MainDecoder,
    sections: Sections,
    acks: Acks,
    /// The source sent a handover section.
    is_sterna: bool,
}

impl<'a> Loader<'a> {
    fn new(shared: &'a Shared, channel: &Arc<Channel>) -> Self {
        let knowledge = Box::new(Sections::new(shared.vm.as_ref()));
        Self {
            shared,
            reader: Reader::new(Arc::clone(channel)),
            decoder: MainDecoder::new(knowledge, expectations(shared)),
            sections: Sections::new(shared.vm.as_ref()),
            acks: Acks::new(shared.vm.as_ref(), &shared.capabilities),
            is_sterna: false,
        }
    }

    fn run(&mut self) -> Result<(), MigrationError> {
        let mut due = 1;
        while !self.shared.stopping.load(Ordering::Acquire) {
            if !self.reader.fill(due)? {
                return self.end_of_file();
            }
            match self.decoder.next(self.reader.bytes()).map_err(MigrationError::wire(CHANNEL))? {
                Step::NeedMore(count) => due = count,
                Step::Partial { consumed } => {
                    self.consume(consumed);
                    due = 1;
                }
                Step::Item { item, consumed } => {
                    self.consume(consumed);
                    // An item may be followed by another that needs no further byte.
                    due = 0;
                    self.take(item)?;
                }
                Step::End => return Ok(()),
            }
        }
        Ok(())
    }

    fn consume(&mut self, count: usize) {
        self.reader.consume(count);
        self.shared.received_bytes.fetch_add(count as u64, Ordering::Relaxed);
    }

    /// The source has closed. Behind EOF that is allowed (specs/stream.md §9).
    fn end_of_file(&mut self) -> Result<(), MigrationError> {
        if self.shared.stopping.load(Ordering::Acquire) {
            return Ok(());
        }
        // Nobody did wrong as far as this side can tell: the source died, or cancelled (specs/stream.md §5.2).
        self.decoder.end_of_file(self.reader.bytes().len()).map_err(|error| {
            let text =
                format!("the source closed the main channel early: {}, byte {}", error.message, error.offset);
            MigrationError::Transport(text, None)
        })
    }

    fn take(&mut self, item: MainItem) -> Result<(), MigrationError> {
        match item {
            MainItem::Command(command) => self.command(command),
            MainItem::Zero { block, offset } => {
                self.shared.zero_pages.fetch_add(1, Ordering::Relaxed);
                let run = page(block, offset);
                if self.shared.capabilities.multifd {
                    self.shared.rounds.enter(run)?;
                }
                self.shared.sink.zero(run)
            }
            MainItem::PagePayloadFollows { block, offset } => self.page(page(block, offset)),
            MainItem::Xbzrle { block, offset, delta } => self.delta(page(block, offset), &delta),
            MainItem::MultifdFlush => self.shared.rounds.flush(self.shared.params.limits.stall),
            MainItem::RamEnd { kind } => {
                lock(&self.shared.loaded).ram |= kind == sterna_wire::main::SectionKind::End;
                let due = self.acks.at_section();
                self.acknowledge(due)
            }
            MainItem::Section { name, instance, version, body, .. } => {
                self.section(&name, instance, version, &body)
            }
            MainItem::Eof => {
                self.shared.report(Fed::EofRead);
                Ok(())
            }
            MainItem::MappedBlock { .. } => {
                Err(MigrationError::Internal("a mapped block on a socket".to_owned()))
            }
            MainItem::RamStart(_) => self.demand_compatibility(),
            MainItem::Header | MainItem::Configuration(_) | MainItem::VmDescription(_) => Ok(()),
        }
    }

    fn command(&mut self, command: Command) -> Result<(), MigrationError> {
        match command {
            Command::OpenReturnPath => {
                self.shared.report(Fed::ReturnPathOpened);
                let due = self.acks.at_opening();
                self.acknowledge(due)
            }
            Command::Ping(extension::PREPARE_PING) => {
                self.shared.report(Fed::PrepareRead);
                Ok(())
            }
            Command::Ping(value) => {
                self.shared.say(&ReturnMessage::Pong(value))?;
                if value == extension::EXTENSION_PING {
                    self.shared.say(&ReturnMessage::Pong(Features::HANDOVER.to_pong()))?;
                }
                Ok(())
            }
            Command::SwitchoverStart => Ok(()),
            other => Err(MigrationError::PeerIncompatible {
                what: format!("the source sent {other:?}, which belongs to postcopy: switch it off there"),
            }),
        }
    }

    /// Before any RAM moves the machines must have been compared. Only a Sterna that hears our answers can
    /// have sent its record; with any other source the operator is told that nobody compared.
    fn demand_compatibility(&self) -> Result<(), MigrationError> {
        let compared = |came: &(String, u32)| came.0 == extension::COMPATIBILITY_SECTION;
        if self.shared.vm.compatibility().is_none() || lock(&self.shared.loaded).devices.iter().any(compared)
        {
            return Ok(());
        }
        if self.is_sterna {
            return Err(MigrationError::PeerIncompatible {
                what: "the source sent no compatibility record, and this machine compares before any RAM \
                       moves: migrate from a machine of the same kind"
                    .to_owned(),
            });
        }
        self.shared.tell(&Event::Warning(
            "the source sent no compatibility record (it is no Sterna, or its return-path is off): CPUID and \
             TSC were not compared"
                .to_owned(),
        ));
        Ok(())
    }

    fn acknowledge(&self, due: usize) -> Result<(), MigrationError> {
        (0..due).try_for_each(|_| self.shared.say(&ReturnMessage::SwitchoverAck))
    }

    fn page(&mut self, run: PageRun) -> Result<(), MigrationError> {
        let shared = self.shared;
        if shared.capabilities.multifd {
            shared.rounds.enter(run)?;
        }
        let place = shared.sink.prepare(run)?;
        if !self.reader.fill_ram(place)? {
            return Err(MigrationError::Transport(
                format!("the main channel ended inside a page, at byte {}", self.decoder.position()),
                None,
            ));
        }
        shared.sink.commit(run)?;
        self.decoder.payload_consumed();
        shared.normal_pages.fetch_add(1, Ordering::Relaxed);
        shared.received_bytes.fetch_add(PAGE_SIZE as u64, Ordering::Relaxed);
        Ok(())
    }

    fn delta(&self, run: PageRun, delta: &[u8]) -> Result<(), MigrationError> {
        let place = self.shared.sink.prepare(run)?;
        let mut content = [0; PAGE_SIZE];
        place.copy_to(&mut content);
        sterna_wire::xbzrle::apply(delta, &mut content).map_err(MigrationError::wire(CHANNEL))?;
        place.copy_from(&content);
        self.shared.normal_pages.fetch_add(1, Ordering::Relaxed);
        self.shared.sink.commit(run)
    }

    fn section(
        &mut self,
        name: &str,
        instance: u32,
        version: u32,
        body: &[u8],
    ) -> Result<(), MigrationError> {
        if name == Handover::SECTION_NAME {
            let handover = Handover::decode(body).map_err(MigrationError::wire(CHANNEL))?;
            self.is_sterna = true;
            self.shared.tell(&Event::Peer { sterna: true, features: Features::HANDOVER.0 });
            self.shared.report(Fed::HandoverIdRead(MigrationId(handover.migration_id)));
            return Ok(());
        }
        if name == global_state::SECTION_NAME {
            let state = GlobalState::decode(body).map_err(MigrationError::wire(CHANNEL))?;
            lock(&self.shared.loaded).run = Some(state.wants_to_run());
            return Ok(());
        }
        let Some(device) = self.sections.find(name, instance) else {
            return Err(MigrationError::Internal(format!("section {name:?} passed and has no device")));
        };
        if let Err(error) = device.load(version, body) {
            // A record that is refused says how the machines differ; a device that cannot load is broken here.
            return Err(if name == extension::COMPATIBILITY_SECTION {
                MigrationError::PeerIncompatible { what: error.to_string() }
            } else {
                error.into()
            });
        }
        lock(&self.shared.loaded).devices.push((name.to_owned(), instance));
        Ok(())
    }
}

fn page(block: usize, offset: u64) -> PageRun {
    PageRun { block, first: offset / PAGE_SIZE as u64, count: 1 }
}

//! Peers that behave like QEMU (spec §1.8, §5), and the tool that controls both monitors of a
//! managed migration.

use super::qemu_state::Stage;
use super::schedule::{Effect, Pairing};
use super::world::{Command, Item, Message, Owner, SECOND, Side, Work, World};
use crate::destination;
use crate::source::SwitchoverAck;

impl World<'_> {
    fn qemu_return_path(&self) -> bool {
        matches!(
            self.schedule.pairing,
            Pairing::FromQemu { return_path: true, .. } | Pairing::ToQemu { return_path: true }
        )
    }

    // The source: it does not prepare, and resumes by itself when it misses SHUT.

    pub(super) fn qemu_source_connects(&mut self) {
        if self.qemu_return_path() {
            self.send(Side::Destination, Message::OpenReturnPath);
        }
        self.send(Side::Destination, Message::Ram);
        let at = self.local_delay();
        self.push(at, Item::SourceDoes(Work::QemuStops));
    }

    pub(super) fn qemu_source_does(&mut self, work: Work) {
        let at = self.local_delay();
        match (work, self.source.qemu.stage) {
            (Work::QemuStops, Stage::Active) => {
                self.source.running = false;
                self.source.qemu.stopped = true;
                self.push(at, Item::SourceDoes(Work::QemuReleases));
            }
            (Work::QemuReleases, Stage::Active) => {
                self.hooks = [Owner::Nobody; 2];
                self.send(Side::Destination, Message::Final);
                self.push(at, Item::SourceDoes(Work::QemuEof));
            }
            (Work::QemuEof, Stage::Active) => {
                self.eof_goes_out();
                if !self.qemu_return_path() {
                    self.qemu_source_ends(Stage::Completed);
                }
            }
            (Work::QemuResumes, Stage::Failed) => self.qemu_source_resumes(),
            _ => {}
        }
    }

    pub(super) fn qemu_source_reads(&mut self, message: Message) {
        match message {
            Message::Shut(0) if self.facts.eof_out => self.qemu_source_ends(Stage::Completed),
            Message::Shut(_) | Message::Garbage => self.qemu_source_broken(),
            _ => {}
        }
    }

    pub(super) fn qemu_source_broken(&mut self) {
        self.qemu_source_ends(Stage::Failed);
    }

    fn qemu_source_ends(&mut self, stage: Stage) {
        if self.source.qemu.stage != Stage::Active || !self.source.alive {
            return;
        }
        self.source.qemu.stage = stage;
        self.note(|| format!("  QEMU source {stage:?}"));
        self.close(Side::Source);
        if stage == Stage::Failed && self.source.qemu.stopped {
            let at = self.local_delay();
            self.push(at, Item::SourceDoes(Work::QemuResumes));
        }
        if self.destination_state() == Some(destination::State::Held) {
            self.tool_looks();
        }
    }

    /// Resumes the source's guest. On storage without locks, QEMU resumes whatever the destination
    /// does.
    fn qemu_source_resumes(&mut self) {
        if self.locks_some(Owner::Destination) {
            self.source.retries += 1;
            if self.source.retries < 60 {
                self.push(SECOND, Item::SourceDoes(Work::QemuResumes));
            }
            return;
        }
        for hook in &mut self.hooks {
            if *hook == Owner::Nobody {
                *hook = Owner::Source;
            }
        }
        self.source.running = self.schedule.was_running;
    }

    /// Plays `sterna migrate`, which looks at the source of a managed migration whose destination
    /// is held. It then sends a command to the destination.
    pub(super) fn tool_looks(&mut self) {
        let command = match self.source.qemu.stage {
            Stage::Active => return,
            Stage::Completed => Command::Cont,
            Stage::Failed => Command::Abandon,
        };
        if self.source.alive {
            let at = self.network_delay();
            self.push(at, Item::Operator(command));
        }
    }

    // The destination: it loads in order, answers any PING, and starts after EOF.

    pub(super) fn qemu_destination_reads(&mut self, message: Message) {
        match message {
            Message::OpenReturnPath if self.schedule.ack == SwitchoverAck::Legacy => {
                self.send(Side::Source, Message::Ack);
            }
            Message::Hello => self.send(Side::Source, Message::HelloPong { sterna: false }),
            Message::HandoverId | Message::Compatibility => {
                self.violate("extensions: a QEMU peer was sent what only a Sterna knows");
            }
            Message::DeviceAsks => self.send(Side::Source, Message::Ack),
            Message::Final => self.facts.final_arrived = true,
            Message::Prepare => {
                let at = self.local_delay();
                self.push(at, Item::DestinationDoes(Work::QemuPongs));
            }
            Message::Run => {
                let at = self.local_delay();
                self.push(at, Item::DestinationDoes(Work::QemuRuns));
            }
            Message::Page(page) => self.facts.placed |= page,
            Message::Eof if self.schedule.postcopy => {
                self.facts.committed = true;
                self.facts.pages_complete = true;
                self.send(Side::Source, Message::Shut(0));
                self.close(Side::Destination);
            }
            Message::Eof => {
                self.destination.qemu.eof = true;
                let at = self.local_delay();
                self.push(at, Item::DestinationDoes(Work::QemuStarts));
            }
            _ => {}
        }
    }

    pub(super) fn qemu_destination_does(&mut self, work: Work) {
        if work == Work::QemuPongs {
            self.facts.prepared = true;
            return self.send(Side::Source, Message::PreparePong);
        }
        let taken = self.locks_some(Owner::Source);
        let fails = self.fails(Effect::Load) || self.fails(Effect::Start);
        if taken || fails || !self.facts.final_arrived {
            return self.crash(Side::Destination);
        }
        self.hooks = [Owner::Destination; 2];
        self.destination.running = self.schedule.was_running && self.schedule.autostart;
        if work == Work::QemuRuns {
            // From now on the destination keeps the guest when the connection breaks.
            self.destination.qemu.eof = true;
            self.facts.taken_over = true;
            return self.send(Side::Source, Message::Started);
        }
        self.facts.committed = true;
        if self.qemu_return_path() {
            self.send(Side::Source, Message::Shut(0));
        }
        self.close(Side::Destination);
    }

    pub(super) fn qemu_destination_broken(&mut self) {
        if !self.destination.qemu.eof {
            self.crash(Side::Destination);
        }
    }
}

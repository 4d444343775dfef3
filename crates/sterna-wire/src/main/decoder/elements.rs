//! Elements at top level, and the rules for their order (`specs/stream.md §1`).

use super::{DecoderState, MainDecoder, Taken, silent, taken};
use crate::limits::{DEVICE_STATE_BYTES, VM_DESCRIPTION_BYTES};
use crate::main::command::Command;
use crate::main::element::{self, FOOTER, SectionHeader, SectionKind, VM_DESCRIPTION};
use crate::main::expect::BodyKind;
use crate::main::item::MainItem;
use crate::ram;
use crate::reader::{Reader, Stop};

impl MainDecoder {
    pub(super) fn element(&mut self, r: &mut Reader<'_>) -> Result<Taken, Stop> {
        let start = r.clone();
        let kind = r.u8()?;
        // RAM ends with its END. A FULL section before END loads before RAM's pages, or it belongs to a
        // background snapshot, which has no END (§1.7). Only later elements show which.
        let is_behind_ram = match kind {
            element::EOF => self.sections.has_ram(),
            element::FULL => self.sections.is_ram_over(),
            _ => false,
        };
        if self.expect.opaque_tail && is_behind_ram {
            self.state = DecoderState::Tail;
            return taken(&start, MainItem::Tail);
        }
        match (kind, SectionKind::from_byte(kind)) {
            (element::EOF, _) => self.eof(r),
            (element::COMMAND, _) => self.command(r),
            (_, Some(kind @ (SectionKind::Start | SectionKind::Full))) => self.new_section(r, kind),
            (_, Some(kind)) => self.known_section(r, kind),
            _ => Err(r.bad("specs/stream.md §1.3", format!("no element starts with {kind:02x}"))),
        }
    }

    fn eof(&mut self, r: &Reader<'_>) -> Result<Taken, Stop> {
        let spec = "specs/stream.md §1.7";
        if !self.expect.background_snapshot
            && let Some(name) = self.sections.first_open()
        {
            return Err(r.bad(spec, format!("EOF before the END of section {name:?}")));
        }
        if self.blocks.as_ref().is_some_and(|blocks| !blocks.is_empty()) && !self.sections.has_ram() {
            return Err(r.bad(spec, "EOF, but RAM has not arrived"));
        }
        self.state = if self.expect.no_description { DecoderState::Done } else { DecoderState::Committed };
        taken(r, MainItem::Eof)
    }

    fn command(&mut self, r: &mut Reader<'_>) -> Result<Taken, Stop> {
        let command = Command::read(r)?;
        match command {
            Command::OpenReturnPath if self.return_path_open => {
                return Err(r.bad("specs/stream.md §1.8", "OPEN_RETURN_PATH occurs twice"));
            }
            Command::OpenReturnPath => self.return_path_open = true,
            Command::Ping(_) if !self.return_path_open => {
                return Err(r.bad("specs/stream.md §1.8", "PING before OPEN_RETURN_PATH"));
            }
            Command::SwitchoverStart if self.switchover_started => {
                return Err(r.bad("specs/stream.md §1.8", "SWITCHOVER_START occurs twice"));
            }
            Command::SwitchoverStart => self.switchover_started = true,
            Command::Ping(_) => {}
            // After LISTEN, no description follows EOF (specs/postcopy.md §2), and the next page record names its
            // block.
            Command::PostcopyListen if self.expect.postcopy => {
                self.expect.no_description = true;
                self.forget_block();
            }
            _ if !self.expect.postcopy => {
                let rule = "a command of postcopy, which is off at this side: switch postcopy-ram and dirty-bitmaps \
                            off at the source";
                return Err(r.unfit("specs/stream.md §6", rule));
            }
            _ => {}
        }
        taken(r, MainItem::Command(command))
    }

    /// Reads the header of a START or FULL section and registers the section.
    fn new_section(&mut self, r: &mut Reader<'_>, kind: SectionKind) -> Result<Taken, Stop> {
        let header = SectionHeader::read(r)?;
        let SectionHeader { id, name, instance, version } = header;
        let body = self.knowledge.body(name, instance, version, kind);
        let is_ram = body == BodyKind::Ram;
        if is_ram {
            check_ram_header(r, &header, kind)?;
        }
        self.sections.introduce(&header, kind, is_ram).map_err(|rule| r.bad("specs/stream.md §1.4", rule))?;
        self.enter(r, id, kind, body)
    }

    /// Reads the header of a PART or END section and finds its earlier section.
    fn known_section(&mut self, r: &mut Reader<'_>, kind: SectionKind) -> Result<Taken, Stop> {
        let spec = "specs/stream.md §1.4";
        let id = r.u32()?;
        let Some(section) = self.sections.get(id).filter(|section| section.open) else {
            return Err(r.bad(spec, format!("no section with id {id} is open for {kind:?}")));
        };
        let body = match section.is_ram {
            true => BodyKind::Ram,
            false => self.knowledge.body(&section.name, section.instance, section.version, kind),
        };
        if body == BodyKind::Ram && !section.is_ram {
            return Err(r.bad(spec, format!("section {id} is not the section of RAM")));
        }
        if kind == SectionKind::End {
            self.sections.close(id);
        }
        self.enter(r, id, kind, body)
    }

    pub(super) fn enter(
        &mut self,
        r: &Reader<'_>,
        id: u32,
        kind: SectionKind,
        body: BodyKind,
    ) -> Result<Taken, Stop> {
        self.current.id = id;
        self.current.kind = Some(kind);
        self.state = match body {
            BodyKind::Ram if kind == SectionKind::Start => DecoderState::RamTotal,
            BodyKind::Ram => DecoderState::RamRecord,
            BodyKind::LengthPrefixed { most } => DecoderState::BodyLength { most, is_held: true },
            BodyKind::Passing { most } => DecoderState::BodyLength { most, is_held: false },
            BodyKind::FixedLength(length) => {
                self.claim(r, length as u64)?;
                DecoderState::BodyBytes { left: length }
            }
            BodyKind::OpaqueByFooter => DecoderState::BodyOpaque,
            BodyKind::Refuse(rule) => return Err(r.unfit("specs/stream.md §1.4", rule)),
        };
        silent(r)
    }

    /// Counts bytes of bodies against the limit before the decoder waits for them.
    pub(super) fn claim(&mut self, r: &Reader<'_>, bytes: u64) -> Result<(), Stop> {
        let limit = self.expect.device_state_bytes.min(DEVICE_STATE_BYTES);
        let total = self.body_bytes.saturating_add(bytes);
        if total > limit {
            return Err(
                r.bad("specs/stream.md §9", format!("{total} bytes of device state, more than {limit}"))
            );
        }
        self.body_bytes = total;
        Ok(())
    }

    pub(super) fn footer(&mut self, r: &mut Reader<'_>) -> Result<Taken, Stop> {
        let spec = "specs/stream.md §1.4";
        let mark = r.u8()?;
        if mark != FOOTER {
            return Err(r.bad(spec, format!("{mark:02x} instead of the footer (7e) of a section")));
        }
        let id = r.u32()?;
        if id != self.current.id {
            return Err(r.bad(spec, format!("footer of section {id} in section {}", self.current.id)));
        }
        let (Some(section), Some(kind)) = (self.sections.get(id), self.current.kind) else {
            return Err(r.bad(spec, format!("footer of section {id}, which has no header")));
        };
        self.state = if self.in_checkpoint { DecoderState::CheckpointEnd } else { DecoderState::Element };
        if section.is_ram {
            return taken(r, MainItem::RamEnd { kind });
        }
        let (name, instance, version) = (section.name.clone(), section.instance, section.version);
        let body = std::mem::take(&mut self.body);
        taken(r, MainItem::Section { name, instance, version, kind, body })
    }

    pub(super) fn description_head(&mut self, r: &mut Reader<'_>) -> Result<Taken, Stop> {
        let spec = "specs/stream.md §1.6";
        let kind = r.u8()?;
        if kind != VM_DESCRIPTION {
            return Err(r.bad(spec, format!("{kind:02x} after EOF instead of the description (06)")));
        }
        let length = r.u32()? as usize;
        if length > VM_DESCRIPTION_BYTES {
            return Err(
                r.bad(spec, format!("{length} bytes of description, more than {VM_DESCRIPTION_BYTES}"))
            );
        }
        self.state = DecoderState::Description { left: length };
        silent(r)
    }

    pub(super) fn description_bytes(&mut self, r: &mut Reader<'_>, left: usize) -> Result<Taken, Stop> {
        let left = self.take_over(r, left)?;
        if left > 0 {
            self.state = DecoderState::Description { left };
            return silent(r);
        }
        let text = std::mem::take(&mut self.body);
        self.state = DecoderState::Done;
        taken(r, MainItem::VmDescription(text))
    }
}

fn check_ram_header(r: &Reader<'_>, header: &SectionHeader<'_>, kind: SectionKind) -> Result<(), Stop> {
    let spec = "specs/stream.md §2";
    if header.name != ram::SECTION_NAME
        || header.instance != ram::SECTION_INSTANCE
        || kind != SectionKind::Start
    {
        let rule = format!("{kind:?} section {:?} instance {} cannot be RAM", header.name, header.instance);
        return Err(r.bad(spec, rule));
    }
    if header.version != ram::SECTION_VERSION {
        return Err(r.unfit(spec, format!("version {} of RAM; only 4 is known", header.version)));
    }
    Ok(())
}

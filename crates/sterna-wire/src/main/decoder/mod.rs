//! Reading the main channel as its bytes arrive (`specs/stream.md §1`, `§2`, `§9`).
//!
//! The decoder is a state machine over the caller's buffer. Every state reads one field group from the front of
//! it; too few bytes leave the state as it was. What has no bound on the wire (device bodies, the description) is
//! taken over piece by piece, so that the caller's buffer stays small, and grows here only by bytes that have
//! arrived. The states: [`DecoderState`]; the ways between them: this file for elements, `body` for sections of devices,
//! `ram` for records, `checkpoint` for what COLO sends behind the end.

mod body;
mod checkpoint;
mod elements;
mod ram;
mod sections;

use super::SectionKind;
use super::configuration::{Configuration, FileHeader};
use super::element::FOOTER_BYTES;
use super::expect::{Expectations, SectionKnowledge};
use super::item::{MainItem, Step};
use crate::PAGE_SIZE;
use crate::error::WireError;
use crate::multifd::BlockTable;
use crate::reader::{Reader, Stop};
use ram::RamState;
use sections::Sections;

/// Incremental decoder of the main channel.
pub struct MainDecoder {
    knowledge: Box<dyn SectionKnowledge + Send>,
    expect: Expectations,
    /// The expected blocks; from the block list on, those of the stream.
    blocks: Option<BlockTable>,
    position: u64,
    state: DecoderState,
    current: Current,
    sections: Sections,
    return_path_open: bool,
    switchover_started: bool,
    /// Behind the end, in the RAM of a checkpoint.
    in_checkpoint: bool,
    ram: RamState,
    /// What has been taken over of the body, or the description, that is being read.
    body: Vec<u8>,
    /// Bytes of all bodies so far, that of the current section with all its announced bytes.
    body_bytes: u64,
}

/// What comes next.
#[derive(Debug, Clone, PartialEq, Eq)]
enum DecoderState {
    Header,
    Configuration,
    Element,
    /// Word of the block list.
    RamTotal,
    /// Its entries, so many bytes of RAM still to be listed.
    RamBlocks {
        left: u64,
    },
    /// HOOK, MULTIFD_FLUSH or EOS after the list.
    RamSetup,
    /// A record.
    RamRecord,
    /// The caller takes a page.
    RamPayload,
    /// Length of a framed body.
    BodyLength {
        most: usize,
        /// Whether it counts against the limit of what is held.
        is_held: bool,
    },
    /// So many more bytes of a body.
    BodyBytes {
        left: usize,
    },
    /// A body up to its footer.
    BodyOpaque,
    Footer,
    /// Between EOF and the description.
    Committed,
    /// So many more bytes of the description.
    Description {
        left: usize,
    },
    Done,
    /// The caller takes the rest.
    Tail,
    /// The END section of RAM in a checkpoint.
    CheckpointRam,
    /// The byte behind it.
    CheckpointEnd,
    Failed(WireError),
}

/// The section that is being read.
#[derive(Debug, Default)]
struct Current {
    id: u32,
    kind: Option<SectionKind>,
}

/// One step: bytes taken and what they made.
struct Taken {
    used: usize,
    item: Option<MainItem>,
}

impl MainDecoder {
    /// A decoder at the start of a channel.
    pub fn new(knowledge: Box<dyn SectionKnowledge + Send>, expect: Expectations) -> Self {
        let mut state = DecoderState::Header;
        let blocks = expect.blocks.clone().map(BlockTable::new).transpose().unwrap_or_else(|error| {
            state = DecoderState::Failed(error);
            None
        });
        Self {
            knowledge,
            expect,
            blocks,
            position: 0,
            state,
            current: Current::default(),
            sections: Sections::default(),
            return_path_open: false,
            switchover_started: false,
            in_checkpoint: false,
            ram: RamState::default(),
            body: Vec::new(),
            body_bytes: 0,
        }
    }

    /// Counts positions from `position` on: where the stream begins in its file.
    #[must_use]
    pub fn starting_at(mut self, position: u64) -> Self {
        self.position = position;
        self
    }

    /// Reads on. `buf` starts with the first byte that has not been consumed yet.
    ///
    /// # Errors
    /// The first broken rule, with its position in the channel; every later call repeats it.
    /// [`Fault::Local`](crate::Fault::Local) when a page has not been taken yet, or when
    /// [`Expectations::blocks`] is no sound list.
    pub fn next(&mut self, buf: &[u8]) -> Result<Step, WireError> {
        let mut consumed = 0;
        loop {
            if matches!(self.state, DecoderState::Done | DecoderState::Tail) {
                return Ok(if consumed > 0 { Step::Partial { consumed } } else { Step::End });
            }
            let mut reader = Reader::new(&buf[consumed..], self.place());
            match self.step(&mut reader) {
                Ok(Taken { used, item }) => {
                    consumed += used;
                    self.position += used as u64;
                    // In a file, the stream jumps over bitmap and pages.
                    if let Some(MainItem::MappedBlock { resume_at, .. }) = &item {
                        self.position = *resume_at;
                    }
                    if let Some(item) = item {
                        return Ok(Step::Item { item, consumed });
                    }
                }
                Err(Stop::Short(_)) if consumed > 0 => return Ok(Step::Partial { consumed }),
                Err(Stop::Short(needed)) => return Ok(Step::NeedMore(needed)),
                Err(Stop::Bad(error)) => {
                    let error = match &self.state {
                        DecoderState::Failed(_) => error,
                        _ => error.at(self.position),
                    };
                    self.state = DecoderState::Failed(error.clone());
                    return Err(error);
                }
            }
        }
    }

    /// Tells the decoder that the caller has taken the page after
    /// [`PagePayloadFollows`](MainItem::PagePayloadFollows). At any other time it does nothing.
    pub fn payload_consumed(&mut self) {
        if self.state == DecoderState::RamPayload {
            self.position += PAGE_SIZE as u64;
            self.state = DecoderState::RamRecord;
        }
    }

    /// A recovery goes on over another channel, from its first byte: elements of the same stream follow, without a header. Whatever
    /// was torn when the last channel was lost is forgotten, and the next record of a page names its block.
    pub fn begin_recovery(&mut self) {
        (self.position, self.state) = (0, DecoderState::Element);
        self.current = Current::default();
        self.body = Vec::new();
        // Its END may have come, and EOF not.
        self.sections.reopen_ram();
        self.forget_block();
    }

    /// Offset in the channel of the first byte not consumed yet.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Names and lengths of the RAM blocks, in the order of the indices in items; `None` before the block list
    /// unless blocks are expected.
    pub fn blocks(&self) -> Option<&BlockTable> {
        self.blocks.as_ref()
    }

    /// Id of the section that the last [`Section`](MainItem::Section), [`RamStart`](MainItem::RamStart) or
    /// [`RamEnd`](MainItem::RamEnd) belongs to.
    pub fn section_id(&self) -> u32 {
        self.current.id
    }

    /// Whether a source may fall silent here, `left` bytes not consumed, without owing this side anything: between two
    /// elements, between two records of RAM, and before the footer after RAM's records, which a QEMU holds back until
    /// it goes on. Never before the first element: who connects says at once what it brings.
    pub fn may_rest(&self, left: usize) -> bool {
        match self.state {
            DecoderState::Element | DecoderState::RamRecord => left == 0,
            DecoderState::Footer => {
                left == 0 && self.sections.get(self.current.id).is_some_and(|it| it.is_ram)
            }
            // What is left begins with a footer, and shows to be one only by what comes behind it.
            DecoderState::BodyOpaque => left == FOOTER_BYTES,
            _ => false,
        }
    }

    /// Whether the source says no MULTIFD_FLUSH and means every EOS as one, as QEMU does up to 8.0. Known from START on.
    pub fn flushes_silently(&self) -> bool {
        self.ram.legacy_flush
    }

    /// What the end of the connection means here, where `left` bytes were not consumed: nothing once EOF has been
    /// read (a description that is missing or torn does no harm), before it a failure.
    ///
    /// # Errors
    /// The stream is torn; or the error that [`next`](Self::next) returned.
    pub fn end_of_file(&self, left: usize) -> Result<(), WireError> {
        match &self.state {
            DecoderState::Committed
            | DecoderState::Description { .. }
            | DecoderState::Done
            | DecoderState::Tail => Ok(()),
            DecoderState::Failed(error) => Err(error.clone()),
            _ if self.in_checkpoint => Err(self.torn_checkpoint(left)),
            _ => {
                let rule = "the connection or file ended before EOF (00)";
                let end = self.position.saturating_add(left as u64);
                Err(WireError::misbehaved(self.place(), end, "specs/stream.md §1.7", rule))
            }
        }
    }

    fn step(&mut self, r: &mut Reader<'_>) -> Result<Taken, Stop> {
        match self.state {
            DecoderState::Header => {
                FileHeader::read(r)?;
                self.state = DecoderState::Configuration;
                taken(r, MainItem::Header)
            }
            DecoderState::Configuration => {
                let configuration = Configuration::read(r)?;
                configuration.check(&self.expect)?;
                self.state = DecoderState::Element;
                taken(r, MainItem::Configuration(configuration))
            }
            DecoderState::Element => self.element(r),
            DecoderState::RamTotal => self.ram_total(r),
            DecoderState::RamBlocks { left } => self.ram_block(r, left),
            DecoderState::RamSetup => self.ram_setup(r),
            DecoderState::RamRecord => self.ram_record(r),
            DecoderState::RamPayload => {
                let rule = "the page before has not been taken: call payload_consumed";
                Err(WireError::local("RAM record", 0, "specs/stream.md §2.3", rule).into())
            }
            DecoderState::BodyLength { most, is_held } => self.body_length(r, most, is_held),
            DecoderState::BodyBytes { left } => self.body_bytes(r, left),
            DecoderState::BodyOpaque => self.body_opaque(r),
            DecoderState::Footer => self.footer(r),
            DecoderState::Committed => self.description_head(r),
            DecoderState::Description { left } => self.description_bytes(r, left),
            DecoderState::Done | DecoderState::Tail => silent(r),
            DecoderState::CheckpointRam => self.checkpoint_ram(r),
            DecoderState::CheckpointEnd => self.checkpoint_end(r),
            DecoderState::Failed(ref error) => Err(Stop::Bad(error.clone())),
        }
    }

    /// The element for error messages.
    fn place(&self) -> &'static str {
        match self.state {
            DecoderState::Header => "file header",
            DecoderState::Configuration => "configuration",
            DecoderState::Element => "element",
            DecoderState::RamTotal | DecoderState::RamBlocks { .. } => "RAM block list",
            DecoderState::RamSetup | DecoderState::RamRecord | DecoderState::RamPayload => "RAM record",
            DecoderState::BodyLength { .. } | DecoderState::BodyBytes { .. } | DecoderState::BodyOpaque => {
                "section body"
            }
            DecoderState::Footer => "section footer",
            DecoderState::CheckpointRam | DecoderState::CheckpointEnd => "RAM of a checkpoint",
            _ => "description",
        }
    }
}

impl std::fmt::Debug for MainDecoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { position, state, .. } = self;
        f.debug_struct("MainDecoder")
            .field("position", position)
            .field("state", state)
            .finish_non_exhaustive()
    }
}

/// All that `r` has read made `item`.
fn taken(r: &Reader<'_>, item: MainItem) -> Result<Taken, Stop> {
    Ok(Taken { used: r.at(), item: Some(item) })
}

/// All that `r` has read only changed the state.
fn silent(r: &Reader<'_>) -> Result<Taken, Stop> {
    Ok(Taken { used: r.at(), item: None })
}

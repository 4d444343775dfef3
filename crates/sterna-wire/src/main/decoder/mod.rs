//! Incremental decoding of the main channel (`specs/stream.md §1`, `§2`, `§9`).
//!
//! The decoder is a state machine over the caller's buffer. Every state reads one group of fields from the
//! front of the buffer. If bytes are missing, the state does not change.
//!
//! Device bodies and the description have no bound on the wire. The decoder moves them piece by piece into its
//! own memory, so that the caller's buffer stays small. That memory grows only with bytes that have arrived.
//!
//! [`DecoderState`] lists the states. The transitions between elements are in this file, and for device
//! sections in `body`. `ram` has the transitions for RAM records, `checkpoint` for COLO after the end.

mod body;
mod checkpoint;
mod elements;
mod ram;
mod ram_state;
mod sections;

use super::configuration::{Configuration, FileHeader};
use super::element::FOOTER_BYTES;
use super::element::SectionKind;
use super::expect::{Expectations, SectionKnowledge};
use super::item::{MainItem, Step};
use crate::PAGE_SIZE;
use crate::error::WireError;
use crate::multifd::BlockTable;
use crate::reader::{Reader, Stop};
use ram_state::RamState;
use sections::Sections;

/// Incremental decoder of the main channel.
pub struct MainDecoder {
    knowledge: Box<dyn SectionKnowledge + Send>,
    expect: Expectations,
    /// The expected blocks; after the block list, the blocks of the stream.
    blocks: Option<BlockTable>,
    position: u64,
    state: DecoderState,
    current: Current,
    sections: Sections,
    return_path_open: bool,
    switchover_started: bool,
    /// Whether the decoder reads a checkpoint, after the end of the migration.
    in_checkpoint: bool,
    ram: RamState,
    /// Bytes of the current body or description that have been taken over so far.
    body: Vec<u8>,
    /// Bytes of all bodies so far. Includes all announced bytes of the current section.
    body_bytes: u64,
}

/// The part of the stream that follows.
#[derive(Debug, Clone, PartialEq, Eq)]
enum DecoderState {
    Header,
    Configuration,
    Element,
    /// The first word of the block list: the total size of RAM.
    RamTotal,
    /// Entries of the block list; `left` bytes of RAM are not listed yet.
    RamBlocks {
        left: u64,
    },
    /// HOOK, MULTIFD_FLUSH or EOS after the block list.
    RamSetup,
    /// A record of RAM.
    RamRecord,
    /// The caller is reading a page.
    RamPayload,
    /// Length of a framed body.
    BodyLength {
        most: usize,
        /// Whether the body counts against the limit of stored device state.
        is_held: bool,
    },
    /// The next `left` bytes of a body.
    BodyBytes {
        left: usize,
    },
    /// A body without a length, up to its footer.
    BodyOpaque,
    Footer,
    /// After EOF, before the description.
    Committed,
    /// The next `left` bytes of the description.
    Description {
        left: usize,
    },
    Done,
    /// The caller reads the rest of the stream itself.
    Tail,
    /// The END section of RAM in a checkpoint.
    CheckpointRam,
    /// The `00` after that section.
    CheckpointEnd,
    Failed(WireError),
}

/// The section that is being read.
#[derive(Debug, Default)]
struct Current {
    id: u32,
    kind: Option<SectionKind>,
}

/// Result of one step: the number of bytes taken, and the item that they completed.
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

    /// Sets the position of the first byte, for a stream that begins inside a file.
    #[must_use]
    pub fn starting_at(mut self, position: u64) -> Self {
        self.position = position;
        self
    }

    /// Decodes the next item. `buf` starts with the first byte that has not been consumed yet.
    ///
    /// # Errors
    /// The first broken rule, with its position in the channel. Every later call returns the same error.
    /// [`Fault::Local`](crate::Fault::Local) when the caller has not taken a page yet, or when
    /// [`Expectations::blocks`] is not a valid list.
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
                    // In a file, the stream skips bitmap and pages.
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

    /// Reports that the caller has taken the page of a [`PagePayloadFollows`](MainItem::PagePayloadFollows).
    ///
    /// At any other time the call has no effect.
    pub fn payload_consumed(&mut self) {
        if self.state == DecoderState::RamPayload {
            self.position += PAGE_SIZE as u64;
            self.state = DecoderState::RamRecord;
        }
    }

    /// Continues the stream on a new channel after a loss in postcopy.
    ///
    /// The channel's first byte begins an element: there is no header. The decoder drops an element that the
    /// loss cut off. The next page record must name its block.
    pub fn begin_recovery(&mut self) {
        (self.position, self.state) = (0, DecoderState::Element);
        self.current = Current::default();
        self.body = Vec::new();
        // The lost channel may have delivered RAM's END, but not EOF.
        self.sections.reopen_ram();
        self.forget_block();
    }

    /// Offset in the channel of the first byte not consumed yet.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Names and lengths of the RAM blocks, in the order of the indices in items.
    ///
    /// `None` before the block list, unless the caller expects certain blocks.
    pub fn blocks(&self) -> Option<&BlockTable> {
        self.blocks.as_ref()
    }

    /// Id of the section of the last [`Section`](MainItem::Section), [`RamStart`](MainItem::RamStart) or
    /// [`RamEnd`](MainItem::RamEnd).
    pub fn section_id(&self) -> u32 {
        self.current.id
    }

    /// Whether the source may be silent here, with `left` bytes not consumed, without an error.
    ///
    /// It may be silent at three places: between two elements, between two records of RAM, and before the
    /// footer after RAM's records. QEMU sends that footer only when it continues. Silence before the first
    /// element is an error, because a source sends its header immediately.
    pub fn may_rest(&self, left: usize) -> bool {
        match self.state {
            DecoderState::Element | DecoderState::RamRecord => left == 0,
            DecoderState::Footer => {
                left == 0 && self.sections.get(self.current.id).is_some_and(|it| it.is_ram)
            }
            // The bytes left begin with a footer. Only the bytes after it can confirm that.
            DecoderState::BodyOpaque => left == FOOTER_BYTES,
            _ => false,
        }
    }

    /// Whether every EOS is also a flush, because the source sends no MULTIFD_FLUSH.
    ///
    /// QEMU does so up to 8.0. The value is valid from START on.
    pub fn flushes_silently(&self) -> bool {
        self.ram.legacy_flush
    }

    /// Judges the end of the connection at this position, with `left` bytes not consumed.
    ///
    /// After EOF it is no error, because a missing or torn description does no harm. Before EOF it is a
    /// failure.
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
                let rule = "the previous page has not been read: call payload_consumed";
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

    /// Name of the current element for error messages.
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

/// A step whose bytes completed `item`.
fn taken(r: &Reader<'_>, item: MainItem) -> Result<Taken, Stop> {
    Ok(Taken { used: r.at(), item: Some(item) })
}

/// A step whose bytes only changed the state.
fn silent(r: &Reader<'_>) -> Result<Taken, Stop> {
    Ok(Taken { used: r.at(), item: None })
}

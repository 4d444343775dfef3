//! The flows of a session by their kind, and the one whose end decides which side runs the guest.

use std::collections::HashMap;

use super::options::Options;
use crate::frame::Verdict;
use crate::phase::{
    Closing, DestinationKeeper, Heard, MultifdPages, Phase, RamProgress, ReturnReader, SourceKeeper,
    StreamKind, StreamReader, StreamState, Unconfirmed,
};
use crate::session::Role;

/// The kinds of a session's flows, and the state of its main channel.
pub(super) struct MainFlow {
    keeper: Keeper,
    is_raw: bool,
    unconfirmed: bool,
    /// Whether the places of pages are noted.
    finds_pages: bool,
    watched: HashMap<u32, Watch>,
    main: Option<Main>,
}

enum Keeper {
    Source(SourceKeeper),
    Destination(DestinationKeeper),
}

#[derive(Default)]
struct Watch {
    /// The first bytes of the source's VMM, until they tell the kind.
    first: Vec<u8>,
    kind: Option<StreamKind>,
    /// The destination's side has sent bytes.
    has_answered: bool,
    /// Of a multifd channel: finds its pages.
    pages: Option<MultifdPages>,
}

struct Main {
    flow: u32,
    stream: StreamReader,
    answers: ReturnReader,
    /// Bytes of the stream that were read, and of the answers.
    read: u64,
    answered: u64,
    /// Bytes of the answers up to the end of SHUT.
    shut_at: Option<u64>,
}

/// Why a flow is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refusal {
    #[error(
        "a second main channel while one is open: one listening address carries one migration at a time; wait until the \
         first one ends, or start another --forward"
    )]
    SecondMain,
    #[error(transparent)]
    Unconfirmed(#[from] Unconfirmed),
    #[error("the session is over, and the end of the stream may not be passed on any more")]
    Over,
}

impl MainFlow {
    pub(super) fn new(role: Role, options: &Options) -> Self {
        let keeper = match role {
            Role::Dialer => Keeper::Source(SourceKeeper::new()),
            Role::Acceptor => Keeper::Destination(DestinationKeeper::new()),
        };
        let (is_raw, unconfirmed) = (options.is_raw, options.unconfirmed);
        let finds_pages = role == Role::Dialer && options.compress.is_on();
        Self { keeper, is_raw, unconfirmed, finds_pages, watched: HashMap::new(), main: None }
    }

    /// Whether a main channel is open.
    pub(super) fn has_main(&self) -> bool {
        self.main.is_some()
    }

    /// The flow of the main channel.
    pub(super) fn flow(&self) -> Option<u32> {
        self.main.as_ref().map(|main| main.flow)
    }

    pub(super) fn phase(&self) -> Option<&Phase> {
        self.main.as_ref().map(|main| main.stream.phase())
    }

    /// How much RAM has passed.
    pub(super) fn progress(&self) -> Option<&RamProgress> {
        self.main.as_ref().map(|main| main.stream.progress())
    }

    /// Whether the destination has the guest: it has answered, or the package of postcopy has passed.
    pub(super) fn has_arrived(&self) -> bool {
        self.main.as_ref().is_some_and(|main| {
            main.answers.shut() == Some(0)
                || main.answers.is_package_loaded()
                // Without the answer that newer sources wait for, the package itself counts.
                || main.stream.package().is_some_and(|(_, resumes)| !resumes)
        })
    }

    /// Reads bytes that pass from the source's VMM to the destination's. Returns the kind when it becomes known.
    /// Appends the offsets at which pages begin to `pages`.
    pub(super) fn stream(
        &mut self,
        flow: u32,
        bytes: &[u8],
        pages: &mut Vec<u64>,
    ) -> Result<Option<StreamKind>, Refusal> {
        let has_main = self.main.is_some();
        let watch = self.watched.entry(flow).or_default();
        let mut found = None;
        let first;
        let mut bytes = bytes;
        if watch.kind.is_none() {
            watch.first.extend_from_slice(&bytes[..bytes.len().min(StreamKind::BYTES)]);
            if watch.first.len() < StreamKind::BYTES {
                return Ok(None);
            }
            let kind = match (self.is_raw, watch.has_answered) {
                (true, _) => StreamKind::Raw,
                (false, true) => StreamKind::Server,
                (false, false) => StreamKind::of(&watch.first, has_main),
            };
            if kind.is_main() && has_main {
                return Err(Refusal::SecondMain);
            }
            watch.kind = Some(kind);
            if kind == StreamKind::Multifd && self.finds_pages {
                watch.pages = Some(MultifdPages::default());
            }
            found = Some(kind);
            let mut all = std::mem::take(&mut watch.first);
            let earlier = all.len().saturating_sub(bytes.len().min(StreamKind::BYTES));
            all.truncate(earlier);
            all.extend_from_slice(bytes);
            first = all;
            bytes = &first;
            self.begin(flow, kind);
        }
        if let Some(finder) = self.watched.get_mut(&flow).and_then(|watch| watch.pages.as_mut()) {
            finder.feed(bytes, pages);
        }
        match self.main.as_mut().filter(|main| main.flow == flow) {
            Some(main) => {
                main.stream.feed(bytes)?;
                pages.extend(main.stream.take_pages());
                main.read += bytes.len() as u64;
            }
            None => return Ok(found),
        }
        self.after_stream()?;
        Ok(found)
    }

    fn begin(&mut self, flow: u32, kind: StreamKind) {
        let mut stream = match kind {
            StreamKind::Main => StreamReader::new(!self.unconfirmed),
            StreamKind::Recovered => StreamReader::recovered(),
            StreamKind::Opaque => StreamReader::unread("it is encrypted, or not a QEMU migration stream"),
            _ => return,
        };
        if kind == StreamKind::Recovered {
            match &mut self.keeper {
                Keeper::Source(keeper) => keeper.in_postcopy(),
                Keeper::Destination(keeper) => keeper.in_postcopy(),
            }
        }
        if self.finds_pages {
            stream.collect_pages();
        }
        self.main =
            Some(Main { flow, stream, answers: ReturnReader::new(), read: 0, answered: 0, shut_at: None });
    }

    /// Updates the keepers after bytes of the stream were read: taken at the source, about to be passed on at the
    /// destination.
    fn after_stream(&mut self) -> Result<(), Refusal> {
        let Some(main) = &self.main else { return Ok(()) };
        let has_ended = main.stream.end().is_some_and(|end| end < main.read);
        match &mut self.keeper {
            Keeper::Source(keeper) => {
                // Older sources are in postcopy as soon as the package is written, and cannot resume.
                if let Some((_, false)) = main.stream.package() {
                    keeper.end_sent();
                }
            }
            Keeper::Destination(keeper) => {
                if has_ended || main.stream.package().is_some() {
                    if !keeper.may_pass_end() {
                        return Err(Refusal::Over);
                    }
                    keeper.end_passed();
                } else {
                    keeper.refuted();
                }
                if main.stream.package().is_some() {
                    keeper.in_postcopy();
                }
            }
        }
        Ok(())
    }

    /// At the source: bytes of the flow up to `sent` are given to a carrier, and `delivered` are passed on.
    pub(super) fn sent(&mut self, flow: u32, sent: u64, delivered: u64) {
        let (Keeper::Source(keeper), Some(main)) = (&mut self.keeper, &self.main) else { return };
        if main.flow != flow {
            return;
        }
        match (main.stream.package(), main.stream.end()) {
            (Some((end, _)), _) if sent > end => {
                keeper.end_sent();
                let resumes_until_loaded = main.stream.package().is_some_and(|(_, resumes)| resumes);
                if !resumes_until_loaded && delivered > end {
                    keeper.in_postcopy();
                }
            }
            (None, Some(end)) if sent > end => keeper.end_sent(),
            (None, None) => keeper.refuted(),
            _ => {}
        }
    }

    /// Reads bytes that pass from the destination's VMM to the source's: taken at the destination, delivered at the
    /// source.
    pub(super) fn answers(&mut self, flow: u32, bytes: &[u8]) {
        let watch = self.watched.entry(flow).or_default();
        watch.has_answered = true;
        let Some(main) = self.main.as_mut().filter(|main| main.flow == flow) else { return };
        main.answers.feed(bytes);
        main.answered += bytes.len() as u64;
        if main.answers.shut().is_some() && main.shut_at.is_none() {
            main.shut_at = Some(main.answered);
        }
        if let Keeper::Source(keeper) = &mut self.keeper {
            if main.answers.is_package_loaded() {
                keeper.in_postcopy();
            }
            if main.answers.shut().is_some() {
                keeper.answered();
            }
        }
    }

    /// At the source: the return path has ended. At the destination: `delivered` bytes of the answers have arrived.
    pub(super) fn answers_arrived(&mut self, flow: u32, delivered: Option<u64>) {
        let Some(main) = self.main.as_ref().filter(|main| main.flow == flow) else { return };
        match (&mut self.keeper, delivered) {
            (Keeper::Source(keeper), None) => keeper.answered(),
            (Keeper::Destination(keeper), Some(delivered))
                if main.shut_at.is_some_and(|at| at <= delivered) =>
            {
                keeper.answered();
            }
            _ => {}
        }
    }

    /// A flow is over. A main channel may follow the one that is over.
    pub(super) fn gone(&mut self, flow: u32) {
        self.watched.remove(&flow);
        if self.main.as_ref().is_some_and(|main| main.flow == flow) {
            // Both directions of the main channel have ended and are acknowledged.
            match &mut self.keeper {
                Keeper::Source(keeper) => keeper.answered(),
                Keeper::Destination(keeper) if keeper.state() != StreamState::Open => keeper.answered(),
                Keeper::Destination(_) => {}
            }
            self.main = None;
        }
    }

    pub(super) fn give_up(&mut self) -> Closing {
        match &mut self.keeper {
            Keeper::Source(keeper) => keeper.give_up(),
            Keeper::Destination(keeper) => keeper.give_up(),
        }
    }

    pub(super) fn heard(&mut self, heard: Heard) -> Closing {
        match &mut self.keeper {
            Keeper::Source(keeper) => keeper.heard(heard),
            Keeper::Destination(keeper) => keeper.give_up(),
        }
    }

    pub(super) fn state(&self) -> StreamState {
        match &self.keeper {
            Keeper::Source(keeper) => keeper.state(),
            Keeper::Destination(keeper) => keeper.state(),
        }
    }

    /// What the other relay is told at the end.
    pub(super) fn verdict(&self) -> Verdict {
        match &self.keeper {
            Keeper::Source(keeper) => match keeper.state() {
                StreamState::Open | StreamState::Closed => Verdict::Never,
                _ => Verdict::Passed,
            },
            Keeper::Destination(keeper) => keeper.verdict(),
        }
    }
}

//! Which connection is what, at the destination (`specs/rdma.md §2.4`).

use super::chunk::ChunkSize;
use super::introduction::{Introduction, Part};
use super::private_data::{ConnectReply, ConnectRequest};
use crate::error::WireError;

const REQUEST: &str = "RDMA connect request";
const SPEC: &str = "specs/rdma.md §2.4";

/// The connections of one migration that a destination has admitted.
///
/// It decides on private data alone, before a queue pair or memory is there for the connection.
#[derive(Debug, Clone)]
pub struct Admission {
    lanes: u8,
    chunk: ChunkSize,
    pinned_limit: Option<u64>,
    /// What the main connection asked for.
    main: Option<ConnectRequest>,
    /// Places that are taken beside it.
    taken: Vec<Part>,
}

impl Admission {
    /// A destination with this chunk size that takes so many lanes.
    pub fn new(lanes: u8, chunk: ChunkSize) -> Self {
        Self { lanes, chunk, pinned_limit: None, main: None, taken: Vec::new() }
    }

    /// The same, of a destination that registers no more than so many bytes at once.
    #[must_use]
    pub fn with_pinned_limit(self, limit: Option<u64>) -> Self {
        Self { pinned_limit: limit, ..self }
    }

    /// Decides on a connect request: what the connection is, and what to accept it with. Its place is taken then, but
    /// for a question, which takes none.
    ///
    /// # Errors
    /// Private data that break a rule, a place that is taken, a connection that does not belong to the main one. Reject
    /// the connection; nothing else changes.
    pub fn request(&mut self, received: &[u8]) -> Result<(Part, ConnectReply), WireError> {
        let request = ConnectRequest::decode(received)?;
        let part = match (&request.introduction, &self.main) {
            (Some(asked), _) => asked.part,
            // A QEMU says nothing: it connects for the return path when the main connection is there.
            (None, None) => Part::Main,
            (None, Some(_)) => Part::ReturnPath,
        };
        if part != Part::Question {
            self.belongs(&request, part)?;
        }
        let reply = request.reply(self.lanes, self.chunk)?.with_pinned_limit(self.pinned_limit);
        match part {
            Part::Main => self.main = Some(request),
            Part::ReturnPath | Part::Lane(_) => self.taken.push(part),
            Part::Question => {}
        }
        Ok((part, reply))
    }

    fn belongs(&self, request: &ConnectRequest, part: Part) -> Result<(), WireError> {
        let no = |at, rule: String| Err(WireError::incompatible(REQUEST, at, SPEC, rule));
        let Some(main) = &self.main else {
            return match part {
                Part::Main => Ok(()),
                _ => no(8, format!("{part}, and no main connection is there")),
            };
        };
        if part == Part::Main || self.taken.contains(&part) {
            return no(8, format!("{part} is there already"));
        }
        let session = |asked: &ConnectRequest| asked.introduction.map(|it: Introduction| it.session);
        if session(request) != session(main) {
            return no(24, format!("{part} of another migration"));
        }
        if request.pin_all != main.pin_all {
            return no(4, format!("{part} with other flags than the main connection"));
        }
        Ok(())
    }

    /// A connection that was admitted has ended before it was of use. Without a main connection nothing is left of the
    /// others: end them, too.
    pub fn ended(&mut self, part: Part) {
        match part {
            Part::Main => {
                self.main = None;
                self.taken.clear();
            }
            _ => self.taken.retain(|taken| *taken != part),
        }
    }

    /// The introduction of the main connection, if a Sterna has sent one.
    pub fn introduction(&self) -> Option<Introduction> {
        self.main.as_ref().and_then(|main| main.introduction)
    }

    /// Whether this part is there.
    pub fn has(&self, part: Part) -> bool {
        if part == Part::Main { self.main.is_some() } else { self.taken.contains(&part) }
    }
}

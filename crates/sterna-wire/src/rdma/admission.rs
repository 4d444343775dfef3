//! Assigns incoming RDMA connections to their purposes at the destination (`specs/rdma.md §2.4`).

use super::chunk::ChunkSize;
use super::introduction::{Introduction, Part};
use super::private_data::{ConnectReply, ConnectRequest};
use crate::error::WireError;

const REQUEST: &str = "RDMA connect request";
const SPEC: &str = "specs/rdma.md §2.4";

/// The connections of one migration that a destination has admitted.
///
/// It decides only by private data, before the connection has a queue pair or memory.
#[derive(Debug, Clone)]
pub struct Admission {
    lanes: u8,
    chunk: ChunkSize,
    pinned_limit: Option<u64>,
    /// The connect request of the main connection.
    main: Option<ConnectRequest>,
    /// Parts that are connected in addition to the main connection.
    taken: Vec<Part>,
}

impl Admission {
    /// A destination with this chunk size that accepts at most `lanes` lanes.
    pub fn new(lanes: u8, chunk: ChunkSize) -> Self {
        Self { lanes, chunk, pinned_limit: None, main: None, taken: Vec::new() }
    }

    /// The same destination, with a limit in bytes on registered memory.
    #[must_use]
    pub fn with_pinned_limit(self, limit: Option<u64>) -> Self {
        Self { pinned_limit: limit, ..self }
    }

    /// Decides on a connect request. Returns the connection's part and the reply to accept it with.
    ///
    /// The part then counts as connected. A question is the exception.
    ///
    /// # Errors
    /// - private data that break a rule
    /// - a part that is connected already
    /// - a connection that does not match the main one
    ///
    /// Then reject the connection. The state does not change.
    pub fn request(&mut self, received: &[u8]) -> Result<(Part, ConnectReply), WireError> {
        let request = ConnectRequest::decode(received)?;
        let part = match (&request.introduction, &self.main) {
            (Some(asked), _) => asked.part,
            // QEMU sends no introduction. It connects for the return path after the main connection.
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
                _ => no(8, format!("{part} without a main connection")),
            };
        };
        if part == Part::Main || self.taken.contains(&part) {
            return no(8, format!("{part} exists already"));
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

    /// Records that an admitted connection ended before its first use.
    ///
    /// Without a main connection the other connections have no purpose. The caller must end them, too.
    pub fn ended(&mut self, part: Part) {
        match part {
            Part::Main => {
                self.main = None;
                self.taken.clear();
            }
            _ => self.taken.retain(|taken| *taken != part),
        }
    }

    /// The introduction of the main connection; `None` from a QEMU.
    pub fn introduction(&self) -> Option<Introduction> {
        self.main.as_ref().and_then(|main| main.introduction)
    }

    /// Whether this part is connected.
    pub fn has(&self, part: Part) -> bool {
        if part == Part::Main { self.main.is_some() } else { self.taken.contains(&part) }
    }
}

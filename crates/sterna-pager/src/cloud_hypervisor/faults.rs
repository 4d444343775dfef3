//! Answers the page requests of a VMM (specs/ch-offload.md §5).

use std::sync::atomic::{AtomicU64, Ordering};

use super::ahead::Ahead;
use super::channel::Channel;
use super::error::SessionError;
use super::layout::Found;
use super::message::{Command, HEADER_BYTES, PAGE_REQUEST_BYTES, PageRequest, Request, Response};
use super::placement::Placement;
use crate::descriptors::Descriptors;

/// Bytes of a request with its payload.
const WHOLE: usize = HEADER_BYTES + PAGE_REQUEST_BYTES;

/// Answers requests until the VMM closes the connection. After an error, the VMM has got the answer *failed*.
pub(super) fn serve(
    channel: &Channel<'_>,
    placement: &Placement,
    ahead: &Ahead,
    answered: &AtomicU64,
) -> Result<(), SessionError> {
    let mut requests = Requests { channel, bytes: [0; WHOLE], done: 0 };
    let mut buffer = placement.buffer();
    while let Some(request) = requests.next()? {
        let place = |request: Request| match request.command {
            Command::PageFault => place(placement, ahead, requests.page()?, &mut buffer),
            command => Err(SessionError::NoPageRequest(command)),
        };
        if let Err(why) = request.map_err(SessionError::from).and_then(place) {
            // The VMM may have closed the connection; the error of before is the reason.
            let _ = channel.respond(Response::FAILED);
            return Err(why);
        }
        answered.fetch_add(1, Ordering::Relaxed);
        channel.respond(Response::DONE)?;
    }
    Ok(())
}

/// Places all pages of a request.
fn place(
    placement: &Placement,
    ahead: &Ahead,
    request: PageRequest,
    buffer: &mut [u8],
) -> Result<(), SessionError> {
    let PageRequest { address, bytes } = request;
    let found = placement.machine.layout.at_address(address, bytes);
    let mut at = address;
    for found in found.ok_or(SessionError::Outside { address, bytes })? {
        match found {
            Found::Image { offset, bytes } => {
                for frame in placement.frame_of(offset)..=placement.frame_of(offset + bytes - 1) {
                    ahead.requested(frame);
                    placement.ensure(frame, buffer).map_err(|why| with_page(why, at, offset))?;
                }
                at += bytes;
            }
            Found::Unused { slot, file_offset, bytes } => {
                let allocated = placement.memory.allocate(slot, file_offset, bytes);
                allocated.map_err(SessionError::system("fallocate of the guest's memory"))?;
                at += bytes;
            }
        }
    }
    Ok(())
}

/// Adds the page to the error of an image.
fn with_page(why: SessionError, address: u64, offset: u64) -> SessionError {
    match why {
        SessionError::Source(source) => SessionError::Page { address, offset, source },
        why => why,
    }
}

/// The requests of one connection. The VMM sends the next one after the answer, so none is read ahead.
struct Requests<'a> {
    channel: &'a Channel<'a>,
    bytes: [u8; WHOLE],
    done: usize,
}

impl Requests<'_> {
    /// The next request, with its payload if it is a page request. `None`: the VMM has closed the connection.
    fn next(&mut self) -> Result<Option<Result<Request, super::message::MessageError>>, SessionError> {
        self.done = 0;
        if !self.fill(HEADER_BYTES)? {
            return Ok(None);
        }
        let mut header = [0; HEADER_BYTES];
        header.copy_from_slice(&self.bytes[..HEADER_BYTES]);
        let request = Request::decode(&header);
        let is_page = matches!(request, Ok(Request { command: Command::PageFault, .. }));
        if is_page && !self.fill(WHOLE)? {
            return Ok(None);
        }
        Ok(Some(request))
    }

    /// The payload of the last page request.
    fn page(&self) -> Result<PageRequest, SessionError> {
        let mut payload = [0; PAGE_REQUEST_BYTES];
        payload.copy_from_slice(&self.bytes[HEADER_BYTES..]);
        Ok(PageRequest::decode(&payload)?)
    }

    /// Receives until `count` bytes are there. `false`: the VMM has closed the connection at the beginning of a request.
    fn fill(&mut self, count: usize) -> Result<bool, SessionError> {
        // Descriptors that come are closed.
        let mut descriptors = Descriptors::default();
        while self.done < count {
            // A request and its payload usually arrive together.
            match self.channel.read(&mut self.bytes[self.done..], &mut descriptors)? {
                0 if self.done == 0 => return Ok(false),
                0 => {
                    let during = format!("after {} of {WHOLE} bytes of a page request", self.done);
                    return Err(SessionError::Closed { during });
                }
                read => self.done += read,
            }
        }
        Ok(true)
    }
}

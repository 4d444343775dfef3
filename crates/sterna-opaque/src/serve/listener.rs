//! Reads a destination's messages and acts on them.

use sterna::error::{BadAnswer, Ending, MigrationError};
use sterna::internals::postcopy::{Answer, LOADED_PING};
use sterna_transport::{Channel, TransportError};
use sterna_wire::received_pages::ReceivedPages;
use sterna_wire::return_path::ReturnMessage;

use super::shared::{Shared, State};
use super::statistics::Stage;

const CHANNEL: &str = "return path";
/// Bytes of one read: 16 KiB, some hundred requests.
const PIECE: usize = 16 << 10;

/// The body of the return path's thread. Returns when the connection ends.
pub(crate) fn listen(shared: &Shared, channel: &Channel) {
    if let Err(error) = read(shared, channel) {
        shared.fail(error);
    }
}

fn read(shared: &Shared, channel: &Channel) -> Result<(), MigrationError> {
    let mut buffer = Vec::new();
    let mut position = 0;
    // The block whose bitmap is the next data.
    let mut bitmap = None;
    let mut piece = vec![0; PIECE];
    loop {
        let count = match channel.read_some(&mut piece) {
            // Silence is allowed: a guest that lacks no page requests nothing.
            Err(TransportError::Stalled { .. }) => continue,
            other => other?,
        };
        if count == 0 {
            return Err(Ending::ServedConnection { peer: channel.peer().to_owned() }.into());
        }
        // The buffer keeps less than one message, or the bitmap of one block.
        buffer.extend_from_slice(&piece[..count]);
        let mut taken = 0;
        shared.change(|state| {
            loop {
                let at = position + taken as u64;
                let used = take(state, &buffer[taken..], at, &mut bitmap)?;
                if used == 0 {
                    return Ok::<(), MigrationError>(());
                }
                taken += used;
            }
        })?;
        buffer.drain(..taken);
        position += taken as u64;
        if shared.state.lock().connection.is_done {
            // The destination closes the connection now, which is not an error.
            return Ok(());
        }
    }
}

/// Takes one message or bitmap from the front of `bytes`. Returns its length, or 0 if it is incomplete.
fn take(
    state: &mut State,
    bytes: &[u8],
    at: u64,
    bitmap: &mut Option<usize>,
) -> Result<usize, MigrationError> {
    let wire = |error: sterna_wire::WireError| MigrationError::wire(CHANNEL)(error.at(at));
    if let Some(block) = *bitmap {
        let pages = state.order.pages(block);
        let Some((received, used)) = ReceivedPages::decode(bytes, pages).map_err(wire)? else { return Ok(0) };
        state.connection.bitmaps.push((block, received));
        *bitmap = None;
        return Ok(used);
    }
    let Some((message, used)) = ReturnMessage::decode(bytes).map_err(wire)? else { return Ok(0) };
    let answer = state.connection.answers.take(message)?;
    state.statistics.has_answered = true;
    match answer {
        Answer::Pong(value) => {
            if value == LOADED_PING {
                // Set immediately: a connection that breaks from now on can be recovered.
                state.statistics.enter(Stage::Active);
            }
            state.connection.pongs.push(value);
        }
        Answer::Request { block, start, length } => {
            state.statistics.requests += 1;
            let name = || state.connection.answers.name(block);
            state.order.request(block, start, length).map_err(|why| BadAnswer::Request {
                block: name().to_owned(),
                start,
                length,
                why,
            })?;
        }
        Answer::Bitmap { block } => *bitmap = Some(block),
        Answer::Resumed => state.connection.has_resumed = true,
        Answer::Done => state.connection.is_done = true,
        Answer::Nothing => {}
    }
    Ok(used)
}

//! Asks the source for pages that somebody waits for.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use sterna_ram::PAGE_SHIFT;
use sterna_ram::missing_pages::Fault;
use sterna_wire::return_path::ReturnMessage;

use crate::error::MigrationError;
use crate::incoming::arriving::ArrivingPages;
use crate::incoming::shared::Shared;
use crate::threads;

/// Starts the thread. It ends when no page is missing any more, and goes on when the connection is lost: who touches a page
/// that is here and was never populated waits for it, too.
pub(super) fn spawn(
    shared: &Arc<Shared>,
    arriving: &Arc<ArrivingPages>,
) -> Result<JoinHandle<()>, MigrationError> {
    let (theirs, died, arriving) = (Arc::clone(shared), Arc::clone(shared), Arc::clone(arriving));
    let work = move || {
        if let Err(error) = answer(&theirs, &arriving) {
            theirs.fail(error);
        }
    };
    threads::spawn("page faults", work, move |error| died.fail(error))
}

fn answer(shared: &Shared, arriving: &ArrivingPages) -> Result<(), MigrationError> {
    let (mut faults, mut bytes) = (Vec::new(), Vec::new());
    // The block of the request before: the next need not name it.
    let mut last = None;
    while arriving.wait(&mut faults)? {
        for fault in faults.drain(..) {
            if arriving.wants(&fault)? {
                request(shared, &fault, &mut last, &mut bytes)?;
            }
        }
        // All that came at once in one write.
        if !bytes.is_empty() {
            if let Err(error) = shared.write_main(&bytes) {
                shared.fail(error);
            }
            bytes.clear();
        }
    }
    Ok(())
}

fn request(
    shared: &Shared,
    fault: &Fault,
    last: &mut Option<usize>,
    bytes: &mut Vec<u8>,
) -> Result<(), MigrationError> {
    let block = match last.replace(fault.block) == Some(fault.block) {
        true => None,
        false => Some(shared.layout()?.table.name(fault.block).to_owned()),
    };
    // A page of the memory below is much shorter than 4 GiB.
    let length = (fault.count << PAGE_SHIFT) as u32;
    let message = ReturnMessage::RequestPages { block, start: fault.first << PAGE_SHIFT, length };
    shared.postcopy.requests.fetch_add(1, Ordering::Relaxed);
    message.encode(bytes).map_err(MigrationError::wire("return path"))
}

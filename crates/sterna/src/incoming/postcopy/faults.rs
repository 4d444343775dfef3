//! Asks the source for pages that somebody waits for.

use std::sync::Arc;
use std::thread::JoinHandle;

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
    while arriving.wait(&mut faults)? {
        let mut asked = 0;
        // Held to the end, so that nothing of this can befall a connection that comes after a loss.
        let mut asking = shared.postcopy.asking.lock();
        for fault in faults.drain(..) {
            if arriving.wants(&fault)? && asking.is_open() {
                let name = shared.layout()?.table.name(fault.block);
                asking.encode((fault.block, name), (fault.first, fault.count), &mut bytes)?;
                asked += 1;
            }
        }
        // All that came at once in one write.
        if !bytes.is_empty() {
            if let Err(error) = shared.write_main(&bytes) {
                shared.fail(error);
            }
            bytes.clear();
        }
        // Counted when they are on their way: nobody waits for that.
        shared.postcopy.has_asked(asked);
    }
    Ok(())
}

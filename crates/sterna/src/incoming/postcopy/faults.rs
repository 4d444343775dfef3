//! Requests pages from the source that threads wait for.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use crate::error::MigrationError;
use crate::incoming::accept::warn;
use crate::incoming::arriving::ArrivingPages;
use crate::incoming::shared::Shared;
use crate::threads::{self, ThreadRole};

/// Delay between two attempts to place a page for which the host has no memory.
const RETRY: Duration = Duration::from_millis(50);

/// Starts the thread that answers page faults. It ends when no page is missing.
///
/// It continues when the connection is lost, because a thread also faults on a page that is here and was never
/// populated.
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
    threads::spawn(ThreadRole::PageFaults, work, move |error| died.fail(error))
}

fn answer(shared: &Shared, arriving: &ArrivingPages) -> Result<(), MigrationError> {
    let (mut faults, mut bytes, mut unanswered) = (Vec::new(), Vec::new(), Vec::new());
    let mut was_warned = false;
    while arriving.wait(&mut faults)? {
        let mut asked = 0;
        // Locked until the end, so that these requests cannot reach a connection that replaces a lost one.
        let mut asking = shared.postcopy.asking.lock();
        for fault in faults.drain(..) {
            match arriving.wants(&fault) {
                Ok(true) if asking.is_open() => {
                    let name = shared.layout()?.table.name(fault.block);
                    asking.encode((fault.block, name), (fault.first, fault.count), &mut bytes)?;
                    asked += 1;
                }
                Ok(_) => {}
                // This thread must not end, because no other thread answers a fault. The host may have memory
                // again later.
                Err(error) => {
                    if !std::mem::replace(&mut was_warned, true) {
                        warn(shared, &format!("{error}; a thread of the guest waits until this succeeds"));
                    }
                    unanswered.push(fault);
                }
            }
        }
        // All requests of this turn in one write.
        if !bytes.is_empty() {
            if let Err(error) = shared.write_main(&bytes) {
                shared.fail(error);
            }
            bytes.clear();
        }
        // Counted after the write, so that counting does not delay a request.
        shared.postcopy.has_asked(asked);
        drop(asking);
        if !unanswered.is_empty() {
            std::thread::sleep(RETRY);
            unanswered.drain(..).try_for_each(|fault| arriving.look_again(&fault))?;
        }
    }
    Ok(())
}

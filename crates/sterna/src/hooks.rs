//! What must change hands with the guest besides RAM and devices: disks, locks, network.
//!
//! Every hook is fallible and undoable. At the source a hook is *released* after the guest has stopped
//! and *taken back* if the migration ends before its commit. At the destination it is *acquired* after
//! all is loaded and before *prepare* is answered, and *given back* if the commit never comes. So at no
//! instant do both sides hold it, and a side that runs the guest holds it.

use crate::error::VmError;

/// One thing that changes hands with the guest.
pub trait Hook: Send + Sync {
    /// For messages: `disk vda`, `lease`, `network`.
    fn name(&self) -> String;
    /// Source, guest stopped: let go. On error the migration fails and hooks released so far are taken back.
    fn release(&self) -> Result<(), VmError> {
        Ok(())
    }
    /// Source: undo [`Hook::release`]. On error the guest is held stopped, since it may have lost its disk.
    fn take_back(&self) -> Result<(), VmError> {
        Ok(())
    }
    /// Destination, all loaded, before prepare is answered. On error nothing of it may be held, and the
    /// migration fails; the source runs on. After a panic [`Hook::give_back`] is called.
    fn acquire(&self) -> Result<(), VmError> {
        Ok(())
    }
    /// Destination: undo [`Hook::acquire`]. Must not fail: there is nobody left to tell. One that panics is told to the
    /// observer; the source then holds its guest until it can take the hook back.
    fn give_back(&self) {}
    /// Destination, the guest runs: tell the network where it lives now. An error is reported, nothing undone.
    fn announce(&self) -> Result<(), VmError> {
        Ok(())
    }
}

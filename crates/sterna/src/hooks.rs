//! What is handed over with the guest besides RAM and devices: disks, locks, network.
//!
//! Every hook can fail and can be undone. The source *releases* a hook after the guest has stopped, and
//! *takes it back* if the migration ends before its commit. The destination *acquires* it after all is
//! loaded and before *prepare* is answered, and *gives it back* if the commit never comes. So both sides
//! never hold it at once, and a side that runs the guest holds it.

use crate::error::VmError;

/// One thing that is handed over with the guest.
pub trait Hook: Send + Sync {
    /// For messages: `disk vda`, `lease`, `network`.
    fn name(&self) -> String;
    /// Source, guest stopped: release it. On error the migration fails, and the hooks released so far are taken back.
    fn release(&self) -> Result<(), VmError> {
        Ok(())
    }
    /// Source: undo [`Hook::release`]. On error the guest is held, because it may have lost its disk.
    fn take_back(&self) -> Result<(), VmError> {
        Ok(())
    }
    /// Destination, all loaded, before prepare is answered. On error the migration fails and the source runs on, so this
    /// side must hold nothing of it. After a panic [`Hook::give_back`] is called.
    fn acquire(&self) -> Result<(), VmError> {
        Ok(())
    }
    /// Standby, which takes a protected guest over: acquire it although the other side has not released it, and may never again. By the
    /// protection's rules the guest does not run there. On error the guest does not start; an operator may try again.
    ///
    /// The default refuses: who cannot take it from a host that is gone must not start the guest by itself.
    fn seize(&self) -> Result<(), VmError> {
        Err(VmError::new(
            self.name(),
            "this machine cannot take it from a host that has not released it: release it by other means, then try again",
        ))
    }
    /// Destination: undo [`Hook::acquire`]. It cannot report a failure. A panic is reported to the observer; the source
    /// then holds its guest until it can take the hook back.
    fn give_back(&self) {}
    /// Destination, the guest runs: announce its new place to the network. An error is reported; nothing is undone.
    fn announce(&self) -> Result<(), VmError> {
        Ok(())
    }
}

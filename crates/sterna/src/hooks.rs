//! Hooks: callbacks for the guest's resources besides RAM and devices, such as disks, locks and network.
//!
//! Every hook can fail and can be undone. The source *releases* a hook after the guest has stopped, and *takes it
//! back* if the migration ends before its commit. The destination *acquires* the hook after all state is loaded and
//! before it answers *prepare*. It *gives the hook back* if the commit does not follow. So the two sides never have
//! the resource at the same time, and the side that runs the guest always has it.

use crate::error::VmError;

/// One resource that is handed over with the guest.
pub trait Hook: Send + Sync {
    /// Name in messages, for example `disk vda`, `lease` or `network`.
    fn name(&self) -> String;
    /// Source, guest stopped: releases the resource. Writes to the guest's RAM in this call still reach the
    /// destination, because the last sync follows. On error the migration fails, and the hooks released so far are
    /// taken back.
    fn release(&self) -> Result<(), VmError> {
        Ok(())
    }
    /// Source: undoes [`Hook::release`]. On error the guest is held, because it may have lost its disk.
    fn take_back(&self) -> Result<(), VmError> {
        Ok(())
    }
    /// Destination, all state loaded, before it answers *prepare*: acquires the resource.
    ///
    /// On error the migration fails and the source's guest resumes, so this side must keep no part of the resource.
    /// After a panic the engine calls [`Hook::give_back`].
    fn acquire(&self) -> Result<(), VmError> {
        Ok(())
    }
    /// Standby, at takeover: acquires a resource that the other side has not released. The other side may never
    /// release it.
    ///
    /// By the protection's rules, the guest does not run on the other side. On error the guest does not start; an
    /// operator may try again.
    ///
    /// The default refuses: a machine that cannot take the resource from a failed host must not start the guest by
    /// itself.
    fn seize(&self) -> Result<(), VmError> {
        Err(VmError::new(
            self.name(),
            "this machine cannot take it from a host that has not released it: release it by other means, then try again",
        ))
    }
    /// Destination: undoes [`Hook::acquire`]. It cannot report a failure. A panic is reported to the observer; the
    /// source then holds its guest until it can take the hook back.
    fn give_back(&self) {}
    /// Destination, guest running: announces the guest's new place to the network. An error is reported, and nothing
    /// is undone.
    fn announce(&self) -> Result<(), VmError> {
        Ok(())
    }
}

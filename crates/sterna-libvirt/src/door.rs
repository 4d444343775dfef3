//! A socket on which the domain's QEMU answers QMP.

use std::os::fd::OwnedFd;

use serde_json::Value;
use sterna_transport::CancelFlag;

use crate::access::Access;
use crate::address::DomainAddress;
use crate::error::LibvirtError;
use crate::own_monitor::{self, OwnMonitor};
use crate::passthrough::Passthrough;

/// The way to a domain's monitor. It must live as long as the socket that [`open`](Self::open) returns, and be dropped after
/// it. Dropping it removes what it added to QEMU.
pub struct Door {
    passes_files: bool,
    way: Way,
}

enum Way {
    Own(OwnMonitor, Access),
    Through(#[expect(dead_code, reason = "dropping it ends its thread")] Passthrough),
}

impl Door {
    /// Connects to libvirt, and returns a socket for a QMP client. QEMU 11.1 and later gets a monitor of its own. If that is
    /// impossible, libvirt's own monitor is used.
    ///
    /// # Errors
    /// See [`LibvirtError`]. The domain has no additional monitor then.
    pub fn open(address: &DomainAddress, cancel: &CancelFlag) -> Result<(Self, OwnedFd), LibvirtError> {
        Self::through(Access::open(address, cancel)?)
    }

    /// Does the same as [`open`](Self::open) with a connection that exists.
    ///
    /// # Errors
    /// Those of [`open`](Self::open).
    pub fn through(mut access: Access) -> Result<(Self, OwnedFd), LibvirtError> {
        let passes_files = access.passes_files();
        let version = access.execute("query-version", Value::Null, &[])?;
        // A monitor of its own takes a descriptor.
        if passes_files && OwnMonitor::is_known_to(&version) {
            own_monitor::remove_left(&mut access);
            if let Some((monitor, socket)) = OwnMonitor::add(&mut access)? {
                return Ok((Self { passes_files, way: Way::Own(monitor, access) }, socket));
            }
        }
        Self::passthrough(access, &version)
    }

    /// Returns a socket that leads to libvirt's own monitor, also if QEMU could have another one.
    ///
    /// # Errors
    /// Those of [`open`](Self::open).
    pub fn to_libvirts_monitor(mut access: Access) -> Result<(Self, OwnedFd), LibvirtError> {
        let version = access.execute("query-version", Value::Null, &[])?;
        Self::passthrough(access, &version)
    }

    fn passthrough(access: Access, version: &Value) -> Result<(Self, OwnedFd), LibvirtError> {
        let passes_files = access.passes_files();
        let (through, socket) = Passthrough::start(access, version)?;
        Ok((Self { passes_files, way: Way::Through(through) }, socket))
    }

    /// Whether descriptors can be passed over the socket: QEMU runs on this host.
    pub fn passes_files(&self) -> bool {
        self.passes_files
    }

    /// Whether QEMU has a monitor of its own for this door.
    pub fn is_own_monitor(&self) -> bool {
        matches!(self.way, Way::Own(..))
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        if let Way::Own(monitor, access) = &mut self.way {
            monitor.remove(access);
        }
    }
}

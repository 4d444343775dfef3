//! The QMP monitor of a libvirt domain, through libvirt.
//!
//! [`Door::open`] connects to the daemon and returns a socket on which the domain's QEMU answers QMP. The modules are:
//!
//! * [`xdr`] and [`packet`]: the messages of libvirt's RPC (specs/libvirt-rpc.md), without I/O;
//! * [`Connection`]: calls over the daemon's Unix socket;
//! * [`Virsh`]: the same calls by the program `virsh`, for daemons whose socket cannot be reached;
//! * [`Door`]: a monitor of its own in QEMU 11.1 and later, else libvirt's monitor.
//!
//! The first monitor command taints the domain for libvirt (`custom monitor control commands issued`). This has no effect on
//! the guest, and remains until its QEMU ends.
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

mod access;
mod address;
mod connection;
mod door;
mod error;
mod own_monitor;
pub mod packet;
mod passthrough;
mod socket;
mod virsh;
pub mod xdr;

pub use access::Access;
pub use address::DomainAddress;
pub use connection::Connection;
pub use door::Door;
pub use error::LibvirtError;
pub use virsh::Virsh;

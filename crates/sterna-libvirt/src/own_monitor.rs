//! A QMP monitor of its own in the domain's QEMU, 11.1 or later.
//!
//! QEMU gets one end of a socket pair: no path, so neither QEMU's user nor its mount namespace matters. The monitor has
//! `close-action=delete`: QEMU removes it with its character device when the other end is closed, also if this process is
//! killed. A process that is killed before the monitor exists leaves a disconnected character device. The next command
//! removes that one ([`remove_left`]).

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use serde_json::{Value, json};

use crate::access::Access;
use crate::error::LibvirtError;

/// First version of QEMU with `monitor-qmp`.
const SINCE: (u64, u64) = (11, 1);
/// Beginning of the names of descriptors, character devices and monitors.
const NAMES: &str = "sterna-door-";
/// How long the greeting of a new monitor may take. A security policy that forbids QEMU the socket prevents it.
const GREETING_LIMIT: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };
/// Interval between two looks for a monitor that QEMU removes.
const STEP: Duration = Duration::from_millis(10);

/// A monitor in QEMU.
pub(crate) struct OwnMonitor {
    name: String,
}

impl OwnMonitor {
    /// Whether QEMU of this version has such monitors. `version` is the answer to `query-version`.
    pub(crate) fn is_known_to(version: &Value) -> bool {
        let number = |name: &str| version["qemu"][name].as_u64().unwrap_or(0);
        (number("major"), number("minor")) >= SINCE
    }

    /// Adds a monitor. Returns it with the socket on which it sends its greeting. None if it does not greet: then nothing of it
    /// is left.
    ///
    /// # Errors
    /// libvirt's connection failed. A refusal of QEMU is None.
    pub(crate) fn add(access: &mut Access) -> Result<Option<(Self, OwnedFd)>, LibvirtError> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("{NAMES}{}-{number}", rustix::process::getpid().as_raw_nonzero());
        let failed = |error: rustix::io::Errno| LibvirtError::Io { call: "socketpair", error: error.into() };
        let pair = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
        let (ours, theirs) = pair.map_err(failed)?;
        let monitor = Self { name };
        let added = monitor.make(access, theirs);
        let greets = added.is_ok() && greets(&ours);
        if greets {
            return Ok(Some((monitor, ours)));
        }
        drop(ours);
        monitor.remove(access);
        match added {
            Ok(()) | Err(LibvirtError::Answer { .. } | LibvirtError::Refused { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn make(&self, access: &mut Access, end: OwnedFd) -> Result<(), LibvirtError> {
        let name = &self.name;
        access.execute("getfd", json!({ "fdname": name }), &[end.as_fd()])?;
        let address = json!({"type": "fd", "data": {"str": name}});
        let socket = json!({"type": "socket", "data": {"addr": address, "server": false}});
        access.execute("chardev-add", json!({"id": name, "backend": socket}), &[])?;
        let object =
            json!({"qom-type": "monitor-qmp", "id": name, "chardev": name, "close-action": "delete"});
        access.execute("object-add", object, &[]).map(drop)
    }

    /// Waits until QEMU has removed the monitor, or removes it. The other end of its socket is closed.
    pub(crate) fn remove(&self, access: &mut Access) {
        for _ in 0..20 {
            match devices(access) {
                Ok(devices) if devices.iter().any(|device| device["label"] == *self.name) => {}
                _ => break,
            }
            std::thread::sleep(STEP);
        }
        remove_parts(access, &self.name);
        // QEMU has the descriptor under this name only if `chardev-add` was refused.
        let _ = access.execute("closefd", json!({ "fdname": self.name }), &[]);
    }
}

/// Removes what earlier commands have left because they were killed. Errors are ignored: the command works without it.
pub(crate) fn remove_left(access: &mut Access) {
    let Ok(devices) = devices(access) else { return };
    for device in devices {
        let text = |name: &str| device[name].as_str().unwrap_or_default().to_owned();
        // The device of a command that runs is connected.
        if text("label").starts_with(NAMES) && text("filename").starts_with("disconnected:") {
            remove_parts(access, &text("label"));
        }
    }
}

fn devices(access: &mut Access) -> Result<Vec<Value>, LibvirtError> {
    Ok(access.execute("query-chardev", Value::Null, &[])?.as_array().cloned().unwrap_or_default())
}

/// Removes monitor and character device. QEMU refuses to remove what does not exist.
fn remove_parts(access: &mut Access, name: &str) {
    let _ = access.execute("object-del", json!({ "id": name }), &[]);
    let _ = access.execute("chardev-remove", json!({ "id": name }), &[]);
}

fn greets(socket: &OwnedFd) -> bool {
    let mut looks = [PollFd::new(socket, PollFlags::IN)];
    let is_ready = matches!(poll(&mut looks, Some(&GREETING_LIMIT)), Ok(1..));
    is_ready && !looks[0].revents().contains(PollFlags::HUP)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn monitor_is_known_since_11_1() {
        let version = |major: u64, minor: u64| json!({"qemu": {"major": major, "minor": minor, "micro": 3}});

        assert!(OwnMonitor::is_known_to(&version(11, 1)) && OwnMonitor::is_known_to(&version(12, 0)));
        assert!(!OwnMonitor::is_known_to(&version(11, 0)) && !OwnMonitor::is_known_to(&json!({})));
    }
}

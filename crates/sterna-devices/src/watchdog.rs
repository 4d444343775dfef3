//! A host watchdog such as `/dev/watchdog`. The kernel resets the host unless the watchdog is fed in time.
//!
//! The calls follow the kernel's watchdog API (Documentation/watchdog/watchdog-api.rst). Opening the device
//! starts it. Writing the letter `V` before closing the device stops it. After any other end, such as a
//! killed process, the watchdog continues to run.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::AsFd;
use std::os::linux::fs::MetadataExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::ioctl::{Getter, Opcode, Updater, ioctl, opcode};

const GROUP: u8 = b'W';
const GET_SUPPORT: Opcode = opcode::read::<Support>(GROUP, 0);
const SET_TIMEOUT: Opcode = opcode::read_write::<i32>(GROUP, 6);
/// `WDIOF_SETTIMEOUT`: the driver can change the timeout.
const CAN_SET_TIMEOUT: u32 = 0x80;
/// The byte that stops the watchdog when it is written before the close.
const MAGIC: &[u8] = b"V";

/// `struct watchdog_info` of the kernel.
#[repr(C)]
struct Support {
    options: u32,
    firmware: u32,
    identity: [u8; 32],
}

/// A watchdog that is opened through its device file.
#[derive(Debug)]
pub struct WatchdogDevice {
    path: PathBuf,
    /// The open device. `None` while the watchdog does not run.
    file: Mutex<Option<File>>,
}

impl WatchdogDevice {
    /// Checks the device at `path`. It is not opened, so the watchdog does not run yet.
    ///
    /// # Errors
    /// There is no such device, or it could not be stopped again.
    pub fn new(path: &Path) -> Result<Self, String> {
        let shown = path.display();
        let found = path.metadata().map_err(|error| format!("{shown}: {error}"))?;
        if !found.file_type().is_char_device() {
            return Err(format!("{shown} is not a watchdog: give a character device, such as /dev/watchdog"));
        }
        if never_stops(found.st_rdev()) {
            return Err(format!(
                "{shown} cannot be stopped once it runs (nowayout), so it would reset this host after the protection \
                 has ended: load its driver with nowayout=0"
            ));
        }
        Ok(Self { path: path.to_owned(), file: Mutex::default() })
    }

    fn failed(&self, what: &str, error: impl std::fmt::Display) -> String {
        format!("{} {}: {error}", what, self.path.display())
    }

    /// Sets the longest timeout that is at most `longest`, and returns it.
    fn set(&self, file: &File, longest: Duration) -> Result<Duration, String> {
        // SAFETY: the kernel writes one `struct watchdog_info`, which `Support` is, or nothing if the file is no watchdog.
        let support = unsafe { ioctl(file.as_fd(), Getter::<GET_SUPPORT, Support>::new()) };
        let support = support.map_err(|error| self.failed("cannot ask the watchdog", error))?;
        let seconds = i32::try_from(longest.as_secs()).unwrap_or(i32::MAX);
        if seconds < 1 {
            return Err(format!(
                "a watchdog's timeout has whole seconds, but the lease allows only {} ms: give a longer --lease",
                longest.as_millis()
            ));
        }
        if support.options & CAN_SET_TIMEOUT == 0 {
            return Err(format!("the timeout of {} cannot be set", self.path.display()));
        }
        let mut set = seconds;
        // SAFETY: the kernel reads and writes one `int`, which lives as long as the call.
        let done = unsafe { ioctl(file.as_fd(), Updater::<SET_TIMEOUT, i32>::new(&mut set)) };
        done.map_err(|error| self.failed("cannot set the timeout of", error))?;
        match u64::try_from(set).map(Duration::from_secs) {
            Ok(timeout) if !timeout.is_zero() && timeout <= longest => Ok(timeout),
            _ => Err(format!(
                "the timeout of {} is at least {set} s, but the lease allows only {} ms: give a longer --lease",
                self.path.display(),
                longest.as_millis()
            )),
        }
    }
}

impl WatchdogDevice {
    /// Starts the watchdog with its longest timeout that is at most `longest`. Returns the timeout: the time from the
    /// last feeding to the reset.
    ///
    /// # Errors
    /// The watchdog cannot be used, or has no timeout that is short enough. It is then not running.
    pub fn arm(&self, longest: Duration) -> Result<Duration, String> {
        let mut held = self.file.lock();
        let file = OpenOptions::new().write(true).open(&self.path);
        let file = file.map_err(|error| self.failed("cannot open", error))?;
        let timeout = self.set(&file, longest);
        *held = Some(file);
        drop(held);
        match timeout {
            Ok(timeout) => Ok(timeout),
            Err(why) => Err(match self.disarm() {
                Ok(()) => why,
                Err(more) => format!("{why}; {more}"),
            }),
        }
    }

    /// Restarts the timeout.
    ///
    /// # Errors
    /// The watchdog was not fed, or does not run.
    pub fn feed(&self) -> Result<(), String> {
        let held = self.file.lock();
        let mut file = held.as_ref().ok_or_else(|| format!("{} does not run", self.path.display()))?;
        file.write_all(b"\n").map_err(|error| self.failed("cannot feed", error))
    }

    /// Stops the watchdog: the host is not reset any more.
    ///
    /// # Errors
    /// The watchdog continues to run.
    pub fn disarm(&self) -> Result<(), String> {
        let Some(mut file) = self.file.lock().take() else { return Ok(()) };
        file.write_all(MAGIC).map_err(|error| self.failed("cannot stop", error))
    }
}

/// Whether the kernel reports that this device cannot be stopped. False if the kernel reports nothing.
fn never_stops(device: u64) -> bool {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    // The first watchdog has a second device number, which does not belong to the watchdog class.
    const FIRST: (u32, u32) = (10, 130);
    let place = match (major, minor) {
        FIRST => "/sys/class/watchdog/watchdog0".to_owned(),
        _ => format!("/sys/dev/char/{major}:{minor}"),
    };
    std::fs::read_to_string(format!("{place}/nowayout")).is_ok_and(|text| text.trim() == "1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_watchdog_is_refused_by_name() {
        let missing = WatchdogDevice::new(Path::new("/dev/no-watchdog")).unwrap_err();
        assert!(missing.contains("/dev/no-watchdog"), "{missing}");
        let file = WatchdogDevice::new(Path::new("/proc/self/status")).unwrap_err();
        assert!(file.contains("is not a watchdog"), "{file}");
    }

    #[test]
    fn device_of_another_kind_is_refused_when_it_is_armed() {
        let device = WatchdogDevice::new(Path::new("/dev/null")).expect("a character device");

        let refused = device.arm(Duration::from_secs(5)).unwrap_err();

        assert!(refused.contains("/dev/null"), "{refused}");
        assert!(device.feed().is_err(), "it does not run");
        assert_eq!(device.disarm(), Ok(()), "nothing is left to stop");
    }
}

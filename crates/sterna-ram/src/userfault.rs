//! userfaultfd: the calls of the kernel.

use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use linux_raw_sys::general::{
    UFFD_API, UFFD_EVENT_PAGEFAULT, uffd_msg, uffdio_api, uffdio_copy, uffdio_range, uffdio_register,
    uffdio_writeprotect, uffdio_zeropage,
};
use linux_raw_sys::ioctl::{
    UFFDIO_API, UFFDIO_COPY, UFFDIO_REGISTER, UFFDIO_UNREGISTER, UFFDIO_WAKE, UFFDIO_WRITEPROTECT,
    UFFDIO_ZEROPAGE,
};

use crate::sys;

/// `_IO(0xAA, 0)`, a request to `/dev/userfaultfd`: a new descriptor. The bindings miss it.
const USERFAULTFD_IOC_NEW: u32 = 0xaa00;
/// `UFFDIO_WRITEPROTECT_MODE_WP`.
const MODE_WP: u64 = 1;
/// Where a message names the address, and the thread that faulted.
const ADDRESS_AT: usize = 16;
const THREAD_AT: usize = 24;
const MESSAGE_BYTES: usize = size_of::<uffd_msg>();
/// Faults that are heard of at once.
const MESSAGES: usize = 64;

/// A userfaultfd that holds accesses of the kernel, too.
#[derive(Debug)]
pub(crate) struct Userfault {
    file: File,
}

/// A thread waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fault {
    /// What it wants to access: an address in the page.
    pub(crate) address: u64,
    /// The thread, with `UFFD_FEATURE_THREAD_ID`.
    pub(crate) thread: u32,
}

/// What this host does not have, or this process has no right to.
#[derive(Debug)]
pub(crate) struct Unsupported {
    pub(crate) is_feature: bool,
    pub(crate) source: io::Error,
}

impl Userfault {
    /// One with these features, all of them.
    pub(crate) fn open(features: u32) -> Result<Self, Unsupported> {
        let fd = new_descriptor().map_err(|source| Unsupported { is_feature: false, source })?;
        let mut api = uffdio_api { api: u64::from(UFFD_API), features: u64::from(features), ioctls: 0 };
        // SAFETY: the request expects this structure, which points to nothing.
        unsafe { sys::ioctl(fd.as_fd(), UFFDIO_API, &mut api) }
            .map_err(|source| Unsupported { is_feature: true, source })?;
        Ok(Self { file: File::from(fd) })
    }

    /// Registers memory; `mode`: `UFFDIO_REGISTER_MODE_*`.
    pub(crate) fn register(&self, bytes: &Range<u64>, mode: u32) -> io::Result<()> {
        let mut register = uffdio_register { range: range(bytes), mode: u64::from(mode), ioctls: 0 };
        // SAFETY: the request expects this structure; registering changes no byte of the memory.
        unsafe { sys::ioctl(self.file.as_fd(), UFFDIO_REGISTER, &mut register) }.map(|_| ())
    }

    pub(crate) fn set_protected(&self, bytes: &Range<u64>, is_protected: bool) -> io::Result<()> {
        let mode = if is_protected { MODE_WP } else { 0 };
        let mut protect = uffdio_writeprotect { range: range(bytes), mode };
        loop {
            // SAFETY: the request expects this structure; protecting changes no byte of the memory.
            match unsafe { sys::ioctl(self.file.as_fd(), UFFDIO_WRITEPROTECT, &mut protect) } {
                Ok(_) => return Ok(()),
                // The address space is just changing; it begins anew.
                Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Copies `bytes` at `content` to `address`, where no page may be, and wakes who waits for it. Whole pages of the memory below.
    /// False: a page was there.
    pub(crate) fn copy(&self, address: u64, content: *const u8, bytes: u64) -> io::Result<bool> {
        let mut done = 0;
        while done < bytes {
            let (dst, src, len) = (address + done, content as u64 + done, bytes - done);
            let mut copy = uffdio_copy { dst, src, len, mode: 0, copy: 0 };
            // SAFETY: the request expects this structure. The kernel reads `len` bytes at `src`, and says EFAULT where nothing is
            // mapped. It fills memory at `dst` only where it was registered and no page was, so that no byte changes that anybody
            // has seen.
            let result = unsafe { sys::ioctl(self.file.as_fd(), UFFDIO_COPY, &mut copy) };
            match placed(result.map(drop), copy.copy, len)? {
                Placed::Bytes(count) => done += count,
                Placed::There => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Puts zero pages where no page may be, and wakes who waits for them. Not on huge pages. False: a page was there.
    pub(crate) fn zero(&self, bytes: &Range<u64>) -> io::Result<bool> {
        let mut start = bytes.start;
        while start < bytes.end {
            let left = start..bytes.end;
            let mut zero = uffdio_zeropage { range: range(&left), mode: 0, zeropage: 0 };
            // SAFETY: the request expects this structure; memory is filled only where it was registered and no page was.
            let result = unsafe { sys::ioctl(self.file.as_fd(), UFFDIO_ZEROPAGE, &mut zero) };
            match placed(result.map(drop), zero.zeropage, left.end - left.start)? {
                Placed::Bytes(count) => start += count,
                Placed::There => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Has everybody who waits for these bytes try again.
    pub(crate) fn wake(&self, bytes: &Range<u64>) -> io::Result<()> {
        // SAFETY: the request expects this structure; waking changes no byte of the memory.
        unsafe { sys::ioctl(self.file.as_fd(), UFFDIO_WAKE, &mut range(bytes)) }.map(drop)
    }

    /// Lets all writers of these bytes go on. Each call is made whatever becomes of the others.
    pub(crate) fn unprotect(&self, bytes: &Range<u64>) {
        let _ = self.set_protected(bytes, false);
        self.unregister(bytes);
    }

    /// Lets go of these bytes, and of all who wait there. Each call is made whatever becomes of the other.
    pub(crate) fn unregister(&self, bytes: &Range<u64>) {
        // Wakes nobody who waits (as seen with Linux 6.18); who comes now does not wait.
        // SAFETY: the request expects this structure, and changes no byte of the memory.
        let _ = unsafe { sys::ioctl(self.file.as_fd(), UFFDIO_UNREGISTER, &mut range(bytes)) };
        let _ = self.wake(bytes);
    }

    /// Waits for faults, and adds them. False: to be stopped.
    pub(crate) fn wait(&self, stop: &Stop, faults: &mut Vec<Fault>) -> io::Result<bool> {
        let mut messages = [0u8; MESSAGES * MESSAGE_BYTES];
        loop {
            let entry =
                |fd: &dyn AsRawFd| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            let mut polled = [entry(&self.file), entry(&stop.0)];
            // SAFETY: the array is live and has two entries.
            match sys::check(unsafe { libc::poll(polled.as_mut_ptr(), 2, -1) }.into()) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            if polled[1].revents != 0 {
                return Ok(false);
            }
            match (&self.file).read(&mut messages) {
                Ok(length) => {
                    faults.extend(messages[..length].chunks_exact(MESSAGE_BYTES).filter_map(fault));
                    return Ok(true);
                }
                // Nobody waits any more; or the message went elsewhere.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// A page fault's message.
fn fault(message: &[u8]) -> Option<Fault> {
    let address = message.get(ADDRESS_AT..ADDRESS_AT + 8)?.try_into().ok().map(u64::from_ne_bytes)?;
    let thread = message.get(THREAD_AT..THREAD_AT + 4)?.try_into().ok().map(u32::from_ne_bytes)?;
    (u32::from(message[0]) == UFFD_EVENT_PAGEFAULT).then_some(Fault { address, thread })
}

/// What came of placing pages.
enum Placed {
    /// So many bytes more.
    Bytes(u64),
    /// There was a page.
    There,
}

/// `count`: what the kernel says that it has done, or minus the reason why not.
fn placed(result: io::Result<()>, count: i64, len: u64) -> io::Result<Placed> {
    match result {
        Ok(()) => Ok(Placed::Bytes(len)),
        // Some of it, or nothing yet: the address space is just changing.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => {
            Ok(Placed::Bytes(u64::try_from(count).unwrap_or(0)))
        }
        Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(Placed::There),
        Err(error) => Err(error),
    }
}

/// Ends the waiting for faults; once set, it stays so.
#[derive(Debug)]
pub(crate) struct Stop(OwnedFd);

impl Stop {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: no pointers are passed.
        let fd = sys::check(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) }.into())?;
        // SAFETY: the kernel just gave this descriptor, and no one else knows it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd as libc::c_int) }))
    }

    pub(crate) fn set(&self) {
        let one = 1u64;
        // SAFETY: eight bytes of a live number are read. It fails only where the count is at its end, and so set.
        unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), size_of::<u64>()) };
    }
}

fn new_descriptor() -> io::Result<OwnedFd> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: no pointers are passed.
    let fd = match sys::check(unsafe { libc::syscall(libc::SYS_userfaultfd, flags) }) {
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
            // Whoever may open this file may hold the kernel's writes.
            let device =
                File::options().read(true).write(true).open("/dev/userfaultfd").map_err(|_| error)?;
            sys::ioctl_value(device.as_fd(), USERFAULTFD_IOC_NEW, flags as libc::c_ulong)?
        }
        other => other? as libc::c_int,
    };
    // SAFETY: the kernel just gave this descriptor, and no one else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn range(bytes: &Range<u64>) -> uffdio_range {
    uffdio_range { start: bytes.start, len: bytes.end - bytes.start }
}

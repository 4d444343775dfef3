//! The calls of the kernel.

use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use linux_raw_sys::general::{
    UFFD_API, UFFD_EVENT_PAGEFAULT, UFFD_FEATURE_PAGEFAULT_FLAG_WP, UFFD_FEATURE_WP_HUGETLBFS_SHMEM,
    UFFD_FEATURE_WP_UNPOPULATED, UFFDIO_REGISTER_MODE_WP, uffd_msg, uffdio_api, uffdio_range,
    uffdio_register, uffdio_writeprotect,
};
use linux_raw_sys::ioctl::{
    UFFDIO_API, UFFDIO_REGISTER, UFFDIO_UNREGISTER, UFFDIO_WAKE, UFFDIO_WRITEPROTECT,
};

use super::WriteProtectionError;
use crate::sys;

/// `_IO(0xAA, 0)`, a request to `/dev/userfaultfd`: a new descriptor. The bindings miss it.
const USERFAULTFD_IOC_NEW: u32 = 0xaa00;
/// `UFFDIO_WRITEPROTECT_MODE_WP`.
const MODE_WP: u64 = 1;
/// Where a message names the address.
const ADDRESS_AT: usize = 16;
const MESSAGE_BYTES: usize = size_of::<uffd_msg>();
/// Writers that are heard of at once.
const MESSAGES: usize = 64;

/// A userfaultfd that holds writes of the kernel, too.
#[derive(Debug)]
pub(super) struct Userfault {
    file: File,
}

impl Userfault {
    pub(super) fn open() -> Result<Self, WriteProtectionError> {
        let unsupported = |what| move |source| WriteProtectionError::Unsupported { what, source };
        let fd = new_descriptor().map_err(unsupported("userfaultfd(2) for writes of the kernel"))?;
        // Also memory that is not populated: whoever writes there first must wait, too.
        let features =
            UFFD_FEATURE_PAGEFAULT_FLAG_WP | UFFD_FEATURE_WP_HUGETLBFS_SHMEM | UFFD_FEATURE_WP_UNPOPULATED;
        let mut api = uffdio_api { api: u64::from(UFFD_API), features: u64::from(features), ioctls: 0 };
        // SAFETY: the request expects this structure, which points to nothing.
        unsafe { sys::ioctl(fd.as_fd(), UFFDIO_API, &mut api) }
            .map_err(unsupported("UFFD_FEATURE_WP_UNPOPULATED"))?;
        Ok(Self { file: File::from(fd) })
    }

    pub(super) fn register(&self, bytes: &Range<u64>) -> io::Result<()> {
        let mut register =
            uffdio_register { range: range(bytes), mode: u64::from(UFFDIO_REGISTER_MODE_WP), ioctls: 0 };
        // SAFETY: the request expects this structure; registering changes no byte of the memory.
        unsafe { sys::ioctl(self.file.as_fd(), UFFDIO_REGISTER, &mut register) }.map(|_| ())
    }

    pub(super) fn set_protected(&self, bytes: &Range<u64>, is_protected: bool) -> io::Result<()> {
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

    /// Lets all writers of these bytes go on. Each call is made whatever becomes of the others.
    pub(super) fn unregister(&self, bytes: &Range<u64>) {
        let _ = self.set_protected(bytes, false);
        // Lifts the protection, but wakes nobody who waits (as seen with Linux 6.18); who comes now does not wait.
        // SAFETY: the requests expect this structure; neither changes a byte of the memory.
        let _ = unsafe { sys::ioctl(self.file.as_fd(), UFFDIO_UNREGISTER, &mut range(bytes)) };
        // SAFETY: as above.
        let _ = unsafe { sys::ioctl(self.file.as_fd(), UFFDIO_WAKE, &mut range(bytes)) };
    }

    /// Waits for writers, and adds the addresses that they write. False: to be stopped.
    pub(super) fn wait(&self, stop: &Stop, writers: &mut Vec<u64>) -> io::Result<bool> {
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
                    writers.extend(messages[..length].chunks_exact(MESSAGE_BYTES).filter_map(address));
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

/// The address of a page fault's message.
fn address(message: &[u8]) -> Option<u64> {
    let address = message.get(ADDRESS_AT..ADDRESS_AT + 8)?.try_into().ok().map(u64::from_ne_bytes);
    address.filter(|_| u32::from(message[0]) == UFFD_EVENT_PAGEFAULT)
}

/// Ends the waiting for writers; once set, it stays so.
#[derive(Debug)]
pub(super) struct Stop(OwnedFd);

impl Stop {
    pub(super) fn new() -> Result<Self, WriteProtectionError> {
        // SAFETY: no pointers are passed.
        let fd = sys::check(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) }.into())
            .map_err(|source| WriteProtectionError::System { call: "eventfd", source })?;
        // SAFETY: the kernel just gave this descriptor, and no one else knows it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd as libc::c_int) }))
    }

    pub(super) fn set(&self) {
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

//! Wraps the system calls of userfaultfd, for missing pages and for write protection.

use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use linux_raw_sys::general::{
    UFFD_API, UFFD_EVENT_PAGEFAULT, uffd_msg, uffdio_api, uffdio_copy, uffdio_range, uffdio_register,
    uffdio_writeprotect, uffdio_zeropage,
};
use linux_raw_sys::ioctl::{
    UFFDIO_API, UFFDIO_COPY, UFFDIO_REGISTER, UFFDIO_UNREGISTER, UFFDIO_WAKE, UFFDIO_WRITEPROTECT,
    UFFDIO_ZEROPAGE,
};

use crate::kept::with_userfaultfd_device;
use crate::sys;

/// `_IO(0xAA, 0)`: the request to `/dev/userfaultfd` for a new descriptor. linux-raw-sys lacks it.
const USERFAULTFD_IOC_NEW: u32 = 0xaa00;
/// `UFFDIO_WRITEPROTECT_MODE_WP`, whose definition in the headers the bindings miss.
const MODE_WP: u64 = 1;
/// Offset of the address in a message; the offset of the thread id follows.
const ADDRESS_AT: usize = 16;
const THREAD_AT: usize = 24;
const MESSAGE_BYTES: usize = size_of::<uffd_msg>();
/// Largest number of faults that one read returns.
const MESSAGES: usize = 64;

/// A userfaultfd that also blocks accesses of the kernel.
#[derive(Debug)]
pub(crate) struct Userfault {
    file: File,
}

/// A blocked thread and the address that it accesses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fault {
    /// An address in the page of the access.
    pub(crate) address: u64,
    /// The thread id; set only with `UFFD_FEATURE_THREAD_ID`.
    pub(crate) thread: u32,
}

/// The host lacks userfaultfd or a feature, or this process may not use it.
#[derive(Debug)]
pub(crate) struct Unsupported {
    pub(crate) is_feature: bool,
    pub(crate) source: io::Error,
}

impl Userfault {
    /// Opens a userfaultfd with all of these features.
    pub(crate) fn open(features: u32) -> Result<Self, Unsupported> {
        let fd = new_descriptor().map_err(|source| Unsupported { is_feature: false, source })?;
        let mut api = uffdio_api { api: u64::from(UFFD_API), features: u64::from(features), ioctls: 0 };
        // SAFETY: the request expects this structure, which points to nothing.
        unsafe { sys::ioctl(fd.as_fd(), UFFDIO_API, &mut api) }
            .map_err(|source| Unsupported { is_feature: true, source })?;
        Ok(Self { file: File::from(fd) })
    }

    /// The file, for a reader of its own.
    pub(crate) fn into_file(self) -> File {
        self.file
    }

    /// Registers memory with a `mode` of `UFFDIO_REGISTER_MODE_*`.
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
                // The address space is changing; a repeated call starts again at the first byte.
                Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Copies `bytes` bytes from `content` to missing pages at `address`, and wakes their waiting threads.
    ///
    /// The range must consist of whole pages of the backing.
    pub(crate) fn copy(&self, address: u64, content: *const u8, bytes: u64) -> Filled {
        filled(bytes, |done| {
            let (dst, src, len) = (address + done, content as u64 + done, bytes - done);
            let mut copy = uffdio_copy { dst, src, len, mode: 0, copy: 0 };
            // SAFETY: the request expects this structure. The kernel reads `len` bytes at `src`, and returns
            // EFAULT where nothing is mapped. It fills memory at `dst` only where it is registered and a page
            // is missing, so no byte changes that a thread has read.
            let result = unsafe { sys::ioctl(self.file.as_fd(), UFFDIO_COPY, &mut copy) };
            (result.map(drop), copy.copy)
        })
    }

    /// Fills missing pages with zero pages, and wakes the threads that wait for them. Not for huge pages.
    pub(crate) fn zero(&self, bytes: &Range<u64>) -> Filled {
        filled(bytes.end - bytes.start, |done| {
            let left = bytes.start + done..bytes.end;
            let mut zero = uffdio_zeropage { range: range(&left), mode: 0, zeropage: 0 };
            // SAFETY: the request expects this structure; memory is filled only where it was registered and no page was.
            let result = unsafe { sys::ioctl(self.file.as_fd(), UFFDIO_ZEROPAGE, &mut zero) };
            (result.map(drop), zero.zeropage)
        })
    }

    /// Wakes all threads that wait for these bytes, so that they repeat their access.
    pub(crate) fn wake(&self, bytes: &Range<u64>) -> io::Result<()> {
        // SAFETY: the request expects this structure; waking changes no byte of the memory.
        unsafe { sys::ioctl(self.file.as_fd(), UFFDIO_WAKE, &mut range(bytes)) }.map(drop)
    }

    /// Removes the protection and the registration of these bytes. Each call is made even if another fails.
    pub(crate) fn unprotect(&self, bytes: &Range<u64>) {
        let _ = self.set_protected(bytes, false);
        self.unregister(bytes);
    }

    /// Removes the registration of these bytes and wakes their waiting threads. Each call is made even if the
    /// other fails.
    pub(crate) fn unregister(&self, bytes: &Range<u64>) {
        // Unregistering wakes no waiting thread (seen on Linux 6.18), so they are woken afterwards. New
        // accesses do not block.
        // SAFETY: the request expects this structure, and changes no byte of the memory.
        let _ = unsafe { sys::ioctl(self.file.as_fd(), UFFDIO_UNREGISTER, &mut range(bytes)) };
        let _ = self.wake(bytes);
    }

    /// Waits for faults and appends them. Returns `false` once `stop` is set.
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
                // The thread was woken meanwhile, or another reader took the message.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// Decodes the message of a page fault; `None` for other events.
fn fault(message: &[u8]) -> Option<Fault> {
    let address = message.get(ADDRESS_AT..ADDRESS_AT + 8)?.try_into().ok().map(u64::from_ne_bytes)?;
    let thread = message.get(THREAD_AT..THREAD_AT + 4)?.try_into().ok().map(u32::from_ne_bytes)?;
    (u32::from(message[0]) == UFFD_EVENT_PAGEFAULT).then_some(Fault { address, thread })
}

/// The part of a range that the kernel filled. It fills page after page until one fails.
#[derive(Debug)]
pub(crate) struct Filled {
    /// Number of filled bytes, from the first on.
    pub(crate) bytes: u64,
    /// The reason why the next byte was not filled. `None`: all bytes were filled.
    pub(crate) end: Option<FillEnd>,
}

/// The reason why the kernel stopped to fill memory.
#[derive(Debug)]
pub(crate) enum FillEnd {
    /// The page was not missing.
    Occupied,
    /// The kernel refused, for example because the host has no memory left.
    Failed(io::Error),
}

/// Repeats a call that fills memory and may stop in the middle.
///
/// `call` gets the number of filled bytes. It returns the kernel's result and count: the newly filled bytes, or
/// the negative error if none.
fn filled(bytes: u64, mut call: impl FnMut(u64) -> (io::Result<()>, i64)) -> Filled {
    let mut done = 0;
    while done < bytes {
        let (result, count) = call(done);
        let end = match result {
            Ok(()) => {
                done = bytes;
                continue;
            }
            // The kernel stopped after some pages, or before the first because the address space is changing.
            // The next call continues, and returns the reason if the page cannot be filled.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => {
                done += u64::try_from(count).unwrap_or(0).min(bytes - done);
                continue;
            }
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => FillEnd::Occupied,
            Err(error) => FillEnd::Failed(error),
        };
        return Filled { bytes: done, end: Some(end) };
    }
    Filled { bytes: done, end: None }
}

/// Ends the waits for faults. It cannot be reset.
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
        // SAFETY: eight bytes of a live number are read. The write fails only if the counter is at its maximum,
        // so it is set.
        unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), size_of::<u64>()) };
    }
}

fn new_descriptor() -> io::Result<OwnedFd> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: no pointers are passed.
    let fd = match sys::check(unsafe { libc::syscall(libc::SYS_userfaultfd, flags) }) {
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
            // The permissions of this file decide who may block the kernel's writes.
            let new = |device: BorrowedFd<'_>| {
                sys::ioctl_value(device, USERFAULTFD_IOC_NEW, flags as libc::c_ulong)
            };
            with_userfaultfd_device(new).map_err(|_| error)?
        }
        other => other? as libc::c_int,
    };
    // SAFETY: the kernel just gave this descriptor, and no one else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn range(bytes: &Range<u64>) -> uffdio_range {
    uffdio_range { start: bytes.start, len: bytes.end - bytes.start }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel fills some bytes and stops; the next call returns the reason.
    #[test]
    fn bytes_filled_before_a_failure_are_counted() {
        let failed = |code| Err(io::Error::from_raw_os_error(code));
        let mut answers = vec![
            (failed(libc::EAGAIN), 8192),
            (failed(libc::EAGAIN), -i64::from(libc::EAGAIN)),
            (failed(libc::EAGAIN), 4096),
            (failed(libc::ENOMEM), -i64::from(libc::ENOMEM)),
        ]
        .into_iter();
        let mut asked = Vec::new();

        let filled = filled(20480, |done| {
            asked.push(done);
            answers.next().expect("no further call after a failure")
        });

        assert_eq!(filled.bytes, 12288);
        assert_eq!(asked, [0, 8192, 8192, 12288]);
        assert!(
            matches!(filled.end, Some(FillEnd::Failed(error)) if error.raw_os_error() == Some(libc::ENOMEM))
        );
    }

    #[test]
    fn page_that_is_there_ends_filling_after_those_before_it() {
        let mut answers = vec![
            (Err(io::Error::from_raw_os_error(libc::EAGAIN)), 4096),
            (Err(io::Error::from_raw_os_error(libc::EEXIST)), -i64::from(libc::EEXIST)),
        ]
        .into_iter();

        let filled = filled(12288, |_| answers.next().expect("no further call after a page"));

        assert!(matches!(filled, Filled { bytes: 4096, end: Some(FillEnd::Occupied) }));
    }
}

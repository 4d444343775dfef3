//! Memory of another process whose page faults this process answers, by that process's userfaultfd.
//!
//! The other process created the userfaultfd, registered its memory, and sent the descriptor. Addresses are those of
//! the other process. Any number of threads may use a [`PeerMemory`].
//!
//! The guest RAM of this process can be registered in the same way ([`PeerMemory::of_own`]). There are no events then
//! except faults: memory is given back only through its blocks, which tell the server ([`Filling`](crate::Filling)).
//!
//! The kernel delivers the faults of a batch before the other events of the batch, also if an event came first. A
//! caller therefore reads until [`PeerMemory::read`] returns `false`, and handles all [`PeerEvent::Removed`] before
//! the faults.

use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use linux_raw_sys::general::{
    UFFD_EVENT_FORK, UFFD_EVENT_PAGEFAULT, UFFD_EVENT_REMAP, UFFD_EVENT_REMOVE, UFFD_EVENT_UNMAP,
    UFFDIO_REGISTER_MODE_MISSING, uffd_msg, uffdio_copy, uffdio_range, uffdio_zeropage,
};
use linux_raw_sys::ioctl::{UFFDIO_COPY, UFFDIO_UNREGISTER, UFFDIO_WAKE, UFFDIO_ZEROPAGE};

use crate::GuestRam;
use crate::missing_pages::{FEATURES, MissingPages, MissingPagesError, unsupported};
use crate::sys;
use crate::userfault::Userfault;

const MESSAGE_BYTES: usize = size_of::<uffd_msg>();
/// Largest number of events that one read returns.
const MESSAGES: usize = 64;
/// What the kernel calls the file of a userfaultfd.
const KERNEL_NAME: &str = "anon_inode:[userfaultfd]";

/// An event of the other process's memory.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum PeerEvent {
    /// A thread waits for the page of this address.
    Fault {
        /// The address of the access, in the other process.
        address: u64,
    },
    /// The other process gives these bytes back (`madvise`), or unmaps them. Those that it can still access read as
    /// zeros from now on.
    Removed(Range<u64>),
    /// The other process moves memory (`mremap`).
    Moved(Range<u64>),
    /// The other process has forked. The descriptor of the child was closed.
    Forked,
    /// An event that this version does not know.
    Unknown(u8),
}

/// The part of a range that the kernel filled, from the first byte on.
#[derive(Debug)]
#[must_use]
pub struct Placed {
    /// Number of filled bytes.
    pub bytes: u64,
    /// The reason why the next page was not filled. `None`: all were filled.
    pub end: Option<PlacingEnd>,
}

/// The reason why a page was not filled.
#[derive(Debug)]
pub enum PlacingEnd {
    /// The page is there already (EEXIST).
    Present,
    /// An event is waiting that changes the memory (EAGAIN): read the events, and then fill the page again.
    Changing,
    /// The memory is not registered, for example because it was unmapped (ENOENT).
    NotRegistered,
    /// The other process ends (ESRCH).
    Gone,
    /// The kernel refused, for example because the host has no memory left.
    Failed(io::Error),
}

/// The descriptor is no userfaultfd.
#[derive(Debug, thiserror::Error)]
#[error("the descriptor is `{found}` and no userfaultfd")]
pub struct NotUserfaultfd {
    /// What the kernel calls the descriptor's file.
    pub found: String,
}

/// The registered memory of another process.
#[derive(Debug)]
pub struct PeerMemory {
    file: File,
}

impl PeerMemory {
    /// Takes the userfaultfd of another process, and makes its reads non-blocking.
    ///
    /// # Errors
    /// [`NotUserfaultfd`]; the descriptor is then closed.
    pub fn new(descriptor: OwnedFd) -> Result<Self, NotUserfaultfd> {
        let link = format!("/proc/self/fd/{}", descriptor.as_raw_fd());
        let found = std::fs::read_link(&link).map(|name| name.to_string_lossy().into_owned());
        let found = found.unwrap_or_else(|error| format!("{link}: {error}"));
        if found != KERNEL_NAME {
            return Err(NotUserfaultfd { found });
        }
        let file = File::from(descriptor);
        // SAFETY: no pointers are passed.
        let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
        let set = sys::check(flags.into()).and_then(|flags| {
            let flags = flags as libc::c_int | libc::O_NONBLOCK;
            // SAFETY: no pointers are passed.
            sys::check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags) }.into())
        });
        set.map_err(|error| NotUserfaultfd { found: format!("{found} ({error})") })?;
        Ok(Self { file })
    }

    /// Registers the guest RAM of this process for missing pages. An access to a page that is not in memory waits from now on
    /// until the page is placed.
    ///
    /// Dropping the result ends the registration: missing pages then read as zeros.
    ///
    /// # Errors
    /// [`MissingPagesError::Refused`], [`MissingPagesError::Unsupported`], [`MissingPagesError::Taken`],
    /// [`MissingPagesError::Block`]. No access waits then.
    pub fn of_own(ram: &GuestRam) -> Result<Self, MissingPagesError> {
        MissingPages::check(ram)?;
        let kernel = Userfault::open(FEATURES).map_err(unsupported)?;
        for block in ram.blocks() {
            let start = block.host_address() as u64;
            let bytes = start..start + block.len_bytes();
            kernel.register(&bytes, UFFDIO_REGISTER_MODE_MISSING).map_err(|source| {
                let block = block.name().to_owned();
                match source.raw_os_error() {
                    Some(libc::EBUSY) => MissingPagesError::Taken { block },
                    _ => MissingPagesError::Block { block, call: "UFFDIO_REGISTER", source },
                }
            })?;
        }
        Ok(Self { file: kernel.into_file() })
    }

    /// Appends the next events, at most 64. Returns `false` if no further event is waiting.
    ///
    /// # Errors
    /// The kernel's error of the read.
    pub fn read(&self, events: &mut Vec<PeerEvent>) -> io::Result<bool> {
        let mut messages = [0u8; MESSAGES * MESSAGE_BYTES];
        loop {
            return match (&self.file).read(&mut messages) {
                Ok(length) => {
                    events.extend(messages[..length].chunks_exact(MESSAGE_BYTES).map(event));
                    Ok(length == messages.len())
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => Err(error),
            };
        }
    }

    /// Fills missing pages from `address` on with `content`, and wakes the threads that wait for them.
    ///
    /// Address and length must be multiples of the memory's page size. A page that is there keeps its content.
    pub fn copy(&self, address: u64, content: &[u8]) -> Placed {
        let (src, len) = (content.as_ptr() as u64, content.len() as u64);
        let mut copy = uffdio_copy { dst: address, src, len, mode: 0, copy: 0 };
        // SAFETY: the request expects this structure. The kernel reads `len` bytes at `src`, which are borrowed, and
        // fills memory of another process. If the descriptor is one of this process, memory is filled only where it
        // is registered and no page is, so no byte changes that a thread has read.
        let result = unsafe { sys::ioctl(self.file.as_fd(), UFFDIO_COPY, &mut copy) };
        placed(len, result.map(drop), copy.copy)
    }

    /// Fills missing pages with zeros, and wakes the threads that wait for them. Not for huge pages.
    pub fn zero(&self, bytes: &Range<u64>) -> Placed {
        let mut zero = uffdio_zeropage { range: range(bytes), mode: 0, zeropage: 0 };
        // SAFETY: the request expects this structure. Memory is filled only where it is registered and no page is.
        let result = unsafe { sys::ioctl(self.file.as_fd(), UFFDIO_ZEROPAGE, &mut zero) };
        placed(bytes.end - bytes.start, result.map(drop), zero.zeropage)
    }

    /// Wakes all threads that wait for these bytes, so that they repeat their access.
    ///
    /// # Errors
    /// The kernel's error, such as ESRCH for a process that ends.
    pub fn wake(&self, bytes: &Range<u64>) -> io::Result<()> {
        // SAFETY: the request expects this structure; waking changes no byte of the memory.
        unsafe { sys::ioctl(self.file.as_fd(), UFFDIO_WAKE, &mut range(bytes)) }.map(drop)
    }

    /// Ends the registration of these bytes and wakes their waiting threads. Missing pages then read as zeros.
    ///
    /// An event of these bytes that was sent before can still be read, and its sender waits until then.
    ///
    /// # Errors
    /// The kernel's error of the first call that failed. The second call is made even if the first failed.
    pub fn unregister(&self, bytes: &Range<u64>) -> io::Result<()> {
        // Unregistering wakes no waiting thread, so they are woken afterwards. New accesses do not block.
        // SAFETY: the request expects this structure, and changes no byte of the memory.
        let ended = unsafe { sys::ioctl(self.file.as_fd(), UFFDIO_UNREGISTER, &mut range(bytes)) };
        let woken = self.wake(bytes);
        ended.map(drop).and(woken)
    }
}

impl AsFd for PeerMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// The outcome of one call. `count`: the kernel's count of filled bytes, or the negative error if none.
fn placed(bytes: u64, result: io::Result<()>, count: i64) -> Placed {
    let Err(error) = result else { return Placed { bytes, end: None } };
    // After some pages the kernel returns EAGAIN. The next call returns the reason if the page cannot be filled.
    let done = u64::try_from(count).unwrap_or(0).min(bytes);
    let end = match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EINTR) => PlacingEnd::Changing,
        Some(libc::EEXIST) => PlacingEnd::Present,
        Some(libc::ENOENT) => PlacingEnd::NotRegistered,
        Some(libc::ESRCH) => PlacingEnd::Gone,
        _ => PlacingEnd::Failed(error),
    };
    Placed { bytes: done, end: Some(end) }
}

/// Decodes one message. Its layout is that of `struct uffd_msg`.
fn event(message: &[u8]) -> PeerEvent {
    let word = |at: usize| {
        let bytes = message.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
        bytes.map_or(0, u64::from_ne_bytes)
    };
    match u32::from(message[0]) {
        UFFD_EVENT_PAGEFAULT => PeerEvent::Fault { address: word(16) },
        UFFD_EVENT_REMOVE | UFFD_EVENT_UNMAP => PeerEvent::Removed(word(8)..word(16).max(word(8))),
        UFFD_EVENT_REMAP => PeerEvent::Moved(word(8)..word(8).saturating_add(word(24))),
        UFFD_EVENT_FORK => {
            let number = word(8) as u32 as libc::c_int;
            if number > 2 {
                // SAFETY: the kernel has just installed this descriptor for the read of the message, and no other
                // code knows it.
                drop(unsafe { OwnedFd::from_raw_fd(number) });
            }
            PeerEvent::Forked
        }
        _ => PeerEvent::Unknown(message[0]),
    }
}

fn range(bytes: &Range<u64>) -> uffdio_range {
    uffdio_range { start: bytes.start, len: bytes.end - bytes.start }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(event: u32, words: &[(usize, u64)]) -> Vec<u8> {
        let mut message = vec![0; MESSAGE_BYTES];
        message[0] = event as u8;
        for (at, word) in words {
            message[*at..at + 8].copy_from_slice(&word.to_ne_bytes());
        }
        message
    }

    #[test]
    fn events_are_decoded_with_their_ranges() {
        let fault = message(UFFD_EVENT_PAGEFAULT, &[(8, 1), (16, 0x7000)]);
        let removed = message(UFFD_EVENT_REMOVE, &[(8, 0x1000), (16, 0x3000)]);
        let backwards = message(UFFD_EVENT_REMOVE, &[(8, 0x3000), (16, 0x1000)]);

        assert_eq!(event(&fault), PeerEvent::Fault { address: 0x7000 });
        assert_eq!(event(&removed), PeerEvent::Removed(0x1000..0x3000));
        assert_eq!(event(&backwards), PeerEvent::Removed(0x3000..0x3000));
        assert_eq!(event(&message(0x7f, &[])), PeerEvent::Unknown(0x7f));
    }

    #[test]
    fn pages_before_the_one_that_failed_are_counted() {
        let failed = |code| Err(io::Error::from_raw_os_error(code));

        let partly = placed(16384, failed(libc::EAGAIN), 8192);
        assert_eq!(partly.bytes, 8192);
        assert!(matches!(partly.end, Some(PlacingEnd::Changing)));
        let present = placed(16384, failed(libc::EEXIST), -i64::from(libc::EEXIST));
        assert_eq!(present.bytes, 0);
        assert!(matches!(present.end, Some(PlacingEnd::Present)));
        let refused = placed(4096, failed(libc::ENOMEM), -i64::from(libc::ENOMEM));
        assert!(matches!(refused.end, Some(PlacingEnd::Failed(_))));
    }

    #[test]
    fn descriptor_of_another_kind_is_refused_by_its_name() {
        let refused = PeerMemory::new(File::open("/dev/null").unwrap().into()).unwrap_err();

        assert_eq!(refused.found, "/dev/null");
    }
}

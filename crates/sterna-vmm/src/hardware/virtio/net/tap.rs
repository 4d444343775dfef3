//! The tap, which is the host's end of a network card.

use std::ffi::{c_char, c_int, c_uint};
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{AtomicBool, Ordering};

use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6,
};

use super::format::HEADER_BYTES;

const DEVICE: &str = "/dev/net/tun";

/// One queue of a tap. A tap has one queue unless it was created for several.
pub(super) struct Tap {
    file: File,
    /// Whether the queue is attached: the kernel delivers packets to it.
    is_attached: AtomicBool,
    /// Whether `file` is the tap. False while another process still owns it; nothing is read or sent then.
    is_here: AtomicBool,
    /// A socket replaces the tap, and supports neither queues nor offloads.
    #[cfg(any(test, feature = "fuzzing"))]
    is_socket: bool,
}

impl Tap {
    /// Opens the tap with this name. Creates it if it does not exist and this program may. The error does not
    /// contain the name. With `may_wait` another program may use the tap now, and hands it over later
    /// ([`Tap::take`]).
    pub(super) fn open(name: &str, has_several: bool, may_wait: bool) -> Result<Self, String> {
        // SAFETY: the structure consists of integers and a union of integers, for which zeros are a valid
        // value.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        let room = request.ifr_name.len() - 1;
        if name.is_empty() || name.len() > room || name.contains(['/', '\0']) {
            return Err(format!("a name has 1 to {room} bytes and no `/`"));
        }
        request.ifr_name.iter_mut().zip(name.bytes()).for_each(|(to, from)| *to = from as c_char);
        let several = if has_several { libc::IFF_MULTI_QUEUE } else { 0 };
        request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | several) as i16;
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).custom_flags(libc::O_NONBLOCK).open(DEVICE);
        let file = file.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => format!("{DEVICE} does not exist: load the kernel's module `tun`"),
            _ => format!("{DEVICE}: {error}"),
        })?;
        // SAFETY: the descriptor is open, and the kernel reads and writes one `ifreq`.
        let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
        let is_busy = result < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::EBUSY);
        if is_busy && may_wait {
            return Ok(Self::waiting(file));
        }
        if result < 0 {
            let error = io::Error::last_os_error();
            return Err(match error.raw_os_error() {
                Some(libc::EBUSY) => "another program uses it, such as another VMM".to_owned(),
                Some(libc::EPERM) => {
                    "this program has no permission to create or use it: run `ip tuntap add mode tap user NAME` first".to_owned()
                }
                Some(libc::EINVAL) if has_several => {
                    "it is not a tap with several queues and packet headers: create it with `ip tuntap add mode tap \
                     vnet_hdr multi_queue`".to_owned()
                }
                Some(libc::EINVAL) => {
                    "it is not a tap with one queue and packet headers: create it with `ip tuntap add mode tap \
                     vnet_hdr`".to_owned()
                }
                _ => error.to_string(),
            });
        }
        let tap = Self {
            file,
            is_attached: AtomicBool::new(true),
            is_here: AtomicBool::new(true),
            #[cfg(any(test, feature = "fuzzing"))]
            is_socket: false,
        };
        let bytes = HEADER_BYTES as c_int;
        // SAFETY: the descriptor is open, and the kernel reads one int.
        check(unsafe { libc::ioctl(tap.file.as_raw_fd(), libc::TUNSETVNETHDRSZ, &raw const bytes) })
            .map_err(|error| format!("its header's length cannot be set: {error}"))?;
        Ok(tap)
    }

    /// Uses a socket of packets instead of a tap.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn of(socket: std::os::unix::net::UnixDatagram) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        let file = std::os::fd::OwnedFd::from(socket).into();
        let (is_attached, is_here) = (AtomicBool::new(true), AtomicBool::new(true));
        Ok(Self { file, is_attached, is_here, is_socket: true })
    }

    fn waiting(file: File) -> Self {
        Self {
            file,
            is_attached: AtomicBool::new(true),
            is_here: AtomicBool::new(false),
            #[cfg(any(test, feature = "fuzzing"))]
            is_socket: false,
        }
    }

    /// Whether this process owns the tap.
    pub(super) fn is_here(&self) -> bool {
        self.is_here.load(Ordering::SeqCst)
    }

    /// A duplicate of the descriptor for another process.
    pub(super) fn give(&self) -> io::Result<OwnedFd> {
        self.file.as_fd().try_clone_to_owned()
    }

    /// Replaces this queue by another process's queue of the tap. Nothing is read, sent or changed.
    pub(super) fn take(&self, queue: &OwnedFd) -> io::Result<()> {
        // SAFETY: the structure consists of integers and a union of integers, for which zeros are a valid
        // value.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        // SAFETY: the descriptor is open, and the kernel writes one `ifreq`.
        check(unsafe { libc::ioctl(queue.as_raw_fd(), libc::TUNGETIFF, &raw mut request) })?;
        // SAFETY: this request has flags in the union.
        let flags = c_int::from(unsafe { request.ifr_ifru.ifru_flags });
        self.replace(queue)?;
        self.is_attached.store(flags & libc::IFF_DETACH_QUEUE == 0, Ordering::SeqCst);
        self.is_here.store(true, Ordering::SeqCst);
        Ok(())
    }

    /// Closes the tap, because another process owns it now.
    pub(super) fn let_go(&self) -> io::Result<()> {
        self.is_here.store(false, Ordering::SeqCst);
        let nothing =
            OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(DEVICE)?;
        self.replace(&nothing.into())
    }

    /// Replaces the open file but keeps the descriptor's number. Poll loops know the descriptor by that
    /// number.
    fn replace(&self, by: &OwnedFd) -> io::Result<()> {
        // SAFETY: both descriptors are open. The second one remains this tap's.
        check(unsafe { libc::dup3(by.as_raw_fd(), self.file.as_raw_fd(), libc::O_CLOEXEC) }.min(0))
    }

    /// Attaches or detaches the queue, so that packets pass here or not.
    pub(super) fn attach(&self, is_attached: bool) -> io::Result<()> {
        #[cfg(any(test, feature = "fuzzing"))]
        if self.is_socket {
            return Ok(());
        }
        if self.is_attached.load(Ordering::SeqCst) == is_attached {
            return Ok(());
        }
        // SAFETY: the structure consists of integers and a union of integers, for which zeros are a valid
        // value.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        let flag = if is_attached { libc::IFF_ATTACH_QUEUE } else { libc::IFF_DETACH_QUEUE };
        request.ifr_ifru.ifru_flags = flag as i16;
        // SAFETY: the descriptor is open, and the kernel reads one `ifreq`.
        check(unsafe { libc::ioctl(self.file.as_raw_fd(), libc::TUNSETQUEUE, &raw const request) })?;
        self.is_attached.store(is_attached, Ordering::SeqCst);
        Ok(())
    }

    /// Tells the tap which packets a guest with these features accepts. They are large packets, and packets
    /// whose checksums are left to the guest.
    pub(super) fn set_offloads(&self, features: u64) -> io::Result<()> {
        #[cfg(any(test, feature = "fuzzing"))]
        if self.is_socket {
            return Ok(());
        }
        let of = |bit: u32, flag: c_uint| if features & 1 << bit != 0 { flag } else { 0 };
        let flags = of(VIRTIO_NET_F_GUEST_CSUM, libc::TUN_F_CSUM)
            | of(VIRTIO_NET_F_GUEST_TSO4, libc::TUN_F_TSO4)
            | of(VIRTIO_NET_F_GUEST_TSO6, libc::TUN_F_TSO6);
        // SAFETY: the descriptor is open; the argument is a number.
        check(unsafe {
            libc::ioctl(self.file.as_raw_fd(), libc::TUNSETOFFLOAD, std::ffi::c_ulong::from(flags))
        })
    }

    /// Reads the next packet with its header. `None` if there is none now.
    pub(super) fn receive(&self, into: &mut [u8]) -> io::Result<Option<usize>> {
        match (&self.file).read(into) {
            Ok(length) => Ok(Some(length)),
            Err(error) if is_over(&error) => Err(error),
            // There is no packet, or the host lacks a resource. The next packet wakes this thread.
            Err(_) => Ok(None),
        }
    }

    /// Sends a packet with its header. False if the network takes no packet now; the packet is lost.
    ///
    /// # Safety
    /// The vectors' memory must be mapped.
    pub(super) unsafe fn send(&self, vectors: &[libc::iovec]) -> io::Result<bool> {
        // SAFETY: the descriptor is open, and the caller vouches for the memory.
        let sent = unsafe { libc::writev(self.file.as_raw_fd(), vectors.as_ptr(), vectors.len() as c_int) };
        if sent >= 0 {
            return Ok(true);
        }
        match io::Error::last_os_error() {
            error if is_over(&error) => Err(error),
            // It is no valid packet, the interface is down, or the host lacks a resource.
            _ => Ok(false),
        }
    }

    /// Sends a packet of this program.
    pub(super) fn send_bytes(&self, packet: &[u8]) -> io::Result<bool> {
        let vector = libc::iovec { iov_base: packet.as_ptr().cast_mut().cast(), iov_len: packet.len() };
        // SAFETY: the vector is the slice, which the kernel only reads.
        unsafe { self.send(&[vector]) }
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Whether the error means that the tap no longer exists.
fn is_over(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EBADF | libc::EBADFD | libc::ENODEV))
}

fn check(result: c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

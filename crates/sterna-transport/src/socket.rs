//! The socket calls: the only ones here that pass raw memory to the kernel.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use rustix::net::{AddressFamily, SocketAddrAny, SocketType, getpeername, sockopt};

use crate::channel::Delivery;
use crate::parts::{Part, Remaining, Vectors};

/// Receives into as much of `left` as one call takes. `whole`: the kernel goes on waiting until all is
/// there, which saves calls.
pub(crate) fn receive<P: Part>(
    socket: BorrowedFd<'_>,
    left: &Remaining<'_, P>,
    whole: bool,
) -> io::Result<usize> {
    let mut vectors = left.vectors();
    let mut message = header(&mut vectors);
    let flags = if whole { libc::MSG_WAITALL } else { 0 };
    // SAFETY: the vectors name the parts that `left` borrows: memory that is mapped and writable (guest
    // RAM, or a buffer that is borrowed mutably); the kernel writes nowhere else.
    let moved = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) };
    if moved < 0 { Err(io::Error::last_os_error()) } else { Ok(moved as usize) }
}

/// Bytes that a socket holds beyond those that are on their way; one packet of pages.
const UNSENT_BYTES: libc::c_int = 512 << 10;

/// Sends as much of `left` as one call takes. A peer that is gone is an error, never a signal.
pub(crate) fn send<P: Part>(socket: BorrowedFd<'_>, left: &Remaining<'_, P>) -> io::Result<usize> {
    let mut vectors = left.vectors();
    let message = header(&mut vectors);
    // SAFETY: the vectors name the parts that `left` borrows, which are mapped; the kernel only reads.
    let moved = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
    if moved < 0 { Err(io::Error::last_os_error()) } else { Ok(moved as usize) }
}

fn header(vectors: &mut Vectors) -> libc::msghdr {
    // SAFETY: msghdr is plain data for which all zeros is a value: no address, no control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = vectors.as_mut_ptr();
    message.msg_iovlen = vectors.count();
    message
}

/// Bytes that wait in the socket; 0 where the kernel does not say. Of TCP those that were not sent yet, without
/// those on their way, which wait for an acknowledgement only. A Unix socket knows but what its buffers cost the
/// kernel until the peer has read them: the bytes and the buffers' own overhead.
pub(crate) fn queued(socket: BorrowedFd<'_>) -> u64 {
    // TIOCOUTQ counts what is on its way too: in a long network a round trip's worth, which delays nothing.
    count(socket, libc::SIOCOUTQNSD).unwrap_or_else(|| outstanding(socket))
}

/// Bytes that wait in the socket or are on their way; 0 where the kernel does not say.
pub(crate) fn outstanding(socket: BorrowedFd<'_>) -> u64 {
    count(socket, libc::TIOCOUTQ).unwrap_or(0)
}

/// Asks for one of those two counts.
fn count(socket: BorrowedFd<'_>, request: libc::c_ulong) -> Option<u64> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: both requests write one int, which lives through the call.
    let failed = unsafe { libc::ioctl(socket.as_raw_fd(), request, &raw mut bytes) };
    if failed == 0 { u64::try_from(bytes).ok() } else { None }
}

/// How a TCP connection's bytes are delivered: four members of the kernel's `struct tcp_info`, which only ever grows at its
/// end. The C library's own form of it ends before three of them.
pub(crate) fn delivery(socket: BorrowedFd<'_>) -> Option<Delivery> {
    const ROUND_TRIP: usize = 68;
    const ACKNOWLEDGED: usize = 120;
    const LEAST_ROUND_TRIP: usize = 148;
    const BUSY: usize = 168;
    let mut info = [0_u8; 256];
    let mut length = size_of_val(&info) as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to `info` and the new length to `length`; both live through the call.
    let failed = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    // A Unix socket refuses, and an old kernel knows less.
    if failed != 0 || (length as usize) < BUSY + 8 {
        return None;
    }
    let short = |at: usize| info[at..at + 4].try_into().map(u32::from_ne_bytes).ok();
    let long = |at: usize| info[at..at + 8].try_into().map(u64::from_ne_bytes).ok();
    Some(Delivery {
        round_trip: Duration::from_micros(short(ROUND_TRIP)?.into()),
        least_round_trip: Duration::from_micros(short(LEAST_ROUND_TRIP)?.into()),
        acknowledged_bytes: long(ACKNOWLEDGED)?,
        busy: Duration::from_micros(long(BUSY)?),
    })
}

/// Lets the kernel send at most so many bytes a second. It paces by itself where the device's queue does not.
pub(crate) fn pace(socket: BorrowedFd<'_>, bytes_per_second: u64) {
    let length = size_of_val(&bytes_per_second) as libc::socklen_t;
    // SAFETY: the option is a 64-bit number, which lives through the call. A Unix socket takes it without effect, and a
    // kernel that does not know it refuses: the sender is not held back then.
    unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_MAX_PACING_RATE,
            (&raw const bytes_per_second).cast(),
            length,
        );
    }
}

/// Whether a write to a peer that is gone is an error in this process, and no signal, even where the call cannot ask for it.
pub(crate) fn ignores_sigpipe() -> bool {
    // SAFETY: sigaction is plain data for which all zeros is a value.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: nothing is changed; the kernel writes one sigaction, which lives through the call.
    let failed = unsafe { libc::sigaction(libc::SIGPIPE, std::ptr::null(), &raw mut action) };
    failed == 0 && action.sa_sigaction == libc::SIG_IGN
}

/// Makes a connected stream socket ready to be a channel: blocking, without Nagle's delay.
pub(crate) fn prepare(socket: BorrowedFd<'_>) -> Result<(), (&'static str, io::Error)> {
    let kind = sockopt::socket_type(socket).map_err(|error| ("getsockopt(SO_TYPE)", error.into()))?;
    if kind != SocketType::STREAM {
        let error = io::Error::new(io::ErrorKind::InvalidInput, "it is not a stream socket");
        return Err(("getsockopt(SO_TYPE)", error));
    }
    getpeername(socket).map_err(|error| ("getpeername", error.into()))?;
    rustix::io::ioctl_fionbio(socket, false).map_err(|error| ("ioctl(FIONBIO)", error.into()))?;
    let domain = sockopt::socket_domain(socket);
    if matches!(domain, Ok(AddressFamily::INET | AddressFamily::INET6)) {
        sockopt::set_tcp_nodelay(socket, true).map_err(|error| ("setsockopt(TCP_NODELAY)", error.into()))?;
        keep_queue_short(socket);
    }
    Ok(())
}

/// Lets a sender wait rather than put more into the socket than the network is about to take: what lies there must
/// go out before anything that comes later, and later comes what a stopped guest waits for.
fn keep_queue_short(socket: BorrowedFd<'_>) {
    let (option, value) = (libc::TCP_NOTSENT_LOWAT, UNSENT_BYTES);
    let length = size_of_val(&value) as libc::socklen_t;
    // SAFETY: the option is an int, which lives through the call. A kernel that does not know it refuses, and the
    // queue is long then.
    unsafe {
        libc::setsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, option, (&raw const value).cast(), length);
    }
}

/// Lets the kernel ask the peer's after half of `limit` without a byte, and give the connection up when the peer's has
/// not answered anything, data or questions, for `limit`. Whole seconds, as the kernel counts. A socket that knows
/// nothing of this is left as it is: a Unix socket's kernel is the peer's.
pub(crate) fn probe_peer(socket: BorrowedFd<'_>, limit: Duration) {
    if !matches!(sockopt::socket_domain(socket), Ok(AddressFamily::INET | AddressFamily::INET6)) {
        return;
    }
    let second = Duration::from_secs(1);
    let given_up = u32::try_from(limit.max(2 * second).as_millis()).unwrap_or(u32::MAX);
    // Where the kernel refuses one of them, its own, longer times hold.
    let _ = sockopt::set_tcp_keepidle(socket, (limit / 2).clamp(second, 3_600 * second));
    let _ = sockopt::set_tcp_keepintvl(socket, (limit / 8).clamp(second, 600 * second));
    let _ = sockopt::set_tcp_user_timeout(socket, given_up);
    let _ = sockopt::set_socket_keepalive(socket, true);
}

/// Whether the socket is listening.
pub(crate) fn is_listening(socket: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(sockopt::socket_acceptconn(socket)?)
}

/// Who is at the other end, in words.
pub(crate) fn describe(socket: BorrowedFd<'_>) -> String {
    match getpeername(socket) {
        Ok(Some(address)) => spell(&address),
        _ => format!("descriptor {}", socket.as_raw_fd()),
    }
}

/// A socket address in the spelling of addresses, as far as it has one.
pub(crate) fn spell(address: &SocketAddrAny) -> String {
    if let Ok(v4) = std::net::SocketAddrV4::try_from(address.clone()) {
        return format!("tcp:{v4}");
    }
    if let Ok(v6) = std::net::SocketAddrV6::try_from(address.clone()) {
        return format!("tcp:{v6}");
    }
    match rustix::net::SocketAddrUnix::try_from(address.clone()) {
        Ok(unix) => match unix.path() {
            Some(path) => format!("unix:{}", path.to_string_lossy()),
            None => "unix:".to_owned(),
        },
        Err(_) => "socket".to_owned(),
    }
}

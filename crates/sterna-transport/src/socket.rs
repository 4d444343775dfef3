//! The socket calls. Only this file passes raw memory to the kernel's socket interface.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use rustix::net::{AddressFamily, SocketAddrAny, SocketType, getpeername, sockopt};

use crate::delivery::Delivery;
use crate::parts::{Part, Remaining, Vectors};

/// Receives into as much of `left` as one call takes. `whole`: the kernel waits until all is there, which saves calls.
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

/// `TCP_RTO_MAX_MS` of Linux 6.15, which the C library does not name yet.
const TCP_RTO_MAX_MS: libc::c_int = 44;
/// The longest pause between two retransmissions, in ms; the kernel allows no shorter limit.
static LONGEST_PAUSE_MS: libc::c_int = 1000;
/// Time without an acknowledgement after which the kernel ends a connection, in ms.
const GIVEN_UP_MS: u32 = 120_000;
/// Limit of unsent bytes in a socket, in addition to those in flight. It is the size of one packet of pages.
const UNSENT_BYTES: libc::c_int = 512 << 10;

/// Sends as much of `left` as one call takes. If the peer has closed, this is an error, never a signal.
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

/// Bytes that wait in the socket; 0 if the kernel does not report it.
///
/// For TCP: unsent bytes, without those in flight, which only wait for an acknowledgement. For a Unix socket: the
/// memory of the buffers until the peer has read them, which is the bytes and the buffers' overhead.
pub(crate) fn queued(socket: BorrowedFd<'_>) -> u64 {
    // TIOCOUTQ also counts bytes in flight. On a long network that is a round trip's worth, which delays nothing.
    count(socket, libc::SIOCOUTQNSD).unwrap_or_else(|| outstanding(socket))
}

/// Bytes that wait in the socket or are in flight. 0 if the kernel does not report it.
pub(crate) fn outstanding(socket: BorrowedFd<'_>) -> u64 {
    count(socket, libc::TIOCOUTQ).unwrap_or(0)
}

/// Reads one of these two counts.
fn count(socket: BorrowedFd<'_>, request: libc::c_ulong) -> Option<u64> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: both requests write one int, which lives through the call.
    let failed = unsafe { libc::ioctl(socket.as_raw_fd(), request, &raw mut bytes) };
    if failed == 0 { u64::try_from(bytes).ok() } else { None }
}

/// Offsets in the kernel's `struct tcp_info`, which grows only at its end. The C library's definition ends before
/// three of these fields.
const LAST_ACKNOWLEDGEMENT: usize = 56;
const ROUND_TRIP: usize = 68;
const ACKNOWLEDGED: usize = 120;
const LEAST_ROUND_TRIP: usize = 148;
const BUSY: usize = 168;

/// How a TCP connection's bytes are delivered.
pub(crate) fn delivery(socket: BorrowedFd<'_>) -> Option<Delivery> {
    let info = tcp_info(socket)?;
    let short = |at: usize| info[at..at + 4].try_into().map(u32::from_ne_bytes).ok();
    let long = |at: usize| info[at..at + 8].try_into().map(u64::from_ne_bytes).ok();
    Some(Delivery {
        round_trip: Duration::from_micros(short(ROUND_TRIP)?.into()),
        least_round_trip: Duration::from_micros(short(LEAST_ROUND_TRIP)?.into()),
        acknowledged_bytes: long(ACKNOWLEDGED)?,
        busy: Duration::from_micros(long(BUSY)?),
        acknowledged_ago: Duration::from_millis(short(LAST_ACKNOWLEDGEMENT)?.into()),
    })
}

fn tcp_info(socket: BorrowedFd<'_>) -> Option<[u8; 256]> {
    let mut info = [0_u8; 256];
    let mut length = size_of_val(&info) as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to `info` and the new length to `length`; both live through
    // the call.
    let failed = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    // A Unix socket refuses the option, and an old kernel returns a shorter structure.
    (failed == 0 && (length as usize) >= BUSY + 8).then_some(info)
}

/// Limits the kernel's sending rate. TCP itself paces if the device's queue does not.
pub(crate) fn pace(socket: BorrowedFd<'_>, bytes_per_second: u64) {
    let length = size_of_val(&bytes_per_second) as libc::socklen_t;
    // SAFETY: the option is a 64-bit number, which lives through the call. A Unix socket accepts it without effect. A
    // kernel without the option refuses it; then the rate is unlimited.
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

/// Whether this process ignores SIGPIPE. If so, every write to a closed peer is an error.
///
/// `splice` has no flag that suppresses the signal.
pub(crate) fn ignores_sigpipe() -> bool {
    // SAFETY: sigaction is plain data for which all zeros is a value.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: nothing is changed; the kernel writes one sigaction, which lives through the call.
    let failed = unsafe { libc::sigaction(libc::SIGPIPE, std::ptr::null(), &raw mut action) };
    failed == 0 && action.sa_sigaction == libc::SIG_IGN
}

/// Prepares a connected stream socket for use as a channel: blocking, without Nagle's delay.
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
        retransmit_often(socket);
    }
    Ok(())
}

/// Makes the kernel retransmit at least once a second while the network delivers nothing.
///
/// By default each pause is twice as long as the previous one. An outage can therefore last twice as long for the
/// connection as for the network. Needs Linux 6.15. An older kernel does it only for connections with few packets
/// in flight, such as a heartbeat's.
pub(crate) fn retransmit_often(socket: BorrowedFd<'_>) {
    let _ = sockopt::set_tcp_thin_linear_timeouts(socket, true);
    // With pauses of a second, the kernel's limit of 15 retransmissions would end the connection after 15 seconds. A
    // time limit replaces that count; `probe_peer` sets a shorter one.
    if sockopt::set_tcp_user_timeout(socket, GIVEN_UP_MS).is_err() {
        return;
    }
    let (option, length) = (TCP_RTO_MAX_MS, size_of_val(&LONGEST_PAUSE_MS) as libc::socklen_t);
    // SAFETY: the option is an int, which lives through the call. A kernel without the option refuses it and keeps its
    // own pauses.
    unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            option,
            (&raw const LONGEST_PAUSE_MS).cast(),
            length,
        );
    }
}

/// Makes a sender wait instead of filling the socket. The network would not send the bytes soon.
///
/// Bytes in the socket are sent before all later ones, and later ones can be those that a paused guest waits for.
fn keep_queue_short(socket: BorrowedFd<'_>) {
    let (option, value) = (libc::TCP_NOTSENT_LOWAT, UNSENT_BYTES);
    let length = size_of_val(&value) as libc::socklen_t;
    // SAFETY: the option is an int, which lives through the call. A kernel without the option refuses it, and the
    // queue is then long.
    unsafe {
        libc::setsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, option, (&raw const value).cast(), length);
    }
}

/// Makes the kernel probe the peer after half of `limit` without a byte.
///
/// The kernel ends the connection if the peer acknowledges neither data nor probes for `limit`. Times are whole
/// seconds, as in the kernel. Other sockets are left unchanged: both ends of a Unix socket are on the same kernel.
pub(crate) fn probe_peer(socket: BorrowedFd<'_>, limit: Duration) {
    if !matches!(sockopt::socket_domain(socket), Ok(AddressFamily::INET | AddressFamily::INET6)) {
        return;
    }
    let second = Duration::from_secs(1);
    let given_up = u32::try_from(limit.max(2 * second).as_millis()).unwrap_or(u32::MAX);
    // If the kernel refuses an option, its own, longer default applies.
    let _ = sockopt::set_tcp_keepidle(socket, (limit / 2).clamp(second, 3_600 * second));
    let _ = sockopt::set_tcp_keepintvl(socket, (limit / 8).clamp(second, 600 * second));
    let _ = sockopt::set_tcp_user_timeout(socket, given_up);
    let _ = sockopt::set_socket_keepalive(socket, true);
}

/// Whether the socket accepts connections.
pub(crate) fn is_listening(socket: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(sockopt::socket_acceptconn(socket)?)
}

/// The other end in the spelling of addresses, or the number of the descriptor.
pub(crate) fn describe(socket: BorrowedFd<'_>) -> String {
    match getpeername(socket) {
        Ok(Some(address)) => spell(&address),
        _ => format!("descriptor {}", socket.as_raw_fd()),
    }
}

/// A socket address in the spelling of [`Address`](crate::Address), or `socket` if it has none.
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

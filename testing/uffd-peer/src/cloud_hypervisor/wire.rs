//! Messages on a Unix socket.

use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

/// Limit of every wait.
const PATIENCE: Duration = Duration::from_secs(60);

pub(super) fn patient(stream: UnixStream) -> io::Result<UnixStream> {
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

pub(super) fn header(command: u16, length: u64) -> [u8; 16] {
    let mut header = [0; 16];
    header[..2].copy_from_slice(&command.to_le_bytes());
    header[8..].copy_from_slice(&length.to_le_bytes());
    header
}

/// Sends bytes, and descriptors with them.
pub(super) fn send(stream: &UnixStream, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)), "room for the descriptors");
    }
    let sent = sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
    if sent == bytes.len() { Ok(()) } else { io::Write::write_all(&mut &*stream, &bytes[sent..]) }
}

/// Receives a header: command or status, and length of the payload. `None`: the peer has closed the connection.
pub(super) fn receive(mut stream: &UnixStream) -> io::Result<Option<(u16, u64)>> {
    let mut header = [0; 16];
    match stream.read_exact(&mut header) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
        read => read?,
    }
    let length = header[8..].iter().rev().fold(0, |all, byte| all << 8 | u64::from(*byte));
    Ok(Some((u16::from_le_bytes([header[0], header[1]]), length)))
}

/// Receives bytes, and the descriptor that comes with them.
pub(super) fn receive_descriptor(stream: &UnixStream, to: &mut [u8]) -> io::Result<Option<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let count = recvmsg(stream, &mut [IoSliceMut::new(to)], &mut control, RecvFlags::CMSG_CLOEXEC)?.bytes;
    assert_eq!(count, to.len(), "a payload in one piece");
    let mut came = None;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(mut descriptors) = message {
            came = descriptors.next();
        }
    }
    Ok(came)
}

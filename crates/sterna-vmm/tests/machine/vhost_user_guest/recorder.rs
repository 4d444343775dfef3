//! A proxy between front end and back end that records the front end's requests.

use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use crate::registers::wait_until;

pub const GET_FEATURES: u32 = 1;
pub const SET_OWNER: u32 = 3;
pub const SET_MEM_TABLE: u32 = 5;
pub const SET_LOG_BASE: u32 = 6;
pub const GET_VRING_BASE: u32 = 11;
pub const SET_DEVICE_STATE_FD: u32 = 42;

const HEADER_BYTES: usize = 12;
/// Highest number of descriptors that are received with one message, more than any message has.
const DESCRIPTORS: usize = 16;

/// The requests of one connection, in order.
#[derive(Clone, Default)]
pub struct Recorder(Arc<Mutex<Vec<u32>>>);

impl Recorder {
    /// Listens in `directory` for the front end of the back end at `socket`. Returns the recorder and the new
    /// socket's path.
    pub fn before(socket: &Path, directory: &Path) -> (Self, PathBuf) {
        let path = directory.join("recorded");
        let listener = UnixListener::bind(&path).unwrap();
        let (recorder, socket) = (Self::default(), socket.to_owned());
        let notes = recorder.clone();
        thread::spawn(move || {
            let front = listener.accept().unwrap().0;
            let back = connect(&socket);
            let (answers, to) = (back.try_clone().unwrap(), front.try_clone().unwrap());
            thread::spawn(move || pass_on(&answers, &to, |_| ()));
            pass_on(&front, &back, |request| notes.0.lock().unwrap().push(request));
        });
        (recorder, path)
    }

    /// The requests so far.
    pub fn said(&self) -> Vec<u32> {
        self.0.lock().unwrap().clone()
    }

    pub fn count(&self, request: u32) -> usize {
        self.said().into_iter().filter(|said| *said == request).count()
    }
}

/// Connects to the back end, whose socket exists a moment before it listens.
fn connect(socket: &Path) -> UnixStream {
    let mut back = None;
    wait_until("the back end", || {
        back = UnixStream::connect(socket).ok();
        back.is_some()
    });
    back.unwrap()
}

/// Forwards messages until either side ends, and forwards the end as well.
fn pass_on(from: &UnixStream, to: &UnixStream, mut note: impl FnMut(u32)) {
    let mut pass = || -> io::Result<()> {
        loop {
            let (head, files) = begin(from)?;
            let word = |at: usize| u32::from_ne_bytes(head[at..at + 4].try_into().unwrap());
            let mut message = head.to_vec();
            message.resize(HEADER_BYTES + word(8) as usize, 0);
            { from }.read_exact(&mut message[HEADER_BYTES..])?;
            note(word(0));
            send(to, &message, &files)?;
        }
    };
    let _ = pass();
    for end in [from, to] {
        let _ = end.shutdown(std::net::Shutdown::Both);
    }
}

/// Receives the next message's header and descriptors.
fn begin(mut from: &UnixStream) -> io::Result<([u8; HEADER_BYTES], Vec<OwnedFd>)> {
    let mut head = [0; HEADER_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut head)];
    let count = recvmsg(from, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)?.bytes;
    if count == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let files = control.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => files.collect(),
        _ => Vec::new(),
    });
    let files = files.collect();
    from.read_exact(&mut head[count..])?;
    Ok((head, files))
}

fn send(to: &UnixStream, message: &[u8], files: &[OwnedFd]) -> io::Result<()> {
    let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(files.is_empty() || control.push(SendAncillaryMessage::ScmRights(&files)));
    // A small message into an empty socket is sent in one piece.
    let count = sendmsg(to, &[IoSlice::new(message)], &mut control, SendFlags::NOSIGNAL)?;
    assert_eq!(count, message.len());
    Ok(())
}

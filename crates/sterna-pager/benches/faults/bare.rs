//! The least that an answer costs on this machine: one thread reads an event, reads the page from the file, and places it.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;
use std::path::Path;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use sterna_pager::handshake;
use sterna_ram::peer_memory::{PeerEvent, PeerMemory};
use sterna_uffd_peer::PAGE;

use crate::Failure;

/// Serves one guest, which has connected, until its process ends.
pub fn serve(listener: &UnixListener, image: &Path) -> Result<(), Failure> {
    let (socket, _) = listener.accept()?;
    let mut bytes = vec![0; handshake::LONGEST];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received =
        recvmsg(&socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let descriptor: Option<OwnedFd> = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut came) => came.next(),
        _ => None,
    });
    let memory = PeerMemory::new(descriptor.ok_or("no descriptor came")?)?;
    let regions = handshake::decode(&bytes[..received.bytes])?.ok_or("half a message came")?.regions;
    let file = std::fs::File::open(image)?;
    let (mut events, mut page) = (Vec::new(), vec![0; PAGE as usize]);
    loop {
        let mut watched = [PollFd::new(&memory, PollFlags::IN), PollFd::new(&socket, PollFlags::RDHUP)];
        poll(&mut watched, None)?;
        if !watched[1].revents().is_empty() {
            return Ok(());
        }
        while memory.read(&mut events)? {}
        for event in events.drain(..) {
            let PeerEvent::Fault { address } = event else { continue };
            let address = address / PAGE * PAGE;
            let region = regions.iter().find(|region| (region.address..).contains(&address));
            let region = region.ok_or("a fault outside of the memory")?;
            file.read_exact_at(&mut page, region.offset + address - region.address)?;
            let _ = memory.copy(address, &page);
        }
    }
}

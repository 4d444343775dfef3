//! Relays the connection over which QEMU writes a disk of the guest to the standby (`specs/replica.md §6`).
//!
//! Bytes are copied in both directions without decoding. The end of the connection is important: a QEMU that has lost
//! it continues to write to its own disk alone. From then on, checkpoints that reach the standby may lack writes.
//! Therefore
//!
//! * if the standby's side ends, the whole stream to the standby is closed before QEMU's side of the disk is,
//! * after QEMU has closed its side of a disk, no more of its stream is forwarded ([`Shared::check_disks`]),
//! * and QEMU is asked in each checkpoint whether it still writes all of its disks there ([`Shared::ask_about_disks`]).

use std::io;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sterna_transport::Channel;
use sterna_wire::nbd::DiskHello;

use super::outlet::Outlet;
use super::pair::DiskPair;
use super::{CONNECT_LIMIT, Ended, LOOK, PIECE_BYTES, Relay, Shared, spawn};

impl Relay {
    /// Listens at `path` for the connection of one disk.
    ///
    /// # Errors
    /// The host refuses the socket or a thread.
    pub(in crate::protect) fn listen_for_disk(&self, path: &Path) -> io::Result<()> {
        let listener = UnixListener::bind(path)?;
        listener.set_nonblocking(true)?;
        let shared = Arc::clone(&self.shared);
        spawn("relay disk", move || {
            if let Err(ended) = shared.accept_disk(&listener) {
                shared.over(ended);
            }
        })
    }

    /// The longest time for which QEMU has been waiting for an answer about a disk.
    pub(in crate::protect) fn disk_stalled(&self) -> Duration {
        let state = self.shared.state.lock();
        let since = state.disks.iter().filter_map(|disk| *disk.asks.lock());
        since.map(|since| since.elapsed()).max().unwrap_or_default()
    }
}

impl Shared {
    /// Checks that all of QEMU's disk connections are open. Called for each piece of the stream, after the piece was
    /// read. So if QEMU lost a connection before it sent the piece, that is detected here.
    pub(super) fn check_disks(&self) -> Result<(), Ended> {
        match self.state.lock().disks.iter().any(|disk| disk.qemu.peer_has_closed()) {
            true => Err(Ended::new(
                "QEMU has closed its connection for a disk, so the standby does not get the disk's new data",
            )),
            false => Ok(()),
        }
    }

    /// Asks QEMU over its monitor whether it still writes its disks at the standby. If a node was removed from its
    /// disk, its connection stays open without data, so the connection does not show it.
    pub(super) fn ask_about_disks(self: &Arc<Self>, outlet: &Arc<Outlet>) -> Result<(), Ended> {
        if self.state.lock().disks.is_empty() {
            return Ok(());
        }
        outlet.ask();
        let (shared, outlet) = (Arc::clone(self), Arc::clone(outlet));
        let ask = move || {
            let steps = shared.steps.upgrade().ok_or_else(|| Ended::new("the protection was ended"));
            let asked = steps.and_then(|steps| steps.check_disks().map_err(Ended::new));
            let asked = asked.and_then(|()| shared.check_disks());
            let gone = asked.and_then(|()| outlet.answered().map_err(Ended::of_standby));
            if let Err(ended) = gone {
                shared.over(ended);
            }
        };
        spawn("relay asks", ask).map_err(|error| Ended::new(format!("cannot start a thread: {error}")))
    }

    fn accept_disk(self: &Arc<Self>, listener: &UnixListener) -> Result<(), Ended> {
        let socket = loop {
            match listener.accept() {
                Ok((socket, _)) => break socket,
                _ if self.state.lock().is_qemu_closed => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::thread::sleep(LOOK),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Ended::of_disk("QEMU's side", error)),
            }
        };
        let qemu = Channel::from_fd(socket.into()).map_err(|error| Ended::of_disk("QEMU's side", error))?;
        let (qemu, asks) = (Arc::new(qemu), Arc::new(Mutex::new(None)));
        self.keep(|state| state.qemu.push(Arc::clone(&qemu)), &qemu);
        let adopt = |channel| {
            let channel = Arc::new(channel);
            self.keep(|state| state.standby.push(Arc::clone(&channel)), &channel);
            channel
        };
        let at_standby = |error| Ended::of_disk("the standby's side", error);
        let standby =
            Channel::connect_with(&self.standby, self.tls.as_ref(), CONNECT_LIMIT, &self.cancel, adopt)
                .map_err(at_standby)?;
        standby.write_all(&DiskHello::BYTES).map_err(at_standby)?;
        self.state.lock().disks.push(DiskPair { qemu: Arc::clone(&qemu), asks: Arc::clone(&asks) });
        let out = {
            let (shared, qemu, standby, asks) =
                (Arc::clone(self), Arc::clone(&qemu), Arc::clone(&standby), Arc::clone(&asks));
            move || {
                let ended = copy(("QEMU's side", &qemu), ("the standby's side", &standby), || {
                    asks.lock().get_or_insert_with(Instant::now);
                });
                shared.over(ended);
            }
        };
        spawn("relay disk out", out)
            .map_err(|error| Ended::new(format!("cannot start a thread: {error}")))?;
        Err(copy(("the standby's side", &standby), ("QEMU's side", &qemu), || *asks.lock() = None))
    }
}

/// Copies until one side ends. `came` is called when bytes have arrived, before they are forwarded.
fn copy((from_side, from): (&str, &Channel), (to_side, to): (&str, &Channel), came: impl Fn()) -> Ended {
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        let length = match from.read_some(&mut piece) {
            Ok(0) => return Ended::of_disk(from_side, "it was closed"),
            Ok(length) => length,
            Err(error) => return Ended::of_disk(from_side, error),
        };
        came();
        if let Err(error) = to.write_all(&piece[..length]) {
            return Ended::of_disk(to_side, error);
        }
    }
}

//! The connection over which QEMU writes a disk of the guest's to the standby (`specs/replica.md §6`).
//!
//! Bytes are copied both ways, and none is understood. What matters is the end of the connection: a QEMU that has lost it writes to its own
//! disk alone, and goes on. So whatever the standby gets of the stream from then on may lack writes. Therefore
//!
//! * where the standby's side ends, the whole stream to the standby is closed before QEMU's side of the disk is,
//! * nothing that QEMU says in the stream is handed on once it has closed its side of a disk ([`Shared::check_disks`]),
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
    pub(in crate::drive::protect) fn listen_for_disk(&self, path: &Path) -> io::Result<()> {
        let listener = UnixListener::bind(path)?;
        listener.set_nonblocking(true)?;
        let shared = Arc::clone(&self.shared);
        spawn("relay disk", move || {
            if let Err(ended) = shared.accept_disk(&listener) {
                shared.over(ended);
            }
        })
    }

    /// How long QEMU has waited for an answer about a disk.
    pub(in crate::drive::protect) fn disk_stalled(&self) -> Duration {
        let state = self.shared.state.lock();
        let since = state.disks.iter().filter_map(|disk| *disk.asks.lock());
        since.map(|since| since.elapsed()).max().unwrap_or_default()
    }
}

impl Shared {
    /// Whether QEMU has all its disks' connections. Asked for each piece of the stream, after it was read: a QEMU that has lost one
    /// before it said this is known here.
    pub(super) fn check_disks(&self) -> Result<(), Ended> {
        match self.state.lock().disks.iter().any(|disk| disk.qemu.peer_has_closed()) {
            true => Err(Ended::new(
                "QEMU has closed its connection for a disk, so the standby lacks what is written",
            )),
            false => Ok(()),
        }
    }

    /// Asks QEMU, beside the stream, whether it still writes its disks at the standby. A node that was taken out of its disk keeps its
    /// connection, over which nothing comes.
    pub(super) fn ask_about_disks(self: &Arc<Self>, outlet: &Arc<Outlet>) -> Result<(), Ended> {
        if self.state.lock().disks.is_empty() {
            return Ok(());
        }
        outlet.ask();
        let (shared, outlet) = (Arc::clone(self), Arc::clone(outlet));
        let ask = move || {
            let steps = shared.steps.upgrade().ok_or_else(|| Ended::new("the protection was given up"));
            let asked = steps.and_then(|steps| steps.check_disks().map_err(Ended::new));
            let asked = asked.and_then(|()| shared.check_disks());
            let gone = asked.and_then(|()| outlet.answered().map_err(Ended::of_standby));
            if let Err(ended) = gone {
                shared.over(ended);
            }
        };
        spawn("relay asks", ask).map_err(|error| Ended::new(format!("the host refuses a thread: {error}")))
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
            .map_err(|error| Ended::new(format!("the host refuses a thread: {error}")))?;
        Err(copy(("the standby's side", &standby), ("QEMU's side", &qemu), || *asks.lock() = None))
    }
}

/// Copies until one side ends. `came` is called when something has come, before it is handed on.
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

//! A device's back end goes to another process of this host with the guest: it stays the same one, with the state that it has, and the
//! connection to it changes hands as a descriptor (`specs/vhost-user.md §7`).

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::net::{AddressFamily, SocketType, sockopt};
use sterna::{HostDescriptors, VmError};

use super::device::VhostUserDevice;
use super::ended;
use super::error::VhostUserError;
use super::session::{Offer, Session};
use super::turn::Turn;

impl HostDescriptors for VhostUserDevice {
    fn name(&self) -> String {
        self.name.to_string()
    }

    fn give(&self) -> Result<Vec<OwnedFd>, VmError> {
        let link = self.link()?;
        let socket = link.socket.try_clone().map_err(|source| VhostUserError::System {
            device: Arc::clone(&self.name),
            what: "doubling the socket",
            source,
        })?;
        link.worker.set_shared(true);
        Ok(vec![socket.into()])
    }

    fn take(&self, descriptors: Vec<OwnedFd>) -> Result<(), VmError> {
        let refuse = |rule: String| VhostUserError::NotTaken { device: Arc::clone(&self.name), rule };
        let mut link = self.link.lock();
        if link.is_some() {
            let rule =
                "this side is connected to one already; start it so that it waits (`sterna run --same-host`)";
            return Err(refuse(rule.to_owned()).into());
        }
        let count = descriptors.len();
        let [socket] = <[OwnedFd; 1]>::try_from(descriptors)
            .map_err(|_| refuse(format!("{count} descriptors came, and it is one")))?;
        let is_stream = sockopt::socket_domain(&socket) == Ok(AddressFamily::UNIX)
            && sockopt::socket_type(&socket) == Ok(SocketType::STREAM);
        if !is_stream {
            return Err(refuse("what came is no connection over a Unix socket".to_owned()).into());
        }
        let socket = UnixStream::from(socket);
        if ended::has_come(&socket) {
            return Err(VhostUserError::Ended { device: Arc::clone(&self.name) }.into());
        }
        let taken = self.link_over(socket, Turn::Theirs)?;
        taken.worker.set_shared(true);
        *link = Some(Arc::new(taken));
        Ok(())
    }

    /// Closes descriptors of a connection that another process has, too, and leaves the connection alone.
    fn let_go(&self) {
        let link = self.link.lock().take_if(|link| link.worker.is_shared());
        // Its thread ends, without the lock.
        drop(link);
    }
}

impl VhostUserDevice {
    /// Whether its back end belongs to a guest that another process has, or had last: the device is as that process says
    /// ([`VhostUserDevice::expect`]), and the back end hears nothing of this one.
    pub fn is_awaited(&self) -> bool {
        self.link.lock().as_ref().is_none_or(|link| link.is_awaited.load(Ordering::Acquire))
    }

    /// Of a device that waits: what the source says of it, which is what its driver sees from now on. Gives the configuration space as
    /// this side's options want it.
    ///
    /// # Errors
    /// [`VhostUserError::Space`], [`VhostUserError::Lacks`] for what no driver may be given;
    /// [`VhostUserError::OutOfOrder`] for a device that does not wait.
    pub fn expect(&self, features: u64, has_state: bool, space: &[u8]) -> Result<Vec<u8>, VhostUserError> {
        let device = || Arc::clone(&self.name);
        if !self.is_awaited() {
            let (call, state) = ("taking the source's word", "it has a back end of its own");
            return Err(VhostUserError::OutOfOrder { device: device(), call, state });
        }
        let refuse = |rule| VhostUserError::Space { device: device(), rule };
        let kind = self.options.kind.as_ref().ok_or_else(|| refuse("no guest sees it".to_owned()))?;
        let features =
            kind.features(features).map_err(|feature| VhostUserError::Lacks { device: device(), feature })?;
        let space = kind.space(self.queues(), Some(space.to_vec()), features).map_err(refuse)?;
        *self.offer.lock() = Offer { features, of_back_end: features, has_state };
        Ok(space)
    }

    /// The guest has arrived, and does not run yet: a back end that came with it hears from this process for the first time, and has
    /// a connection for what it says unasked. Without this it does when the device [runs](sterna::DeviceStream::run). Idempotent.
    ///
    /// # Errors
    /// Whatever a request can fail with.
    pub fn introduce(&self) -> Result<(), VhostUserError> {
        self.speak();
        self.call_session(Session::introduce)
    }

    /// The guest is this side's, for good or again.
    pub(super) fn speak(&self) {
        if let Ok(link) = self.link() {
            link.is_awaited.store(false, Ordering::Release);
            link.worker.post(Session::speak);
        }
    }

    /// Whether another process has the connection, too.
    pub(super) fn is_shared(&self) -> bool {
        self.link().is_ok_and(|link| link.worker.is_shared())
    }
}

//! Hands a device's back end over to another process of this host, with the guest. The back end keeps running
//! with its state. Its connection is handed over as a descriptor (`specs/vhost-user.md §7`).

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
            what: "duplicating the socket",
            source,
        })?;
        link.worker.set_shared(true);
        Ok(vec![socket.into()])
    }

    fn take(&self, descriptors: Vec<OwnedFd>) -> Result<(), VmError> {
        let refuse = |rule: String| VhostUserError::NotTaken { device: Arc::clone(&self.name), rule };
        let mut link = self.link.lock();
        if link.is_some() {
            let rule = "this side is already connected to a back end; start it with `sterna run --same-host`, so that it \
                 waits for the source's";
            return Err(refuse(rule.to_owned()).into());
        }
        let count = descriptors.len();
        let [socket] = <[OwnedFd; 1]>::try_from(descriptors)
            .map_err(|_| refuse(format!("{count} descriptors arrived instead of one")))?;
        let is_stream = sockopt::socket_domain(&socket) == Ok(AddressFamily::UNIX)
            && sockopt::socket_type(&socket) == Ok(SocketType::STREAM);
        if !is_stream {
            return Err(refuse("the descriptor is not a connection over a Unix socket".to_owned()).into());
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

    /// Closes this process's descriptors of a shared connection, without shutting the connection down.
    fn let_go(&self) {
        let link = self.link.lock().take_if(|link| link.worker.is_shared());
        // Dropped without the lock, because this ends the link's thread.
        drop(link);
    }
}

impl VhostUserDevice {
    /// Whether the back end belongs to a guest that another process has, or had last. The device then has the
    /// properties that the other process reports ([`VhostUserDevice::expect`]). The back end gets no request
    /// from this process.
    pub fn is_awaited(&self) -> bool {
        self.link.lock().as_ref().is_none_or(|link| link.is_awaited.load(Ordering::Acquire))
    }

    /// Sets the source's description of a waiting device, which its driver sees from now on. Returns the
    /// configuration space with this side's options applied.
    ///
    /// # Errors
    /// [`VhostUserError::Space`] or [`VhostUserError::Lacks`] for a description that is not valid for a
    /// driver; [`VhostUserError::OutOfOrder`] for a device that does not wait.
    pub fn expect(&self, features: u64, has_state: bool, space: &[u8]) -> Result<Vec<u8>, VhostUserError> {
        let device = || Arc::clone(&self.name);
        if !self.is_awaited() {
            let (call, state) = ("reading the source's message", "it already has a back end");
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

    /// Introduces this process to a back end that was handed over. Called after the guest arrived and before
    /// it runs. It also gives the back end a connection for its own requests. Otherwise this happens when the
    /// device [runs](sterna::DeviceStream::run). Idempotent.
    ///
    /// # Errors
    /// Every error of a request.
    pub fn introduce(&self) -> Result<(), VhostUserError> {
        self.speak();
        self.call_session(Session::introduce)
    }

    /// Permits requests to the back end, because the guest now belongs to this side.
    pub(super) fn speak(&self) {
        if let Ok(link) = self.link() {
            link.is_awaited.store(false, Ordering::Release);
            link.worker.post(Session::speak);
        }
    }

    /// Whether another process has descriptors of the same connection.
    pub(super) fn is_shared(&self) -> bool {
        self.link().is_ok_and(|link| link.worker.is_shared())
    }
}

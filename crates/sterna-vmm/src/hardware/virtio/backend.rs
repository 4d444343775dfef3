//! The interface of a kind of virtio device. The transport implements everything that all kinds share.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use sterna::DeviceStream;
use sterna_devices::vhost_user::VhostUserDevice;

use super::block::control::DiskControl;
use super::ring::{Broken, Ring};
use super::space::ConfigurationSpace;

/// A device without its transport.
pub(crate) trait Backend: Send {
    /// Virtio's device type number.
    fn kind(&self) -> u32;
    /// Feature bits of the kind that the device offers. For a device that another process serves: all of its
    /// feature bits.
    fn features(&self) -> u64;
    /// The maximum sizes of the queues.
    fn queue_sizes(&self) -> Vec<u16>;
    /// The initial configuration space.
    fn configuration(&self) -> Vec<u8>;
    /// Large state that is sent in addition to the device's section.
    fn stream(&self) -> Option<Arc<dyn DeviceStream>> {
        None
    }
    /// The migration mode and the length, if the device is a disk.
    fn disk(&self) -> Option<Arc<DiskControl>> {
        None
    }
    /// The other process that serves the queues, if there is one.
    fn process(&self) -> Option<Arc<VhostUserDevice>> {
        None
    }
    /// The kind's own state, in addition to the state that every device has.
    fn state(&self) -> Vec<u8> {
        Vec::new()
    }
    /// Loads the bytes of [`Backend::state`] at the destination. The error says why they are invalid.
    fn set_state(&mut self, state: &[u8]) -> Result<(), String> {
        if state.is_empty() { Ok(()) } else { Err(format!("the section is {} bytes too long", state.len())) }
    }
    /// Handles a reset by the driver.
    fn reset(&mut self) {}
    /// Starts to work on the device's own thread, with the features that the driver chose.
    ///
    /// # Errors
    /// The host lacks a resource. The device then reports to its driver that it needs a reset.
    fn begin<'a>(
        &'a mut self,
        features: u64,
        space: &'a ConfigurationSpace,
    ) -> io::Result<Box<dyn Session<'a> + 'a>>;
}

/// A device at work. It keeps no chain after [`Session::finish`] or after it is dropped.
pub(crate) trait Session<'a> {
    /// Called first, when the queues are ready. Earlier kicks may be lost, on this host or on another one.
    fn begun(&mut self, rings: &mut [Ring<'a>]) -> Result<(), Broken> {
        (0..rings.len()).try_for_each(|queue| self.kicked(rings, queue))
    }

    /// Whether this session handles kicks.
    fn takes_kicks(&self) -> bool {
        true
    }

    /// The driver may have added a chain to a queue.
    fn kicked(&mut self, rings: &mut [Ring<'a>], queue: usize) -> Result<(), Broken> {
        let _ = (rings, queue);
        Ok(())
    }

    /// Descriptors that become readable when [`Session::woken`] has work. They are polled edge-triggered.
    fn wakes(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    /// Whether [`Session::woken`] has more work and only returned to let other queues work.
    fn has_more(&self) -> bool {
        false
    }

    /// One of [`Session::wakes`] has become readable.
    fn woken(&mut self, rings: &mut [Ring<'a>]) -> Result<(), Broken> {
        let _ = rings;
        Ok(())
    }

    /// Completes the requests in flight and takes no new ones, because the guest is paused. Other requests
    /// stay in the rings.
    fn finish(&mut self, rings: &mut [Ring<'a>]) -> Result<(), Broken> {
        let _ = rings;
        Ok(())
    }
}

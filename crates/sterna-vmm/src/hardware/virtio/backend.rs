//! What a kind of device has to say; the transport does everything else.

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
    /// Virtio's number of the kind.
    fn kind(&self) -> u32;
    /// The features of the kind that it offers, as bits; of one that another process serves, all of them.
    fn features(&self) -> u64;
    /// How long its queues may be.
    fn queue_sizes(&self) -> Vec<u16>;
    /// The configuration space, as it is at first.
    fn configuration(&self) -> Vec<u8>;
    /// Large state that moves beside the device's section.
    fn stream(&self) -> Option<Arc<dyn DeviceStream>> {
        None
    }
    /// Of a disk: how it moves, and how long it is.
    fn disk(&self) -> Option<Arc<DiskControl>> {
        None
    }
    /// The process that serves its queues, if it is another one.
    fn process(&self) -> Option<Arc<VhostUserDevice>> {
        None
    }
    /// What moves with the guest besides what every device has.
    fn state(&self) -> Vec<u8> {
        Vec::new()
    }
    /// Takes what [`Backend::state`] gave on the other side. Why it is none.
    fn set_state(&mut self, state: &[u8]) -> Result<(), String> {
        if state.is_empty() { Ok(()) } else { Err(format!("{} bytes too many", state.len())) }
    }
    /// The driver has reset the device.
    fn reset(&mut self) {}
    /// Begins to work, on a thread of its own, with the features that the driver chose.
    ///
    /// # Errors
    /// The host lacks something. The driver is told that the device needs a reset.
    fn begin<'a>(
        &'a mut self,
        features: u64,
        space: &'a ConfigurationSpace,
    ) -> io::Result<Box<dyn Session<'a> + 'a>>;
}

/// A device at work. It keeps no chain beyond [`Session::finish`] or its end.
pub(crate) trait Session<'a> {
    /// The queues are ready, and nothing has been looked at. Kicks of the time before may be lost, on this host or on another one.
    fn begun(&mut self, rings: &mut [Ring<'a>]) -> Result<(), Broken> {
        (0..rings.len()).try_for_each(|queue| self.kicked(rings, queue))
    }

    /// Whether kicks come here.
    fn takes_kicks(&self) -> bool {
        true
    }

    /// The driver may have added something to a queue.
    fn kicked(&mut self, rings: &mut [Ring<'a>], queue: usize) -> Result<(), Broken> {
        let _ = (rings, queue);
        Ok(())
    }

    /// One is readable when [`Session::woken`] has something to do. It is looked at when it becomes so, and not as long as it is.
    fn wakes(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    /// [`Session::woken`] has more to do, and has only given way to others.
    fn has_more(&self) -> bool {
        false
    }

    /// [`Session::wakes`] has become readable.
    fn woken(&mut self, rings: &mut [Ring<'a>]) -> Result<(), Broken> {
        let _ = rings;
        Ok(())
    }

    /// Finishes what is in flight and takes nothing new: the guest stands still. What was not taken stays in the rings.
    fn finish(&mut self, rings: &mut [Ring<'a>]) -> Result<(), Broken> {
        let _ = rings;
        Ok(())
    }
}

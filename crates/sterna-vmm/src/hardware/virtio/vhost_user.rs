//! A device that another process serves (vhost-user): its queues go there, and this one is the transport alone.
//!
//! Kicks go from the kernel to the process: its eventfds are those of `QueueNotify`. Calls come back through the device's thread
//! here. An eventfd of the process's could be the interrupt itself, but the driver reads in `InterruptStatus` why it was
//! interrupted, and only this process can set that. (A status that always says "a queue" would do without the thread, but then a
//! line could not tell a change of the configuration, nor be raised again after a move.)
//!
//! The rings run and stop with the machine's other processes (`hardware::external`), and how far they are moves in the process's
//! own record. The device's section has what the driver set.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;

use sterna_devices::vhost_user::{DeviceKind, VhostUserDevice};
use virtio_bindings::virtio_mmio::{VIRTIO_MMIO_INT_CONFIG, VIRTIO_MMIO_INT_VRING};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use super::backend::{Backend, Session};
use super::ring::{Broken, Ring};
use super::space::ConfigurationSpace;
use crate::error::VmmError;

/// Entries that a queue may have: what the back ends that are known take.
const QUEUE_SIZE: u16 = 256;
/// Whose events they are, if they are no queue's.
const CHANGED: u64 = u64::MAX;
const ENDED: u64 = u64::MAX - 1;

pub(crate) struct VhostUser {
    device: Arc<VhostUserDevice>,
    kind: DeviceKind,
    configuration: Vec<u8>,
}

/// Those of `devices` that the guest sees, with their names.
pub(super) fn seen(devices: &[Arc<VhostUserDevice>]) -> Result<Vec<(String, VhostUser)>, VmmError> {
    let see = |device: &Arc<VhostUserDevice>| {
        let kind = device.kind()?.clone();
        let name = format!("{} ({})", device.name(), kind.as_str());
        let refused = |why: String| VmmError::Config { what: "vhost-user", why };
        Some(match device.configuration_space() {
            Ok(configuration) => Ok((name, VhostUser { device: Arc::clone(device), kind, configuration })),
            Err(error) => Err(refused(error.to_string())),
        })
    };
    devices.iter().filter_map(see).collect()
}

impl Backend for VhostUser {
    fn kind(&self) -> u32 {
        self.kind.virtio_id()
    }

    fn features(&self) -> u64 {
        self.device.offered_features()
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![QUEUE_SIZE; self.device.queues()]
    }

    fn configuration(&self) -> Vec<u8> {
        self.configuration.clone()
    }

    fn process(&self) -> Option<Arc<VhostUserDevice>> {
        Some(Arc::clone(&self.device))
    }

    fn begin<'a>(
        &'a mut self,
        features: u64,
        space: &'a ConfigurationSpace,
    ) -> io::Result<Box<dyn Session<'a> + 'a>> {
        let events = Epoll::new()?;
        self.device.watch_end(&events, ENDED)?;
        let calls = (0..).map_while(|queue| Some((queue, self.device.call(queue as usize)?)));
        for (data, event) in calls.chain([(CHANGED, self.device.changed())]) {
            events.ctl(ControlOperation::Add, event.as_raw_fd(), EpollEvent::new(EventSet::IN, data))?;
        }
        let events = Events(events);
        Ok(Box::new(VhostUserSession { device: &self.device, features, space, events, has_more: false }))
    }
}

/// All that the thread waits for.
struct Events(Epoll);

impl AsFd for Events {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open as long as `self` is.
        unsafe { BorrowedFd::borrow_raw(self.0.as_raw_fd()) }
    }
}

struct VhostUserSession<'a> {
    device: &'a VhostUserDevice,
    features: u64,
    space: &'a ConfigurationSpace,
    events: Events,
    /// There may be more of them. A back end can go on with them as long as it likes.
    has_more: bool,
}

impl VhostUserSession<'_> {
    /// What the back end says now. If that breaks a rule, the driver keeps what it knows.
    fn changed(&self, rings: &[Ring<'_>]) {
        match self.device.configuration_space() {
            // A process that came with the guest was asked without a reason.
            Ok(now) if self.space.is(&now) => {}
            Ok(now) => {
                self.space.change(|space| space.copy_from_slice(&now));
                // One interrupt is for the whole device.
                rings.iter().take(1).for_each(|ring| ring.interrupt(VIRTIO_MMIO_INT_CONFIG));
            }
            Err(error) => tracing::warn!(%error, "a change of the device's configuration is ignored"),
        }
    }
}

impl<'a> Session<'a> for VhostUserSession<'a> {
    /// Kicks are the other process's.
    fn takes_kicks(&self) -> bool {
        false
    }

    fn begun(&mut self, rings: &mut [Ring<'a>]) -> Result<(), Broken> {
        let places: Vec<_> = rings.iter().map(|ring| ring.place()).collect();
        Ok(self.device.serve(self.features, &places)?)
    }

    fn wakes(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.events.as_fd()]
    }

    fn has_more(&self) -> bool {
        self.has_more
    }

    fn woken(&mut self, rings: &mut [Ring<'a>]) -> Result<(), Broken> {
        let mut events = [EpollEvent::default(); 8];
        let count = self.events.0.wait(0, &mut events)?;
        self.has_more = count > 0;
        for event in &events[..count] {
            match event.data() {
                ENDED => self.device.check_alive()?,
                CHANGED => {
                    let _ = self.device.changed().read();
                    self.changed(rings);
                }
                queue => {
                    // Nothing there: another look was faster.
                    let _ = self.device.call(queue as usize).map(|call| call.read());
                    if let Some(ring) = rings.get(queue as usize) {
                        ring.interrupt(VIRTIO_MMIO_INT_VRING);
                    }
                }
            }
        }
        Ok(())
    }
}

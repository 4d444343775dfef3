//! A device whose queues another process serves over vhost-user. This process only implements the transport.
//!
//! Kicks go directly from the kernel to the process, whose eventfds are registered for `QueueNotify`. Calls
//! of the process pass through the device's thread here. An eventfd of the process could be the interrupt
//! itself. But the driver reads the cause of the interrupt from `InterruptStatus`, and only this process can
//! set that register. (A status that always names a queue would need no thread. But then a line could not
//! report a change of the configuration, and could not be raised again after a migration.)
//!
//! The rings run and stop with the machine's other processes (`hardware::external`). The process's own record
//! contains the rings' positions. The device's section contains the driver's settings.

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

/// Maximum size of a queue, which the known back ends accept.
const QUEUE_SIZE: u16 = 256;
/// Event numbers that belong to no queue.
const CHANGED: u64 = u64::MAX;
const ENDED: u64 = u64::MAX - 1;

pub(crate) struct VhostUser {
    device: Arc<VhostUserDevice>,
    kind: DeviceKind,
    configuration: Vec<u8>,
}

/// The devices of `devices` that the guest sees, with their names.
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

/// The events that the thread waits for.
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
    /// There may be more events. A back end can send events without end.
    has_more: bool,
}

impl VhostUserSession<'_> {
    /// Reads the back end's new configuration. If it breaks a rule, the driver keeps the old one.
    fn changed(&self, rings: &[Ring<'_>]) {
        match self.device.configuration_space() {
            // No change: the process was handed over with the guest, and its event needed no action.
            Ok(now) if self.space.is(&now) => {}
            Ok(now) => {
                self.space.change(|space| space.copy_from_slice(&now));
                // One configuration interrupt serves the whole device.
                rings.iter().take(1).for_each(|ring| ring.interrupt(VIRTIO_MMIO_INT_CONFIG));
            }
            Err(error) => tracing::warn!(%error, "a change of the device's configuration is ignored"),
        }
    }
}

impl<'a> Session<'a> for VhostUserSession<'a> {
    /// The other process handles kicks.
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
                    // An error means that another reader has taken the event.
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

//! Devices with a [`DeviceStream`]: their names on the wire, and calls to their streams, for both sides.

use std::sync::Arc;

use crate::device_stream::DeviceStream;
use crate::error::{MigrationError, VmError};
use crate::threads::{ThreadRole, caught, died};
use crate::vm::Device;

/// Most bytes of a stream in one chunk. A device occupies a lane for one chunk. A chunk should still be in the cache
/// when it is sent, and when it is loaded.
pub(crate) const CHUNK_BYTES: usize = 256 << 10;
/// Most bytes of one chunk that are accepted on the main channel, from any source.
pub const MOST_CHUNK_BYTES: usize = 1 << 20;
/// Most bytes of a device's configuration.
pub(crate) const CONFIGURATION_BYTES: usize = 64 << 10;

/// Name of the main channel's section that carries a device's stream (specs/extension.md §9).
pub(crate) fn section_name(device: &str) -> String {
    format!("{device}{SECTION_SUFFIX}")
}

/// The device whose stream a section carries; `None` if the section carries no stream.
pub fn device_of_section(section: &str) -> Option<&str> {
    section.strip_suffix(SECTION_SUFFIX)
}

const SECTION_SUFFIX: &str = "/stream";

/// A device with a stream, under its name on the wire.
#[derive(Clone)]
#[doc(hidden)]
pub struct Streamed {
    pub name: String,
    pub instance: u32,
    pub stream: Arc<dyn DeviceStream>,
}

impl Streamed {
    /// The devices among `devices` that have a stream, in their order.
    pub fn of(devices: &[Arc<dyn Device>]) -> Vec<Self> {
        let streamed = devices.iter().filter_map(|device| {
            let stream = device.stream()?;
            Some(Self { name: device.name(), instance: device.instance(), stream })
        });
        streamed.collect()
    }

    /// Calls the device's stream.
    ///
    /// # Errors
    /// The call's error or its panic. Both name the device.
    pub fn call<T>(
        &self,
        doing: &str,
        act: impl FnOnce(&dyn DeviceStream) -> Result<T, VmError>,
    ) -> Result<T, MigrationError> {
        let name = format!("DeviceStream of {self}, told to {doing}");
        caught(&name, || act(self.stream.as_ref()))?.map_err(|error| self.named(doing, error))
    }

    /// Adds the device's name and the operation to `error`.
    pub fn named(&self, doing: &str, error: VmError) -> MigrationError {
        VmError::new(format!("{self}: {doing}: {}", error.what), error.why).into()
    }
}

impl std::fmt::Display for Streamed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "device {:?}, instance {}", self.name, self.instance)
    }
}

/// Runs `act` for all `devices` in parallel and waits for all. Returns the first error in the devices' order; `act`
/// is called for all devices anyway.
pub fn in_parallel(
    devices: &[Streamed],
    doing: &str,
    act: impl Fn(&dyn DeviceStream) -> Result<(), VmError> + Sync,
) -> Result<(), MigrationError> {
    failed_in_parallel(devices, doing, act).into_iter().next().map_or(Ok(()), Err)
}

/// Like [`in_parallel`], but returns every error.
pub fn failed_in_parallel(
    devices: &[Streamed],
    doing: &str,
    act: impl Fn(&dyn DeviceStream) -> Result<(), VmError> + Sync,
) -> Vec<MigrationError> {
    let one = &|device: &Streamed| device.call(doing, &act).err();
    let named = |device: &Streamed| ThreadRole::CallDevice.of(&device.name);
    let Some((last, others)) = devices.split_last() else { return Vec::new() };
    std::thread::scope(|scope| {
        let mut begun = Vec::with_capacity(others.len());
        for device in others {
            begun.push((device, named(device).spawn_scoped(scope, move || one(device))));
        }
        let last = one(last);
        let joined = begun.into_iter().map(|(device, thread)| match thread {
            Ok(thread) => thread
                .join()
                .unwrap_or_else(|panic| Some(died(&format!("{doing}: a device's thread"), &*panic))),
            // The host refused a thread: this thread calls the device.
            Err(_) => one(device),
        });
        joined.chain([last]).flatten().collect()
    })
}

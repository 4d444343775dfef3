//! What both sides know of devices with a [`DeviceStream`].

use std::sync::Arc;

use crate::device_stream::DeviceStream;
use crate::error::{MigrationError, VmError};
use crate::threads::caught;
use crate::vm::Device;

/// Most bytes of a stream that one chunk carries. A chunk is what one device holds up a lane for, and should still lie in
/// the cache when it is sent, and when it is loaded.
pub(crate) const CHUNK_BYTES: usize = 256 << 10;
/// Most bytes that are taken in one chunk on the main channel, whoever sends them.
pub(crate) const MOST_CHUNK_BYTES: usize = 1 << 20;
/// Most bytes of a configuration.
pub(crate) const CONFIGURATION_BYTES: usize = 64 << 10;

/// Name of the section that a device's stream has on the main channel (specs/extension.md §9).
pub(crate) fn section_name(device: &str) -> String {
    format!("{device}{SECTION_SUFFIX}")
}

/// The device whose stream is in the section of that name.
pub(crate) fn device_of_section(section: &str) -> Option<&str> {
    section.strip_suffix(SECTION_SUFFIX)
}

const SECTION_SUFFIX: &str = "/stream";

/// A device with a stream, under the name that it has on the wire.
#[derive(Clone)]
pub(crate) struct Streamed {
    pub name: String,
    pub instance: u32,
    pub stream: Arc<dyn DeviceStream>,
}

impl Streamed {
    /// Those of `devices` that have one, in their order.
    pub(crate) fn of(devices: &[Arc<dyn Device>]) -> Vec<Self> {
        let streamed = devices.iter().filter_map(|device| {
            let stream = device.stream()?;
            Some(Self { name: device.name(), instance: device.instance(), stream })
        });
        streamed.collect()
    }

    /// Makes a call to its stream.
    ///
    /// # Errors
    /// What it says, or that it panicked, with whose stream it is.
    pub(crate) fn call<T>(
        &self,
        doing: &str,
        act: impl FnOnce(&dyn DeviceStream) -> Result<T, VmError>,
    ) -> Result<T, MigrationError> {
        let name = format!("DeviceStream of {self}, told to {doing}");
        caught(&name, || act(self.stream.as_ref()))?.map_err(|error| self.named(doing, error))
    }

    /// Says whose `error` it is.
    pub(crate) fn named(&self, doing: &str, error: VmError) -> MigrationError {
        VmError::new(format!("{self}: {doing}: {}", error.what), error.why).into()
    }
}

impl std::fmt::Display for Streamed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "device {:?}, instance {}", self.name, self.instance)
    }
}

/// Does `act` to all `devices` at once and waits for all. The first error in their order is returned; the others
/// have been tried anyway.
pub(crate) fn in_parallel(
    devices: &[Streamed],
    doing: &str,
    act: impl Fn(&dyn DeviceStream) -> Result<(), VmError> + Sync,
) -> Result<(), MigrationError> {
    failed_in_parallel(devices, doing, act).into_iter().next().map_or(Ok(()), Err)
}

/// As [`in_parallel`]: every error.
pub(crate) fn failed_in_parallel(
    devices: &[Streamed],
    doing: &str,
    act: impl Fn(&dyn DeviceStream) -> Result<(), VmError> + Sync,
) -> Vec<MigrationError> {
    let one = &|device: &Streamed| device.call(doing, &act).err();
    let Some((last, others)) = devices.split_last() else { return Vec::new() };
    std::thread::scope(|scope| {
        let spawn = |device| std::thread::Builder::new().spawn_scoped(scope, move || one(device));
        let others: Vec<_> = others.iter().map(|device| (device, spawn(device))).collect();
        let last = one(last);
        let panicked = || MigrationError::Internal(format!("{doing}: a device's thread panicked"));
        let joined = others.into_iter().map(|(device, thread)| match thread {
            Ok(thread) => thread.join().unwrap_or_else(|_| Some(panicked())),
            // Out of threads: one after the other, then.
            Err(_) => one(device),
        });
        joined.chain([last]).flatten().collect()
    })
}

//! `--watchdog`: a watchdog of this host that guards a protected guest's lease.

use std::path::Path;
use std::sync::Arc;

use sterna::replica::Watchdog;
use sterna_devices::watchdog::WatchdogDevice;

use crate::exit::Stop;

/// The watchdog `device`. It is not opened yet, because opening it starts it.
pub fn named(device: &Path) -> Result<Arc<dyn Watchdog>, Stop> {
    match WatchdogDevice::new(device) {
        Ok(device) => Ok(Arc::new(device)),
        Err(why) => Err(Stop::usage(format!("--watchdog: {why}"))),
    }
}

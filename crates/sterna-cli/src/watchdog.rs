//! `--watchdog`: a watchdog of this host that guards a protected guest's lease.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use sterna_devices::watchdog::WatchdogDevice;
use sterna_standby::Watchdog;

use crate::exit::Stop;

/// The watchdog `device`. It is not opened yet, because opening it starts it.
pub fn named(device: &Path) -> Result<Arc<dyn Watchdog>, Stop> {
    match WatchdogDevice::new(device) {
        Ok(device) => Ok(Arc::new(LeaseGuard(device))),
        Err(why) => Err(Stop::usage(format!("--watchdog: {why}"))),
    }
}

/// A watchdog device that is fed while the lease lasts.
struct LeaseGuard(WatchdogDevice);

impl Watchdog for LeaseGuard {
    fn arm(&self, longest: Duration) -> Result<Duration, String> {
        self.0.arm(longest)
    }

    fn feed(&self) -> Result<(), String> {
        self.0.feed()
    }

    fn disarm(&self) -> Result<(), String> {
        self.0.disarm()
    }
}

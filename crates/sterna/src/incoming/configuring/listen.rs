//! Begins to wait for a configuration.

use std::sync::{Arc, mpsc};

use sterna_transport::{Address, Listener};

use super::making;
use super::no_vm::NoVm;
use crate::error::VmError;
use crate::events::Observer;
use crate::incoming::awaited_vm::Configuring;
use crate::incoming::greeting::Greetings;
use crate::incoming::shared::Shared;
use crate::incoming::{Incoming, accept, check_settings, postcopy};
use crate::params::{Capabilities, Parameters};
use crate::rules::{self, Features, Side};
use crate::settings_error::SettingsError;
use crate::shared_settings::SharedSettings;
use crate::start_error::StartError;
use crate::threads::hooked;
use crate::vm::TargetVm;

/// Most channels of a migration: multifd, the main channel, and the preempt channel.
const MOST_CHANNELS: usize = u8::MAX as usize + 2;

impl Incoming {
    /// As [`Incoming::listen`], for a VM that does not exist yet: `make` makes it from the source's configuration
    /// ([`SourceVm::configuration`](crate::SourceVm::configuration)).
    ///
    /// `make` is called at most once, before any byte of the guest arrives, and after TLS has authenticated the source
    /// if credentials are set. It runs on the thread `configure`, which this function starts, under no lock of the
    /// engine. The source waits for it within its own `limits.setup`. The configuration is the peer's, so it may have
    /// any content: check it. An error or a panic of `make` ends the migration at both sides; its text, up to 440 bytes,
    /// is the source's error ([`MigrationError::NotConfigured`](crate::MigrationError::NotConfigured)). A cancel does
    /// not interrupt `make`: the VM is dropped when it returns.
    ///
    /// `shared` says where the settings that both sides must share come from. A source whose settings are refused, or
    /// that sends no configuration (a QEMU, an older Sterna), is refused with a warning, and this side waits for the
    /// next one. Once the VM is made, only the source that configured it can send the guest. If that source
    /// disappears before all of its channels are connected, the migration has failed.
    ///
    /// If `shared` permits postcopy, this function finds out on the calling thread whether this host supports it. A sandbox
    /// must then permit the calls of [`Feature::Postcopy`](crate::sandbox::Feature::Postcopy), also if no source uses it.
    ///
    /// # Errors
    /// As [`Incoming::listen`], and [`SettingsError::ConfigurationNeedsSocket`] for `file:` and `rdma:`. With
    /// [`SharedSettings::AsHere`] and `postcopy_ram`, a host without postcopy is refused ([`StartError::Postcopy`]). With
    /// [`SharedSettings::AsSource`], only a source that uses postcopy is refused there.
    pub fn listen_with(
        at: &Address,
        params: Parameters,
        capabilities: Capabilities,
        shared: SharedSettings,
        observer: Arc<dyn Observer>,
        make: impl FnOnce(&[u8]) -> Result<Arc<dyn TargetVm>, VmError> + Send + 'static,
    ) -> Result<Self, StartError> {
        if matches!(at, Address::File { .. } | Address::Rdma { .. }) {
            return Err(SettingsError::ConfigurationNeedsSocket.into());
        }
        check_settings(&params, &capabilities)?;
        rules::check(Features::of(at, &params, &capabilities), Side::Destination)?;
        let probed = if shared.permits_postcopy(&capabilities) { postcopy::probe() } else { Ok(()) };
        if matches!(shared, SharedSettings::AsHere) {
            // This side's operator asked for postcopy, so no source may find out first that it is impossible here.
            probed.clone().map_err(StartError::Postcopy)?;
        }
        let listener = Listener::bind(at).map_err(StartError::system)?;
        let (jobs, work) = mpsc::channel();
        let own = (params.clone(), capabilities);
        // The channels of the migration are known with the source's settings.
        let alone =
            Capabilities { multifd: false, postcopy_ram: false, postcopy_preempt: false, ..capabilities };
        let address = listener.local_address();
        let mut waiting = Shared::new((Arc::new(NoVm), None), address, params, alone, observer)
            .map_err(StartError::system)?;
        waiting.can_be_dialled_again = !listener.is_one_channel();
        waiting.greetings = Greetings::beside(MOST_CHANNELS);
        waiting.configuring = Some(Configuring::new(shared, own, at.clone(), probed, jobs));
        let hook = waiting.params.on_thread_start.clone();
        hooked(hook.as_ref(), || {
            making::spawn(work, Box::new(make)).map_err(StartError::system)?;
            Self::begin_without_vm(waiting, |shared| accept::spawn(shared, listener).map(Some))
        })
    }

    /// The settings of the migration. After [`Incoming::listen_with`] they are known when the VM is made: `None` until
    /// then.
    pub fn settings(&self) -> Option<(Parameters, Capabilities)> {
        let shared = self.guard.now();
        let is_known = shared.configuring.is_none();
        is_known.then(|| (shared.params.clone(), shared.capabilities))
    }
}

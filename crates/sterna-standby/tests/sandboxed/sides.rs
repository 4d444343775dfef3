//! The two sides of a protection, each in its sandbox.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use sterna::{Address, Capabilities, Parameters, SourceVm, TargetVm, TlsEndpoint};
use sterna_standby::machines::Ruling;
use sterna_standby::{
    ByteGate, CheckpointCopy, Claims, ContactRules, Guardians, Primary, PrimaryOptions, ProtectError,
    Protection, Secret, Standby, StandbyOptions, Terms, VmSurvivor, Watchdog,
};

use crate::common;
use crate::locked::{DESTINATION_CALLER, Locked, SOURCE_CALLER};
use crate::support::PATIENCE;
use crate::support::pairs::with_tls;
use crate::vm::LockedVm;

/// Settings of both sides.
#[derive(Clone)]
pub struct Settings {
    pub params: Parameters,
    pub capabilities: Capabilities,
    pub copy: CheckpointCopy,
    pub lease: Duration,
    pub is_unix: bool,
    pub is_tls: bool,
}

impl Settings {
    pub fn plain() -> Self {
        // On a busy host the seeding would not converge within the default limit.
        let params = Parameters { downtime_limit: PATIENCE, ..common::parameters() };
        let (capabilities, copy) = (Capabilities::default(), CheckpointCopy::Copy);
        // A lease that does not end on a busy host.
        Self { params, capabilities, copy, lease: Duration::from_secs(60), is_unix: false, is_tls: false }
    }
}

/// Certificates and directories, which exist before a sandbox closes.
pub struct Stage {
    directory: tempfile::TempDir,
    certificates: tempfile::TempDir,
}

impl Stage {
    pub fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        Self { directory, certificates: crate::certificates::good_directory() }
    }

    fn params(&self, settings: &Settings, locked: &Locked, endpoint: TlsEndpoint) -> Parameters {
        let params = Parameters { on_thread_start: Some(locked.hook()), ..settings.params.clone() };
        if settings.is_tls { with_tls(&params, self.certificates.path(), endpoint) } else { params }
    }
}

/// Gives the claim to the side that asks first.
#[derive(Default)]
pub struct Arbiter(Mutex<Option<&'static str>>);

impl Arbiter {
    pub fn favours(side: Option<&'static str>) -> Arc<Self> {
        Arc::new(Self(Mutex::new(side)))
    }

    fn of(self: &Arc<Self>, side: &'static str) -> Arc<dyn Claims> {
        let this = Arc::clone(self);
        Arc::new(move || {
            let owner = *this.0.lock().get_or_insert(side);
            Ok(if owner == side { Ruling::Won } else { Ruling::Lost })
        })
    }
}

/// A watchdog that resets nothing.
pub struct Patient;

impl Watchdog for Patient {
    fn arm(&self, longest: Duration) -> Result<Duration, String> {
        // Short, so that the thread soon notices the end of the protection.
        Ok(longest.min(Duration::from_millis(80)))
    }
    fn feed(&self) -> Result<(), String> {
        Ok(())
    }
    fn disarm(&self) -> Result<(), String> {
        Ok(())
    }
}

pub type Env<'a> = (&'a Settings, &'a Stage, &'a Locked);

/// Starts a standby, whose survivor is `vm`.
pub fn stand_by((settings, stage, locked): Env<'_>, vm: &Arc<LockedVm>, arbiter: &Arc<Arbiter>) -> Standby {
    let claims = Arc::clone(arbiter);
    let rules = ContactRules {
        secret: secret(),
        is_required: true,
        claims: Arc::new(move |_| claims.of("standby")),
        fence: Arc::new(|_| Err("no fence is needed".to_owned())),
        always_fences: false,
    };
    let at = match settings.is_unix {
        true => Address::Unix(stage.directory.path().join("standby")),
        false => "tcp:127.0.0.1:0".parse().unwrap(),
    };
    let options = StandbyOptions { insecure: !settings.is_tls, ..StandbyOptions::default() };
    let params = stage.params(settings, locked, TlsEndpoint::Server);
    let vm: Arc<dyn TargetVm> = vm.clone();
    locked.on(DESTINATION_CALLER, || {
        let survivor = Arc::new(VmSurvivor::new(vm).unwrap().saying_again(|_, _| {}));
        let on = settings.capabilities;
        Standby::protect(&at, &options, params, on, Arc::new(()), survivor, Some(rules)).unwrap()
    })
}

/// Protects the guest by the standby at `to`. The gate's output has no place.
pub fn protect(
    (settings, stage, locked): Env<'_>,
    vm: &Arc<LockedVm>,
    to: &Address,
    (arbiter, generation): (&Arc<Arbiter>, u64),
) -> Result<Primary, ProtectError> {
    let terms = Terms {
        heartbeat: Duration::from_millis(20),
        lease: settings.lease,
        drift_per_mille: 10,
        margin: Duration::from_millis(100),
        claim_interval: Duration::from_millis(50),
    };
    let options = PrimaryOptions {
        checkpoint_delay: Duration::from_millis(5),
        checkpoint_copy: settings.copy,
        buffer_bytes: 64 << 20,
        terms,
        ..PrimaryOptions::default()
    };
    let params = stage.params(settings, locked, TlsEndpoint::Client);
    let vm: Arc<dyn SourceVm> = vm.clone();
    locked.on(SOURCE_CALLER, || {
        let gate = Arc::new(ByteGate::new(1 << 20, |_| {}).unwrap());
        gate.put(b"output");
        let (protection, claims) = (Protection { id: [7; 16], generation }, arbiter.of("primary"));
        let guardians = Guardians { protection, secret: secret(), claims, gate };
        Primary::protect(vm, to, &options, guardians, params, settings.capabilities, Arc::new(()))
    })
}

fn secret() -> Secret {
    Secret::from_bytes([3; 32])
}

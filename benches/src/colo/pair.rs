//! A QEMU as primary, and one other end.

use std::cell::RefCell;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::json;
use sterna::replica::machines::Ruling;
use sterna::replica::{Claims, Protection, Secret, Standby, StandbyContact, StandbyGuest, StandbyOptions};
use sterna::{Address, Capabilities, Parameters, VmError};
use sterna_benches::clock::{CpuClock, ticks_per_second};
use sterna_interop::{Builder, Guest, PACE_ADDRESS, Qemu, Ram, Root};
use sterna_qmp::Endpoint;
use sterna_qmp::drive::Vm;
use sterna_qmp::drive::protect::{ProtectRequest, QemuProtection};
use sterna_transport::Channel;

use crate::pauses::{Costs, Measured, Setting, follow};
use crate::{Failure, Way};

/// Follows a primary for that time.
pub(crate) fn measure(root: &Root, setting: &Setting) -> Result<Measured, Failure> {
    let guest = if setting.pages_per_second > 0 { Guest::Boot } else { Guest::None };
    let builder = Qemu::builder(root).kvm_if_any().memory_mib(setting.ram_mib).ram(Ram::File).guest(guest);
    let mut primary = builder.clone().spawn()?;
    if setting.pages_per_second > 0 {
        primary.wait_for_ticks(1)?;
        set_pace(&primary, setting.pages_per_second)?;
    }
    // What it needs lives as long as this.
    let other = other_end(&builder, &mut primary, setting)?;
    let clock = CpuClock::of(primary.id())?;
    let log = |primary: &Qemu, why: String| format!("{why}; {}", primary.log().trim());
    let primary = RefCell::new(primary);
    let next = || {
        let event = primary.borrow_mut().qmp().next_event(Duration::from_secs(1));
        event.map_err(|error| error.to_string())
    };
    let costs = || {
        let (pages, bytes) = match other.standby() {
            Some(standby) => {
                let counts = standby.statistics();
                (counts.normal_pages + counts.zero_pages, counts.received_bytes)
            }
            // It counts neither after the seeding.
            None => (0, 0),
        };
        Ok(Costs { pages, bytes, primary_cpu: clock.read(), standby_cpu: other.cpu()? })
    };
    let measured = follow(setting.time, next, costs, other.process());
    measured.map_err(|why| log(&primary.borrow(), why))
}

fn set_pace(primary: &Qemu, pages_per_second: u64) -> Result<(), Failure> {
    let ticks = u32::try_from(ticks_per_second() / pages_per_second).unwrap_or(u32::MAX);
    let ram = std::fs::OpenOptions::new().write(true).open(primary.directory().join("ram"));
    ram.and_then(|ram| ram.write_all_at(&ticks.to_le_bytes(), PACE_ADDRESS))
        .map_err(|error| error.to_string())
}

/// What keeps the other end alive.
enum Other {
    Qemu { secondary: Qemu },
    Standby { standby: Standby },
    Protect { standby: Standby, _protection: Box<QemuProtection>, ends: Arc<AtomicBool> },
}

impl Other {
    fn standby(&self) -> Option<&Standby> {
        match self {
            Self::Qemu { .. } => None,
            Self::Standby { standby } | Self::Protect { standby, .. } => Some(standby),
        }
    }

    fn process(&self) -> u32 {
        match self {
            Self::Qemu { secondary } => secondary.id(),
            _ => std::process::id(),
        }
    }

    fn cpu(&self) -> Result<Duration, Failure> {
        Ok(CpuClock::of(self.process())?.read())
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        if let Self::Protect { ends, .. } = self {
            ends.store(true, Ordering::SeqCst);
        }
    }
}

fn other_end(builder: &Builder, primary: &mut Qemu, setting: &Setting) -> Result<Other, Failure> {
    let socket = primary.directory().join("stream");
    let uri = format!("unix:{}", socket.display());
    let mut capabilities = vec!["x-colo", "return-path"];
    capabilities.extend((setting.channels > 0).then_some("multifd"));
    let channels = setting.channels.max(1);
    if setting.way != Way::Protect {
        primary.capabilities(&capabilities)?;
        primary.parameters(json!({
            "max-bandwidth": 0, "x-checkpoint-delay": setting.delay.as_millis() as u64, "multifd-channels": channels,
        }))?;
    }
    if setting.way == Way::Qemu {
        let mut secondary = builder.clone().incoming_defer().spawn()?;
        secondary.capabilities(&capabilities)?;
        secondary.parameters(json!({ "multifd-channels": channels }))?;
        secondary.start_incoming(&uri)?;
        primary.start_migration(&uri)?;
        return Ok(Other::Qemu { secondary });
    }
    let standby = Standby::listen(
        &Address::Unix(socket.clone()),
        &StandbyOptions::default(),
        Parameters { multifd_channels: channels, ..Parameters::default() },
        Capabilities { multifd: setting.channels > 0, ..Capabilities::default() },
        Arc::new(()),
    )
    .map_err(|error| error.to_string())?;
    if setting.way == Way::Standby {
        primary.start_migration(&uri)?;
        return Ok(Other::Standby { standby });
    }
    let contact = primary.directory().join("contact");
    let ends = Arc::new(AtomicBool::new(false));
    greet(&contact, standby.clone(), Arc::clone(&ends))?;
    let vm = Vm::connect(&Endpoint::Unix(primary.operator_socket())).map_err(|error| error.to_string())?;
    let protection = Protection { id: [1; 16], generation: 1 };
    let request = ProtectRequest {
        contact: Some(Address::Unix(contact)),
        checkpoint_delay: setting.delay,
        channels: setting.channels,
        parameters: [("max-bandwidth".to_owned(), json!(0))].into_iter().collect(),
        ..ProtectRequest::new(Address::Unix(socket), protection, Secret::from_bytes([0; 32]))
    };
    let protection = QemuProtection::begin(vm, request, wins()).map_err(|error| error.to_string())?;
    Ok(Other::Protect { standby, _protection: Box::new(protection), ends })
}

fn wins() -> Arc<dyn Claims> {
    Arc::new(|| Ok(Ruling::Won))
}

/// Nothing is taken over here.
struct Nothing;

impl StandbyGuest for Nothing {
    fn close_channels(&self) {}
    fn prepare(&self, _: u64) -> Result<(), VmError> {
        Ok(())
    }
    fn fence(&self) -> Result<(), VmError> {
        Ok(())
    }
    fn start(&self) -> Result<(), VmError> {
        Ok(())
    }
    fn discard(&self) {}
}

/// The standby's side of the contact: says what is held.
fn greet(at: &Path, standby: Standby, ends: Arc<AtomicBool>) -> Result<(), Failure> {
    let listener = UnixListener::bind(at).map_err(|error| error.to_string())?;
    std::thread::spawn(move || {
        let greeted = listener.accept().ok().and_then(|(socket, _)| {
            let channel = Channel::from_fd(socket.into()).ok()?;
            let secret = Secret::from_bytes([0; 32]);
            StandbyContact::begin(&Arc::new(channel), &secret, Arc::new(Nothing), |_| wins()).ok()
        });
        let Some(contact) = greeted else { return };
        let mut told = 0;
        while !ends.load(Ordering::SeqCst) {
            while told < standby.statistics().checkpoints {
                told += 1;
                if contact.checkpoint_held(told).is_err() {
                    return;
                }
            }
            std::thread::sleep(Duration::from_micros(500));
        }
    });
    Ok(())
}

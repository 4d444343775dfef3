//! `sterna run` as primary and as standby, protected as an operator does it.

use std::cell::RefCell;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use sterna_benches::clock::ticks_per_second;
use sterna_benches::machines::{Lab, Role};
use sterna_benches::peer::Peer;
use sterna_interop::{PACE_ADDRESS, Root};

use crate::Failure;
use crate::pauses::{Costs, Measured, Setting, follow};

/// The command that protects; it ends with this.
struct Protects(Child);

impl Drop for Protects {
    fn drop(&mut self) {
        // Errors mean that it has ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Follows a primary for that time.
pub(crate) fn measure(root: &Root, sterna: PathBuf, setting: &Setting) -> Result<Measured, Failure> {
    let lab = Lab { root: Some(root.clone()), sterna, kvm: true, namespace: None };
    let place = tempfile::tempdir().map_err(|error| format!("no temporary directory: {error}"))?;
    let (sector, arbiter) = (place.path().join("sector"), place.path().join("arbiter"));
    std::fs::create_dir(&arbiter).map_err(|error| error.to_string())?;
    let bytes = setting.ram_mib << 20;
    lab.boot_sector(bytes, &sector)?;
    let claims = [format!("--arbiter=file:{}", arbiter.display()), "--lease=60s".to_owned()];
    let mut primary = lab.start_protected(Role::Source, bytes, &sector, &claims)?;
    let standby = lab.start_protected(Role::FreshDestination, bytes, &sector, &claims)?;
    primary.execute("cont", Value::Null)?;
    primary.wait_for_ticks(1)?;
    set_pace(&primary, setting.pages_per_second.max(1))?;
    let mut protects = Command::new(&lab.sterna);
    protects.arg("protect").arg(primary.directory().join("qmp"));
    protects.arg(format!("unix:{}", place.path().join("contact").display()));
    protects.arg("--standby-qmp").arg(standby.directory().join("qmp"));
    protects.arg(format!("--checkpoint-delay={}", setting.delay.as_millis()));
    protects.arg(format!("--set=x-sterna-checkpoint-copy={}", setting.copy));
    if setting.channels > 0 {
        protects.arg(format!("--channels={}", setting.channels));
    }
    let protects = protects.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let _protects = Protects(protects.map_err(|error| format!("sterna protect: {error}"))?);
    let primary = RefCell::new(primary);
    let costs = || {
        let mut primary = primary.borrow_mut();
        let report = primary.execute("x-sterna-query-protection", Value::Null)?;
        let number = |name: &str| report[name].as_u64().ok_or(format!("{name} is missing: {report}"));
        Ok(Costs {
            pages: number("pages")?,
            bytes: number("transferred-bytes")?,
            primary_cpu: primary.cpu(),
            standby_cpu: standby.cpu(),
        })
    };
    let next = || primary.borrow_mut().next_event(Duration::from_secs(1));
    follow(setting.time, next, costs, standby.id())
}

fn set_pace(primary: &Peer, pages_per_second: u64) -> Result<(), Failure> {
    let ticks = u32::try_from(ticks_per_second() / pages_per_second).unwrap_or(u32::MAX);
    let ram = primary.ram()?;
    let low = ram.first().ok_or("the guest has no memory")?;
    low.write_all_at(&ticks.to_le_bytes(), PACE_ADDRESS).map_err(|error| error.to_string())
}

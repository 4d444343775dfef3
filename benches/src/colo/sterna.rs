//! `sterna run` as primary and as standby. They are protected with the same commands that an operator uses.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use sterna_benches::machines::{Lab, Role};
use sterna_benches::peer::Peer;
use sterna_benches::words::GuestWords;
use sterna_interop::Root;
use sterna_qmp::QmpEvent;
use tempfile::TempDir;

use crate::Failure;
use crate::guest::writer;
use crate::pauses::{Costs, Measured, Watched, follow};
use crate::plan::{Cell, Load};
use crate::process::{Program, number, seconds, wait};

/// Two VMs, and the command that protects one.
pub(crate) struct Protected {
    pub(crate) primary: Peer,
    pub(crate) standby: Peer,
    words: GuestWords,
    talks: bool,
    _protects: Program,
    _place: TempDir,
}

/// Measures a primary for the cell's time.
pub(crate) fn measure(root: &Root, sterna: &Path, cell: &Cell) -> Result<Measured, Failure> {
    follow(cell.time, &mut Protected::begin(root, sterna, cell)?)
}

impl Protected {
    /// Starts a protection and waits until a checkpoint is held.
    pub(crate) fn begin(root: &Root, sterna: &Path, cell: &Cell) -> Result<Self, Failure> {
        let lab = Lab { root: Some(root.clone()), sterna: sterna.to_owned(), kvm: true, namespace: None };
        let place = tempfile::tempdir().map_err(|error| format!("no temporary directory: {error}"))?;
        let (sector, arbiter) = (place.path().join("sector"), place.path().join("arbiter"));
        std::fs::create_dir(&arbiter).map_err(|error| error.to_string())?;
        let bytes = cell.ram_mib << 20;
        lab.boot_sector_of(writer(cell.load), bytes, &sector)?;
        let claims = [format!("--arbiter=file:{}", arbiter.display())];
        let mut primary = lab.start_protected(Role::Source, bytes, &sector, &claims)?;
        let standby = lab.start_protected(Role::FreshDestination, bytes, &sector, &claims)?;
        primary.execute("cont", Value::Null)?;
        primary.wait_for_ticks(1)?;
        let words = GuestWords::of_process(primary.id())?;
        words.set_pace(cell.load.pages_per_second())?;
        words.clear_gaps()?;
        if cell.load == Load::Talker {
            words.say()?;
        }
        if cell.load == Load::Sparse {
            let on = json!([{"capability": "xbzrle", "state": true}]);
            primary.execute("migrate-set-capabilities", json!({ "capabilities": on }))?;
            primary.execute("migrate-set-parameters", json!({"xbzrle-cache-size": 256 << 20}))?;
        }
        let log = place.path().join("protect.log");
        let protects = Program::start(&mut protect(sterna, &primary, &standby, place.path(), cell), &log)?;
        let talks = cell.load == Load::Talker;
        let mut this = Self { primary, standby, words, talks, _protects: protects, _place: place };
        this.await_protection().map_err(|why| {
            let said = std::fs::read_to_string(&log).unwrap_or_default();
            format!("{why}: {}", said.trim())
        })?;
        if cell.load == Load::Sparse {
            this.await_differences()?;
        }
        if cell.delay < LEAST_DELAY {
            let delay = cell.delay.as_millis() as u64;
            this.primary.execute("migrate-set-parameters", json!({ "x-checkpoint-delay": delay }))?;
        }
        // Discards the events of checkpoints during the setup.
        this.primary.forget_events()?;
        Ok(this)
    }

    fn await_protection(&mut self) -> Result<(), Failure> {
        wait("the first checkpoint", Duration::from_millis(20), || {
            // Before the protection starts, the report does not exist.
            let report = self.report().unwrap_or_default();
            Ok((report["held"].as_u64() > Some(0)).then_some(()))
        })
    }

    /// Waits until checkpoints contain differences. A page is sent as a difference if an earlier checkpoint
    /// contained it.
    fn await_differences(&mut self) -> Result<(), Failure> {
        wait("differences", Duration::from_millis(20), || {
            Ok((number(&self.report()?, "xbzrle-pages")? > 1000).then_some(()))
        })
    }

    fn report(&mut self) -> Result<Value, Failure> {
        self.primary.execute("x-sterna-query-protection", Value::Null)
    }
}

/// Minimum delay that the command accepts.
const LEAST_DELAY: Duration = Duration::from_millis(10);

fn protect(sterna: &Path, primary: &Peer, standby: &Peer, place: &Path, cell: &Cell) -> Command {
    let mut command = Command::new(sterna);
    command.arg("protect").arg(primary.directory().join("qmp"));
    command.arg(format!("unix:{}", place.join("contact").display()));
    command.arg("--standby-qmp").arg(standby.directory().join("qmp"));
    command.arg(format!("--checkpoint-delay={}", cell.delay.max(LEAST_DELAY).as_millis()));
    if cell.channels > 0 {
        command.arg(format!("--channels={}", cell.channels));
    }
    command.arg(format!("--set=x-sterna-checkpoint-copy={}", cell.mode));
    if cell.in_flight > 1 {
        command.arg(format!("--set=x-sterna-checkpoints-in-flight={}", cell.in_flight));
    }
    command
}

impl Watched for Protected {
    fn next_event(&mut self) -> Result<Option<QmpEvent>, Failure> {
        self.primary.next_event(Duration::from_secs(1))
    }

    fn costs(&mut self) -> Result<Costs, Failure> {
        let report = self.report()?;
        Ok(Costs {
            sent: Some((number(&report, "pages")?, number(&report, "transferred-bytes")?)),
            primary_cpu: self.primary.cpu(),
            standby_cpu: self.standby.cpu(),
            gaps: Some(self.words.gaps()?),
        })
    }

    fn transfer(&mut self) -> Result<Option<Duration>, Failure> {
        seconds(&self.report()?, "last-transfer").map(Some)
    }

    fn output_delay(&mut self) -> Result<Option<[Duration; 2]>, Failure> {
        if !self.talks {
            return Ok(None);
        }
        let report = self.report()?;
        Ok(Some([seconds(&report, "output-delay-p50")?, seconds(&report, "output-delay-p99")?]))
    }

    fn standby(&self) -> u32 {
        self.standby.id()
    }
}

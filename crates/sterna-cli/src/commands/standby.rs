//! `sterna standby`: stores the checkpoints of a QEMU on another host, and takes over if that host fails.

mod arguments;
mod desk;
mod disks;
mod follow;
mod judge;
mod place;
mod say;

use std::sync::Arc;
use std::time::Duration;

use sterna::StartError;
use sterna_drive::waiting::WaitingVm;
use sterna_image::MappedOptions;
use sterna_opaque::ImagePlan;
use sterna_qmp::standby::{StandbyControl as _, StandbyMonitor};
use sterna_qmp::{EventBus, Server};
use sterna_standby::{ImageSurvivor, Standby, StandbyOptions, Survivor as _};
use sterna_transport::{CreateOptions, TlsEndpoint};
use tempfile::TempDir;

use crate::commands::peer;
use crate::commands::save::direct;
use crate::exit::{Done, Stop};
use crate::interrupts::Interrupts;
use crate::metrics::{self, MetricsServer};
use crate::record::Report;
use crate::terminal;
pub use arguments::{Arguments, OnLoss};
use desk::Desk;
use follow::Following;
use judge::Judge;
use place::Place;

/// How long the monitor still answers after the end.
const LAST_ANSWERS: Duration = Duration::from_millis(300);

/// Receives the checkpoints of a primary until the guest is at its final place.
pub fn execute(arguments: &Arguments) -> Done {
    let interrupts = Interrupts::catch()?;
    // Arguments are checked before a VM is started or a file is created.
    let address = peer::address(arguments.at.strip_prefix("listen:").unwrap_or(&arguments.at))?;
    if arguments.image.exists() && !arguments.force {
        // Refuse now, not when the primary is lost.
        return Err(Stop::usage(format!(
            "{} exists: choose another name, or use --force",
            arguments.image.display()
        )));
    }
    let directory = arguments.image.parent().filter(|directory| !directory.as_os_str().is_empty());
    if let Some(directory) = directory.filter(|directory| !directory.is_dir()) {
        return Err(Stop::usage(format!(
            "{}: the directory {} does not exist: create it, or choose another name",
            arguments.image.display(),
            directory.display()
        )));
    }
    let report = arguments.report.as_deref().map(Report::begin).transpose()?;
    terminal::note_stale(&arguments.image);
    let (mut parameters, mut capabilities) = arguments.wire.engine(TlsEndpoint::Server)?;
    if let Some(channels) = arguments.channels {
        capabilities.multifd = true;
        parameters.multifd_channels = channels;
    }
    let options = StandbyOptions {
        journal_limit_bytes: arguments.journal_limit,
        insecure: arguments.insecure,
        disk_limit_bytes: arguments.disk_limit,
    };
    let file = CreateOptions {
        direct: direct(arguments.direct_io, arguments.no_direct_io),
        replace: arguments.force,
        ..CreateOptions::default()
    };
    let image = MappedOptions { file, ..MappedOptions::default() };
    let plan = ImagePlan { path: arguments.image.clone(), options: image, convert: None };
    let judge = Judge::open(arguments)?;
    let monitors = monitors(arguments)?;
    let vm = match (&arguments.ram_dir, &monitors) {
        (Some(ram), Some(directory)) => {
            let ram = ram.canonicalize().map_err(|error| Stop::cannot_read(ram, &error))?;
            Some(WaitingVm::new(&arguments.command, &ram, directory.path(), arguments.force)?)
        }
        _ => None,
    };
    let disks = disks::open(&arguments.disk)?;
    let place = Arc::new(Place::new(ImageSurvivor::new(plan), vm, disks));
    let rules = Some(judge.rules(arguments)?);
    let survivor = Arc::clone(&place);
    let standby =
        Standby::protect(&address, &options, parameters, capabilities, Arc::new(()), survivor, rules)
            .map_err(|error| refused(&error))?;
    let (bus, desk) = (EventBus::new(), Desk::new(standby, judge, place, interrupts));
    let _server = match &arguments.qmp {
        Some(endpoint) => {
            let bound = Server::bind(endpoint, StandbyMonitor::new(desk.clone()), bus.clone());
            Some(bound.map_err(|error| Stop::failed(format!("the monitor cannot listen: {error}")))?)
        }
        None => None,
    };
    let _metrics = {
        let desk = Arc::clone(&desk);
        MetricsServer::start_if(arguments.metrics.as_deref(), move || metrics::of_standby(&desk.report()))?
    };
    terminal::note(&format!("listening at {}", desk.standby.address()));
    let (done, record) = Following::new(&desk, arguments, &bus).run();
    if let (Some(report), Some(record)) = (report, record)
        && let Err(error) = report.write_text(&record.to_json())
    {
        // The exit status tells where the guest is. A record that cannot be written does not change it.
        terminal::note(&format!("sterna: warning: {error}"));
    }
    if arguments.qmp.is_some() {
        // `sterna takeover` reads the outcome at the monitor.
        std::thread::sleep(LAST_ANSWERS);
    }
    if done.is_err() {
        // Other threads also hold a reference to `place` and end only with the process, so the guest is
        // discarded explicitly.
        desk.place.discard();
    }
    let has_vm = done.is_ok() && desk.place.vm().is_some();
    if let Some(directory) = monitors.filter(|_| has_vm) {
        // The directory contains the VM's monitor.
        let _ = directory.keep();
    }
    done
}

/// The error for a standby that could not start: contradicting options, or a failed attempt.
fn refused(error: &StartError) -> Stop {
    let sentence = sterna_qmp::migration::refusal_sentence(error);
    match error {
        StartError::Settings(_) => Stop::usage(sentence),
        _ => Stop::failed(sentence),
    }
}

/// A directory for the monitors and the log of the waiting VM.
fn monitors(arguments: &Arguments) -> Result<Option<TempDir>, Stop> {
    if arguments.ram_dir.is_none() {
        return Ok(None);
    }
    let made = tempfile::Builder::new().prefix("sterna-standby-").tempdir();
    made.map(Some)
        .map_err(|error| Stop::failed(format!("cannot create a directory for the VM's monitor: {error}")))
}

//! `sterna save listen:ch:SOCKET IMAGE`: saves the machine that a Cloud Hypervisor sends.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::json;
use sterna_image::Format;
use sterna_image::convert::ConvertOptions;
use sterna_pager::cloud_hypervisor::{Save, SavePlan, SaveProgress, SaveStage, SavedGuest, SessionError};

use super::Arguments;
use crate::exit::{Done, Status, Stop};
use crate::frames;
use crate::interrupts::Interrupts;
use crate::monitor::Progress;
use crate::terminal::{self, Live};
use crate::units;

/// Begins the address of a socket, after `listen:`.
pub const SCHEME: &str = "ch:";
/// Interval between two looks at the save.
const LOOK: Duration = Duration::from_millis(50);

/// Waits for a machine, writes it to the image, and reports the result.
pub fn execute(arguments: &Arguments, socket: &str, interrupts: &Interrupts) -> Done {
    check(arguments, socket)?;
    let options = ConvertOptions {
        replace: arguments.force,
        frames: arguments.frames.options()?,
        ..ConvertOptions::default()
    };
    let plan = SavePlan { socket: socket.into(), image: arguments.image.clone(), options };
    let began = Instant::now();
    let save = Save::start(plan).map_err(|error| Stop::failed(error.to_string()))?;
    terminal::note(&format!(
        "listening at {socket}; start the save with `ch-remote send-migration destination_url=unix:{socket},local=on`"
    ));
    let saved = wait(&save, arguments, interrupts)?;
    tell(arguments, &saved, began.elapsed());
    Ok(Status::Done)
}

/// Refuses what has no meaning here, before the VMM sends anything.
fn check(arguments: &Arguments, socket: &str) -> Result<(), Stop> {
    if socket.is_empty() {
        return Err(Stop::usage("listen:ch: needs the path of a socket: listen:ch:/run/ch.sock"));
    }
    arguments.wire.check_unused()?;
    let of_others = [
        (arguments.channels.is_some(), "--channels"),
        (arguments.direct_io, "--direct-io"),
        (arguments.no_direct_io, "--no-direct-io"),
        (arguments.xml.is_some(), "--xml"),
        (arguments.stop, "--stop"),
        (arguments.resume_after, "--resume-after"),
    ];
    if let Some((_, option)) = of_others.iter().find(|(is_given, _)| *is_given) {
        return Err(Stop::usage(format!(
            "{option} is not for listen:ch:; whether the VMM keeps its guest is its own setting preserve_source"
        )));
    }
    let name = Format::Sterna.to_string();
    if arguments.format != "auto" && arguments.format != name {
        return Err(Stop::usage(format!(
            "listen:ch: writes only the format {name}: leave --format out, and convert the image"
        )));
    }
    if !frames::is_place(&arguments.image) && arguments.format == "auto" {
        return Err(Stop::usage(format!(
            "{} has another ending than .sterna, which listen:ch: writes: give --format {name} if that is wanted",
            arguments.image.display()
        )));
    }
    if arguments.image.exists() && !arguments.force {
        // Refuse now, not when the guest is paused.
        let image = arguments.image.display();
        return Err(Stop::usage(format!("{image} exists: choose another name, or use --force")));
    }
    Ok(())
}

fn wait(save: &Save, arguments: &Arguments, interrupts: &Interrupts) -> Result<SavedGuest, Stop> {
    let live = Live::new(arguments.shown, arguments.json);
    let mut seen = 0;
    loop {
        if let Some(result) = save.result() {
            live.end();
            return result.map_err(|error| failed(&error, &arguments.image));
        }
        live.show(&progress(save.progress()));
        interrupts.sleep(LOOK, seen);
        if interrupts.count() > seen {
            seen = interrupts.count();
            save.stop();
        }
    }
}

fn failed(error: &SessionError, image: &Path) -> Stop {
    match error {
        SessionError::Stopped => {
            Stop::with(Status::Cancelled, "cancelled; there is no image, and the guest is at the source.")
        }
        SessionError::Image(error) => Stop::of_image(error, &[image]),
        error => Stop::failed(format!("{error}; there is no image")),
    }
}

fn progress(save: SaveProgress) -> Progress {
    let status = match save.stage {
        SaveStage::Waiting => "waiting",
        SaveStage::Receiving => "receiving",
        _ => "storing",
    };
    Progress {
        status: status.into(),
        total_bytes: save.memory_bytes,
        remaining_bytes: save.memory_bytes.saturating_sub(save.stored_bytes),
        transferred_bytes: save.stored_bytes,
        ..Progress::default()
    }
}

fn tell(arguments: &Arguments, saved: &SavedGuest, took: Duration) {
    if !saved.is_acknowledged {
        terminal::note(
            "sterna: warning: the image is complete, but the VMM closed its connection before it got the answer: its \
             guest may have continued, and may use the same disks",
        );
    }
    if arguments.json {
        let value = json!({
            "schema": "sterna-save",
            "version": 1,
            "image": arguments.image.display().to_string(),
            "format": Format::Sterna.to_string(),
            "vmm": "cloud-hypervisor",
            "pid": saved.pid,
            "was_running": !saved.was_paused,
            "acknowledged": saved.is_acknowledged,
            "memory_slots": saved.slots,
            "ram_total_bytes": saved.memory_bytes,
            "file_bytes": saved.image_bytes,
            "total_time": took.as_secs_f64(),
        });
        return terminal::print(&format!("{value:#}\n"));
    }
    let mut text = String::new();
    let mut row = |name: &str, value: String| text += &format!("{name:<12} {value}\n");
    row("saved", arguments.image.display().to_string());
    row("form", Format::Sterna.to_string());
    row("guest", if saved.was_paused { "was paused" } else { "was running" }.to_owned());
    row("guest RAM", units::bytes(saved.memory_bytes));
    row("written", units::bytes(saved.image_bytes));
    row("total time", format!("{} (including the wait for the VMM)", units::seconds(took.as_secs_f64())));
    terminal::print(&text);
}

//! `sterna restore`: loads a guest from an image into a waiting VM, or into one that this command starts.

mod lazy;
pub(super) mod place;

use std::ffi::OsString;
use std::path::PathBuf;

use serde_json::json;
use sterna_drive::Vm;
use sterna_drive::restore::launch::Launched;
use sterna_drive::restore::{RestoreRequest, Restored, Start, Subject, restore};
use sterna_image::open_frames;
use sterna_libvirt::DomainAddress;
use sterna_qmp::Endpoint;

use crate::commands::peer::{self, SendWire, Sending};
use crate::commands::save::direct;
use crate::commands::serve::Reading;
use crate::exit::{Done, Status, Stop};
use crate::frames::Opened;
use crate::interrupts::Interrupts;
use crate::libvirt;
use crate::monitor::Monitor;
use crate::storage::Storage;
use crate::terminal::{self, Live, Shown};
use crate::units;
use crate::watch::Watcher;

/// Which image, and into which VM.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Image to restore, in any format that `sterna save`, QEMU or libvirt writes
    pub image: PathBuf,
    /// QMP socket of a VM that was started with `-incoming defer`: unix:PATH, a path, or qmp:PATH. Or
    /// send:tcp:HOST:PORT or send:unix:PATH: send to a VM that already listens for a migration there
    #[arg(required_unless_present = "command", conflicts_with = "command")]
    pub target: Option<String>,
    /// Number of threads that read pages (mapped-ram and libvirt-sparse) [default: 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    pub channels: Option<u8>,
    /// Require direct I/O for pages. By default pages bypass the page cache if the file system supports it and the
    /// image is not cached yet
    #[arg(long)]
    pub direct_io: bool,
    /// Read pages through the page cache
    #[arg(long, conflicts_with = "direct_io")]
    pub no_direct_io: bool,
    /// Leave the guest stopped, even if it was running when it was saved
    #[arg(long)]
    pub paused: bool,
    /// Start the guest, even if it was paused when it was saved
    #[arg(long, conflicts_with = "paused")]
    pub running: bool,
    /// Only with send:. Send the image even if it is damaged (see `sterna verify`). Damaged data is sent unchanged and
    /// reported; a truncated description is left out
    #[arg(long)]
    pub force_damaged: bool,
    /// Start the guest immediately (postcopy; only QEMU). Pages are sent when the guest needs them, the rest in the
    /// background. Until all pages have arrived, the guest depends on this command and on the image: the first Ctrl-C
    /// only prints a warning, the second leaves the guest paused
    #[arg(long, conflicts_with = "channels")]
    pub lazy: bool,
    /// Only with --lazy. Time in seconds to try to connect again if the connection breaks
    #[arg(long, value_name = "SECONDS", default_value_t = 60, requires = "lazy")]
    pub reconnect_window: u64,
    /// How a lazily restored image is read.
    #[command(flatten)]
    pub reading: Reading,
    /// How an image in Sterna's own format is read.
    #[command(flatten)]
    pub opened: Opened,
    /// How images in object storages are reached.
    #[command(flatten)]
    pub storage: Storage,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// How progress is shown.
    #[command(flatten)]
    pub shown: Shown,
    /// Command that starts a VM, such as `-- qemu-system-x86_64 -m 4G …`. This command adds `-incoming defer` and a
    /// monitor. The VM continues to run after this command has ended
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
    /// What a peer without a monitor was told.
    #[command(flatten, next_help_heading = "Settings of a peer without a monitor (only with send:)")]
    pub wire: SendWire,
}

/// Restores the guest and reports the result.
pub fn execute(arguments: &Arguments) -> Done {
    let interrupts = Interrupts::catch()?;
    let request = RestoreRequest {
        path: arguments.image.clone(),
        access: arguments.opened.access()?,
        channels: arguments.channels,
        direct: direct(arguments.direct_io, arguments.no_direct_io),
        start: match (arguments.paused, arguments.running) {
            (true, _) => Start::Paused,
            (_, true) => Start::Running,
            _ => Start::AsItWas,
        },
    };
    if let Some(address) = arguments.target.as_ref().and_then(|target| target.strip_prefix("send:")) {
        if request.start != Start::AsItWas {
            return Err(Stop::usage(
                "--paused and --running are only for VMs with a monitor; a peer without a monitor decides by itself",
            ));
        }
        if arguments.lazy {
            return Err(Stop::usage(
                "--lazy needs the VM's monitor; for a QEMU without a monitor, use `sterna serve`",
            ));
        }
        let sending = Sending {
            image: &arguments.image,
            to: address,
            access: &request.access,
            direct: request.direct,
            force_damaged: arguments.force_damaged,
            wire: &arguments.wire,
            json: arguments.json,
            shown: arguments.shown,
        };
        return peer::send_to(&sending, &interrupts);
    }
    if let Some(target) = arguments.target.as_ref().filter(|target| DomainAddress::is_meant_by(target)) {
        let domain: DomainAddress = target.parse().map_err(Stop::usage)?;
        return Err(libvirt::restore(&domain, &arguments.image));
    }
    arguments.wire.check_unused()?;
    if arguments.force_damaged {
        return Err(Stop::usage(
            "--force-damaged is only for peers without a monitor (send:); a VM with a monitor gets a damaged image \
             with a warning, and refuses data that it cannot load",
        ));
    }
    let live = Live::new(arguments.shown, arguments.json);
    let mut watcher = Watcher::new(&live, &interrupts);
    if arguments.lazy {
        let done = lazy::restore(arguments, &request, &mut watcher);
        live.end();
        return done;
    }
    let Some(target) = &arguments.target else {
        return start_and_restore(arguments, &request, &mut watcher, &live);
    };
    let endpoint: Endpoint = target.strip_prefix("qmp:").unwrap_or(target).parse().map_err(Stop::usage)?;
    // A wrong key or a missing base is found before the VM is touched.
    open_frames(&request.path, &request.access).map_err(|error| Stop::of_image(&error, &[&request.path]))?;
    let mut monitor = Monitor::connect(&endpoint)?;
    let restored = restore(monitor.vm(), &request, &mut watcher)?;
    live.end();
    tell(arguments, &restored, None);
    end(&restored)
}

fn start_and_restore(
    arguments: &Arguments,
    request: &RestoreRequest,
    watcher: &mut Watcher<'_>,
    live: &Live,
) -> Done {
    // The image is checked first, so that no VM is started for an image that cannot be restored.
    Subject::examine(&request.path, &request.access)?;
    let directory = place::directory()
        .map_err(|error| Stop::failed(format!("cannot create a directory for the VM's monitor: {error}")))?;
    let mut launched = Launched::start(&arguments.command, directory.path())?;
    let mut vm: Vm = launched.vm(watcher)?;
    let restored =
        restore(&mut vm, request, watcher).map_err(|error| Stop::from(error).with_more(&launched.said()))?;
    live.end();
    tell(arguments, &restored, Some(&launched));
    launched.release();
    let _ = directory.keep();
    end(&restored)
}

/// The exit status. It is a failure if the guest should run but does not, because a script may delete the
/// image after success.
fn end(restored: &Restored) -> Done {
    if restored.should_run && !restored.is_running {
        return Err(Stop::failed(
            "the guest was loaded but could not be started: keep the image, and see the warnings above",
        ));
    }
    Ok(Status::Done)
}

fn tell(arguments: &Arguments, restored: &Restored, launched: Option<&Launched>) {
    for warning in &restored.warnings {
        terminal::note(&format!("sterna: warning: {warning}"));
    }
    terminal::print(&if arguments.json {
        to_json(arguments, restored, launched)
    } else {
        table(arguments, restored, launched)
    });
}

fn table(arguments: &Arguments, restored: &Restored, launched: Option<&Launched>) -> String {
    let mut text = String::new();
    let mut row = |name: &str, value: String| text += &format!("{name:<12} {value}\n");
    let seconds = restored.total.as_secs_f64();
    row("restored", arguments.image.display().to_string());
    row("form", restored.kind.clone());
    row("guest", if restored.is_running { "runs" } else { "is stopped; `cont` starts it" }.into());
    row("guest RAM", units::bytes(restored.ram_bytes));
    row(
        "total time",
        format!(
            "{} ({} examining the image)",
            units::seconds(seconds),
            units::seconds(restored.examining.as_secs_f64())
        ),
    );
    row("rate", format!("{} of guest RAM", units::rate(restored.ram_bytes as f64 / seconds.max(1e-9))));
    let past = if restored.is_direct { ", direct I/O" } else { "" };
    row("channels", format!("{}{past}", restored.channels));
    if let Some(launched) = launched {
        row("process", launched.id().to_string());
        row("monitor", launched.socket().display().to_string());
        row("messages", launched.log().display().to_string());
    }
    text
}

fn to_json(arguments: &Arguments, restored: &Restored, launched: Option<&Launched>) -> String {
    let value = json!({
        "schema": "sterna-restore",
        "version": 1,
        "image": arguments.image.display().to_string(),
        "format": restored.kind,
        "is_running": restored.is_running,
        "ram_total_bytes": restored.ram_bytes,
        "total_time": restored.total.as_secs_f64(),
        "examining_time": restored.examining.as_secs_f64(),
        "channels": restored.channels,
        "direct_io": restored.is_direct,
        "warnings": restored.warnings,
        "process": launched.map(Launched::id),
        "monitor": launched.map(|launched| launched.socket().display().to_string()),
        "messages": launched.map(|launched| launched.log().display().to_string()),
    });
    format!("{value:#}\n")
}

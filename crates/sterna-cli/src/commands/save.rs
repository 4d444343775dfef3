//! `sterna save`: saves a guest to an image through its monitor.

mod cloud_hypervisor;

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::json;
use sterna_drive::live::{self, LiveImage, LiveRequest};
use sterna_drive::save::{Domain, SaveRequest, Saved, newest_format, newest_libvirt_format, save};
use sterna_drive::{MonitorAddress, Settings};
use sterna_image::{Compression, Format};
use sterna_transport::{Direct, PageFile};

use crate::commands::peer::{self, Listening, Wire};
use crate::exit::{Done, Status, Stop};
use crate::frames::{self, Frames};
use crate::interrupts::{Interrupts, until_interrupted};
use crate::libvirt;
use crate::monitor::Monitor;
use crate::storage::Storage;
use crate::terminal::{self, Live, Shown};
use crate::watch::Watcher;
use crate::{bitmaps, units};

/// Which guest, where to, and how.
#[derive(Debug, clap::Args)]
#[command(after_long_help = libvirt::HELP)]
pub struct Arguments {
    /// QMP socket of a QEMU or Sterna VM: unix:PATH, a path, or qmp:PATH. Or a domain of libvirt: libvirt:NAME, which is saved in
    /// a format for `virsh restore`, with its XML, unless --format names another one. Or listen:tcp:HOST:PORT or listen:unix:PATH:
    /// wait there for a VM whose operator starts a migration to this address. Or listen:ch:SOCKET: wait there for a Cloud
    /// Hypervisor (`ch-remote send-migration destination_url=unix:SOCKET,local=on`)
    pub source: String,
    /// Image to write: a file; or in Sterna's own format store:DIRECTORY#NAME, s3://BUCKET/PREFIX#NAME or s3://BUCKET/KEY.sterna
    pub image: PathBuf,
    /// Format of the image.
    #[arg(long, default_value = "auto", help = format_help())]
    pub format: String,
    /// Number of threads that write pages (mapped-ram and libvirt-sparse) [default: 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    pub channels: Option<u8>,
    /// Require direct I/O for pages (not with legacy and libvirt-raw). By default pages bypass the page cache if the
    /// file system supports it, in mapped-ram and libvirt-sparse only if the guest's RAM is larger than half of this
    /// host's free memory
    #[arg(long)]
    pub direct_io: bool,
    /// Write pages through the page cache
    #[arg(long, conflicts_with = "direct_io")]
    pub no_direct_io: bool,
    /// File with the domain XML for libvirt's formats, from `virsh dumpxml --migratable --inactive DOMAIN`
    #[arg(long, value_name = "FILE")]
    pub xml: Option<PathBuf>,
    /// File with libvirt's cookie
    #[arg(long, value_name = "FILE", requires = "xml")]
    pub cookie: Option<PathBuf>,
    /// Replace the image if it exists, and accept an XML of another machine
    #[arg(long)]
    pub force: bool,
    /// Leave the guest stopped after the save (default)
    #[arg(long)]
    pub stop: bool,
    /// Resume the guest after the save
    #[arg(long, conflicts_with = "stop")]
    pub resume_after: bool,
    /// Save a Sterna VM while its guest runs: the image, in Sterna's own format, is the state of one moment, for which the
    /// guest is paused for milliseconds
    #[arg(long, conflicts_with_all = ["stop", "resume_after", "xml", "channels", "direct_io", "no_direct_io"])]
    pub live: bool,
    /// How an image in Sterna's own format is written.
    #[command(flatten, next_help_heading = "Sterna's own format")]
    pub frames: Frames,
    /// How images in object storages are reached.
    #[command(flatten)]
    pub storage: Storage,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// How progress is shown.
    #[command(flatten)]
    pub shown: Shown,
    /// What a peer without a monitor was told.
    #[command(flatten, next_help_heading = "Settings of a peer without a monitor (only with listen:)")]
    pub wire: Wire,
}

/// Saves the guest and reports the result.
pub fn execute(arguments: &Arguments) -> Done {
    let interrupts = Interrupts::catch()?;
    let domain = domain(arguments)?;
    let direct = direct(arguments.direct_io, arguments.no_direct_io);
    if let Some(address) = arguments.source.strip_prefix("listen:") {
        if arguments.live {
            return Err(Stop::usage(
                "--live needs the monitor of a Sterna VM, which listen: does not have".to_owned(),
            ));
        }
        if let Some(socket) = address.strip_prefix(cloud_hypervisor::SCHEME) {
            return cloud_hypervisor::execute(arguments, socket, &interrupts);
        }
        let format = match arguments.format.as_str() {
            "auto" if domain.is_none() && frames::is_place(&arguments.image) => Some(Format::Sterna),
            "auto" => None,
            name => Some(name.parse().map_err(Stop::usage)?),
        };
        let listening = Listening {
            address,
            image: &arguments.image,
            format,
            domain,
            frames: arguments.frames.options()?,
            direct,
            replace: arguments.force,
            wire: &arguments.wire,
            json: arguments.json,
            shown: arguments.shown,
        };
        return peer::listen(&listening, &interrupts);
    }
    arguments.wire.check_unused()?;
    let address: MonitorAddress =
        arguments.source.strip_prefix("qmp:").unwrap_or(&arguments.source).parse().map_err(Stop::usage)?;
    let mut monitor = Monitor::connect(&address)?;
    if arguments.live {
        return save_live(arguments, &mut monitor, &interrupts);
    }
    let state = monitor.run_state()?;
    for left in PageFile::stale_staging_files(&arguments.image) {
        terminal::note(&broken_off(&left, &address, &state));
    }
    let format = format(arguments, &mut monitor, domain.is_some() || address.domain().is_some())?;
    let domain = match (domain, address.domain()) {
        (None, Some(address)) if format.is_libvirt() => {
            Some(until_interrupted(|cancel| Domain::ask(address, cancel))?)
        }
        (domain, _) => domain,
    };
    let request = SaveRequest {
        path: arguments.image.clone(),
        format,
        channels: arguments.channels,
        direct,
        domain,
        replace: arguments.force,
        resume_after: arguments.resume_after,
        frames: arguments.frames.options()?,
    };
    let settings = Settings::read(monitor.vm())?;
    let advice = "switch the capability `dirty-bitmaps` on in the QEMU before the save";
    if let Some(text) = bitmaps::warning(&mut monitor, &settings, &[], advice) {
        terminal::note(&format!("sterna: warning: {text}"));
    }
    let live = Live::new(arguments.shown, arguments.json);
    let saved = save(monitor.vm(), &request, &mut Watcher::new(&live, &interrupts))?;
    live.end();
    if let Some(warning) = &saved.warning {
        terminal::note(&format!("sterna: warning: {warning}"));
    }
    terminal::print(&if arguments.json {
        to_json(&request, &saved)
    } else {
        table(&request, &saved, &address)
    });
    if arguments.resume_after && saved.was_running && !saved.is_running {
        return Err(Stop::failed(format!(
            "the image is complete, but the guest was not resumed: see the warning above, and resume it with {} at \
             {address}",
            libvirt::resume(&address)
        )));
    }
    Ok(Status::Done)
}

/// Saves the guest while it runs.
fn save_live(arguments: &Arguments, monitor: &mut Monitor, interrupts: &Interrupts) -> Done {
    if !["auto", Format::Sterna.name()].contains(&arguments.format.as_str()) {
        let text = format!(
            "--live writes Sterna's own format: leave --format out, and convert the image to {}",
            arguments.format
        );
        return Err(Stop::usage(text));
    }
    let request = LiveRequest {
        path: arguments.image.clone(),
        frames: arguments.frames.options()?,
        replace: arguments.force,
        track: false,
        since: None,
    };
    let shown = Live::new(arguments.shown, arguments.json);
    let image = live::save(monitor.vm(), &request, &mut Watcher::new(&shown, interrupts))?;
    shown.end();
    terminal::print(&if arguments.json { live_json(&request, &image) } else { live_table(&request, &image) });
    Ok(Status::Done)
}

fn live_table(request: &LiveRequest, image: &LiveImage) -> String {
    format!(
        "saved        {}\n\
         form         {}\n\
         guest        continues to run; it was paused for {}, and {} of its writes waited for a copy\n\
         guest RAM    {}\n\
         file         {} long\n\
         total time   {}\n",
        request.path.display(),
        Format::Sterna,
        units::seconds(image.pause.as_secs_f64()),
        image.held_writes,
        units::bytes(image.trace.last().total_bytes),
        units::bytes(image.file_bytes),
        units::seconds(image.total.as_secs_f64()),
    )
}

fn live_json(request: &LiveRequest, image: &LiveImage) -> String {
    let value = json!({
        "schema": "sterna-save",
        "version": 1,
        "image": request.path.display().to_string(),
        "format": Format::Sterna.to_string(),
        "live": true,
        "pause": image.pause.as_secs_f64(),
        "held_writes": image.held_writes,
        "ram_total_bytes": image.trace.last().total_bytes,
        "file_bytes": image.file_bytes,
        "total_time": image.total.as_secs_f64(),
    });
    format!("{value:#}\n")
}

/// The help of `--format`, with the names of the formats that exist.
fn format_help() -> String {
    let mut names: Vec<&str> = Compression::all().map(Compression::name).collect();
    let last = names.pop().unwrap_or_default();
    let [mapped, own, legacy, raw, sparse] =
        [Format::MappedRam, Format::Sterna, Format::Legacy, Format::LibvirtRaw, Format::LibvirtSparse];
    format!(
        "{mapped}, {own}, {legacy}, {raw}, {sparse}, or libvirt- or legacy- followed by {} or {last}. auto: {own} if the image \
         ends with .sterna, else {mapped}, or {legacy} \
         if the VM does not support it. With --xml, auto is {sparse} if both the VM (with listen: the QEMU on this \
         machine) and the libvirt on this machine support it, else {raw}",
        names.join(", ")
    )
}

/// What to do about a file that a save which was killed left behind, in front of the VM that it may have stopped.
fn broken_off(left: &Path, vm: &MonitorAddress, state: &str) -> String {
    let mut text = terminal::stale(left);
    if state == "paused" {
        text += &format!(
            ". The guest at {vm} is paused: if that save stopped it, {} resumes it (until then it would be saved as a paused \
             guest)",
            libvirt::resume(vm)
        );
    }
    text
}

/// The mode for `--direct-io`, `--no-direct-io`, or neither.
pub fn direct(required: bool, off: bool) -> Direct {
    match (required, off) {
        (true, _) => Direct::Required,
        (_, true) => Direct::Off,
        _ => Direct::Wanted,
    }
}

fn domain(arguments: &Arguments) -> Result<Option<Domain>, Stop> {
    let read = |file: &Path| std::fs::read(file).map_err(|error| Stop::cannot_read(file, &error));
    let Some(xml) = &arguments.xml else { return Ok(None) };
    let cookie = arguments.cookie.as_deref().map(read).transpose()?;
    Ok(Some(Domain { xml: without_nul(read(xml)?), cookie: cookie.map(without_nul) }))
}

/// Removes the NUL at the end of a text that was extracted from an image.
fn without_nul(mut text: Vec<u8>) -> Vec<u8> {
    if text.last() == Some(&0) {
        text.pop();
    }
    text
}

fn format(arguments: &Arguments, monitor: &mut Monitor, has_xml: bool) -> Result<Format, Stop> {
    if arguments.format != "auto" {
        return arguments.format.parse().map_err(Stop::usage);
    }
    if frames::is_place(&arguments.image) {
        return Ok(Format::Sterna);
    }
    let settings = Settings::read(monitor.vm())?;
    Ok(if has_xml { newest_libvirt_format(&settings) } else { newest_format(&settings) })
}

fn guest(saved: &Saved, address: &MonitorAddress) -> String {
    let resume = libvirt::resume(address);
    match (saved.was_running, saved.is_running) {
        (true, true) => "was running, and continues to run".to_owned(),
        (true, false) if address.domain().is_some() => {
            format!("was running; libvirt shows it as paused now, and {resume} resumes it")
        }
        (true, false) => format!("was running, and is stopped now; {resume} resumes it"),
        (false, _) => {
            format!(
                "was not running, and is stopped (`postmigrate` in a QEMU: {resume} first, to save it again)"
            )
        }
    }
}

fn table(request: &SaveRequest, saved: &Saved, address: &MonitorAddress) -> String {
    let progress = saved.trace.last();
    let mut text = String::new();
    let mut row = |name: &str, value: String| text += &format!("{name:<12} {value}\n");
    row("saved", request.path.display().to_string());
    row("form", request.format.to_string());
    row("guest", guest(saved, address));
    row("guest RAM", units::bytes(progress.total_bytes));
    row(
        "file",
        format!(
            "{} long, {} on the disk",
            units::bytes(saved.file_bytes),
            units::bytes(saved.allocated_bytes)
        ),
    );
    row(
        "total time",
        format!(
            "{} ({} checking and writing to disk)",
            units::seconds(saved.total.as_secs_f64()),
            units::seconds(saved.settling.as_secs_f64())
        ),
    );
    row("rate", format!("{} of guest RAM", units::rate(rate(progress.total_bytes, saved.total))));
    row("channels", format!("{}{}", saved.channels, if saved.is_direct { ", direct I/O" } else { "" }));
    text
}

fn rate(bytes: u64, time: Duration) -> f64 {
    bytes as f64 / time.as_secs_f64().max(1e-9)
}

fn to_json(request: &SaveRequest, saved: &Saved) -> String {
    let progress = saved.trace.last();
    let value = json!({
        "schema": "sterna-save",
        "version": 1,
        "image": request.path.display().to_string(),
        "format": request.format.to_string(),
        "was_running": saved.was_running,
        "is_running": saved.is_running,
        "ram_total_bytes": progress.total_bytes,
        "normal_pages": progress.normal_pages,
        "zero_pages": progress.zero_pages,
        "file_bytes": saved.file_bytes,
        "allocated_bytes": saved.allocated_bytes,
        "total_time": saved.total.as_secs_f64(),
        "settling_time": saved.settling.as_secs_f64(),
        "channels": saved.channels,
        "direct_io": saved.is_direct,
        "warning": saved.warning,
    });
    format!("{value:#}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broken_off_names_the_file_and_says_how_a_paused_guest_goes_on() {
        let file = tempfile::NamedTempFile::new().unwrap();

        let vm = "unix:/vm".parse().unwrap();
        let paused = broken_off(file.path(), &vm, "paused");
        let running = broken_off(file.path(), &vm, "running");

        for text in [&paused, &running] {
            assert!(text.contains(&file.path().display().to_string()) && text.contains("verify"), "{text}");
        }
        assert!(paused.contains("`cont`") && paused.contains("unix:/vm"), "{paused}");
        assert!(!running.contains("`cont`"), "{running}");
        let domain = broken_off(file.path(), &"libvirt+qemu:///system:web1".parse().unwrap(), "paused");
        assert!(domain.contains("`virsh -c qemu:///system resume web1` resumes it"), "{domain}");
    }
}

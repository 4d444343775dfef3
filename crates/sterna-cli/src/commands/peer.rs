//! Images and peers without a monitor: `sterna save listen:ADDRESS` and `sterna restore IMAGE send:ADDRESS`.
//!
//! The engine does the work (`sterna_opaque`). The protocol does not negotiate multifd, compression and TLS.
//! Therefore the operator gives this command the same settings as the peer, under QEMU's names.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use sterna::{Address, Capabilities, MigrationError, Outcome, Parameters, StartError, Status as Stage};
use sterna_drive::save::{Domain, newest_libvirt_format_here};
use sterna_image::convert::{ConvertOptions, FrameOptions};
use sterna_image::{Access, Envelope, Form, Format, Image, MappedOptions};
use sterna_opaque::{ImagePlan, Receiving, SendOptions, Stored, receive, send};
use sterna_qmp::migration::{CapabilitySet, ParameterSet, from_uri};
use sterna_transport::{CreateOptions, Direct, OpenOptions, TlsEndpoint};
use uuid::Uuid;

use super::verify::warn_of_damage;
use super::{CapabilityState, capability, pair};
use crate::exit::{Done, FORCE_DAMAGED, Status, Stop};
use crate::frames;
use crate::interrupts::Interrupts;
use crate::monitor::{Progress, parameter};
use crate::terminal::{self, Live, Shown};
use crate::{tls, units};

/// How long an undecided peer is asked whether it has taken the machine.
const ASKING: Duration = Duration::from_secs(30);
/// Interval between two queries of the progress.
const LOOK: Duration = Duration::from_millis(100);

/// Settings of a peer without a monitor.
#[derive(Debug, Clone, clap::Args)]
pub struct Wire {
    /// Migration parameter that is set at the peer, such as multifd-channels=4
    #[arg(long, value_name = "NAME=VALUE", value_parser = pair)]
    pub set: Vec<(String, String)>,
    /// Migration capability that is switched on at the peer, such as multifd
    #[arg(long, value_name = "NAME[=on|off]", value_parser = capability)]
    pub cap: Vec<CapabilityState>,
    /// Use TLS with the certificates in this directory (file names of QEMU's tls-creds-x509)
    #[arg(long, value_name = "DIR")]
    pub tls_dir: Option<PathBuf>,
}

/// Settings of a peer that this side connects to.
#[derive(Debug, Clone, clap::Args)]
pub struct SendWire {
    /// Settings that both sides share.
    #[command(flatten)]
    pub wire: Wire,
    /// Host name in the peer's certificate, if it differs from the address
    #[arg(long, value_name = "NAME", requires = "tls_dir")]
    pub tls_hostname: Option<String>,
    /// UUID of the peer (QMP's query-uuid), which multifd compares. Leave it out if the peer has none
    #[arg(long)]
    pub uuid: Option<Uuid>,
}

/// Arguments to receive an image from a peer.
pub struct Listening<'a> {
    /// Address to listen at.
    pub address: &'a str,
    /// Path of the image.
    pub image: &'a Path,
    /// Format of the image. None: Sterna's own if the image's name asks for it, else mapped-ram, or with `domain` the newest libvirt format that Sterna knows.
    pub format: Option<Format>,
    /// Content of libvirt's container.
    pub domain: Option<Domain>,
    /// Options of an image in Sterna's own format.
    pub frames: FrameOptions,
    /// Whether pages bypass the page cache.
    pub direct: Direct,
    /// Whether an existing file is replaced.
    pub replace: bool,
    /// Migration settings of the peer.
    pub wire: &'a Wire,
    /// Whether the result is printed as JSON.
    pub json: bool,
    /// How progress is shown.
    pub shown: Shown,
}

impl Wire {
    /// Refuses settings that have no effect when a monitor controls the VM.
    pub fn check_unused(&self) -> Result<(), Stop> {
        if self.set.is_empty() && self.cap.is_empty() && self.tls_dir.is_none() {
            return Ok(());
        }
        Err(Stop::usage("--set, --cap and --tls-dir are for peers without a monitor (listen: and send:)"))
    }

    /// The engine's settings that match the peer's.
    pub fn engine(&self, endpoint: TlsEndpoint) -> Result<(Parameters, Capabilities), Stop> {
        let mut set = ParameterSet::default();
        let present = set.to_json();
        let mut changes = Map::from_iter([("max-bandwidth".to_owned(), json!(0))]);
        for (name, value) in &self.set {
            changes.insert(name.clone(), parameter(&present, name, value)?);
        }
        set.set(&changes, false).map_err(|error| Stop::usage(error.to_string()))?;
        let capabilities =
            CapabilitySet::default().with(&self.cap).map_err(|error| Stop::usage(error.to_string()))?;
        let mut parameters = set.to_engine();
        if let Some(directory) = &self.tls_dir {
            parameters.tls = Some(tls::of_directory(directory, endpoint)?);
        }
        Ok((parameters, capabilities.to_engine(true)))
    }
}

impl SendWire {
    /// Refuses settings that have no effect when a monitor controls the VM.
    pub fn check_unused(&self) -> Result<(), Stop> {
        match self.uuid {
            Some(_) => Err(Stop::usage("--uuid is for a peer without a monitor (send:)")),
            None => self.wire.check_unused(),
        }
    }

    /// The engine's settings that match the peer's, with the host name for TLS.
    fn engine(&self) -> Result<(Parameters, Capabilities), Stop> {
        let (mut parameters, capabilities) = self.wire.engine(TlsEndpoint::Client)?;
        if let Some(tls) = &mut parameters.tls {
            tls.hostname.clone_from(&self.tls_hostname);
        }
        Ok((parameters, capabilities))
    }
}

/// Waits for a peer and writes its machine to an image.
pub fn listen(listening: &Listening<'_>, interrupts: &Interrupts) -> Done {
    let (parameters, capabilities) = listening.wire.engine(TlsEndpoint::Server)?;
    let address = address(listening.address)?;
    let envelope = match &listening.domain {
        Some(domain) => Some(
            Envelope::new(domain.xml.clone(), domain.cookie.clone())
                .map_err(|error| Stop::unreadable(error.to_string()))?,
        ),
        None => None,
    };
    let format = listening.format.unwrap_or_else(|| match envelope {
        Some(_) => newest_libvirt_format_here(),
        None if frames::is_place(listening.image) => Format::Sterna,
        None => Format::MappedRam,
    });
    if format.is_libvirt() != envelope.is_some() {
        return Err(Stop::usage(if format.is_libvirt() {
            format!("{format} needs the domain's XML (--xml)")
        } else {
            format!("only libvirt's formats contain XML and cookie; {format} does not")
        }));
    }
    if listening.image.exists() && !listening.replace {
        // Refuse now, not after the peer has sent everything.
        return Err(Stop::usage(format!(
            "{} exists: choose another name, or use --force",
            listening.image.display()
        )));
    }
    let is_mapped = format.form() == Form::Mapped && format != Format::Sterna;
    let file =
        CreateOptions { direct: listening.direct, replace: listening.replace, ..CreateOptions::default() };
    let options =
        MappedOptions { file, envelope: envelope.filter(|_| is_mapped), ..MappedOptions::default() };
    let convert = if is_mapped { None } else { Some(conversion(listening, format)) };
    let began = Instant::now();
    let plan = ImagePlan { path: listening.image.to_owned(), options, convert };
    let receiving = receive(&address, plan, parameters, capabilities, Arc::new(()))
        .map_err(|error| Stop::failed(sterna_qmp::migration::refusal_sentence(&error)))?;
    terminal::note(&format!("listening at {}", receiving.address()));
    let stored = wait(&receiving, listening, interrupts)?;
    tell_stored(listening, format, &stored, began.elapsed());
    Ok(Status::Done)
}

/// Arguments to send an image to a peer.
pub struct Sending<'a> {
    /// Path of the image.
    pub image: &'a Path,
    /// Address at which the peer listens.
    pub to: &'a str,
    /// The key of an encrypted image, and the bases of a layer.
    pub access: &'a Access,
    /// Whether pages bypass the page cache.
    pub direct: Direct,
    /// Whether a damaged image is sent, too.
    pub force_damaged: bool,
    /// Migration settings of the peer.
    pub wire: &'a SendWire,
    /// Whether the result is printed as JSON.
    pub json: bool,
    /// How progress is shown.
    pub shown: Shown,
}

/// Sends an image to a peer that listens.
pub fn send_to(sending: &Sending<'_>, interrupts: &Interrupts) -> Done {
    let Sending { image, to, access, direct, force_damaged, wire, json, shown } = *sending;
    let (parameters, capabilities) = wire.engine()?;
    let to_address = address(to)?;
    let opened = Image::open_with(image, access).map_err(|error| Stop::of_image(&error, &[image]))?;
    if force_damaged {
        warn_of_damage(&opened)?;
    }
    let (kind, ram_bytes) = (opened.format().name(), opened.shape().ram_bytes());
    let file = OpenOptions { direct };
    let options =
        SendOptions { uuid: wire.uuid.map(Uuid::into_bytes), file, force_damaged, ..SendOptions::default() };
    let began = Instant::now();
    let migration = send(opened, &to_address, &options, parameters, capabilities, Arc::new(()))
        .map_err(|error| not_sent(&error))?;
    let live = Live::new(shown, json);
    let mut seen = 0;
    let mut undecided_since = None;
    while !migration.status().is_terminal() {
        if migration.status() == Stage::Undecided {
            // The engine asks the peer without a time limit, so this command sets one.
            let since = *undecided_since.get_or_insert_with(|| {
                live.note(
                    "the machine was committed to the peer and the acknowledgement was lost; asking the peer (Ctrl-C stops asking)",
                );
                Instant::now()
            });
            if since.elapsed() >= ASKING || interrupts.count() > seen {
                live.end();
                return Err(undecided(to));
            }
        }
        let statistics = migration.statistics();
        live.show(&Progress {
            status: "sending".into(),
            total_bytes: statistics.ram_total_bytes,
            remaining_bytes: statistics.ram_remaining_bytes,
            transferred_bytes: statistics.transferred_bytes,
            bandwidth_bytes: statistics.throughput_bytes as f64,
            round: statistics.rounds_begun,
            ..Progress::default()
        });
        interrupts.sleep(LOOK, seen);
        if interrupts.count() > seen && migration.status() != Stage::Undecided {
            seen = interrupts.count();
            if let Err(refused) = migration.cancel() {
                live.note(&refused.to_string());
            }
        }
    }
    live.end();
    match migration.wait() {
        Outcome::Completed => {}
        Outcome::Cancelled => {
            return Err(Stop::with(Status::Cancelled, "cancelled; the image is unchanged."));
        }
        Outcome::Failed { error, .. } => {
            let why = error.to_string();
            let advice = tls::name_advice(&why, tls::NAME_OPTION);
            return Err(Stop::failed(format!(
                "{to} did not accept the machine: {why}{advice}; the image is unchanged"
            )));
        }
        other => return Err(Stop::failed(format!("{to}: {other:?}; the image is unchanged"))),
    }
    let seconds = began.elapsed().as_secs_f64();
    terminal::print(&if json {
        let value = json!({
            "schema": "sterna-restore", "version": 1, "image": image.display().to_string(), "format": kind,
            "sent_to": to, "ram_total_bytes": ram_bytes, "total_time": seconds,
            "transferred_bytes": migration.statistics().transferred_bytes,
        });
        format!("{value:#}\n")
    } else {
        format!(
            "{:<12} {}\n{:<12} {kind}\n{:<12} {to}\n{:<12} {}\n{:<12} {}\n",
            "sent",
            image.display(),
            "form",
            "to",
            "guest RAM",
            units::bytes(ram_bytes),
            "total time",
            units::seconds(seconds)
        )
    });
    Ok(Status::Done)
}

/// The error for an image that was not sent at all.
fn not_sent(error: &StartError) -> Stop {
    match error {
        StartError::Image(why) => Stop::unreadable(why.to_string()),
        StartError::DamagedImage(why) => Stop::unreadable(why.to_string()).with_more(FORCE_DAMAGED),
        error => Stop::failed(sterna_qmp::migration::refusal_sentence(error)),
    }
}

/// The error when the peer may have the machine and cannot be asked.
fn undecided(to: &str) -> Stop {
    Stop::with(
        Status::Undecided,
        format!(
            "undecided: the machine was committed to {to}, and its acknowledgement was lost. Find out whether the \
             guest is there. If it is, it has run, and the image must not be started. If it is not and cannot appear \
             later, send the image again. The image is unchanged."
        ),
    )
}

/// Parses an address of the command line. A descriptor in it was inherited from the parent process.
pub fn address(text: &str) -> Result<Address, Stop> {
    let address = from_uri(text).map_err(|error| Stop::usage(error.to_string()))?;
    if matches!(address, Address::Rdma { .. }) {
        return Err(Stop::usage(
            "rdma: cannot send or receive an image, because remote writes need memory of the guest's size: use tcp: \
             or unix:",
        ));
    }
    sterna_vmm::claim_inherited(address).map_err(|error| Stop::usage(error.to_string()))
}

fn wait(receiving: &Receiving, listening: &Listening<'_>, interrupts: &Interrupts) -> Result<Stored, Stop> {
    let live = Live::new(listening.shown, listening.json);
    let mut seen = 0;
    let mut was_cancelled = false;
    loop {
        if let Some(result) = receiving.result() {
            live.end();
            return result.map_err(|error| match was_cancelled {
                true => Stop::with(
                    Status::Cancelled,
                    "cancelled; there is no image, and the guest is at the source.",
                ),
                // The error message contains the path of the image.
                false if matches!(error, MigrationError::Kept { .. }) => Stop::failed(error.to_string()),
                false => Stop::failed(format!("{error}; there is no image")),
            });
        }
        let statistics = receiving.statistics();
        let total = receiving.ram_bytes();
        let came = (statistics.normal_pages + statistics.zero_pages) * units::PAGE_BYTES;
        live.show(&Progress {
            status: if receiving.status() == Stage::Setup { "waiting" } else { "receiving" }.into(),
            total_bytes: total,
            remaining_bytes: total.saturating_sub(came),
            transferred_bytes: statistics.received_bytes,
            ..Progress::default()
        });
        interrupts.sleep(LOOK, seen);
        if interrupts.count() > seen {
            seen = interrupts.count();
            match receiving.cancel() {
                Ok(()) => was_cancelled = true,
                Err(refused) => live.note(&refused.to_string()),
            }
        }
    }
}

/// The form that is asked for is made of a mapped-ram image beside it, before the peer is told that all is well.
fn conversion(listening: &Listening<'_>, format: Format) -> ConvertOptions {
    ConvertOptions {
        target: Some(format),
        xml: listening.domain.as_ref().map(|domain| domain.xml.clone()),
        cookie: listening.domain.as_ref().and_then(|domain| domain.cookie.clone()),
        replace: listening.replace,
        direct: listening.direct,
        frames: listening.frames.clone(),
        ..ConvertOptions::default()
    }
}

fn tell_stored(listening: &Listening<'_>, format: Format, stored: &Stored, took: Duration) {
    let length = std::fs::metadata(listening.image).map_or(0, |there| there.len());
    let statistics = &stored.statistics;
    let ram_bytes = stored.shape.ram_bytes();
    let was_running = stored.shape.was_running();
    let value: Value = json!({
        "schema": "sterna-save",
        "version": 1,
        "image": listening.image.display().to_string(),
        "format": format.to_string(),
        "machine": stored.shape.configuration.machine_type,
        "was_running": was_running,
        "ram_total_bytes": ram_bytes,
        "normal_pages": statistics.normal_pages,
        "zero_pages": statistics.zero_pages,
        "received_bytes": statistics.received_bytes,
        "file_bytes": length,
        "total_time": took.as_secs_f64(),
    });
    if listening.json {
        return terminal::print(&format!("{value:#}\n"));
    }
    let mut text = String::new();
    let mut row = |name: &str, value: String| text += &format!("{name:<12} {value}\n");
    row("saved", listening.image.display().to_string());
    row("form", format.to_string());
    row("machine", stored.shape.configuration.machine_type.clone());
    row("guest", if was_running { "running; a restore starts it" } else { "not running" }.into());
    row("guest RAM", units::bytes(ram_bytes));
    row("received", units::bytes(statistics.received_bytes));
    row("file", format!("{} long", units::bytes(length)));
    row("total time", format!("{} (including the wait for the peer)", units::seconds(took.as_secs_f64())));
    terminal::print(&text);
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        wire: SendWire,
    }

    #[test]
    fn image_does_not_go_over_rdma_whether_it_is_saved_sent_or_served() {
        let Err(refused) = address("rdma:127.0.0.1:4444") else { panic!("it is taken") };

        let words = "rdma: cannot send or receive an image";
        assert!(format!("{refused:?}").contains(words), "{refused:?}");
    }

    #[test]
    fn uuid_is_read_with_hyphens_and_without() {
        let read = |text: &str| Line::try_parse_from(["x", "--uuid", text]).map(|line| line.wire.uuid);
        let bytes = *b"\x01\x23\x45\x67\x89\xab\xcd\xef\x01\x23\x45\x67\x89\xab\xcd\xef";

        for text in ["01234567-89ab-cdef-0123-456789abcdef", "0123456789ABCDEF0123456789ABCDEF"] {
            assert_eq!(read(text).unwrap().map(Uuid::into_bytes), Some(bytes), "{text}");
        }
        for text in
            ["", "0123", "g1234567-89ab-cdef-0123-456789abcdef", "+1234567-89ab-cdef-0123-456789abcde"]
        {
            assert!(read(text).is_err(), "{text}");
        }
    }
}

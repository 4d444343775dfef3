//! Images and peers without a monitor: `sterna save listen:ADDRESS` and `sterna restore IMAGE send:ADDRESS`.
//!
//! The engine does the work (`sterna::opaque`). Nothing of multifd, compression and TLS is negotiated on the
//! wire, so the operator says here what he says to the peer, under QEMU's names.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use sterna::opaque::{ImagePlan, Receiving, SendOptions, Stored, receive, send};
use sterna::{Address, Capabilities, MigrationError, Outcome, Parameters, StartError, Status as Stage};
use sterna_image::convert::ConvertOptions;
use sterna_image::{Envelope, Form, Image, MappedOptions};
use sterna_qmp::drive::save::{Domain, Format, newest_libvirt_format_here};
use sterna_qmp::migration::{CapabilitySet, ParameterSet, from_uri};
use sterna_transport::{CreateOptions, Direct, OpenOptions, Tls, TlsCredentials, TlsEndpoint};
use uuid::Uuid;

use super::pair;
use super::verify::warn_of_damage;
use crate::exit::{Done, FORCE_DAMAGED, Status, Stop};
use crate::interrupts::Interrupts;
use crate::monitor::{Progress, parameter};
use crate::terminal::{self, Live};
use crate::units;

/// How long a peer is asked whether it has taken the machine.
const ASKING: Duration = Duration::from_secs(30);
/// Between two looks.
const LOOK: Duration = Duration::from_millis(100);

/// What a peer is told by its own operator, told here.
#[derive(Debug, Clone, clap::Args)]
pub struct Wire {
    /// Only with listen: and send:. Migration parameter as the peer has it, such as multifd-channels=4
    #[arg(long, value_name = "NAME=VALUE", value_parser = pair)]
    pub set: Vec<(String, String)>,
    /// Only with listen: and send:. Migration capability as the peer has it, such as multifd
    #[arg(long, value_name = "NAME")]
    pub cap: Vec<String>,
    /// Only with listen: and send:. Use TLS with the certificates in this directory (file names of QEMU's
    /// tls-creds-x509)
    #[arg(long, value_name = "DIR")]
    pub tls_dir: Option<PathBuf>,
    /// Only with send:. The name in the peer's certificate, if it is not the address's
    #[arg(long, value_name = "NAME", requires = "tls_dir")]
    pub tls_hostname: Option<String>,
    /// Only with send:. The peer's UUID (QMP's query-uuid), which multifd compares; leave it out if the peer has none
    #[arg(long)]
    pub uuid: Option<Uuid>,
}

/// An image that a peer sends.
pub struct Listening<'a> {
    /// Where to listen.
    pub address: &'a str,
    /// The image's place.
    pub image: &'a Path,
    /// Its form; none for mapped-ram, or if there is a domain the newest of libvirt's that is known here.
    pub format: Option<Format>,
    /// What libvirt's container holds.
    pub domain: Option<Domain>,
    /// Whether pages go past the page cache.
    pub direct: Direct,
    /// Whether a file in the image's place is replaced.
    pub replace: bool,
    /// What the peer was told.
    pub wire: &'a Wire,
    /// Print JSON.
    pub json: bool,
}

impl Wire {
    /// Refuses what means nothing where a monitor is driven.
    pub fn check_unused(&self) -> Result<(), Stop> {
        if self.set.is_empty() && self.cap.is_empty() && self.tls_dir.is_none() && self.uuid.is_none() {
            return Ok(());
        }
        Err(Stop::usage("--set, --cap and --tls-dir are for peers without a monitor (listen: and send:)"))
    }

    /// What the peer was told, as the engine takes it.
    pub fn engine(&self, endpoint: TlsEndpoint) -> Result<(Parameters, Capabilities), Stop> {
        let mut set = ParameterSet::default();
        let present = set.to_json();
        let mut changes = Map::from_iter([("max-bandwidth".to_owned(), json!(0))]);
        for (name, value) in &self.set {
            changes.insert(name.clone(), parameter(&present, name, value)?);
        }
        set.set(&changes, false).map_err(|error| Stop::usage(error.to_string()))?;
        let capabilities: Vec<_> = self.cap.iter().map(|name| (name.clone(), true)).collect();
        let capabilities =
            CapabilitySet::default().with(&capabilities).map_err(|error| Stop::usage(error.to_string()))?;
        let mut parameters = set.to_engine();
        if let Some(directory) = &self.tls_dir {
            let credentials = TlsCredentials::from_directory(directory, endpoint, true)
                .map_err(|error| Stop::unreadable(error.to_string()))?;
            parameters.tls =
                Some(Tls { hostname: self.tls_hostname.clone(), ..Tls::new(Arc::new(credentials)) });
        }
        Ok((parameters, capabilities.to_engine(true)))
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
        None => Format::MAPPED,
    });
    if format.is_libvirt != envelope.is_some() {
        return Err(Stop::usage(if format.is_libvirt {
            format!("{format} needs the domain's XML (--xml)")
        } else {
            format!("only libvirt's formats contain XML and cookie; {format} does not")
        }));
    }
    if listening.image.exists() && !listening.replace {
        // Told now, and not when the peer has sent everything.
        return Err(Stop::usage(format!(
            "{} exists: choose another name, or use --force",
            listening.image.display()
        )));
    }
    let is_mapped = format.form == Form::Mapped;
    let file =
        CreateOptions { direct: listening.direct, replace: listening.replace, ..CreateOptions::default() };
    let options =
        MappedOptions { file, envelope: envelope.filter(|_| is_mapped), ..MappedOptions::default() };
    let convert = if is_mapped { None } else { Some(conversion(listening, format)?) };
    let began = Instant::now();
    let plan = ImagePlan { path: listening.image.to_owned(), options, convert };
    let receiving = receive(&address, plan, parameters, capabilities, Arc::new(()))
        .map_err(|error| Stop::failed(sterna_qmp::migration::refusal_sentence(&error)))?;
    terminal::note(&format!("listening at {}", receiving.address()));
    let stored = wait(&receiving, listening, interrupts)?;
    tell_stored(listening, format, &stored, began.elapsed());
    Ok(Status::Done)
}

/// An image that goes to a peer.
pub struct Sending<'a> {
    /// The image.
    pub image: &'a Path,
    /// Where the peer listens.
    pub to: &'a str,
    /// Whether pages go past the page cache.
    pub direct: Direct,
    /// Whether an image that is damaged is sent, too.
    pub force_damaged: bool,
    /// What the peer was told.
    pub wire: &'a Wire,
    /// Print JSON.
    pub json: bool,
}

/// Sends an image to a peer that listens.
pub fn send_to(sending: &Sending<'_>, interrupts: &Interrupts) -> Done {
    let Sending { image, to, direct, force_damaged, wire, json } = *sending;
    let (parameters, capabilities) = wire.engine(TlsEndpoint::Client)?;
    let to_address = address(to)?;
    let opened = Image::open(image).map_err(|error| Stop::of_image(&error, &[image]))?;
    if force_damaged {
        warn_of_damage(&opened)?;
    }
    let (kind, ram_bytes) = (opened.kind().name(), opened.shape().ram_bytes());
    let file = OpenOptions { direct };
    let options =
        SendOptions { uuid: wire.uuid.map(Uuid::into_bytes), file, force_damaged, ..SendOptions::default() };
    let began = Instant::now();
    let migration = send(opened, &to_address, &options, parameters, capabilities, Arc::new(()))
        .map_err(|error| not_sent(&error))?;
    let live = Live::new(json);
    let mut seen = interrupts.count();
    let mut undecided_since = None;
    while !migration.status().is_terminal() {
        if migration.status() == Stage::Undecided {
            // The engine asks again; it may ask for ever.
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
            return Err(Stop::failed(format!(
                "{to} did not accept the machine: {error}; the image is unchanged"
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

/// Why nothing was sent.
fn not_sent(error: &StartError) -> Stop {
    match error {
        StartError::Image(why) => Stop::unreadable(why),
        StartError::DamagedImage(why) => Stop::unreadable(why).with_more(FORCE_DAMAGED),
        error => Stop::failed(sterna_qmp::migration::refusal_sentence(error)),
    }
}

/// The peer may have the machine, and it cannot be asked.
fn undecided(to: &str) -> Stop {
    Stop::with(
        Status::Undecided,
        format!(
            "undecided: the machine was committed to {to}, and its acknowledgement was lost. Find out whether the guest is \
             there: if it is, it has gone on and the image must not be started; if it is gone for good, send the image \
             again. The image is unchanged."
        ),
    )
}

/// An address of the command line. A descriptor that it names was handed over by whoever started this program.
pub fn address(text: &str) -> Result<Address, Stop> {
    let address = from_uri(text).map_err(|error| Stop::usage(error.to_string()))?;
    if matches!(address, Address::Rdma { .. }) {
        return Err(Stop::usage(
            "an image cannot be received from or sent to rdma:, since remote writes need memory of the guest's size: use \
             tcp: or unix:",
        ));
    }
    sterna_vmm::claim_inherited(address).map_err(|error| Stop::usage(error.to_string()))
}

fn wait(receiving: &Receiving, listening: &Listening<'_>, interrupts: &Interrupts) -> Result<Stored, Stop> {
    let live = Live::new(listening.json);
    let mut seen = interrupts.count();
    let mut was_cancelled = false;
    loop {
        if let Some(result) = receiving.result() {
            live.end();
            return result.map_err(|error| match was_cancelled {
                true => Stop::with(
                    Status::Cancelled,
                    "cancelled; there is no image, and the guest stays with the source.",
                ),
                // It says where the image is.
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
fn conversion(listening: &Listening<'_>, format: Format) -> Result<ConvertOptions, Stop> {
    Ok(ConvertOptions {
        target: Some(format.to_string().parse().map_err(Stop::usage)?),
        xml: listening.domain.as_ref().map(|domain| domain.xml.clone()),
        cookie: listening.domain.as_ref().and_then(|domain| domain.cookie.clone()),
        replace: listening.replace,
        direct: listening.direct,
        ..ConvertOptions::default()
    })
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
    row("guest", if was_running { "running; it will run after a restore" } else { "not running" }.into());
    row("guest RAM", units::bytes(ram_bytes));
    row("received", units::bytes(statistics.received_bytes));
    row("file", format!("{} long", units::bytes(length)));
    row("total time", format!("{} (waiting for the peer included)", units::seconds(took.as_secs_f64())));
    terminal::print(&text);
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        wire: Wire,
    }

    #[test]
    fn image_does_not_go_over_rdma_whether_it_is_saved_sent_or_served() {
        let Err(refused) = address("rdma:127.0.0.1:4444") else { panic!("it is taken") };

        let words = "an image cannot be received from or sent to rdma:";
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

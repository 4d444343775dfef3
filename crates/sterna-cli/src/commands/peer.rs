//! Images and peers without a monitor: `sterna save listen:ADDRESS` and `sterna restore IMAGE send:ADDRESS`.
//!
//! The engine does the work (`sterna::foreign`). Nothing of multifd, compression and TLS is negotiated on the
//! wire, so the operator says here what he says to the peer, under QEMU's names.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use sterna::foreign::{ImagePlan, Receiving, SendOptions, Stored, receive, send};
use sterna::{Address, Capabilities, Outcome, Parameters, Status as Stage};
use sterna_image::convert::{ConvertOptions, Input, Output, convert};
use sterna_image::{Envelope, Form, Image, MappedOptions};
use sterna_qmp::drive::save::{Domain, Format};
use sterna_qmp::migration::{CapabilitySet, ParameterSet, from_uri};
use sterna_transport::{CreateOptions, Direct, OpenOptions, Tls, TlsCredentials, TlsEndpoint};

use super::pair;
use crate::exit::{Done, Status, Stop};
use crate::interrupts::Interrupts;
use crate::monitor::{Progress, parameter};
use crate::terminal::{self, Live};
use crate::units;

/// Between two looks.
const LOOK: Duration = Duration::from_millis(100);

/// What a peer is told by its own operator, told here.
#[derive(Debug, Clone, clap::Args)]
pub struct Wire {
    /// listen: and send: only: migration parameter as the peer has it, such as multifd-channels=4
    #[arg(long, value_name = "NAME=VALUE", value_parser = pair)]
    pub set: Vec<(String, String)>,
    /// listen: and send: only: migration capability as the peer has it, such as multifd
    #[arg(long, value_name = "NAME")]
    pub cap: Vec<String>,
    /// listen: and send: only: speak TLS with the certificates in this directory, named as QEMU's tls-creds-x509
    /// wants them
    #[arg(long, value_name = "DIRECTORY")]
    pub tls: Option<PathBuf>,
    /// send: only: the name that the peer's certificate must bear, if it is not the address's
    #[arg(long, value_name = "NAME", requires = "tls")]
    pub tls_hostname: Option<String>,
}

/// An image that a peer sends.
pub struct Listening<'a> {
    /// Where to listen.
    pub address: &'a str,
    /// The image's place.
    pub image: &'a Path,
    /// Its form; none for mapped-ram, or libvirt's *sparse* if there is a domain.
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
        if self.set.is_empty() && self.cap.is_empty() && self.tls.is_none() {
            return Ok(());
        }
        Err(Stop::usage("--set, --cap and --tls are for peers without a monitor (listen: and send:)"))
    }

    fn engine(&self, endpoint: TlsEndpoint) -> Result<(Parameters, Capabilities), Stop> {
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
        if let Some(directory) = &self.tls {
            let credentials = TlsCredentials::from_directory(directory, endpoint, true)
                .map_err(|error| Stop::usage(error.to_string()))?;
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
                .map_err(|error| Stop::usage(error.to_string()))?,
        ),
        None => None,
    };
    let of_domain = if envelope.is_some() { Format::LIBVIRT_SPARSE } else { Format::MAPPED };
    let format = listening.format.unwrap_or(of_domain);
    if format.is_libvirt != envelope.is_some() {
        return Err(Stop::usage(if format.is_libvirt {
            format!("{format} needs the domain's XML (--xml)")
        } else {
            format!("only libvirt's forms hold XML and cookie, and {format} is none")
        }));
    }
    // Pages come in any order over several channels; the other forms are made of the image that holds them.
    let is_final = format.form == Form::Mapped;
    let path = if is_final { listening.image.to_owned() } else { beside(listening.image) };
    if !is_final && listening.image.exists() && !listening.replace {
        return Err(Stop::failed(format!(
            "{} is there already: choose another name, or --force",
            listening.image.display()
        )));
    }
    let file = CreateOptions {
        direct: listening.direct,
        replace: listening.replace || !is_final,
        ..CreateOptions::default()
    };
    let options = MappedOptions { file, envelope: envelope.filter(|_| is_final), ..MappedOptions::default() };
    let began = Instant::now();
    let plan = ImagePlan { path: path.clone(), options, convert: None };
    let receiving = receive(&address, plan, parameters, capabilities, Arc::new(()))
        .map_err(|error| Stop::failed(error.to_string()))?;
    terminal::note(&format!("listening at {}", receiving.address()));
    let stored = wait(&receiving, listening, interrupts)?;
    if !is_final {
        become_form(listening, format, &path)?;
    }
    tell_stored(listening, format, &stored, began.elapsed());
    Ok(Status::Done)
}

/// Sends an image to a peer that listens.
pub fn send_to(
    image: &Path,
    to: &str,
    direct: Direct,
    wire: &Wire,
    json: bool,
    interrupts: &Interrupts,
) -> Done {
    let (parameters, capabilities) = wire.engine(TlsEndpoint::Client)?;
    let opened = Image::open(image).map_err(|error| Stop::failed(error.to_string()))?;
    let (kind, ram_bytes) = (opened.kind().name(), opened.shape().ram_bytes());
    let options = SendOptions { file: OpenOptions { direct }, ..SendOptions::default() };
    let began = Instant::now();
    let migration = send(opened, &address(to)?, &options, parameters, capabilities, Arc::new(()))
        .map_err(|error| Stop::failed(error.to_string()))?;
    let live = Live::new(json);
    let mut seen = interrupts.count();
    while !migration.status().is_terminal() {
        let statistics = migration.statistics();
        live.show(&Progress {
            status: "sending".into(),
            total_bytes: statistics.ram_total_bytes,
            remaining_bytes: statistics.ram_remaining_bytes,
            transferred_bytes: statistics.transferred_bytes,
            bandwidth_bytes: statistics.bandwidth_bytes as f64,
            round: statistics.rounds_begun,
            ..Progress::default()
        });
        interrupts.sleep(LOOK, seen);
        if interrupts.count() > seen {
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
            return Err(Stop::with(Status::Cancelled, "cancelled; the image is as it was."));
        }
        Outcome::Failed { error, .. } => {
            return Err(Stop::failed(format!(
                "{to} did not take the machine: {error}; the image is as it was"
            )));
        }
        other => return Err(Stop::failed(format!("{to}: {other:?}; the image is as it was"))),
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

fn address(text: &str) -> Result<Address, Stop> {
    from_uri(text).map_err(|error| Stop::usage(error.to_string()))
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
                    "cancelled; there is no image, and the guest is the source's.",
                ),
                false => Stop::failed(format!("{error}; there is no image")),
            });
        }
        let statistics = receiving.statistics();
        let total = receiving.shape().ram_bytes();
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

/// Turns the image that came into the form that was asked for. The guest has left its source: nothing is thrown
/// away before the other image is whole.
fn become_form(listening: &Listening<'_>, format: Format, from: &Path) -> Result<(), Stop> {
    let kept = |why: String| {
        Stop::failed(format!("{why}; the guest is safe in {}: `sterna convert` it", from.display()))
    };
    let options = ConvertOptions {
        target: Some(format.to_string().parse().map_err(kept)?),
        xml: listening.domain.as_ref().map(|domain| domain.xml.clone()),
        cookie: listening.domain.as_ref().and_then(|domain| domain.cookie.clone()),
        replace: listening.replace,
        direct: listening.direct,
        ..ConvertOptions::default()
    };
    convert(Input::File(from.to_owned()), Output::File(listening.image.to_owned()), &options)
        .map_err(|error| kept(error.to_string()))?;
    std::fs::remove_file(from).map_err(|error| {
        Stop::failed(format!("the image is good, but {} could not be removed: {error}", from.display()))
    })
}

/// A name beside the image's.
fn beside(image: &Path) -> PathBuf {
    let mut name = image.file_name().unwrap_or_default().to_owned();
    name.push(".mapped-ram");
    image.with_file_name(name)
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
    row("guest", if was_running { "ran, and will run when it is restored" } else { "did not run" }.into());
    row("guest RAM", units::bytes(ram_bytes));
    row("received", units::bytes(statistics.received_bytes));
    row("file", format!("{} long", units::bytes(length)));
    row("total time", format!("{} (waiting for the peer included)", units::seconds(took.as_secs_f64())));
    terminal::print(&text);
}

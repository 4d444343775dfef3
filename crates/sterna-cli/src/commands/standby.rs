//! `sterna standby`: holds the last checkpoint of a QEMU that runs elsewhere, and makes an image of it when that is gone.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna::opaque::ImagePlan;
use sterna::replica::{OperatorsWord, Standby, StandbyOptions, StandbyState, StandbyStatistics, TakenOver};
use sterna_image::MappedOptions;
use sterna_transport::{CreateOptions, TlsEndpoint};

use crate::commands::peer::{self, Wire};
use crate::commands::save::direct;
use crate::exit::{Done, Status, Stop};
use crate::interrupts::Interrupts;
use crate::{terminal, units};

/// Between two lines.
const LINE: Duration = Duration::from_secs(1);
/// Between two looks.
const LOOK: Duration = Duration::from_millis(20);

/// Where the primary comes, and what becomes of its last checkpoint.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
The primary is a QEMU 11 with the capabilities x-colo and return-path and the parameter x-checkpoint-delay. It keeps \
its guest and sends a checkpoint of it at each interval; this command holds the last one and runs nothing. The primary \
cannot stop itself: give --on-loss image only if its guest does not run any more when its connection is gone (its host is \
fenced, or it has no network of its own).")]
pub struct Arguments {
    /// Where the primary migrates to: listen:tcp:HOST:PORT or listen:unix:PATH
    pub at: String,
    /// The image that the last checkpoint becomes
    #[arg(long, value_name = "FILE")]
    pub image: PathBuf,
    /// What to do when the primary is gone: hold the checkpoint, or make the image
    #[arg(long, value_enum, default_value = "hold")]
    pub on_loss: OnLoss,
    /// The primary's multifd channels: as --cap multifd --set multifd-channels=N
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    pub channels: Option<u8>,
    /// Most bytes that one checkpoint may bring; memory is taken only as they come
    #[arg(long, default_value = "1G", value_name = "SIZE", value_parser = units::parse_size)]
    pub journal_limit: u64,
    /// On loopback: take a primary that shows no certificate
    #[arg(long)]
    pub insecure: bool,
    /// Require direct I/O for the image's pages
    #[arg(long)]
    pub direct_io: bool,
    /// Write the image's pages through the page cache
    #[arg(long, conflicts_with = "direct_io")]
    pub no_direct_io: bool,
    /// Replace the image if it exists
    #[arg(long)]
    pub force: bool,
    /// Print JSON, a line a second. The first line comes when it listens; each has its address
    #[arg(long)]
    pub json: bool,
    /// What the primary was told.
    #[command(flatten)]
    pub wire: Wire,
}

/// What to do when the primary is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum OnLoss {
    /// Go on holding the last checkpoint.
    Hold,
    /// Make an image of it, and end.
    Image,
}

/// Follows a primary.
pub fn execute(arguments: &Arguments) -> Done {
    let interrupts = Interrupts::catch()?;
    let at = arguments.at.strip_prefix("listen:").unwrap_or(&arguments.at);
    if arguments.image.exists() && !arguments.force {
        // Told now, and not when the primary is gone.
        return Err(Stop::usage(format!(
            "{} exists: choose another name, or use --force",
            arguments.image.display()
        )));
    }
    terminal::note_stale(&arguments.image);
    let (mut parameters, mut capabilities) = arguments.wire.engine(TlsEndpoint::Server)?;
    if let Some(channels) = arguments.channels {
        capabilities.multifd = true;
        parameters.multifd_channels = channels;
    }
    let options =
        StandbyOptions { journal_limit_bytes: arguments.journal_limit, insecure: arguments.insecure };
    let standby = Standby::listen(&peer::address(at)?, &options, parameters, capabilities, Arc::new(()))
        .map_err(|error| Stop::failed(sterna_qmp::migration::refusal_sentence(&error)))?;
    terminal::note(&format!("listening at {}", standby.address()));
    follow(&standby, arguments, &interrupts)
}

fn follow(standby: &Standby, arguments: &Arguments, interrupts: &Interrupts) -> Done {
    let seen = interrupts.count();
    let mut due = Instant::now();
    let mut before = StandbyStatistics::default();
    let mut is_told = false;
    loop {
        let state = standby.state();
        match &state {
            StandbyState::Failed(why) => {
                return Err(Stop::failed(format!("{why}; nothing is held, and the primary has its guest")));
            }
            StandbyState::Lost(why) if arguments.on_loss == OnLoss::Image => {
                terminal::note(&format!("sterna: the primary is gone: {why}"));
                return take_over(standby, arguments);
            }
            StandbyState::Lost(why) if !is_told => {
                is_told = true;
                terminal::note(&format!(
                    "sterna: the primary is gone: {why}. Its last checkpoint is held; Ctrl-C makes an image of it, for \
                     which the primary's guest must not run any more"
                ));
            }
            _ => {}
        }
        if Instant::now() >= due {
            due = Instant::now() + LINE;
            let now = standby.statistics();
            let line = if arguments.json {
                json_line(standby, &state, &now, &before)
            } else {
                text_line(&state, &now, &before)
            };
            terminal::print(&line);
            before = now;
        }
        interrupts.sleep(LOOK, seen);
        if interrupts.count() > seen {
            match state {
                StandbyState::Lost(_) => return take_over(standby, arguments),
                // It lives: a copy of its guest must not be started, and is of no use.
                _ => {
                    let why = "ended; what was held is dropped, and the guest stays with the primary (give it \
                               x-colo-lost-heartbeat)";
                    return Err(Stop::with(Status::Cancelled, why));
                }
            }
        }
    }
}

fn take_over(standby: &Standby, arguments: &Arguments) -> Done {
    let file = CreateOptions {
        direct: direct(arguments.direct_io, arguments.no_direct_io),
        replace: arguments.force,
        ..CreateOptions::default()
    };
    let options = MappedOptions { file, ..MappedOptions::default() };
    let plan = ImagePlan { path: arguments.image.clone(), options, convert: None };
    let began = Instant::now();
    // Who gave --on-loss image, or Ctrl-C, has said that the primary's guest does not run.
    let taken = standby.takeover(&plan, &OperatorsWord).map_err(|error| Stop::failed(error.to_string()))?;
    terminal::print(&end(arguments.json, &taken, began.elapsed()));
    Ok(Status::Done)
}

fn word(state: &StandbyState) -> &'static str {
    match state {
        StandbyState::Waiting => "waiting",
        StandbyState::Seeding => "seeding",
        StandbyState::Following => "following",
        StandbyState::Lost(_) => "holding",
        StandbyState::TakenOver => "taken over",
        _ => "failed",
    }
}

fn per_second(now: &StandbyStatistics, before: &StandbyStatistics) -> f64 {
    (now.checkpoints - before.checkpoints) as f64 / LINE.as_secs_f64()
}

fn json_line(
    standby: &Standby,
    state: &StandbyState,
    now: &StandbyStatistics,
    before: &StandbyStatistics,
) -> String {
    let value: Value = json!({
        "schema": "sterna-standby",
        "version": 1,
        "state": word(state),
        "address": standby.address().to_string(),
        "checkpoints": now.checkpoints,
        "checkpoints_per_second": per_second(now, before),
        "last_normal_pages": now.last_normal_pages,
        "last_zero_pages": now.last_zero_pages,
        "last_device_bytes": now.last_device_bytes,
        "last_time": now.last_took.as_secs_f64(),
        "age": now.age.map(|age| age.as_secs_f64()),
        "most_journal_bytes": now.most_journal_bytes,
        "received_bytes": now.received_bytes,
        "ram_total_bytes": now.ram_bytes,
    });
    format!("{value}\n")
}

fn text_line(state: &StandbyState, now: &StandbyStatistics, before: &StandbyStatistics) -> String {
    match state {
        StandbyState::Waiting => "waiting for a primary\n".to_owned(),
        StandbyState::Seeding => format!(
            "seeding     {} of {}\n",
            units::bytes((now.normal_pages + now.zero_pages) * units::PAGE_BYTES),
            units::bytes(now.ram_bytes)
        ),
        _ => format!(
            "{:<11} checkpoint {}, {:.0}/s; the last one {} in {}, {} ago; journal at most {}\n",
            word(state),
            now.checkpoints,
            per_second(now, before),
            units::bytes(now.last_normal_pages * units::PAGE_BYTES + now.last_device_bytes),
            units::time(now.last_took),
            units::time(now.age.unwrap_or_default()),
            units::bytes(now.most_journal_bytes)
        ),
    }
}

fn end(is_json: bool, taken: &TakenOver, took: Duration) -> String {
    if is_json {
        let value = json!({
            "schema": "sterna-standby",
            "version": 1,
            "state": "taken over",
            "image": taken.path.display().to_string(),
            "machine": taken.shape.configuration.machine_type,
            "checkpoint": taken.checkpoint.number,
            "checkpoints": taken.checkpoint.number,
            "age": taken.checkpoint.age.as_secs_f64(),
            "ram_total_bytes": taken.shape.ram_bytes(),
            "total_time": took.as_secs_f64(),
        });
        return format!("{value}\n");
    }
    format!(
        "{:<12} checkpoint {}, {} old\n{:<12} {}\n{:<12} {}\n{:<12} {}\n",
        "taken over",
        taken.checkpoint.number,
        units::time(taken.checkpoint.age),
        "image",
        taken.path.display(),
        "guest RAM",
        units::bytes(taken.shape.ram_bytes()),
        "total time",
        units::seconds(took.as_secs_f64())
    )
}

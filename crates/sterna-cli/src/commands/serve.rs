//! `sterna serve`: starts guests of QEMUs from an image, and sends their memory while they run. `uffd` does so for
//! Firecracker, and `cloud_hypervisor` for Cloud Hypervisor.

mod cloud_hypervisor;
pub(crate) mod uffd;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use sterna_image::ImageError;
use sterna_opaque::serve::{
    Access, Dial, GuestState, ImageOptions, Reception, ServeFailure, ServeOptions, ServeStatistics,
    ServedImage, Serving, Silence, Stage,
};

use crate::board::Board;
use crate::commands::peer;
use crate::commands::save::direct;
use crate::exit::{Done, FORCE_DAMAGED, Status, Stop};
use crate::frames::Opened;
use crate::interrupts::Interrupts;
use crate::metrics::{self, MetricsServer};
use crate::monitor::Progress;
use crate::storage::Storage;
use crate::terminal::{self, Live, Shown};
use crate::units;

/// Interval between two queries of the progress.
const LOOK: Duration = Duration::from_millis(50);

/// Which image, and to whom.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Image to serve, in any format that `sterna save`, QEMU or libvirt writes. Do not change or remove it until every
    /// guest has all of its memory
    pub image: PathBuf,
    /// Address at which a QEMU waits with `-incoming` and the capability postcopy-ram: tcp:HOST:PORT or unix:PATH; one
    /// address per QEMU. Or a single listen:ADDRESS: every connection to that address gets the image (for a manager
    /// that passes the connection to its QEMU as fd:NAME, or for a relay). Or a single uffd:SOCKET: the page faults of
    /// Firecracker's guests (memory backend `Uffd`) are answered; %i in the name is the guest's number, from 0. Or
    /// ch:SOCKET: a Cloud Hypervisor that waits there (`ch-remote receive-migration receiver_url=unix:SOCKET`) gets the
    /// machine; one address per Cloud Hypervisor
    #[arg(required = true, value_name = "ADDRESS")]
    pub addresses: Vec<String>,
    /// Use a separate connection for requested pages. Give this option if, and only if, the QEMUs have the capability
    /// postcopy-preempt on
    #[arg(long)]
    pub preempt: bool,
    /// Resume an interrupted serving: the QEMUs are in `postcopy-paused` and listen again (`migrate-recover`). Only
    /// missing pages are sent
    #[arg(long)]
    pub recover: bool,
    /// Time in seconds to try to connect again if a connection breaks; with ch:, until the VMM listens
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub reconnect_window: u64,
    /// With listen:, end when N guests have all of their memory [default: end at Ctrl-C]. With uffd:, the number of
    /// guests [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub guests: Option<u32>,
    /// Serve the figures for Prometheus at http://ADDRESS/metrics: HOST:PORT or unix:PATH
    #[arg(long, value_name = "ADDRESS")]
    pub metrics: Option<String>,
    /// How the image is read.
    #[command(flatten)]
    pub reading: Reading,
    /// How an image in Sterna's own format is read.
    #[command(flatten)]
    pub opened: Opened,
    /// How guests of uffd: are served.
    #[command(flatten)]
    pub paging: uffd::Paging,
    /// How guests of ch: are restored.
    #[command(flatten)]
    pub handing: cloud_hypervisor::Handing,
    /// Serve the image even if its devices or its description are damaged (see `sterna verify`)
    #[arg(long)]
    pub force_damaged: bool,
    /// How images in object storages are reached.
    #[command(flatten)]
    pub storage: Storage,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// How progress is shown.
    #[command(flatten)]
    pub shown: Shown,
}

/// How an image is read that is served.
#[derive(Debug, Clone, clap::Args)]
pub struct Reading {
    /// Limit of the memory for pages that are read ahead, for all guests together; at least 1M
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = cache_limit)]
    pub cache_limit: u64,
    /// Directory for the unpacked copy of a compressed image. The copy is a file without a name [default: directory of
    /// the image]
    #[arg(long, value_name = "DIR")]
    pub spool: Option<PathBuf>,
}

/// Parses `--cache-limit` and checks its minimum.
fn cache_limit(text: &str) -> Result<u64, String> {
    let bytes = units::parse_size(text)?;
    if bytes < ImageOptions::LEAST_CACHE_BYTES {
        return Err(format!(
            "`{text}` is too little: at least {}",
            units::bytes(ImageOptions::LEAST_CACHE_BYTES)
        ));
    }
    Ok(bytes)
}

impl Reading {
    /// Opens the image. Notes the way in which it is read, if that needs time or disk space.
    pub fn open(&self, image: &std::path::Path, options: ImageOptions) -> Result<ServedImage, Stop> {
        let options =
            ImageOptions { cache_limit_bytes: self.cache_limit, spool: self.spool.clone(), ..options };
        let served = ServedImage::open(image, &options).map_err(|error| match error {
            sterna::StartError::DamagedImage(why) => {
                Stop::unreadable(why.to_string()).with_more(FORCE_DAMAGED)
            }
            sterna::StartError::Image(why) => Stop::unreadable(why.to_string()),
            error => match image_error(&error) {
                Some(why) => Stop::of_image(why, &[image]),
                None => Stop::failed(error.to_string()),
            },
        })?;
        if served.access() == Access::Spool {
            terminal::note(
                "sterna: the image is compressed or has pages as differences, so it was unpacked into a temporary \
                 file; `sterna convert` to mapped-ram avoids this",
            );
        }
        Ok(served)
    }
}

/// A cause that several errors share.
type Shared = Arc<dyn std::error::Error + Send + Sync>;

/// The error of the image in the chain of causes, such as a key that is missing.
fn image_error<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a ImageError> {
    // The engine shares causes that it does not know.
    fn of_image<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a ImageError> {
        match error.downcast_ref::<Shared>() {
            Some(shared) => shared.downcast_ref(),
            None => error.downcast_ref(),
        }
    }
    std::iter::successors(Some(error), |error| error.source()).find_map(of_image)
}

/// The name of a way to read an image, for reports.
pub fn access_name(access: Access) -> &'static str {
    match access {
        Access::Places => "places",
        Access::Index => "index",
        _ => "spool",
    }
}

/// Serves the image to all guests and reports the result.
pub fn execute(arguments: &Arguments) -> Done {
    if arguments.addresses.iter().any(|text| text.starts_with(uffd::SCHEME)) {
        return page_faults(arguments);
    }
    if arguments.addresses.iter().any(|text| text.starts_with(cloud_hypervisor::SCHEME)) {
        return local_migrations(arguments);
    }
    if let Some(option) = arguments.handing.given() {
        return Err(Stop::usage(format!("{option} is only for ch: addresses")));
    }
    if let Some(option) = arguments.paging.given() {
        return Err(Stop::usage(format!("{option} is only for uffd: addresses")));
    }
    let interrupts = Interrupts::catch()?;
    let listens = match &arguments.addresses[..] {
        [one] => one.strip_prefix("listen:"),
        several if several.iter().any(|text| text.starts_with("listen:")) => {
            return Err(Stop::usage("listen: cannot be combined with other addresses: give one address"));
        }
        _ => None,
    };
    if listens.is_none() && arguments.guests.is_some() {
        return Err(Stop::usage("--guests is only for listen:; without it, one guest per address is served"));
    }
    let addresses: Vec<_> = match listens {
        Some(text) => vec![peer::address(text)?],
        None => arguments.addresses.iter().map(|text| peer::address(text)).collect::<Result<_, _>>()?,
    };
    let options = ImageOptions {
        direct: direct(false, false),
        opening: arguments.opened.access()?,
        force_damaged: arguments.force_damaged,
        ..ImageOptions::default()
    };
    let image = Arc::new(arguments.reading.open(&arguments.image, options)?);
    if !arguments.recover && !ran(&image) {
        terminal::note(
            "sterna: the guest was paused when it was saved, but its QEMU starts it, unless QEMU was started with -S \
             or received `stop` while it waited",
        );
    }
    let options = ServeOptions {
        preempt: arguments.preempt,
        recover: arguments.recover,
        reconnect_window: Duration::from_secs(arguments.reconnect_window),
        ..ServeOptions::default()
    };
    let live = Live::new(arguments.shown, arguments.json);
    let board = Board::new(Vec::new());
    let _metrics = {
        let board = board.clone();
        MetricsServer::start_if(arguments.metrics.as_deref(), move || metrics::of_serving(&board.get()))?
    };
    let watch = Watch { preempt: arguments.preempt, interrupts: &interrupts, live: &live, board };
    let guests = if listens.is_some() {
        let reception = Reception::listen(Arc::clone(&image), &addresses[0], options)
            .map_err(|error| Stop::failed(sterna_qmp::migration::refusal_sentence(&error)))?;
        live.note(&format!("listening at {}", reception.address()));
        watch.run(&|| reception.served(), Some(arguments.guests));
        reception.close();
        // A connection that never answered like a VM is no guest, but for example a port scanner or a
        // monitoring check.
        let (guests, strangers): (Vec<_>, Vec<_>) =
            reception.served().into_iter().partition(|guest| guest.statistics().has_answered);
        strangers.iter().for_each(|stranger| stranger.stop());
        if !strangers.is_empty() {
            live.note(&format!(
                "{} connection(s) sent no answer, and are not counted as guests",
                strangers.len()
            ));
        }
        guests
    } else {
        let begin = |address| Serving::start(Arc::clone(&image), Arc::new(Dial(address)), options.clone());
        let begin = |address| begin(address).map(Arc::new).map_err(|error| Stop::failed(error.to_string()));
        let guests: Vec<_> = addresses.into_iter().map(begin).collect::<Result<_, _>>()?;
        watch.run(&|| guests.clone(), None);
        guests
    };
    live.end();
    tell(arguments, &image, &guests)
}

/// Serves guests of Firecracker.
fn page_faults(arguments: &Arguments) -> Done {
    let [address] = &arguments.addresses[..] else {
        return Err(Stop::usage(
            "uffd: cannot be combined with other addresses: give one address, with %i and --guests",
        ));
    };
    let of_qemu = [
        (arguments.preempt, "--preempt"),
        (arguments.recover, "--recover"),
        (arguments.force_damaged, "--force-damaged"),
    ];
    if let Some((_, option)) = of_qemu.iter().find(|(is_given, _)| *is_given) {
        return Err(Stop::usage(format!("{option} is not for uffd: addresses")));
    }
    if let Some(option) = arguments.handing.given() {
        return Err(Stop::usage(format!("{option} is only for ch: addresses")));
    }
    uffd::execute(&uffd::Plan {
        image: &arguments.image,
        address,
        guests: arguments.guests.unwrap_or(1),
        cache_limit: arguments.reading.cache_limit,
        spool: arguments.reading.spool.as_deref(),
        access: arguments.opened.access()?,
        paging: &arguments.paging,
        json: arguments.json,
        shown: arguments.shown,
    })
}

/// Restores machines of Cloud Hypervisor.
fn local_migrations(arguments: &Arguments) -> Done {
    let of_others = [
        (arguments.preempt, "--preempt"),
        (arguments.recover, "--recover"),
        (arguments.force_damaged, "--force-damaged"),
        (arguments.guests.is_some(), "--guests"),
        (arguments.metrics.is_some(), "--metrics"),
        (arguments.reading.spool.is_some(), "--spool"),
        (arguments.paging.record.is_some(), "--record"),
        (arguments.paging.working_set.is_some(), "--working-set"),
        (arguments.paging.raw, "--raw"),
    ];
    if let Some((_, option)) = of_others.iter().find(|(is_given, _)| *is_given) {
        return Err(Stop::usage(format!("{option} is not for ch: addresses")));
    }
    cloud_hypervisor::execute(&cloud_hypervisor::Plan {
        image: &arguments.image,
        access: arguments.opened.access()?,
        addresses: &arguments.addresses,
        cache_limit: arguments.reading.cache_limit,
        fill: arguments.paging.fill_rate,
        connect_limit: Duration::from_secs(arguments.reconnect_window),
        handing: &arguments.handing,
        json: arguments.json,
        shown: arguments.shown,
    })
}

/// Whether the guest was running when it was saved, from libvirt's header or from the guest's state.
fn ran(image: &ServedImage) -> bool {
    match image.libvirt_header() {
        Some(header) => header.was_running != 0,
        None => image.shape().was_running(),
    }
}

/// How the guests are watched until they are served.
struct Watch<'a> {
    preempt: bool,
    interrupts: &'a Interrupts,
    live: &'a Live,
    /// Where metrics read the guests' statistics.
    board: Board<Vec<ServeStatistics>>,
}

impl Watch<'_> {
    /// Waits until all guests are served.
    /// `comes`: guests may still connect. Then it waits until the given number of guests have all of their
    /// memory, or without a number until Ctrl-C. If a guest needs the image, the first Ctrl-C only prints a
    /// warning.
    fn run(&self, guests: &dyn Fn() -> Vec<Arc<Serving>>, comes: Option<Option<u32>>) {
        let Self { preempt, interrupts, live, board } = self;
        let mut seen = 0;
        let mut was_warned = false;
        let mut seen_stages: Vec<(Stage, Option<Silence>)> = Vec::new();
        // Guests are numbered in the order in which they answer, because a connection to the listener may not be
        // a guest.
        let mut numbers: Vec<Option<usize>> = Vec::new();
        let is_counted = |guest: &ServeStatistics| comes.is_none() || guest.has_answered;
        loop {
            let guests = guests();
            seen_stages.resize(guests.len(), (Stage::Connecting, None));
            numbers.resize(guests.len(), None);
            let mut statistics: Vec<_> = guests.iter().map(|guest| guest.statistics()).collect();
            for (index, (now, before)) in statistics.iter().zip(&mut seen_stages).enumerate() {
                if numbers[index].is_none() && is_counted(now) {
                    numbers[index] = Some(1 + numbers.iter().flatten().count());
                }
                let name =
                    numbers[index].map_or("a connection".to_owned(), |number| format!("guest {number}"));
                if now.stage != before.0
                    && let Some(text) = news(now.stage)
                {
                    live.note(&format!("{name}: {text}"));
                }
                if let Some(silence) = now.silence.filter(|_| now.silence != before.1) {
                    live.note(&format!("{name}: {}", silence_means(silence, *preempt)));
                }
                *before = (now.stage, now.silence);
            }
            statistics.retain(is_counted);
            board.set(statistics.clone());
            let all_are_over = statistics.iter().all(ServeStatistics::is_over);
            let complete = statistics.iter().filter(|guest| guest.stage == Stage::Completed).count();
            match comes {
                None if all_are_over => return,
                Some(Some(wanted)) if complete >= wanted as usize && all_are_over => return,
                _ => {}
            }
            live.show(&progress(&statistics));
            interrupts.sleep(LOOK, seen);
            if interrupts.count() > seen {
                seen = interrupts.count();
                if statistics.iter().any(needs_image) && !was_warned {
                    was_warned = true;
                    live.note(WARNING);
                    continue;
                }
                guests.iter().for_each(|guest| guest.stop());
                if comes.is_some() {
                    return;
                }
            }
        }
    }
}

/// Whether a guest may run that lacks pages. A QEMU that hangs before it loads the devices has no running
/// guest.
fn needs_image(guest: &ServeStatistics) -> bool {
    match guest.stage {
        Stage::Loading => guest.silence.is_none(),
        Stage::Active | Stage::Paused => true,
        _ => false,
    }
}

/// The warning after Ctrl-C while a guest lacks pages.
pub const WARNING: &str = "a guest still lacks pages and would stop: serving continues (Ctrl-C again ends it; the \
                           guest then stays paused until it is served again)";

/// The likely cause of a destination's silence, and the remedy. `preempt`: whether the destination got a
/// channel for requested pages.
pub fn silence_means(silence: Silence, preempt: bool) -> &'static str {
    match silence {
        Silence::LoadsNothing if preempt => {
            "it has received the devices and does not load them. A QEMU whose capability postcopy-preempt is off \
             hangs like this when it gets a second connection: end this command, end that QEMU (`quit`), and serve a \
             new QEMU without --preempt, or with the capability on"
        }
        Silence::LoadsNothing => {
            "it has received the devices and does not load them. A QEMU with the capability postcopy-preempt waits \
             for a second connection: end this command, and serve with --preempt. A QEMU that hangs like this must be \
             ended (`quit`) and started again"
        }
        _ => {
            "it sends no answer. A QEMU with the capability multifd, and a QEMU 7.2 with postcopy-preempt, wait for \
             more connections, which `sterna serve` does not use: switch these capabilities off there. If it is not a \
             QEMU, the address is wrong"
        }
    }
}

/// The message about a new stage.
fn news(stage: Stage) -> Option<&'static str> {
    match stage {
        Stage::Loading => Some("the devices are being sent"),
        Stage::Active => Some("runs; its remaining pages are being sent"),
        Stage::Paused => Some("the connection broke; waiting for it to listen again (`migrate-recover`)"),
        Stage::Completed => Some("has all of its memory"),
        _ => None,
    }
}

/// The progress of all guests, as one bar.
pub fn progress(statistics: &[ServeStatistics]) -> Progress {
    let sum = |of: fn(&ServeStatistics) -> u64| statistics.iter().map(of).sum::<u64>();
    Progress {
        status: "serving".into(),
        total_bytes: sum(|guest| guest.total_pages) * units::PAGE_BYTES,
        remaining_bytes: sum(|guest| guest.missing_pages) * units::PAGE_BYTES,
        transferred_bytes: sum(|guest| guest.written_bytes),
        ..Progress::default()
    }
}

fn tell(arguments: &Arguments, image: &ServedImage, guests: &[Arc<Serving>]) -> Done {
    let addresses: Vec<String> = (0..guests.len())
        .map(|index| arguments.addresses.get(index).unwrap_or(&arguments.addresses[0]).clone())
        .collect();
    let results: Vec<_> = guests.iter().map(|guest| (guest.wait(), guest.statistics())).collect();
    if arguments.json {
        let list: Vec<Value> = results
            .iter()
            .zip(&addresses)
            .map(|((result, statistics), to)| guest_json(to, result, statistics))
            .collect();
        let value = json!({
            "schema": "sterna-serve",
            "version": 1,
            "image": arguments.image.display().to_string(),
            "access": access_name(image.access()),
            "direct_io": image.is_direct(),
            "guests": list,
        });
        terminal::print(&format!("{value:#}\n"));
    } else {
        for ((result, statistics), to) in results.iter().zip(&addresses) {
            if result.is_ok() {
                terminal::print(&table(to, statistics));
            }
        }
    }
    let failures: Vec<_> = results
        .iter()
        .zip(&addresses)
        .filter_map(|((result, _), to)| Some((to, result.as_ref().err()?)))
        .collect();
    match &failures[..] {
        [] => Ok(Status::Done),
        [(to, failure), ..] => {
            let more = failures.len() - 1;
            let more = if more > 0 { format!(" (and {more} more)") } else { String::new() };
            let silence = results.iter().find(|(result, _)| result.is_err()).and_then(|(_, it)| it.silence);
            // An operator who stopped serving has already read the hint.
            let silence = silence.filter(|_| !matches!(failure.error, sterna::MigrationError::Cancelled));
            let hint = silence
                .map_or(String::new(), |silence| format!("; {}", silence_means(silence, arguments.preempt)));
            Err(stop(to, failure).with_more(&hint).with_more(&more))
        }
    }
}

/// The error for a guest that is not served any more, with the guest's state.
pub fn stop(to: &str, failure: &ServeFailure) -> Stop {
    let is_cancelled = matches!(failure.error, sterna::MigrationError::Cancelled);
    let why = if is_cancelled { "stopped".to_owned() } else { failure.error.to_string() };
    let (status, after) = match failure.guest {
        GuestState::NeedsImage => (
            if is_cancelled { Status::Detached } else { Status::Failed },
            "the guest lacks pages and stays paused there: keep the image, give its QEMU `migrate-recover` with an address \
             (`migrate-pause` before, if its migration is still postcopy-active), and serve it there with --recover",
        ),
        GuestState::Uncertain => (
            Status::Failed,
            "its QEMU was loading the devices: it ends by itself when it detects the broken connection. If it stays \
             `inmigrate`, end it (`quit`). The image is unchanged, but check whether the guest had started before you \
             restore it elsewhere",
        ),
        _ => (
            if is_cancelled { Status::Cancelled } else { Status::Failed },
            "the guest has not started, and the image is unchanged",
        ),
    };
    Stop::with(status, format!("{to}: {why}; {after}"))
}

fn table(to: &str, statistics: &ServeStatistics) -> String {
    let mut text = String::new();
    let mut row = |name: &str, value: String| text += &format!("{name:<12} {value}\n");
    row("served", to.to_owned());
    row("guest RAM", units::bytes(statistics.total_pages * units::PAGE_BYTES));
    let seconds = |time: Option<Duration>| units::seconds(time.unwrap_or_default().as_secs_f64());
    row("guest ran", format!("after {}", seconds(statistics.until_guest)));
    row("total time", seconds(statistics.total));
    row("pages", format!("{} with content, {} zero", statistics.content_pages, statistics.zero_pages));
    row("requested", format!("{} pages", statistics.requested_pages));
    if statistics.recoveries > 0 {
        row("recoveries", statistics.recoveries.to_string());
    }
    text
}

fn guest_json(to: &str, result: &Result<(), ServeFailure>, statistics: &ServeStatistics) -> Value {
    let mut value = json!({
        "to": to,
        "completed": result.is_ok(),
        "error": result.as_ref().err().map(ToString::to_string),
    });
    if let (Some(object), Value::Object(figures)) = (value.as_object_mut(), figures(statistics)) {
        object.extend(figures);
    }
    value
}

/// The statistics of one guest, as reports contain them.
pub fn figures(statistics: &ServeStatistics) -> Value {
    json!({
        "ram_total_bytes": statistics.total_pages * units::PAGE_BYTES,
        "missing_pages": statistics.missing_pages,
        "content_pages": statistics.content_pages,
        "zero_pages": statistics.zero_pages,
        "requests": statistics.requests,
        "requested_pages": statistics.requested_pages,
        "written_bytes": statistics.written_bytes,
        "recoveries": statistics.recoveries,
        "time_until_guest": statistics.until_guest.map(|time| time.as_secs_f64()),
        "total_time": statistics.total.map(|time| time.as_secs_f64()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_limit_below_the_least_is_refused() {
        assert_eq!(cache_limit("1M"), Ok(1 << 20));
        let refused = cache_limit("1023k").unwrap_err();
        assert!(refused.contains("at least 1.00 MiB"), "{refused}");
    }
}

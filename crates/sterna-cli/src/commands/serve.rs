//! `sterna serve`: QEMUs whose guests run before their memory is there, out of an image.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use sterna::postcopy::{
    Access, Dial, GuestState, ImageOptions, Reception, ServeFailure, ServeOptions, ServeStatistics,
    ServedImage, Serving, Stage,
};
use sterna_image::Container;

use crate::commands::peer;
use crate::commands::save::direct;
use crate::exit::{Done, FORCE_DAMAGED, Status, Stop};
use crate::interrupts::Interrupts;
use crate::monitor::Progress;
use crate::terminal::{self, Live};
use crate::units;

/// Between two looks.
const LOOK: Duration = Duration::from_millis(50);

/// Which image, and to whom.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// The image, in any format that `sterna save`, QEMU or libvirt writes. It must not change and must not be removed
    /// until every guest has all of its memory
    pub image: PathBuf,
    /// Where a QEMU waits with `-incoming` and the capability postcopy-ram on: tcp:HOST:PORT or unix:PATH; several for
    /// several QEMUs. Or listen:ADDRESS: everybody who connects there is served (a manager that hands the connection to
    /// its QEMU as fd:NAME, or a relay)
    #[arg(required = true, value_name = "ADDRESS")]
    pub addresses: Vec<String>,
    /// The QEMUs have the capability postcopy-preempt on: pages that they ask for get a connection of their own
    #[arg(long)]
    pub preempt: bool,
    /// The QEMUs were served before, are paused (`postcopy-paused`) and listen again (`migrate-recover`): send what they lack
    #[arg(long)]
    pub recover: bool,
    /// How long to try to connect again when a connection breaks
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub reconnect_window: u64,
    /// Only with listen:. End when so many guests have all of their memory [default: by Ctrl-C]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub guests: Option<u32>,
    /// How the image is read.
    #[command(flatten)]
    pub reading: Reading,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// How an image is read that is served.
#[derive(Debug, Clone, clap::Args)]
pub struct Reading {
    /// Most memory for pages that are read ahead while an image is served, over all guests; at least 1M
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = cache_limit)]
    pub cache_limit: u64,
    /// Where a compressed image that is served is unpacked to, in a file without a name [default: beside the image]
    #[arg(long, value_name = "DIR")]
    pub spool: Option<PathBuf>,
}

/// `--cache-limit`.
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
    /// Opens the image and says how it is read, where that takes time or room.
    pub fn open(&self, image: &std::path::Path, options: ImageOptions) -> Result<ServedImage, Stop> {
        let options =
            ImageOptions { cache_limit_bytes: self.cache_limit, spool: self.spool.clone(), ..options };
        let served = ServedImage::open(image, &options).map_err(|error| match error {
            sterna::StartError::DamagedImage(why) => Stop::unreadable(why).with_more(FORCE_DAMAGED),
            sterna::StartError::Image(why) => Stop::unreadable(why),
            error => Stop::failed(error.to_string()),
        })?;
        if served.access() == Access::Spool {
            terminal::note(
                "sterna: the image is compressed or has pages as differences, so it was unpacked into a temporary file; \
                 `sterna convert` to mapped-ram saves that next time",
            );
        }
        Ok(served)
    }
}

/// The name of a way to read an image, in reports.
pub fn access_name(access: Access) -> &'static str {
    match access {
        Access::Places => "places",
        Access::Index => "index",
        _ => "spool",
    }
}

/// Serves.
pub fn execute(arguments: &Arguments) -> Done {
    let interrupts = Interrupts::catch()?;
    let listens = match &arguments.addresses[..] {
        [one] => one.strip_prefix("listen:"),
        several if several.iter().any(|text| text.starts_with("listen:")) => {
            return Err(Stop::usage("listen: is served alone: give one address"));
        }
        _ => None,
    };
    if listens.is_none() && arguments.guests.is_some() {
        return Err(Stop::usage("--guests is for listen:; dialled QEMUs are counted by their addresses"));
    }
    let addresses: Vec<_> = match listens {
        Some(text) => vec![peer::address(text)?],
        None => arguments.addresses.iter().map(|text| peer::address(text)).collect::<Result<_, _>>()?,
    };
    let options = ImageOptions { direct: direct(false, false), ..ImageOptions::default() };
    let image = Arc::new(arguments.reading.open(&arguments.image, options)?);
    if !arguments.recover && !ran(&image) {
        terminal::note(
            "sterna: the guest was paused when it was saved, and its QEMU starts it all the same, unless it was started with \
             -S or was given `stop` while it waited",
        );
    }
    let options = ServeOptions {
        preempt: arguments.preempt,
        recover: arguments.recover,
        reconnect_window: Duration::from_secs(arguments.reconnect_window),
        ..ServeOptions::default()
    };
    let live = Live::new(arguments.json);
    let guests = if listens.is_some() {
        let reception = Reception::listen(Arc::clone(&image), &addresses[0], options)
            .map_err(|error| Stop::failed(sterna_qmp::migration::refusal_sentence(&error)))?;
        live.note(&format!("listening at {}", reception.address()));
        watch(&|| reception.served(), Some(arguments.guests), &interrupts, &live);
        reception.close();
        reception.served()
    } else {
        let begin = |address| Serving::start(Arc::clone(&image), Arc::new(Dial(address)), options.clone());
        let begin = |address| begin(address).map(Arc::new).map_err(|error| Stop::failed(error.to_string()));
        let guests: Vec<_> = addresses.into_iter().map(begin).collect::<Result<_, _>>()?;
        watch(&|| guests.clone(), None, &interrupts, &live);
        guests
    };
    live.end();
    tell(arguments, &image, &guests)
}

/// Whether the guest ran when it was saved, by libvirt's header or its own state.
fn ran(image: &ServedImage) -> bool {
    match &image.kind().container {
        Container::Libvirt(header) => header.was_running != 0,
        Container::Bare => image.shape().was_running(),
    }
}

/// Until all are over; with `comes`, until so many have all of their memory, or by Ctrl-C. The first Ctrl-C says what a second
/// one does, if a guest needs the image.
fn watch(
    guests: &dyn Fn() -> Vec<Arc<Serving>>,
    comes: Option<Option<u32>>,
    interrupts: &Interrupts,
    live: &Live,
) {
    let mut seen = interrupts.count();
    let mut was_warned = false;
    let mut stages = Vec::new();
    loop {
        let guests = guests();
        stages.resize(guests.len(), Stage::Connecting);
        let statistics: Vec<_> = guests.iter().map(|guest| guest.statistics()).collect();
        for (index, (now, before)) in statistics.iter().zip(&mut stages).enumerate() {
            if now.stage != *before {
                *before = now.stage;
                if let Some(text) = news(now.stage) {
                    live.note(&format!("guest {}: {text}", index + 1));
                }
            }
        }
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
            let needs = |guest: &ServeStatistics| {
                matches!(guest.stage, Stage::Loading | Stage::Active | Stage::Paused)
            };
            if statistics.iter().any(needs) && !was_warned {
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

/// What Ctrl-C means while a guest lacks pages.
pub const WARNING: &str = "a guest still lacks pages and would stand still: serving goes on (Ctrl-C again stops it; the \
                           guest then stays paused until it is served again)";

/// What a new stage means, for people.
fn news(stage: Stage) -> Option<&'static str> {
    match stage {
        Stage::Loading => Some("the devices are on their way"),
        Stage::Active => Some("runs; pages follow"),
        Stage::Paused => Some("the connection broke; waiting for it to listen again (`migrate-recover`)"),
        Stage::Completed => Some("has all of its memory"),
        _ => None,
    }
}

/// All guests as one bar.
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
            Err(stop(to, failure).with_more(&more))
        }
    }
}

/// Why a guest is not served any more, and what becomes of it.
pub fn stop(to: &str, failure: &ServeFailure) -> Stop {
    let is_cancelled = matches!(failure.error, sterna::MigrationError::Cancelled);
    let why = if is_cancelled { "stopped".to_owned() } else { failure.error.to_string() };
    let (status, after) = match failure.guest {
        GuestState::NeedsImage => (
            if is_cancelled { Status::Detached } else { Status::Failed },
            "the guest lacks pages and stays paused there: keep the image, give its QEMU `migrate-recover`, and serve it \
             with --recover",
        ),
        GuestState::Uncertain => (
            Status::Failed,
            "its QEMU was loading the devices and ends by itself; the image is unchanged, but look whether the guest had \
             started before you restore it elsewhere",
        ),
        _ => (
            if is_cancelled { Status::Cancelled } else { Status::Failed },
            "nothing of the guest was given away, and the image is unchanged",
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

/// What was done for one guest, as reports have it.
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

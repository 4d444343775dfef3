//! `sterna snapshot`: saves a running guest again and again, each time only what has changed.

mod series;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::json;
use sterna_drive::live::{self, LiveImage, LiveRequest};
use sterna_drive::{DriveError, MonitorAddress};

use crate::exit::{Done, Status, Stop};
use crate::frames::{Frames, Level, key, level};
use crate::interrupts::Interrupts;
use crate::monitor::Monitor;
use crate::storage::Storage;
use crate::terminal::{self, Live, Shown};
use crate::units;
use crate::watch::Watcher;
use series::Series;

/// Layers of an image. The next one is written with all pages, so that no chain gets longer.
const MOST_LAYERS: usize = 32;

/// Which guest, how often, and where to.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
The first image has the whole guest, each further one the pages that changed since. The guest is paused for milliseconds. An image is
named by its time (UTC), and is visible when it is complete: a crash at any moment leaves the images before. Ctrl-C ends the command;
the guest runs on.

Example: sterna snapshot a.qmp --every 30s --keep 10 store:/var/lib/sterna/a
         sterna store ls store:/var/lib/sterna/a")]
pub struct Arguments {
    /// QMP socket of the Sterna VM: unix:PATH, a path, or qmp:PATH
    pub source: String,
    /// Store of the images: store:DIRECTORY or s3://BUCKET/PREFIX, with #PREFIX at the end for names that begin with PREFIX-
    pub store: String,
    /// Time between the beginnings of two saves [default: one save]
    #[arg(long, value_name = "TIME", value_parser = units::parse_time)]
    pub every: Option<Duration>,
    /// Keep only the N newest images of the series, and remove frames that no image needs any more [default: keep all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub keep: Option<u32>,
    /// End after N saves
    #[arg(long, value_name = "N", requires = "every", value_parser = clap::value_parser!(u32).range(1..))]
    pub count: Option<u32>,
    /// Compression level of zstd, 1 to 22; 0: none; auto: changes during a save, so that neither the disk nor the processors
    /// wait
    #[arg(long, default_value = "1", value_name = "N|auto", value_parser = level)]
    pub level: Level,
    /// Bytes of memory in a frame: a power of two from 64k to 2M
    #[arg(long, default_value = "64k", value_name = "SIZE", value_parser = units::parse_size)]
    pub extent: u64,
    /// Encrypt the images with the key in this file: 32 bytes, or 64 hexadecimal digits
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// How the store is reached if it is in an object storage.
    #[command(flatten)]
    pub storage: Storage,
    /// Print one JSON object for each image
    #[arg(long)]
    pub json: bool,
    /// How progress is shown.
    #[command(flatten)]
    pub shown: Shown,
}

/// The image on which the next one is based.
struct Last {
    number: u64,
    name: String,
    layers: usize,
}

/// Saves until the count is reached, or Ctrl-C.
pub fn execute(arguments: &Arguments) -> Done {
    let interrupts = Interrupts::catch()?;
    let address: MonitorAddress =
        arguments.source.strip_prefix("qmp:").unwrap_or(&arguments.source).parse().map_err(Stop::usage)?;
    let key_of = arguments.key.as_deref().map(key).transpose()?;
    let series = Series::parse(&arguments.store, key_of)?;
    let mut monitor = Monitor::connect(&address)?;
    let (mut last, mut done, mut failed) = (None, 0, 0);
    loop {
        let began = Instant::now();
        let saved = save(arguments, &series, &mut monitor, &mut last, &interrupts);
        let kept = saved.and_then(|line| {
            terminal::print(&line);
            arguments.keep.map_or(Ok(()), |keep| series.keep(keep as usize))
        });
        match kept {
            Ok(()) => {}
            // If the first save fails, the next one will fail, too.
            Err(stop) if arguments.every.is_none() || done == failed || stop.status != Status::Failed => {
                return Err(stop);
            }
            // The guest runs, and the images before are complete. The next image has these changes, too.
            Err(stop) => {
                terminal::complain(&stop);
                failed += 1;
                monitor = Monitor::connect(&address)?;
            }
        }
        done += 1;
        let Some(every) = arguments.every.filter(|_| arguments.count.is_none_or(|count| done < count)) else {
            return Ok(if failed == 0 { Status::Done } else { Status::Failed });
        };
        while began.elapsed() < every {
            if interrupts.count() > 0 {
                return Ok(Status::Done);
            }
            std::thread::sleep(Duration::from_millis(50).min(every.saturating_sub(began.elapsed())));
        }
    }
}

/// Saves one image, and returns the line about it.
fn save(
    arguments: &Arguments,
    series: &Series,
    monitor: &mut Monitor,
    last: &mut Option<Last>,
    interrupts: &Interrupts,
) -> Result<String, Stop> {
    let name = series.name_now();
    let base = last.take();
    let mut image = one(arguments, series, monitor, (&name, base.as_ref()), interrupts);
    let mut layers = base.as_ref().map_or(1, |base| base.layers + 1);
    // The VM has lost the record, for example by a migration.
    let is_unknown = |error: &DriveError| error.is_refusal_with("are not known any more");
    if base.is_some() && image.as_ref().err().is_some_and(is_unknown) {
        layers = 1;
        image = one(arguments, series, monitor, (&name, None), interrupts);
    }
    let image = match image {
        Ok(image) => image,
        Err(error) => {
            *last = base;
            return Err(error.into());
        }
    };
    if layers >= MOST_LAYERS {
        series.flatten(&name, &frames(arguments, None, false)?)?;
        layers = 1;
    }
    *last = image.number.map(|number| Last { number, name: name.clone(), layers });
    Ok(line(arguments, series, &name, &image, layers))
}

fn one(
    arguments: &Arguments,
    series: &Series,
    monitor: &mut Monitor,
    (name, base): (&str, Option<&Last>),
    interrupts: &Interrupts,
) -> Result<LiveImage, DriveError> {
    let based = base.map(|base| series.path(&base.name));
    let is_based = based.is_some();
    let frames = frames(arguments, based, is_based).map_err(|stop| DriveError::Request(stop.message))?;
    let request = LiveRequest {
        path: series.path(name),
        frames,
        replace: false,
        track: true,
        since: base.map(|base| base.number),
    };
    let shown = Live::new(arguments.shown, true);
    let image = live::save(monitor.vm(), &request, &mut Watcher::new(&shown, interrupts));
    shown.end();
    image
}

fn frames(
    arguments: &Arguments,
    base: Option<PathBuf>,
    only_changes: bool,
) -> Result<sterna_image::convert::FrameOptions, Stop> {
    let Arguments { level, extent, key, .. } = arguments;
    let frames = Frames { level: *level, extent: *extent, key: key.clone(), base }.options()?;
    Ok(sterna_image::convert::FrameOptions { only_changes, ..frames })
}

fn line(arguments: &Arguments, series: &Series, name: &str, image: &LiveImage, layers: usize) -> String {
    if arguments.json {
        let value = json!({
            "schema": "sterna-snapshot",
            "version": 1,
            "image": series.path(name).display().to_string(),
            "layers": layers,
            "pages": image.pages,
            "file_bytes": image.file_bytes,
            "pause": image.pause.as_secs_f64(),
            "held_writes": image.held_writes,
            "total_time": image.total.as_secs_f64(),
        });
        return format!("{value}\n");
    }
    format!(
        "{name}  {} pages, {} new, paused {}, took {}, layers {layers}\n",
        image.pages,
        units::bytes(image.file_bytes),
        units::seconds(image.pause.as_secs_f64()),
        units::seconds(image.total.as_secs_f64()),
    )
}

//! `sterna serve IMAGE uffd:SOCKET`: answers the page faults of Firecracker's guests.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use sterna_image::{Access, ImageError, open_frames, store_working_set};
use sterna_pager::{
    FillRate, GuestEnd, GuestStage, GuestStatistics, ImageMemory, PageSource, Pager, PagerError,
    PagerOptions, RawMemory, SocketPlan, SourceError, StoredMemory, WorkingSet,
};

use crate::exit::{Done, Status, Stop};
use crate::interrupts::Interrupts;
use crate::monitor::Progress;
use crate::terminal::{self, Live, Shown};
use crate::units;

/// Begins the address of a socket.
pub const SCHEME: &str = "uffd:";
/// Interval between two looks at the guests.
pub const LOOK: Duration = Duration::from_millis(50);
/// The number of a guest in the name of a socket.
const NUMBER: &str = "%i";
/// Most guests of one command.
const MOST_GUESTS: u32 = 4096;

/// How guests of `uffd:` are served.
#[derive(Debug, Clone, clap::Args)]
pub struct Paging {
    /// Only with uffd:, and with ch: and --lazy. Speed at which memory is filled in the background, for all guests together: a rate such as
    /// 200MiB/s, `off` (only pages that guests touch), `max`, or `adaptive` (a tenth of one processor, and up to half of
    /// one while the host has an idle processor) [default: adaptive; with --record: off]
    #[arg(long, value_name = "RATE", value_parser = fill_rate)]
    pub fill_rate: Option<FillRate>,
    /// Only with uffd:. Write the pages that guests touch to this file, in the order of the touches, when the command ends.
    /// Without a file they are stored in the image, if it is in Sterna's own format: later `serve` and lazy restores load
    /// them first
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "", value_parser = record)]
    pub record: Option<Record>,
    /// Only with uffd:. Fill the pages of this file first, which --record wrote [default: those that the image contains]
    #[arg(long, value_name = "FILE")]
    pub working_set: Option<PathBuf>,
    /// Only with uffd:. IMAGE is a raw memory file, whatever it begins with. Give this option if guests are not trusted:
    /// a guest chooses the first bytes of its memory
    #[arg(long)]
    pub raw: bool,
}

/// Where touched pages are recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record {
    /// In the image that is served.
    Image,
    /// In a working-set file of its own, which `--working-set` reads.
    File(PathBuf),
}

/// Which guests are served, and how.
pub struct Plan<'a> {
    pub image: &'a Path,
    pub address: &'a str,
    pub guests: u32,
    pub cache_limit: u64,
    pub spool: Option<&'a Path>,
    pub access: Access,
    pub paging: &'a Paging,
    pub json: bool,
    pub shown: Shown,
}

impl Paging {
    /// The first option that was given, for addresses without page faults.
    pub fn given(&self) -> Option<&'static str> {
        let options = [
            (self.fill_rate.is_some(), "--fill-rate"),
            (self.record.is_some(), "--record"),
            (self.working_set.is_some(), "--working-set"),
            (self.raw, "--raw"),
        ];
        options.into_iter().find(|(is_given, _)| *is_given).map(|(_, name)| name)
    }
}

/// Serves all guests and reports the result.
pub fn execute(plan: &Plan<'_>) -> Done {
    let interrupts = Interrupts::catch()?;
    let sockets = sockets(plan.address, plan.guests)?;
    let (source, frames) = open(plan)?;
    let working_set = plan.paging.working_set.as_deref().map(read_working_set).transpose()?;
    let record = plan.paging.record.as_ref();
    if record == Some(&Record::Image) && frames.is_none() {
        return Err(Stop::usage(format!(
            "{} has no room for a working set: give --record a file, or convert the image to Sterna's own format",
            plan.image.display()
        )));
    }
    let default = if record.is_some() { FillRate::Off } else { FillRate::Adaptive };
    let options = PagerOptions {
        cache_limit_bytes: plan.cache_limit,
        fill: plan.paging.fill_rate.unwrap_or(default),
        working_set,
        record: record.is_some(),
        ..PagerOptions::default()
    };
    let pager = Pager::start(source, &sockets, options).map_err(|error| match error {
        PagerError::OtherWorkingSet { .. } => Stop::unreadable(error.to_string()),
        error => Stop::failed(error.to_string()),
    })?;
    let live = Live::new(plan.shown, plan.json);
    match &sockets[..] {
        [socket] => live.note(&format!("listening at {}", socket.path.display())),
        several => live.note(&format!("listening at {} sockets", several.len())),
    }
    let is_interrupted = watch(&pager, plan.guests, &interrupts, &live);
    live.end();
    let lacking = pager.guests().iter().filter(|guest| guest.needs_image()).count();
    let recorded = pager.working_set();
    let before = pager.guests();
    // Guests that lack pages are killed here.
    drop(pager);
    match (record, recorded, frames) {
        (Some(Record::File(path)), Some(recorded), _) => write_working_set(path, &recorded)?,
        (Some(Record::Image), Some(recorded), Some(memory)) => store_recorded(plan, &memory, &recorded)?,
        _ => {}
    }
    tell(plan, &before)?;
    if is_interrupted && lacking > 0 {
        let what = "guest(s) lacked pages and were killed, because they would wait without end";
        return Err(Stop::with(Status::Cancelled, format!("stopped; {lacking} {what}")));
    }
    failure(&before).map_or(Ok(Status::Done), Err)
}

/// Waits until all guests are over, or the command is interrupted. Returns whether it was.
///
/// If a guest needs the image, the first Ctrl-C only prints a warning.
fn watch(pager: &Pager, expected: u32, interrupts: &Interrupts, live: &Live) -> bool {
    let (mut seen, mut was_warned) = (0, false);
    let mut told: Vec<u8> = Vec::new();
    loop {
        let guests = pager.guests();
        let served: Vec<_> = guests.iter().filter(|guest| guest.total_pages > 0).collect();
        told.resize(served.len().max(told.len()), 0);
        for (guest, told) in served.iter().zip(&mut told) {
            let (number, text) = news(guest);
            if number > *told && !text.is_empty() {
                live.note(&format!("{}: {text}", guest.socket));
            }
            *told = number;
        }
        if served.len() >= expected as usize && served.iter().all(|guest| guest.is_over()) {
            return false;
        }
        live.show(&progress(&served));
        interrupts.sleep(LOOK, seen);
        if interrupts.count() > seen {
            seen = interrupts.count();
            if served.iter().any(|guest| guest.needs_image()) && !was_warned && !interrupts.must_end() {
                was_warned = true;
                live.note(
                    "a guest still lacks pages: serving continues (Ctrl-C again ends it, and kills guests that lack \
                     pages)",
                );
                continue;
            }
            return true;
        }
    }
}

/// How far a guest is, as a number that grows, and the message about it. The log has the reason of a guest that was given up.
fn news(guest: &GuestStatistics) -> (u8, &'static str) {
    match &guest.stage {
        GuestStage::Ended(GuestEnd::Completed) => (2, "has all of its memory, and runs without this command"),
        GuestStage::Ended(GuestEnd::PeerEnded) => (2, "its VMM has ended"),
        GuestStage::Ended(_) => (2, ""),
        _ => (1, "connected"),
    }
}

/// The progress of all guests together.
pub fn progress(guests: &[&GuestStatistics]) -> Progress {
    let sum = |of: fn(&GuestStatistics) -> u64| guests.iter().map(|guest| of(guest)).sum::<u64>();
    Progress {
        status: "serving".into(),
        total_bytes: sum(|guest| guest.total_pages * guest.page_bytes),
        remaining_bytes: sum(|guest| guest.missing_pages * guest.page_bytes),
        transferred_bytes: sum(|guest| guest.content_pages * guest.page_bytes),
        ..Progress::default()
    }
}

/// The sockets of `uffd:PATH`, where `%i` is the guest's number.
fn sockets(address: &str, guests: u32) -> Result<Vec<SocketPlan>, Stop> {
    let path = address.strip_prefix(SCHEME).unwrap_or(address);
    if path.is_empty() {
        return Err(Stop::usage("uffd: needs the path of a socket: uffd:/run/fc/guest.sock"));
    }
    if guests > MOST_GUESTS {
        return Err(Stop::usage(format!(
            "--guests {guests} is too many: at most {MOST_GUESTS} for one command"
        )));
    }
    if !path.contains(NUMBER) {
        return Ok(vec![SocketPlan { path: path.into(), guests }]);
    }
    let of = |number: u32| SocketPlan { path: path.replace(NUMBER, &number.to_string()).into(), guests: 1 };
    Ok((0..guests).map(of).collect())
}

/// The memory, and the same again if it is in Sterna's own format.
type Opened = (Arc<dyn PageSource>, Option<Arc<StoredMemory>>);

/// Opens the image, or the raw memory file of a snapshot.
fn open(plan: &Plan<'_>) -> Result<Opened, Stop> {
    let unreadable = |error: SourceError| Stop::unreadable(error.to_string());
    let raw = || RawMemory::open(plan.image).map(|memory| (Arc::new(memory) as Arc<dyn PageSource>, None));
    if plan.paging.raw {
        return raw().map_err(unreadable);
    }
    let frames =
        open_frames(plan.image, &plan.access).map_err(|error| Stop::of_image(&error, &[plan.image]))?;
    if let Some(image) = frames {
        let memory = Arc::new(StoredMemory::new(image).map_err(unreadable)?);
        return Ok((Arc::clone(&memory) as Arc<dyn PageSource>, Some(memory)));
    }
    match ImageMemory::open(plan.image, plan.spool) {
        Ok(memory) => Ok((Arc::new(memory), None)),
        // No image format: the file is the memory itself.
        Err(SourceError::Image(ImageError::Unknown { .. })) => raw().map_err(unreadable),
        Err(error) => Err(unreadable(error)),
    }
}

pub(crate) fn read_working_set(path: &Path) -> Result<WorkingSet, Stop> {
    let text = std::fs::read_to_string(path).map_err(|error| Stop::cannot_read(path, &error))?;
    WorkingSet::decode(&text).map_err(|error| Stop::unreadable(format!("{}, {error}", path.display())))
}

/// Writes the file completely or not at all.
pub(crate) fn write_working_set(path: &Path, recorded: &WorkingSet) -> Result<(), Stop> {
    let failed = |error: std::io::Error| Stop::failed(format!("cannot write {}: {error}", path.display()));
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(directory).map_err(failed)?;
    file.write_all(recorded.encode().as_bytes()).map_err(failed)?;
    file.persist(path).map_err(|error| failed(error.error))?;
    terminal::note(&format!(
        "sterna: {} of touched pages recorded in {}",
        units::bytes(recorded.len_bytes()),
        path.display()
    ));
    Ok(())
}

/// Stores the working set in the image that was served. An earlier one stays if no guest touched anything.
fn store_recorded(plan: &Plan<'_>, memory: &StoredMemory, recorded: &WorkingSet) -> Result<(), Stop> {
    if recorded.runs.is_empty() {
        terminal::note("sterna: no guest touched a page: nothing was stored");
        return Ok(());
    }
    let ranges = memory.ranges(recorded);
    let stored = store_working_set(plan.image, &plan.access, memory.image(), &ranges);
    stored.map_err(|error| Stop::failed(format!("the touched pages were not stored: {error}")))?;
    terminal::note(&format!(
        "sterna: {} of touched pages stored in {}",
        units::bytes(recorded.len_bytes()),
        plan.image.display()
    ));
    Ok(())
}

fn tell(plan: &Plan<'_>, guests: &[GuestStatistics]) -> Result<(), Stop> {
    if plan.json {
        let value = json!({
            "schema": "sterna-serve",
            "version": 1,
            "image": plan.image.display().to_string(),
            "access": "page-faults",
            "guests": guests.iter().map(|guest| guest_json(guest, SCHEME)).collect::<Vec<_>>(),
        });
        terminal::print(&format!("{value:#}\n"));
        return Ok(());
    }
    for guest in guests.iter().filter(|guest| guest.total_pages > 0) {
        terminal::print(&table(guest));
    }
    Ok(())
}

/// The figures of a guest.
pub fn table(guest: &GuestStatistics) -> String {
    let mut text = String::new();
    let mut row = |name: &str, value: String| text += &format!("{name:<12} {value}\n");
    row("served", guest.socket.clone());
    row("guest RAM", units::bytes(guest.total_pages * guest.page_bytes));
    row("time", units::seconds(guest.time.as_secs_f64()));
    row("faults", guest.faults.to_string());
    row("pages", format!("{} with content, {} zero", guest.content_pages, guest.zero_pages));
    if guest.removed_pages > 0 {
        row("removed", format!("{} pages", guest.removed_pages));
    }
    if guest.missing_pages > 0 {
        row("missing", format!("{} pages", guest.missing_pages));
    }
    text
}

/// The figures of a guest for scripts. `scheme` begins its address.
pub fn guest_json(guest: &GuestStatistics, scheme: &str) -> Value {
    let (end, error) = match &guest.stage {
        GuestStage::Ended(GuestEnd::Completed) => ("completed", None),
        GuestStage::Ended(GuestEnd::PeerEnded) => ("vmm-ended", None),
        GuestStage::Ended(GuestEnd::GivenUp { why, is_killed: true }) => ("killed", Some(why.to_string())),
        GuestStage::Ended(GuestEnd::GivenUp { why, .. }) => ("hangs", Some(why.to_string())),
        _ => ("killed", None),
    };
    json!({
        "to": format!("{scheme}{}", guest.socket),
        "pid": guest.pid,
        "completed": matches!(guest.stage, GuestStage::Ended(GuestEnd::Completed)),
        "end": end,
        "error": error,
        "ram_total_bytes": guest.total_pages * guest.page_bytes,
        "page_bytes": guest.page_bytes,
        "missing_pages": guest.missing_pages,
        "content_pages": guest.content_pages,
        "zero_pages": guest.zero_pages,
        "removed_pages": guest.removed_pages,
        "faults": guest.faults,
        "total_time": guest.time.as_secs_f64(),
    })
}

/// The error of the first guest that could not be served.
fn failure(guests: &[GuestStatistics]) -> Option<Stop> {
    let mut failed = guests.iter().filter_map(|guest| match &guest.stage {
        GuestStage::Ended(GuestEnd::GivenUp { why, is_killed }) => Some((guest, why, *is_killed)),
        _ => None,
    });
    let (guest, why, is_killed) = failed.next()?;
    let after = if is_killed {
        "its VMM was killed, and the image is unchanged"
    } else {
        "its VMM hangs: kill it; the image is unchanged"
    };
    let more = match failed.count() {
        0 => String::new(),
        more => format!(" (and {more} more)"),
    };
    Some(Stop::failed(format!("{}: {why}; {after}{more}", guest.socket)))
}

/// Parses `--record`, whose value may be left out.
fn record(text: &str) -> Result<Record, String> {
    Ok(if text.is_empty() { Record::Image } else { Record::File(text.into()) })
}

pub(crate) fn fill_rate(text: &str) -> Result<FillRate, String> {
    match text {
        "off" => Ok(FillRate::Off),
        "max" => Ok(FillRate::Max),
        "adaptive" => Ok(FillRate::Adaptive),
        rate => units::parse_bandwidth(rate)
            .map(FillRate::BytesPerSecond)
            .map_err(|why| format!("{why}; or off, max, adaptive")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_in_the_name_makes_one_socket_for_each_guest() {
        let several = sockets("uffd:/run/%i.sock", 3).unwrap();
        let paths: Vec<_> = several.iter().map(|plan| plan.path.to_str().unwrap()).collect();
        assert_eq!(paths, ["/run/0.sock", "/run/1.sock", "/run/2.sock"]);
        assert!(several.iter().all(|plan| plan.guests == 1));

        let one = sockets("uffd:/run/all.sock", 3).unwrap();
        assert_eq!((one.len(), one[0].guests), (1, 3));
        assert!(sockets("uffd:", 1).is_err());
        assert!(sockets("uffd:/run/%i", MOST_GUESTS + 1).is_err());
    }

    #[test]
    fn fill_rates_are_words_or_rates() {
        assert_eq!(fill_rate("off"), Ok(FillRate::Off));
        assert_eq!(fill_rate("200MiB/s"), Ok(FillRate::BytesPerSecond(200 << 20)));
        assert!(fill_rate("fast").unwrap_err().contains("off, max, adaptive"));
        assert!(fill_rate("0MB/s").is_err());
    }
}

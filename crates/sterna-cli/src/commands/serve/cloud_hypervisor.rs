//! `sterna serve IMAGE ch:SOCKET`: restores machines of Cloud Hypervisor, with memory that is filled before, or lazily.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::json;
use sterna_image::{Access, open_stored};
use sterna_pager::cloud_hypervisor::{Restore, RestorePlan, SavedMachine, SessionError};
use sterna_pager::{FillRate, GuestEnd, GuestError, GuestStage, GuestStatistics};

use super::uffd::{self, LOOK};
use crate::exit::{Done, Status, Stop};
use crate::interrupts::Interrupts;
use crate::terminal::{self, Live, Shown};

/// Begins the address of a socket.
pub const SCHEME: &str = "ch:";

/// Options of `ch:` addresses.
#[derive(Debug, Clone, clap::Args)]
pub struct Handing {
    /// Only with ch:. Hand over empty memory, and answer the VMM's page requests while its guest runs. The VMM must wait with
    /// memory_mode=postcopy
    #[arg(long)]
    pub lazy: bool,
    /// Only with ch:. Leave the guest paused, until `ch-remote resume`
    #[arg(long)]
    pub paused: bool,
}

/// Which guests are restored, and how.
pub struct Plan<'a> {
    pub image: &'a Path,
    pub access: Access,
    pub addresses: &'a [String],
    pub cache_limit: u64,
    pub fill: Option<FillRate>,
    pub connect_limit: std::time::Duration,
    pub handing: &'a Handing,
    pub json: bool,
    pub shown: Shown,
}

impl Handing {
    /// The first option that was given, for other addresses.
    pub fn given(&self) -> Option<&'static str> {
        [(self.lazy, "--lazy"), (self.paused, "--paused")]
            .into_iter()
            .find(|(is_given, _)| *is_given)
            .map(|(_, name)| name)
    }
}

/// Restores all guests and reports the result.
pub fn execute(plan: &Plan<'_>) -> Done {
    let interrupts = Interrupts::catch()?;
    let sockets = sockets(plan.addresses)?;
    if plan.fill.is_some() && !plan.handing.lazy {
        return Err(Stop::usage("--fill-rate is only for uffd: addresses, and for ch: with --lazy"));
    }
    let image =
        open_stored(plan.image, &plan.access).map_err(|error| Stop::of_image(&error, &[plan.image]))?;
    let machine = SavedMachine::new(&image, plan.cache_limit);
    let machine = Arc::new(machine.map_err(|error| Stop::unreadable(error.to_string()))?);
    let live = Live::new(plan.shown, plan.json);
    let start = |socket: PathBuf| {
        let restore = RestorePlan {
            is_lazy: plan.handing.lazy,
            stays_paused: plan.handing.paused,
            fill: plan.fill.unwrap_or_default(),
            connect_limit: plan.connect_limit,
            ..RestorePlan::new(socket)
        };
        Restore::start(Arc::clone(&machine), restore).map_err(|error| Stop::failed(error.to_string()))
    };
    let guests = sockets.into_iter().map(start).collect::<Result<Vec<_>, _>>()?;
    let is_interrupted = watch(&guests, &interrupts, &live);
    live.end();
    let statistics: Vec<_> = guests.iter().map(Restore::statistics).collect();
    tell(plan, &statistics)?;
    if is_interrupted && statistics.iter().any(is_stopped) {
        let what = match plan.handing.lazy {
            false => "the guest was not handed over",
            true => "a guest may lack pages: end its VMM, which waits for them",
        };
        return Err(Stop::with(Status::Cancelled, format!("stopped; {what}; the image is unchanged")));
    }
    failure(&statistics).map_or(Ok(Status::Done), Err)
}

/// Waits until all guests are over, or the command is interrupted. Returns whether it was.
///
/// If a guest needs the image, the first Ctrl-C only prints a warning.
fn watch(guests: &[Restore], interrupts: &Interrupts, live: &Live) -> bool {
    let (mut seen, mut was_warned, mut is_interrupted) = (0, false, false);
    let mut told = vec![false; guests.len()];
    loop {
        let statistics: Vec<_> = guests.iter().map(Restore::statistics).collect();
        for (guest, told) in statistics.iter().zip(&mut told) {
            if !*told && let GuestStage::Ended(end) = &guest.stage {
                *told = true;
                match end {
                    GuestEnd::Completed => {
                        live.note(&format!(
                            "{}: the VMM has the machine and all of its memory",
                            guest.socket
                        ));
                    }
                    GuestEnd::PeerEnded => live.note(&format!("{}: its VMM has ended", guest.socket)),
                    _ => {}
                }
            }
        }
        if statistics.iter().all(GuestStatistics::is_over) {
            return is_interrupted;
        }
        live.show(&uffd::progress(&statistics.iter().collect::<Vec<_>>()));
        interrupts.sleep(LOOK, seen);
        if interrupts.count() > seen {
            seen = interrupts.count();
            if guests.iter().any(Restore::needs_image) && !was_warned && !interrupts.must_end() {
                was_warned = true;
                live.note(
                    "a guest still lacks pages: serving continues (Ctrl-C again ends it, and the guest waits without end)",
                );
                continue;
            }
            is_interrupted = true;
            guests.iter().for_each(Restore::stop);
        }
    }
}

fn sockets(addresses: &[String]) -> Result<Vec<PathBuf>, Stop> {
    let socket = |address: &String| match address.strip_prefix(SCHEME) {
        Some("") => Err(Stop::usage("ch: needs the path of a socket: ch:/run/ch.sock")),
        Some(path) => Ok(PathBuf::from(path)),
        None => Err(Stop::usage("ch: cannot be combined with addresses of another kind")),
    };
    addresses.iter().map(socket).collect()
}

fn tell(plan: &Plan<'_>, guests: &[GuestStatistics]) -> Result<(), Stop> {
    if plan.json {
        let value = json!({
            "schema": "sterna-serve",
            "version": 1,
            "image": plan.image.display().to_string(),
            "access": if plan.handing.lazy { "page-requests" } else { "filled" },
            "guests": guests.iter().map(|guest| uffd::guest_json(guest, SCHEME)).collect::<Vec<_>>(),
        });
        terminal::print(&format!("{value:#}\n"));
        return Ok(());
    }
    guests.iter().for_each(|guest| terminal::print(&uffd::table(guest)));
    Ok(())
}

fn error_of(guest: &GuestStatistics) -> Option<&GuestError> {
    match &guest.stage {
        GuestStage::Ended(GuestEnd::GivenUp { why, .. }) => Some(why),
        _ => None,
    }
}

fn is_stopped(guest: &GuestStatistics) -> bool {
    let Some(GuestError::Session(why)) = error_of(guest) else { return false };
    matches!(why.downcast_ref(), Some(SessionError::Stopped))
}

/// The error of the first guest that could not be restored.
fn failure(guests: &[GuestStatistics]) -> Option<Stop> {
    let mut failed = guests.iter().filter_map(|guest| Some((guest, error_of(guest)?)));
    let (guest, why) = failed.next()?;
    let more = match failed.count() {
        0 => String::new(),
        more => format!(" (and {more} more)"),
    };
    let after = "the image is unchanged; end the VMM if it still waits, and restore again";
    Some(Stop::failed(format!("{}: {why}; {after}{more}", guest.socket)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_address_is_the_socket_of_one_vmm() {
        let addresses = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        assert_eq!(sockets(&addresses(&["ch:/a", "ch:b/c"])).unwrap(), [Path::new("/a"), Path::new("b/c")]);
        assert!(sockets(&addresses(&["ch:"])).is_err());
        assert!(sockets(&addresses(&["ch:/a", "unix:/b"])).unwrap_err().message.contains("combined"));
    }
}

//! Plays a case in which no side is killed: two machines in this process, and a cable between them.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna::{RecoverError, ResumeError, Status};
use sterna_testing::CoreTime;

use super::LONGEST;
use super::cable::{Cable, Struck};
use super::case::Case;
use super::certificates;
use super::judge::{At, at_destination, at_source, may_fail};
use super::side::{Here, There, anywhere, staged};
use super::trouble::{Order, What};
use crate::ledger::Ledger;
use crate::stop::Side;

/// Time for which a case keeps its bandwidth limits.
const SLOW: Duration = Duration::from_millis(700);

/// The end of a case.
pub(super) struct End {
    /// Description for tables.
    pub(super) how: String,
    /// States in which the disturbances occurred.
    pub(super) struck: Vec<String>,
    /// Bytes of pages that were sent again. `None` if no statistics report them.
    pub(super) resent_bytes: Option<u64>,
}

struct Play {
    here: Here,
    there: There,
    ledger: Arc<Ledger>,
    cable: Cable,
}

impl Case {
    pub(super) fn play(&self) -> Result<End, String> {
        let certificates = certificates::directory()?;
        let ledger = Arc::new(Ledger::with_owner(Side::Source));
        let cable = Cable::new(&self.troubles, self.cut)?;
        let hand = cable.hand();
        let told = move |mark: &str| hand.tell(Side::Destination, mark);
        let there = There::begin(self, &certificates, &ledger, told)?;
        cable.hand().lead_to(&there.incoming.address());
        let hand = cable.hand();
        let told = move |mark: &str| hand.tell(Side::Source, mark);
        let here = Here::begin(self, &cable.address(), &certificates, &ledger, told)?;
        let play = Play { here, there, ledger, cable };
        let ended = self.settle(&play).and_then(|()| self.judge(&play));
        match ended {
            Ok(end) => {
                let lost = play.here.migration.statistics().reconnections;
                let resent_bytes =
                    (!lost.is_empty()).then(|| lost.iter().map(|lost| lost.resent_bytes).sum());
                self.next(play, end.0, certificates)?;
                let how = match resent_bytes {
                    // The lost connection had already carried all of its bytes.
                    None if self.must_arrive() => "arrived, nothing was lost",
                    _ => end.0,
                };
                let how = match self.cut {
                    Some(cut) => {
                        let form = if cut.is_postcopy { "postcopy" } else { "precopy" };
                        let window = if self.reconnects() { "window" } else { "no window" };
                        let sent = if end.1.is_empty() { ", the message was not sent" } else { "" };
                        format!("{form}, {window}, {:?}: {how}{sent}", cut.place)
                    }
                    None => how.to_owned(),
                };
                Ok(End { how, struck: struck(&end.1), resent_bytes })
            }
            Err(why) => {
                let why = format!("{why}; {}", play.describe());
                // The guest may wait for pages, and dropping the play would wait for the guest.
                std::mem::forget(play);
                Err(why)
            }
        }
    }

    /// Waits until both sides have ended. Meanwhile, gives the operators' orders.
    fn settle(&self, play: &Play) -> Result<(), String> {
        let (migration, incoming) = (&play.here.migration, &play.there.incoming);
        let (began, mut is_switched, mut is_slow) = (Instant::now(), false, true);
        let mut time = CoreTime::default();
        // After an operator has broken the connection, only an operator resumes the migration.
        let mut is_asked = !self.reconnects();
        loop {
            let (outcome, arrival) = (migration.outcome(), incoming.arrival());
            if outcome.is_some() && arrival.is_some() {
                return Ok(());
            }
            if self.is_postcopy() && !is_switched && play.cable.forwarded() >= self.switch {
                is_switched = true;
                play.cable.switched();
                // The switch comes too late if the migration was cancelled.
                let _ = migration.start_postcopy();
            }
            for other in play.cable.others.try_iter() {
                match other {
                    What::Order(Order::Cancel) => drop(migration.cancel()),
                    What::Order(Order::Abandon) => drop(incoming.cancel()),
                    What::Order(Order::Pause(Side::Source)) => is_asked |= migration.pause().is_ok(),
                    What::Order(Order::Pause(_)) => is_asked |= incoming.pause().is_ok(),
                    What::Cut(..) | What::Kill(_) => return Err(format!("nobody can do {other:?} here")),
                }
            }
            let paused = [migration.status(), incoming.status()] == [Status::PostcopyPaused; 2];
            if paused && is_asked {
                self.resume(play)?;
            }
            // No source has connected, or none reconnects.
            if outcome.is_some() && incoming.status() == Status::Setup {
                let _ = incoming.cancel();
            }
            if is_slow && began.elapsed() > SLOW {
                is_slow = false;
                let change = |params: &mut sterna::Parameters| {
                    params.max_bandwidth_bytes = 0;
                    params.max_postcopy_bandwidth_bytes = 0;
                };
                migration.set_live(change).map_err(|error| error.to_string())?;
            }
            if time.look() > LONGEST {
                return Err("not settled".into());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn resume(&self, play: &Play) -> Result<(), String> {
        if self.moves {
            match play.there.incoming.recover_at(&anywhere()) {
                Ok(()) => play.cable.hand().lead_to(&play.there.incoming.address()),
                // A source has connected in the meantime, and may have left again.
                Err(RecoverError::Refused(_)) => return Ok(()),
                Err(why) => return Err(format!("the destination waits nowhere else: {why}")),
            }
        }
        match play.here.migration.resume(&play.cable.address()) {
            // Refused if the source has already tried in the meantime. That attempt may have failed.
            Ok(()) | Err(ResumeError::Refused(_)) => Ok(()),
            Err(why) => Err(format!("the source does not go on: {why}")),
        }
    }

    fn judge(&self, play: &Play) -> Result<(&'static str, Vec<Struck>), String> {
        let violations = play.ledger.violations();
        if !violations.is_empty() {
            return Err(violations.join("; "));
        }
        let end = match (at_source(&play.here)?, at_destination(&play.there)?) {
            (At::Gone, At::Runs) => "arrived",
            (At::Runs, At::Gone) => "runs at the source",
            other => return Err(format!("the guest is (source, destination) {other:?}")),
        };
        let has_arrived = end == "arrived";
        if has_arrived != play.ledger.has_run(Side::Destination) {
            return Err(format!("it {end}, and it was started at the destination: {}", !has_arrived));
        }
        let holder = if has_arrived { Side::Destination } else { Side::Source };
        if play.ledger.holder() != Some(holder) {
            return Err(format!("it {end}, and its lease is held by {:?}", play.ledger.holder()));
        }
        if !has_arrived && (self.must_arrive() || !may_fail(self, &play.cable)) {
            return Err("nobody gave it up, and it has not arrived".into());
        }
        let (struck, lost) = (play.cable.struck(), play.here.migration.statistics().reconnections.len());
        let drawn = self.troubles.len();
        if self.must_arrive() && (struck.len() != drawn || lost > drawn) {
            return Err(format!("of {drawn} cuts {} came, and {lost} connections were lost", struck.len()));
        }
        Ok((end, struck))
    }

    /// Migrates the guest again without disturbances. The destination is the side where it did not arrive, or
    /// a new place.
    fn next(&self, play: Play, end: &str, certificates: PathBuf) -> Result<(), String> {
        let case = self.undisturbed();
        let Play { here, there, cable, .. } = play;
        let (arrived, left) = (end == "arrived", (Arc::clone(&here.vm), Arc::clone(&there.vm)));
        drop((here, there, cable));
        let owner = if arrived { left.1 } else { left.0 };
        let cable = Cable::new(&[], None)?;
        let ledger = Arc::new(Ledger::with_owner(Side::Source));
        let there = There::begin(&case, &certificates, &ledger, |_| {})?;
        cable.hand().lead_to(&there.incoming.address());
        let vm = staged(Arc::clone(&owner.guest), owner.banks.clone(), &ledger, Side::Source);
        let here = Here::of(&case, vm, &cable.address(), &certificates, |_| {})?;
        let play = Play { here, there, ledger, cable };
        let ended = case.settle(&play).and_then(|()| case.judge(&play));
        ended
            .map(drop)
            .map_err(|why| format!("the next migration, after it {end}: {why}; {}", play.describe()))
    }
}

impl Play {
    fn describe(&self) -> String {
        let (source, target) = (&self.here.migration, &self.there.incoming);
        format!(
            "source {} {:?} {:?}, destination {} {:?} {:?}, lease {:?}, struck {:?}",
            source.status(),
            source.outcome(),
            source.statistics().error,
            target.status(),
            target.arrival(),
            target.statistics().error,
            self.ledger.holder(),
            self.cable.struck()
        )
    }
}

/// Descriptions of the struck states, for tables.
pub(super) fn struck(all: &[Struck]) -> Vec<String> {
    let status = |status: &String| if status.is_empty() { "none".to_owned() } else { status.clone() };
    all.iter().map(|one| format!("{} / {}", status(&one.statuses[0]), status(&one.statuses[1]))).collect()
}

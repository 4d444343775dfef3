//! One migration with its disturbance, and the properties that must hold at its end.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::disturbance::{Disturbance, Side};
use super::left::adapters_are_free;
use crate::Failure;
use crate::lab::inside::PLACE;
use crate::lab::rdma::child::Sterna;
use crate::lab::rdma::way::{Path, Way};
use crate::lab::rdma::wire::Wire;

/// Limit of every wait, whatever the disturbance.
const LONGEST: Duration = Duration::from_secs(180);
/// Time for which an undecided source asks before the operator decides.
const ASKING: Duration = Duration::from_secs(10);
const LINK_DOWN: Duration = Duration::from_secs(1);

/// The random choices of a migration.
#[derive(Debug)]
pub(super) struct Case {
    seed: u64,
    way: Way,
    lanes: u8,
    pinned_limit_mib: Option<u64>,
    disturbance: Disturbance,
    after: Duration,
}

/// The two processes: the one with the guest first.
#[derive(Default)]
pub(super) struct Places {
    here: Option<Sterna>,
    there: Option<Sterna>,
    /// Seed of the guest that runs in the first process, if there is one.
    guest: Option<u64>,
}

/// The guest's location after a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Guest {
    Stayed,
    Arrived,
    /// The guest was killed with its process.
    Dead,
}

pub(super) struct End {
    pub(super) guest: Guest,
    pub(super) said: String,
}

impl Case {
    pub(super) fn of(seed: u64, number: u64) -> Self {
        let seed = seed.wrapping_mul(1 << 20).wrapping_add(number);
        let mut random = fastrand::Rng::with_seed(seed);
        let way = Way {
            chunks_mib: [1 << random.u32(..4), 1 << random.u32(..4)],
            pin_all: random.u8(..4) == 0,
            path: Path::Wire,
            ..Way::PLAIN
        };
        let lanes = [0, 0, 1, 2, 4][random.usize(..5)];
        let pinned_limit_mib = [None, None, Some(16)][random.usize(..3)].filter(|_| !way.pin_all);
        let (disturbance, after) = Disturbance::draw(&mut random);
        Self { seed, way, lanes, pinned_limit_mib, disturbance, after }
    }

    pub(super) fn name(&self) -> String {
        let Self { way, lanes, pinned_limit_mib, disturbance, after, .. } = self;
        let limit = pinned_limit_mib.map_or(String::new(), |mib| format!(", at most {mib} MiB pinned"));
        let way = way.name();
        format!("{disturbance:?} after {} ms; {way}, {lanes} lanes{limit}", after.as_millis())
    }

    /// Plays the migration, and then one without a disturbance.
    pub(super) fn play(&self, places: &mut Places, wire: &Wire) -> Result<End, Failure> {
        let end = self.migrate(places, wire)?;
        if matches!(self.disturbance, Disturbance::LinkDown(_)) {
            *places = Places::default();
            wire.renew()?;
        }
        if self.disturbance != Disturbance::Nothing {
            let next = Self { disturbance: Disturbance::Nothing, after: Duration::ZERO, ..*self };
            next.migrate(places, wire)
                .map_err(|why| format!("the next migration after {}: {why}", end.said))?;
        }
        Ok(end)
    }

    fn migrate(&self, places: &mut Places, wire: &Wire) -> Result<End, Failure> {
        let guest = places.make(self)?;
        let (Some(source), Some(destination)) = (&mut places.here, &mut places.there) else {
            return Err("no processes".into());
        };
        let order = self.order(guest, &self.way.uri(), self.disturbance != Disturbance::Nothing);
        destination.ask(&with(&order, "receive"))?;
        source.ask(&with(&order, "send"))?;
        std::thread::sleep(self.after);
        match self.disturbance {
            Disturbance::Nothing => {}
            Disturbance::Cancel => drop(source.ask(&json!({ "do": "cancel" }))?),
            Disturbance::Abandon => drop(destination.ask(&json!({ "do": "abandon" }))?),
            Disturbance::Kill(Side::Source) => places.here = None,
            Disturbance::Kill(Side::Destination) => places.there = None,
            Disturbance::Cut => wire.cut()?,
            Disturbance::LinkDown(side) => {
                let end = usize::from(side == Side::Destination);
                wire.set_link(end, false)?;
                std::thread::sleep(LINK_DOWN);
                wire.set_link(end, true)?;
            }
        }
        let ends = settle(places)?;
        if self.disturbance == Disturbance::Cut {
            wire.restore()?;
        }
        let said = ends.each_ref().map(|end| end.as_ref().map_or("killed", |end| said_in(end))).join(", ");
        let guest = self.judge(&ends).map_err(|why| format!("{why}: {said}"))?;
        places.leave(guest)?;
        Ok(End { guest, said })
    }

    fn order(&self, guest: u64, uri: &str, is_disturbed: bool) -> Value {
        json!({
            "guest": guest,
            "uri": uri,
            "way": self.way.to_json(),
            "lanes": self.lanes,
            "pinned_limit_mib": self.pinned_limit_mib,
            "is_disturbed": is_disturbed,
        })
    }

    /// Checks that at most one side runs the guest. It is exactly one if both processes live. Both outcomes
    /// must agree with it.
    fn judge(&self, ends: &[Option<Value>; 2]) -> Result<Guest, Failure> {
        let [source, destination] = ends;
        let runs = |end: &Option<Value>| end.as_ref().map(|end| end["runs"] == true);
        let is = |end: &Option<Value>, name: &str| end.as_ref().map(|end| end["end"] == name);
        let (gone, arrived) = (is(source, "gone"), is(destination, "arrived"));
        if runs(source) != gone.map(|gone| !gone) || runs(destination) != arrived {
            return Err(format!(
                "runs at source and destination: {:?}, {:?}",
                runs(source),
                runs(destination)
            ));
        }
        let guest = match (gone, arrived) {
            (Some(false), Some(true)) => return Err("the guest runs at both sides".into()),
            (Some(true), Some(false)) => return Err("the guest runs at neither side".into()),
            (Some(false), _) => Guest::Stayed,
            (_, Some(true)) => Guest::Arrived,
            _ => Guest::Dead,
        };
        if self.disturbance == Disturbance::Nothing && guest != Guest::Arrived {
            return Err("undisturbed, and it did not arrive".into());
        }
        Ok(guest)
    }
}

impl Places {
    /// Starts missing processes and a guest in the first one. Returns the guest's seed.
    fn make(&mut self, case: &Case) -> Result<u64, Failure> {
        for place in [&mut self.here, &mut self.there] {
            if place.is_none() {
                let started = place.insert(Sterna::start(PLACE)?);
                let plain = Case { lanes: 2, pinned_limit_mib: None, ..*case };
                started.ask(&with(&plain.order(1, &case.way.uri(), false), "measure"))?;
            }
        }
        let here = self.here.as_mut().ok_or("no process")?;
        if let Some(guest) = self.guest {
            return Ok(guest);
        }
        here.ask(&json!({ "do": "boot", "guest": case.seed }))?;
        self.guest = Some(case.seed);
        Ok(case.seed)
    }

    /// Checks that the guest is whole and no resources are left. The side with the guest becomes the first.
    fn leave(&mut self, guest: Guest) -> Result<(), Failure> {
        if guest == Guest::Arrived {
            std::mem::swap(&mut self.here, &mut self.there);
        }
        if guest == Guest::Dead {
            self.guest = None;
        } else {
            let here = self.here.as_mut().ok_or("no process with a guest")?;
            here.ask(&json!({ "do": "check" })).map_err(|why| format!("the guest: {why}"))?;
        }
        for place in [&mut self.here, &mut self.there].into_iter().flatten() {
            place.ask(&json!({ "do": "close" }))?;
        }
        adapters_are_free()
    }
}

/// Waits for the outcomes of source and destination. `None` for a side that was killed.
fn settle(places: &mut Places) -> Result<[Option<Value>; 2], Failure> {
    let until = Instant::now() + LONGEST;
    let mut undecided = None;
    loop {
        let look = |place: &mut Option<Sterna>| {
            place.as_mut().map(|place| place.ask(&json!({ "do": "look" }))).transpose()
        };
        let ends = [look(&mut places.here)?, look(&mut places.there)?];
        let has_ended = |end: &Option<Value>| end.as_ref().is_none_or(|end| end["end"].is_string());
        if ends.iter().all(has_ended) {
            return Ok(ends);
        }
        if Instant::now() > until {
            return Err(format!("it does not end: {ends:?}"));
        }
        let [source, destination] = &ends;
        if source.as_ref().is_some_and(|end| end["is_undecided"] == true)
            && undecided.get_or_insert_with(Instant::now).elapsed() > ASKING
        {
            decide(places)?;
        }
        let waits = destination.as_ref().is_some_and(|end| end["waits_for_a_source"] == true);
        if has_ended(source) && waits {
            // The destination still waits, but the next source gets a destination of its own.
            abandon(places)?;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Decides as an operator after a look at the destination. A destination without the guest is given up first,
/// so that it cannot get it.
fn decide(places: &mut Places) -> Result<(), Failure> {
    let is_given_up = abandon(places)?;
    let runs_there = match &mut places.there {
        Some(there) if !is_given_up => there.ask(&json!({ "do": "look" }))?["end"] != "failed",
        _ => false,
    };
    if let Some(source) = &mut places.here {
        source.ask(&json!({ "do": "decide", "runs_there": runs_there }))?;
    }
    Ok(())
}

/// Gives the destination up. Returns whether that was still possible.
fn abandon(places: &mut Places) -> Result<bool, Failure> {
    let Some(there) = &mut places.there else { return Ok(false) };
    Ok(there.ask(&json!({ "do": "abandon" }))?["given_up"] == true)
}

fn with(order: &Value, name: &str) -> Value {
    let mut order = order.clone();
    order["do"] = name.into();
    order
}

fn said_in(end: &Value) -> &str {
    end["said"].as_str().unwrap_or_default()
}

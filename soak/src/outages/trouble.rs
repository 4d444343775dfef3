//! The disturbances of a case, and their moments.

use std::time::Duration;

use super::case::Kind;
use crate::stop::Side;

/// A selection of connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Which {
    All,
    /// One of the open connections, in the order in which they were opened.
    One(usize),
}

/// Direction in which bytes are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    Forward,
    Back,
}

/// An order of an operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// The source is ordered to cancel.
    Cancel,
    /// The destination is ordered to give up.
    Abandon,
    /// A side is ordered to break the connection.
    Pause(Side),
}

/// A disturbance of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum What {
    /// Connections are cut, and new ones fail for this duration.
    Cut(Which, Duration),
    Order(Order),
    Kill(Side),
}

/// The moment of a disturbance: a side reports a mark, then a number of bytes passes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Moment {
    pub(super) side: Side,
    /// A status, or another mark of [`super::side::mark`]. Empty: immediately.
    pub(super) mark: &'static str,
    /// Direction and number of bytes. `None`: at the mark itself, while the side waits.
    pub(super) bytes: Option<(Way, u64)>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Trouble {
    pub(super) moment: Moment,
    pub(super) what: What,
}

/// Marks at which a postcopy migration can be disturbed.
const OF_POSTCOPY: [(Side, &str); 16] = [
    (Side::Source, ""),
    (Side::Source, "round"),
    (Side::Source, "stopped"),
    (Side::Source, "postcopy-device"),
    (Side::Destination, "prepared"),
    (Side::Source, "prepared"),
    (Side::Source, "committed"),
    (Side::Destination, "committed"),
    (Side::Destination, "resumed"),
    (Side::Destination, "postcopy-active"),
    (Side::Source, "postcopy-active"),
    (Side::Source, "postcopy-active"),
    (Side::Source, "postcopy-active"),
    (Side::Source, "postcopy-active"),
    (Side::Destination, "completed"),
    (Side::Source, "completed"),
];

/// Marks at which a precopy migration can be disturbed.
const OF_PRECOPY: [(Side, &str); 12] = [
    (Side::Source, "round"),
    (Side::Source, "round"),
    (Side::Source, "round"),
    (Side::Source, "round"),
    (Side::Destination, "active"),
    (Side::Source, "stopped"),
    (Side::Source, "device"),
    (Side::Source, "device"),
    (Side::Destination, "prepared"),
    (Side::Source, "prepared"),
    (Side::Source, "committed"),
    (Side::Destination, "resumed"),
];

/// Marks at which a second loss can follow the first.
const OF_LOSSES: [(Side, &str); 8] = [
    (Side::Source, "lost"),
    (Side::Source, "reconnected"),
    (Side::Destination, "reconnected"),
    (Side::Source, "postcopy-paused"),
    (Side::Source, "postcopy-recover"),
    (Side::Destination, "postcopy-recover"),
    (Side::Source, "postcopy-active"),
    (Side::Destination, "postcopy-active"),
];

/// Minimum of bytes that the destination sends back from the first round on.
const LEAST_BACK: u64 = 8;

/// Draws the disturbances of a case of this kind.
pub(super) fn draw(random: &mut fastrand::Rng, kind: Kind) -> Vec<Trouble> {
    let loss =
        |random: &mut fastrand::Rng| Trouble { moment: Moment::first(random, kind), what: cut(random) };
    let again = |random: &mut fastrand::Rng, what| Trouble { moment: Moment::after_a_loss(random), what };
    let other = match random.u8(..16) {
        0 => return Vec::new(),
        1 => What::Order(Order::Cancel),
        2 => What::Order(Order::Abandon),
        3 if kind == Kind::Postcopy => What::Order(Order::Pause(side(random))),
        4 | 5 => What::Kill(side(random)),
        _ => {
            let mut all = vec![loss(random)];
            for _ in 0..[0, 0, 1, 2][random.usize(..4)] {
                let what = cut(random);
                all.push(again(random, what));
            }
            return all;
        }
    };
    if random.bool() {
        return vec![Trouble { moment: Moment::first(random, kind), what: other }];
    }
    vec![loss(random), again(random, other)]
}

/// Marks before *prepare* is answered. A loss at one of them does not end the migration (specs/extension.md
/// §13).
const BEFORE_PREPARED: [(Side, &str); 4] = [
    (Side::Source, "round"),
    (Side::Source, "stopped"),
    (Side::Source, "device"),
    (Side::Destination, "prepared"),
];

/// Draws a cut that a precopy of `bytes` bytes survives. The precopy reaches its position.
pub(super) fn one_cut(random: &mut fastrand::Rng, bytes: u64) -> Trouble {
    let in_round = |way, bytes| Moment { side: Side::Source, mark: "round", bytes: Some((way, bytes)) };
    let moment = match random.u8(..8) {
        0 => in_round(Way::Back, random.u64(1..=LEAST_BACK)),
        1 | 2 => {
            let (side, mark) = BEFORE_PREPARED[random.usize(..BEFORE_PREPARED.len())];
            Moment { side, mark, bytes: None }
        }
        _ => in_round(Way::Forward, random.u64(1..=bytes)),
    };
    Trouble { moment, what: cut(random) }
}

/// Draws a cut that follows another.
pub(super) fn another_cut(random: &mut fastrand::Rng) -> Trouble {
    let what = cut(random);
    Trouble { moment: Moment::after_a_loss(random), what }
}

fn side(random: &mut fastrand::Rng) -> Side {
    if random.bool() { Side::Source } else { Side::Destination }
}

fn cut(random: &mut fastrand::Rng) -> What {
    let which = if random.bool() { Which::All } else { Which::One(random.usize(..8)) };
    let down = [0, 0, 3, 50, 250][random.usize(..5)];
    What::Cut(which, Duration::from_millis(down))
}

impl Moment {
    fn first(random: &mut fastrand::Rng, kind: Kind) -> Self {
        let (side, mark) = match kind {
            Kind::Postcopy => OF_POSTCOPY[random.usize(..OF_POSTCOPY.len())],
            Kind::Resumed | Kind::Cuts | Kind::Handover => OF_PRECOPY[random.usize(..OF_PRECOPY.len())],
        };
        Self { side, mark, bytes: bytes(random, mark.is_empty()) }
    }

    fn after_a_loss(random: &mut fastrand::Rng) -> Self {
        let (side, mark) = OF_LOSSES[random.usize(..OF_LOSSES.len())];
        Self { side, mark, bytes: bytes(random, false) }
    }
}

/// Draws a direction and a number of bytes: from the length of a message up to the length of many pages.
fn bytes(random: &mut fastrand::Rng, is_needed: bool) -> Option<(Way, u64)> {
    let magnitude = 1 << random.u32(1..23);
    match random.u8(..6) {
        0 | 1 if !is_needed => None,
        2 => Some((Way::Back, random.u64(1..2048))),
        _ => Some((Way::Forward, random.u64(1..=magnitude))),
    }
}

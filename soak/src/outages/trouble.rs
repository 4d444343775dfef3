//! What goes wrong in a case, and when.

use std::time::Duration;

use super::case::Kind;
use crate::stop::Side;

/// Which connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Which {
    All,
    /// One of those that are open, in the order in which they were opened.
    One(usize),
}

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    Forward,
    Back,
}

/// What an operator says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// The source is to cancel.
    Cancel,
    /// The destination is to give up.
    Abandon,
    /// A side is to break the connection.
    Pause(Side),
}

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum What {
    /// Connections end, and for so long nobody gets through.
    Cut(Which, Duration),
    Order(Order),
    Kill(Side),
}

/// When: a side tells this, then so many bytes pass.
#[derive(Debug, Clone, Copy)]
pub(super) struct Moment {
    pub(super) side: Side,
    /// A status, or one of [`super::side::mark`]'s others. Empty: at once.
    pub(super) mark: &'static str,
    /// None: while the side tells it.
    pub(super) bytes: Option<(Way, u64)>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Trouble {
    pub(super) moment: Moment,
    pub(super) what: What,
}

/// Where a migration that goes on in postcopy can be disturbed.
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

/// Where one in precopy can be.
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

/// Where a loss can be followed by another.
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

/// At least so many bytes come back from the first round on.
const LEAST_BACK: u64 = 8;

/// Draws what goes wrong in a case of that kind.
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

/// States before *prepare* is answered: what is lost there ends nothing (specs/extension.md §13).
const BEFORE_PREPARED: [(Side, &str); 4] = [
    (Side::Source, "round"),
    (Side::Source, "stopped"),
    (Side::Source, "device"),
    (Side::Destination, "prepared"),
];

/// Draws a cut that a precopy of so many bytes survives, and does not miss.
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
            Kind::Resumed | Kind::Cuts => OF_PRECOPY[random.usize(..OF_PRECOPY.len())],
        };
        Self { side, mark, bytes: bytes(random, mark.is_empty()) }
    }

    fn after_a_loss(random: &mut fastrand::Rng) -> Self {
        let (side, mark) = OF_LOSSES[random.usize(..OF_LOSSES.len())];
        Self { side, mark, bytes: bytes(random, false) }
    }
}

/// As many bytes as any message has, and as many as many pages have.
fn bytes(random: &mut fastrand::Rng, is_needed: bool) -> Option<(Way, u64)> {
    let magnitude = 1 << random.u32(1..23);
    match random.u8(..6) {
        0 | 1 if !is_needed => None,
        2 => Some((Way::Back, random.u64(1..2048))),
        _ => Some((Way::Forward, random.u64(1..=magnitude))),
    }
}

//! What goes wrong in a case, and when.

use std::time::Duration;

use fastrand::Rng;

use super::vm::Callback;
use super::wire::{Line, Way, Which};

/// An operator's order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    Unprotect,
    HandOver,
    TakeOver { is_planned: bool },
}

/// One disturbance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Trouble {
    Nothing,
    Cut(Which),
    /// Bytes are taken and not passed on: which way, and for how long.
    Silence(Which, Option<Way>, Duration),
    /// A callback fails or panics once, at this call of it.
    Fails(Callback, u64, bool),
    /// What is held is gone with the standby, as if its process had died.
    DropStandby,
    /// The standby's operator gives the seeding up.
    GiveUp,
    /// All at once, by threads of their own.
    Orders(Vec<Order>),
}

/// When it comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Moment {
    /// So long after the standby was greeted.
    After(Duration),
    /// Checkpoint so-and-so was taken.
    Taken(u64),
    /// In the pause of such a checkpoint.
    InPause(u64),
    /// So many pieces have come on a line: what carries a checkpoint, its acknowledgement, an answer.
    Piece(Line, Way, u64),
    /// So long after an operator ordered a planned takeover of a guest that is protected.
    HandingOver(Duration),
    /// So long after its protection was to end.
    Ending(Duration),
}

impl Trouble {
    pub(super) fn draw(random: &mut Rng, lease: Duration, has_lanes: bool) -> Self {
        let which = |random: &mut Rng| {
            let only = [Line::Contact, Line::Main, if has_lanes { Line::Lane } else { Line::Main }];
            [Which::All, Which::All, Which::Only(only[0]), Which::Only(only[1]), Which::Only(only[2])]
                [random.usize(..5)]
        };
        match random.u8(..16) {
            0 => Self::Nothing,
            1..=4 => Self::Cut(which(random)),
            5..=7 => {
                let way = [Some(Way::ToStandby), Some(Way::ToPrimary), None][random.usize(..3)];
                let lasting = if random.bool() { lease / 3 } else { lease * 2 };
                Self::Silence(which(random), way, lasting)
            }
            8..=11 => {
                let callbacks = [
                    Callback::Save,
                    Callback::Save,
                    Callback::Stop,
                    Callback::Resume,
                    Callback::Load,
                    Callback::Start,
                ];
                let callback = callbacks[random.usize(..callbacks.len())];
                // At the standby each is called once in a takeover.
                let at_standby = matches!(callback, Callback::Load | Callback::Start);
                let calls = if at_standby { 1 } else { 1 + random.u64(..12) };
                Self::Fails(callback, calls, random.bool())
            }
            12 | 13 => [Self::DropStandby, Self::GiveUp][usize::from(random.u8(..4) == 0)].clone(),
            _ => {
                let all = [
                    Order::Unprotect,
                    Order::HandOver,
                    Order::TakeOver { is_planned: true },
                    Order::TakeOver { is_planned: false },
                ];
                let count = 1 + random.usize(..3);
                Self::Orders((0..count).map(|_| all[random.usize(..all.len())]).collect())
            }
        }
    }

    /// For tables.
    pub(super) fn label(&self) -> String {
        match self {
            Self::Nothing => "nothing".into(),
            Self::Cut(Which::All) => "cut: all".into(),
            Self::Cut(Which::Only(line)) => format!("cut: {line:?}"),
            Self::Silence(..) => "silence".into(),
            Self::Fails(callback, _, false) => format!("{callback:?} fails"),
            Self::Fails(callback, _, true) => format!("{callback:?} panics"),
            Self::DropStandby => "standby dropped".into(),
            Self::GiveUp => "standby given up".into(),
            Self::Orders(_) => "orders".into(),
        }
    }
}

impl Moment {
    pub(super) fn draw(random: &mut Rng) -> Self {
        let soon = Duration::from_micros(random.u64(..20_000));
        let number = 1 + random.u64(..8);
        match random.u8(..12) {
            0 => Self::After(soon),
            1 => Self::After(soon * 10),
            2 | 3 => Self::Taken(number),
            4 | 5 => Self::InPause(number),
            6 => Self::Piece(Line::Main, Way::ToStandby, 1 + random.u64(..400)),
            // READY, and REPLY, RECEIVED and LOADED of each checkpoint.
            7 => Self::Piece(Line::Main, Way::ToPrimary, 1 + random.u64(..16)),
            8 => Self::Piece(Line::Contact, Way::ToPrimary, 1 + random.u64(..20)),
            9 | 10 => Self::HandingOver(soon),
            _ => Self::Ending(soon),
        }
    }
}

//! The disturbances of a case, and their moments.

use std::time::Duration;

use fastrand::Rng;

use super::vm::Callback;
use super::wire::{Line, Way, Which};

/// An order of an operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    Unprotect,
    HandOver,
    TakeOver { is_planned: bool },
}

/// One disturbance of a protection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Trouble {
    Nothing,
    Cut(Which),
    /// The proxy receives bytes and does not forward them: connections, direction, duration.
    Silence(Which, Option<Way>, Duration),
    /// A callback fails or panics once, at the call of this number.
    Fails(Callback, u64, bool),
    /// The standby is dropped with its checkpoints, as if its process had died.
    DropStandby,
    /// The standby's operator gives up the seeding.
    GiveUp,
    /// Several orders in parallel, each from a thread of its own.
    Orders(Vec<Order>),
}

/// The moment of a disturbance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Moment {
    /// This long after the standby was greeted.
    After(Duration),
    /// When the checkpoint of this number was taken.
    Taken(u64),
    /// In the pause of the checkpoint of this number.
    InPause(u64),
    /// When this many pieces have passed on a line. A piece carries a checkpoint, its acknowledgement, or an
    /// answer.
    Piece(Line, Way, u64),
    /// This long after an operator requested a planned takeover of a protected guest.
    HandingOver(Duration),
    /// This long after the order to end the protection.
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
                // At the standby, a takeover calls each of these callbacks once.
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

    /// Name of the disturbance in tables.
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
            // Messages in this direction: READY, and for each checkpoint REPLY, RECEIVED and LOADED.
            7 => Self::Piece(Line::Main, Way::ToPrimary, 1 + random.u64(..16)),
            8 => Self::Piece(Line::Contact, Way::ToPrimary, 1 + random.u64(..20)),
            9 | 10 => Self::HandingOver(soon),
            _ => Self::Ending(soon),
        }
    }
}

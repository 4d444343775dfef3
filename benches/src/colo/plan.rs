//! Which cells are measured.

use std::time::Duration;

use clap::ValueEnum;

use crate::Args;

/// Who protects whom.
#[derive(Debug, Clone, Copy, ValueEnum, PartialEq, Eq)]
pub(crate) enum Pair {
    /// QEMU's own secondary.
    #[value(name = "qemu-qemu")]
    QemuQemu,
    /// A QEMU that migrates to `sterna standby` by itself; its output is not held back.
    #[value(name = "qemu-standby")]
    QemuStandby,
    /// A QEMU with `sterna protect`, and `sterna standby`.
    #[value(name = "qemu-sterna")]
    QemuSterna,
    /// Two VMs of `sterna run`.
    #[value(name = "sterna-sterna")]
    SternaSterna,
}

/// What the guest does.
#[derive(Debug, Clone, Copy, ValueEnum, PartialEq, Eq)]
pub(crate) enum Load {
    /// A QEMU's firmware waits for a disk; Sterna's guest writes a page a second.
    Idle,
    /// 2,500 pages a second, far apart.
    Light,
    /// 25,000 pages a second, far apart.
    Middle,
    /// 100,000 pages a second, far apart.
    Heavy,
    /// A ring of 64 MiB, in order, at 110 MB/s.
    Upload,
    /// 12 bytes in each page of a ring of 64 MiB, 10,000 pages a second, with `xbzrle`.
    Sparse,
    /// It talks: a QEMU's through a network card, Sterna's on its console 500 times a second.
    Talker,
}

/// A row's setting.
#[derive(Debug, Clone)]
pub(crate) struct Cell {
    pub(crate) pair: Pair,
    /// Sterna's primary: how pages are taken while the guest stands. QEMU has one way.
    pub(crate) mode: String,
    pub(crate) load: Load,
    pub(crate) delay: Duration,
    /// 0: the main channel alone.
    pub(crate) channels: u8,
    pub(crate) time: Duration,
    pub(crate) ram_mib: u64,
    /// Checkpoints on their way, at Sterna's primary.
    pub(crate) in_flight: u8,
}

/// Pages are copied while the guest stands; QEMU's guest stands until they are sent.
pub(crate) const COPY: &str = "copy";
/// Sterna's: the first for all cells of the matrix, the others where [`compares_modes`].
pub(crate) const MODES: &str = "auto,copy,copy-on-write";

/// Loads, delays, channels and pairs, each with each.
type Group<'a> = (&'a [Load], &'a [u64], &'a [u8], &'a [Pair]);

/// Pairs with the same load, delay and channels stand together and are measured one after the other.
const GROUPS: [Group<'_>; 8] = {
    use Load::{Heavy, Idle, Light, Middle, Sparse, Talker, Upload};
    use Pair::{QemuQemu, QemuSterna, SternaSterna};
    let all: &[Pair] = &[QemuQemu, QemuSterna, SternaSterna];
    [
        (&[Idle, Middle], &[100], &[0, 1, 2, 4], all),
        (&[Idle, Middle], &[10], &[0, 2], all),
        (&[Middle], &[50], &[0, 2], all),
        (&[Light, Heavy, Upload], &[100], &[0], all),
        (&[Idle, Middle], &[600], &[0], all),
        // `sterna protect` takes no shorter delay than 10 ms.
        (&[Middle], &[1], &[0], &[QemuQemu, SternaSterna]),
        (&[Talker], &[50], &[0], &[QemuSterna, SternaSterna]),
        (&[Sparse], &[100], &[0], &[SternaSterna]),
    ]
};

/// The whole matrix, or what was asked for.
pub(crate) fn cells(args: &Args) -> Vec<Cell> {
    let mut cells = Vec::new();
    if args.pairs.is_empty() && args.loads.is_empty() && args.delays.is_empty() && args.channels.is_empty() {
        for (loads, delays, channels, pairs) in GROUPS {
            product(args, (loads, delays, channels, pairs), &mut cells);
        }
        let first = args.modes.first();
        cells.retain(|cell| {
            cell.pair != Pair::SternaSterna || Some(&cell.mode) == first || compares_modes(cell)
        });
        return cells;
    }
    fn or<'a, T>(given: &'a [T], default: &'a [T]) -> &'a [T] {
        if given.is_empty() { default } else { given }
    }
    let group = (
        or(&args.loads, &[Load::Idle, Load::Middle]),
        or(&args.delays, &[100]),
        or(&args.channels, &[0]),
        or(&args.pairs, &[Pair::QemuQemu, Pair::QemuSterna, Pair::SternaSterna]),
    );
    product(args, group, &mut cells);
    cells
}

/// Whether ways to take pages stand beside each other in the whole matrix.
fn compares_modes(cell: &Cell) -> bool {
    matches!(cell.load, Load::Middle | Load::Heavy | Load::Upload)
        && cell.channels == 0
        && cell.delay == Duration::from_millis(100)
}

fn product(args: &Args, (loads, delays, channels, pairs): Group<'_>, cells: &mut Vec<Cell>) {
    for &load in loads {
        for &delay in delays {
            for &channels in channels {
                for &pair in pairs {
                    let modes = if pair == Pair::SternaSterna { &args.modes[..] } else { &[] };
                    let given = modes.iter().map(String::as_str);
                    let qemus = modes.is_empty().then_some(COPY);
                    for mode in given.chain(qemus) {
                        cells.push(Cell {
                            pair,
                            mode: mode.to_owned(),
                            load,
                            delay: Duration::from_millis(delay),
                            channels,
                            // Some checkpoints, at least.
                            time: Duration::from_secs_f64(args.seconds)
                                .max(Duration::from_millis(delay * 15)),
                            ram_mib: args.ram,
                            in_flight: args.in_flight,
                        });
                    }
                }
            }
        }
    }
}

impl Pair {
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::QemuQemu => "qemu-qemu",
            Self::QemuStandby => "qemu-standby",
            Self::QemuSterna => "qemu-sterna",
            Self::SternaSterna => "sterna-sterna",
        }
    }
}

impl Load {
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Light => "light",
            Self::Middle => "middle",
            Self::Heavy => "heavy",
            Self::Upload => "upload",
            Self::Sparse => "sparse",
            Self::Talker => "talker",
        }
    }

    /// What the boot sector is asked for. As a QEMU's guest that is idle has none, 0 is no rate.
    pub(crate) fn pages_per_second(self) -> u64 {
        match self {
            Self::Idle => 0,
            Self::Light => 2_500,
            Self::Middle => 25_000,
            Self::Heavy => 100_000,
            Self::Upload => 110_000_000 / 4096,
            Self::Sparse => 10_000,
            Self::Talker => 500,
        }
    }
}

impl Cell {
    pub(crate) fn name(&self) -> String {
        format!(
            "{} {} {} ms, {} channels, {}",
            self.pair.word(),
            self.load.word(),
            self.delay.as_millis(),
            self.channels,
            self.mode
        )
    }
}

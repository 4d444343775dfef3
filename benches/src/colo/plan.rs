//! Chooses the cells that are measured.

use std::time::Duration;

use clap::ValueEnum;

use crate::Args;

/// The programs of primary and standby.
#[derive(Debug, Clone, Copy, ValueEnum, PartialEq, Eq)]
pub(crate) enum Pair {
    /// QEMU's own secondary.
    #[value(name = "qemu-qemu")]
    QemuQemu,
    /// A QEMU that migrates directly to `sterna standby`. Its output is not gated.
    #[value(name = "qemu-standby")]
    QemuStandby,
    /// A QEMU with `sterna protect`, and `sterna standby`.
    #[value(name = "qemu-sterna")]
    QemuSterna,
    /// Two VMs of `sterna run`.
    #[value(name = "sterna-sterna")]
    SternaSterna,
}

/// The work of the guest.
#[derive(Debug, Clone, Copy, ValueEnum, PartialEq, Eq)]
pub(crate) enum Load {
    /// A QEMU's firmware waits for a disk. Sterna's guest writes a page per second.
    Idle,
    /// 2,500 pages per second, far apart.
    Light,
    /// 25,000 pages per second, far apart.
    Middle,
    /// 100,000 pages per second, far apart.
    Heavy,
    /// A ring of 64 MiB, in order, at 110 MB/s.
    Upload,
    /// Differences: 12 bytes in each page of a ring of 64 MiB, 10,000 pages per second, with `xbzrle`.
    Sparse,
    /// Output: a QEMU's guest sends packets, Sterna's writes to its console 500 times per second.
    Talker,
}

/// The setting of a row.
#[derive(Debug, Clone)]
pub(crate) struct Cell {
    pub(crate) pair: Pair,
    /// How Sterna's primary takes pages while the guest is paused. QEMU has one way.
    pub(crate) mode: String,
    pub(crate) load: Load,
    pub(crate) delay: Duration,
    /// Number of multifd channels; 0: only the main channel.
    pub(crate) channels: u8,
    pub(crate) time: Duration,
    pub(crate) ram_mib: u64,
    /// Limit of checkpoints in flight at Sterna's primary.
    pub(crate) in_flight: u8,
}

/// Pages are copied while the guest is paused. QEMU's guest stays paused until they are sent.
pub(crate) const COPY: &str = "copy";
/// Sterna's modes. The first runs in all cells of the matrix, the others where [`compares_modes`].
pub(crate) const MODES: &str = "auto,copy,copy-on-write";

/// Loads, delays, channels and pairs, in all combinations.
type Group<'a> = (&'a [Load], &'a [u64], &'a [u8], &'a [Pair]);

/// The cells in groups. Pairs with the same load, delay and channels are adjacent, so that they are measured
/// one after another.
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
        // The minimum delay of `sterna protect` is 10 ms.
        (&[Middle], &[1], &[0], &[QemuQemu, SternaSterna]),
        (&[Talker], &[50], &[0], &[QemuSterna, SternaSterna]),
        (&[Sparse], &[100], &[0], &[SternaSterna]),
    ]
};

/// The whole matrix, or the requested cells.
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

/// Whether the whole matrix compares the modes for this cell.
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
                            // The time is extended to at least 15 checkpoints.
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

    /// The pace that the boot sector gets. 0 is no pace: an idle QEMU has no boot sector.
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

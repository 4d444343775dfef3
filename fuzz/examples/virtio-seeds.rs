//! Writes seeds for the fuzz target `virtio_queues`: for each device, the requests of a driver that follows the
//! specification.
//!
//! `cargo run -p sterna-fuzz --example virtio-seeds -- fuzz/seeds` (the directory is the argument).
#![forbid(unsafe_code)]

use std::path::PathBuf;

use sterna_fuzz::targets::virtio_queues::{Action, Kind};

const ALL: u64 = u64::MAX;
const VERSION_1: u64 = 1 << 32;
const NEXT: u8 = 1;
const WRITE: u8 = 2;
const INDIRECT: u8 = 4;

fn main() -> std::io::Result<()> {
    let directory = std::env::args().nth(1).map(PathBuf::from);
    let directory = directory.ok_or_else(|| std::io::Error::other("give the directory to write to"))?;
    let directory = directory.join("virtio_queues");
    std::fs::create_dir_all(&directory)?;
    for (number, kind) in (0u8..).zip(Kind::ALL) {
        for (name, actions) in [("ready", ready(kind)), ("before", before(kind)), ("broken", broken(kind))] {
            let mut input = vec![number];
            actions.iter().for_each(|action| action.put(&mut input));
            std::fs::write(directory.join(format!("{name}-{number}")), input)?;
        }
    }
    Ok(())
}

/// The requests that a driver sends to a device of this kind.
fn requests(kind: Kind) -> Vec<Action<'static>> {
    match kind {
        Kind::Disk | Kind::ReadOnlyDisk => {
            let mut actions = Vec::new();
            // Request types, each with the bytes that the device reads and writes: in, out, flush, identify,
            // discard,
            // write zeroes, and a type that does not exist.
            let all =
                [(0, 16, 513), (1, 528, 1), (4, 16, 1), (8, 16, 21), (11, 32, 1), (13, 32, 1), (7, 16, 1)];
            for (kind, read, written) in all {
                actions.push(Action::Header(kind, 1, 0));
                actions.push(Action::Request(0, read, written));
                actions.push(Action::Run(false));
                actions.push(Action::Run(true));
            }
            actions
        }
        Kind::Card | Kind::LargeCard => vec![
            Action::Request(0, 0, 1600),
            Action::Request(1, 100, 0),
            Action::Outside(b"a packet"),
            Action::Run(false),
            Action::Run(true),
            Action::Outside(b"another one, which is longer"),
            // Control class 4 sets the number of queue pairs, class 3 acknowledges the announcement.
            Action::Header(4, 0, 2),
            Action::Request(4, 4, 1),
            Action::Header(3, 0, 0),
            Action::Request(2, 2, 1),
            Action::Run(false),
        ],
        Kind::Console => vec![
            Action::Request(0, 0, 64),
            Action::Outside(b"typed"),
            Action::Request(1, 80, 0),
            Action::Run(false),
            Action::Outside(b"typed later"),
            Action::Run(true),
        ],
        Kind::Entropy => vec![Action::Request(0, 0, 64), Action::Request(0, 0, 5000), Action::Run(false)],
        Kind::Reporting => vec![Action::Request(2, 0, 0x3000), Action::Request(0, 4, 0), Action::Run(false)],
        Kind::Hinting => vec![
            Action::Request(2, 4, 0),
            Action::Request(2, 0, 0x3000),
            Action::Request(3, 0, 0x2000),
            Action::Outside(&[2]),
            Action::Run(true),
            Action::Outside(&[0]),
        ],
    }
}

/// Requests to a device that is ready. Then its state is saved and loaded.
fn ready(kind: Kind) -> Vec<Action<'static>> {
    let set_up = Action::SetUp(ALL, 8, 4);
    [vec![set_up], requests(kind), vec![Action::Move, Action::Run(true), Action::Read(0x40, 8)]].concat()
}

/// Requests that wait when the device becomes ready. The driver accepts only `VERSION_1`.
fn before(kind: Kind) -> Vec<Action<'static>> {
    let state = Action::Change(9, 1);
    let ready = Action::Register(0x70 / 4, 12);
    [vec![Action::SetUp(VERSION_1, 8, 8), Action::Run(false)], requests(kind), vec![ready, state]].concat()
}

/// Chains of the maximum length, and chains that break the specification.
fn broken(kind: Kind) -> Vec<Action<'static>> {
    let mut actions = vec![Action::SetUp(ALL, 8, 4)];
    actions.extend(requests(kind));
    for queue in 0..4 {
        actions.extend([
            // An indirect table with one descriptor.
            Action::Memory(0x3000, &[0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 2, 0, 0, 0]),
            Action::Descriptor(queue, 0, 0x1800, 16, INDIRECT, 0),
            Action::Offer(queue, 0),
            Action::Run(false),
            Action::Run(true),
            // A descriptor that crosses the gap in RAM, in a chain that loops.
            Action::Descriptor(queue, 1, 0x3ff0, 0x400, WRITE | NEXT, 1),
            Action::Offer(queue, 1),
            Action::Run(false),
            Action::Run(true),
            Action::Offer(queue, 200),
            Action::Run(false),
        ]);
    }
    actions
}

//! Complete migrations from a source like QEMU, and from one like a Sterna.

use sterna_transport::ByteStream;
use sterna_transport::rdma::double::Settings;

use super::source::{Guest, Habits, Source, returned};
use super::{Lab, config};

const SHUT_0: &[u8] = &[0, 1, 0, 4, 0, 0, 0, 0];

fn assert_moves(seed: u64, guest: &Guest, chunk_here_mib: u64, habits: Habits) {
    let settings = if seed < 3 { Settings::seeded(seed) } else { Settings::new() };
    moves(settings, guest, chunk_here_mib, habits);
}

fn moves(settings: Settings, guest: &Guest, chunk_here_mib: u64, habits: Habits) {
    let lab = Lab::with(settings, &config(), |params| {
        params.rdma.chunk = sterna::ChunkSize::new(chunk_here_mib << 20).unwrap();
    });
    let source = Source::start(&lab, guest, habits);
    let stream = source.run();
    if habits.return_path {
        assert_eq!(returned(&stream), SHUT_0);
    }
    lab.assert_arrived(guest);
    stream.finish_writing().unwrap();
    drop(stream);
    lab.assert_empty();
}

#[test]
fn guest_arrives_whatever_the_chunk_sizes_of_the_two_sides_are() {
    let guest = Guest::new(&config());
    for (seed, (there, here)) in [(1, 1), (8, 1), (1, 16), (64, 1), (1024, 2), (4, 1024)].iter().enumerate() {
        assert_moves(seed as u64 + 1, &guest, *here, Habits::qemu(*there));
        assert_moves(seed as u64 + 1, &guest, *here, Habits::sterna(*there));
    }
}

#[test]
fn guest_arrives_with_all_memory_registered_at_once() {
    let guest = Guest::new(&config());
    for habits in [Habits::qemu(1), Habits::sterna(4)] {
        assert_moves(7, &guest, 1, Habits { pin_all: true, ..habits });
    }
}

#[test]
fn source_with_a_return_path_is_answered() {
    let guest = Guest::new(&config()).with_return_path();
    for habits in [Habits::qemu(1), Habits { pin_all: true, ..Habits::qemu(1) }] {
        assert_moves(9, &guest, 1, habits.with_return_path());
    }
}

#[test]
fn guest_arrives_where_the_adapter_follows_memory() {
    let guest = Guest::new(&config());
    let pin_all = Habits { pin_all: true, ..Habits::qemu(1) };
    for (seed, habits) in [Habits::qemu(1), Habits::qemu(1024), Habits::sterna(4), pin_all].iter().enumerate()
    {
        let mut settings = Settings::seeded(seed as u64);
        settings.on_demand_paging = true;
        // Enough only for messages and for the memory that the source has registered.
        settings.locked_memory_bytes = Some(40 << 20);
        moves(settings, &guest, 1, *habits);
    }
}

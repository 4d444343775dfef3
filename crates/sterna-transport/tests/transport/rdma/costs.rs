//! Virtual time of the double, compared with published measurements of an adapter.

use std::time::Duration;

use sterna_ram::{Backing, RamBlock};
use sterna_transport::rdma::double::Settings;
use sterna_transport::rdma::{Access, Memory, Queue, QueuePairAttributes};

use super::{Lab, MIB, complete, send, write_to};

/// Virtual time of a program that writes 8 GiB chunk by chunk.
///
/// For each chunk it asks the peer to register and registers its own memory after the answer. Then it writes,
/// waits for completion, and waits until the peer is ready again.
fn chunk_by_chunk(chunk: usize) -> Duration {
    const GUEST: usize = 8 << 30;
    let mut settings = Settings::new();
    settings.copies_writes = false;
    let lab = Lab::new(settings);
    let joined = lab.join_with(&QueuePairAttributes::new(16, 16).with_remote_write());
    // Only address space is allocated: no page is touched.
    let guests = [(); 2].map(|()| RamBlock::new("ram", GUEST as u64, Backing::Anonymous).unwrap());
    let [source, destination] = [&joined.source, &joined.destination].map(|side| {
        let memory = Memory::anonymous(4096).unwrap();
        side.adapter().register(memory, Access::RECEIVE).unwrap()
    });
    let began = lab.network.elapsed();
    for offset in (0..GUEST).step_by(chunk) {
        // The request, the peer's registration, and its answer.
        joined.destination.post_receive(0, destination.piece(0, 64).unwrap()).unwrap();
        joined.source.post_receive(0, source.piece(0, 64).unwrap()).unwrap();
        joined.source.post_send(&[send(0, source.piece(0, 40).unwrap())]).unwrap();
        complete(&*joined.destination, Queue::Receive);
        let range = |guest| Memory::of_block(guest, offset as u64, chunk).unwrap();
        let to = joined.destination.adapter().register(range(&guests[1]), Access::REMOTE_WRITE).unwrap();
        joined.destination.post_send(&[send(0, destination.piece(0, 32).unwrap())]).unwrap();
        complete(&*joined.source, Queue::Receive);
        let from = joined.source.adapter().register(range(&guests[0]), Access::SOURCE).unwrap();
        joined.source.post_send(&[write_to(1, from.piece(0, chunk as u32).unwrap(), &to, 0)]).unwrap();
        for side in [&joined.source, &joined.source, &joined.destination] {
            assert!(complete(&**side, Queue::Send).status.is_success());
        }
    }
    lab.network.elapsed() - began
}

#[test]
fn default_costs_give_the_published_times() {
    for (chunk, published) in [(MIB, 37.9), (1 << 30, 4.4)] {
        let seconds = chunk_by_chunk(chunk).as_secs_f64();

        assert!((seconds / published - 1.0).abs() < 0.02, "{} MiB: {seconds} s", chunk / MIB);
    }
}

#[test]
fn writes_in_flight_overlap_and_waiting_costs_round_trips() {
    let lab = Lab::new(Settings::new());
    let joined = lab.join();
    let [from, to] = [(&joined.source, Access::SOURCE), (&joined.destination, Access::REMOTE_WRITE)]
        .map(|(side, access)| super::registered(&*side.adapter(), &super::block(MIB), access));
    let costs = Settings::new().costs;
    let timed = |batch: u32| {
        let began = lab.network.elapsed();
        for _ in 0..32 / batch {
            let request = write_to(1, from.piece(0, 4096).unwrap(), &to, 0);
            joined.source.post_send(&vec![request; batch as usize]).unwrap();
            (0..batch).for_each(|_| assert!(complete(&*joined.source, Queue::Send).status.is_success()));
        }
        lab.network.elapsed() - began
    };

    let (one_by_one, together) = (timed(1), timed(32));

    assert_eq!(one_by_one - together, costs.round_trip * 31);
}

//! Opaque machines in memory: they are received and sent on.

use super::stream::{self, BLOCKS, RAM, Stream};
use super::*;
use sterna::UnusableImage;
use sterna::{Arrival, Incoming, Migration};
use sterna_opaque::MemoryMachine;
use sterna_ram::{Backing, GuestRam, RamBlock};

fn place<'a>(blocks: impl Iterator<Item = (&'a str, u64)>) -> MemoryMachine {
    let block = |(name, length): (&str, u64)| RamBlock::new(name, length, Backing::Anonymous).unwrap();
    MemoryMachine::new(GuestRam::new(blocks.map(block).collect()).unwrap())
}

fn waiting(machine: &MemoryMachine, params: &Parameters, capabilities: Capabilities) -> Incoming {
    let at: Address = "tcp:127.0.0.1:0".parse().unwrap();
    machine.receive(&at, params.clone(), capabilities, Arc::new(())).expect("listening")
}

fn sent(machine: &MemoryMachine, to: &Address, params: &Parameters, capabilities: Capabilities) -> Migration {
    machine.send(to, params.clone(), capabilities, Arc::new(())).expect("started")
}

/// Sends a running guest from memory to memory, once with the blocks in another order, and then to a VM in which it
/// runs.
fn through_memory(params: &Parameters, capabilities: Capabilities) {
    let (source, target) = pair(&config());
    let ram = source.ram();
    let blocks: Vec<_> = ram.blocks().iter().map(|block| (block.name(), block.len_bytes())).collect();
    let (first, second) = (place(blocks.iter().copied()), place(blocks.iter().rev().copied()));

    let incoming = waiting(&first, params, capabilities);
    let migration = start(&source, &incoming.address(), params, capabilities, Arc::new(()));
    assert!(matches!((migration.wait(), incoming.wait()), (Outcome::Completed, Arrival::Completed(_))));
    let incoming = waiting(&second, params, capabilities);
    let migration = sent(&first, &incoming.address(), params, capabilities);
    assert!(matches!((migration.wait(), incoming.wait()), (Outcome::Completed, Arrival::Completed(_))));
    // As if the machine had always been here.
    let ram = GuestRam::new(second.ram().blocks().to_vec()).unwrap();
    let second = MemoryMachine::of(ram, second.shape().unwrap()).unwrap();
    let incoming = listen(&target, params, capabilities);
    let migration = sent(&second, &incoming.address(), params, capabilities);
    let (outcome, arrival) = (migration.wait(), incoming.wait());

    assert_arrived(&outcome, &arrival, &target);
}

#[test]
fn memory_carries_a_guest_on() {
    through_memory(&parameters(), Capabilities::default());
    let (params, capabilities) = multifd(2);
    through_memory(&params, capabilities);
}

fn content(machine: &MemoryMachine) -> Vec<Vec<u8>> {
    let blocks = machine.ram().blocks().iter();
    let read = |block: &RamBlock| {
        let mut bytes = vec![0; block.len_bytes() as usize];
        block.slice(0, bytes.len()).unwrap().copy_to(&mut bytes).unwrap();
        bytes
    };
    blocks.map(read).collect()
}

#[test]
fn qemus_stream_is_kept_in_memory_bit_for_bit() {
    for return_path in [true, false] {
        for (name, change) in stream::CHANGES {
            let mut stream = Stream::new(return_path);
            change(&mut stream);
            // A background snapshot has no END section, so it exists only as a file.
            if !stream.has_end {
                continue;
            }
            let machine = place(BLOCKS.into_iter());
            let incoming = waiting(&machine, &parameters(), Capabilities::default());
            let answers = stream.play(&incoming.address());
            let arrival = incoming.wait();
            let answers = answers.join().unwrap();

            assert!(matches!(arrival, Arrival::Completed(_)), "{name}: {arrival:?}");
            let shape = machine.shape().expect("a machine");
            assert_eq!((shape.early, shape.setup), (stream.early, stream.setup), "{name}");
            assert_eq!((shape.between, shape.devices), (stream.between, stream.devices), "{name}");
            assert_eq!((shape.ram.section_id, shape.has_eof), (RAM, true));
            assert_eq!(shape.description.is_some(), stream.described);
            assert!(content(&machine) == stream.ram, "{name}: RAM");
            if return_path {
                assert!(answers.ends_with(&[0, 1, 0, 4, 0, 0, 0, 0]), "no SHUT 0: {answers:02x?}");
            }
        }
    }
}

#[test]
fn cut_stream_leaves_no_machine_and_the_next_one_comes() {
    let bytes = Stream::new(true).bytes();
    let machine = place(BLOCKS.into_iter());
    for length in [bytes.len() / 2, bytes.len() - 500] {
        let incoming = waiting(&machine, &parameters(), Capabilities::default());
        let answers = stream::play(&incoming.address(), bytes[..length].to_vec(), false);

        assert!(matches!(incoming.wait(), Arrival::Failed(_)), "{length} bytes");
        answers.join().unwrap();
        assert!(machine.shape().is_none());
        assert!(content(&machine).iter().flatten().all(|byte| *byte == 0), "{length} bytes: memory is left");
    }
    let incoming = waiting(&machine, &parameters(), Capabilities::default());
    let mut stream = Stream::new(true);
    let answers = stream.play(&incoming.address());
    assert!(matches!(incoming.wait(), Arrival::Completed(_)));
    answers.join().unwrap();
    assert!(content(&machine) == stream.ram);
}

#[test]
fn place_without_a_machine_and_files_are_refused() {
    let machine = place(BLOCKS.into_iter());
    let file: Address = "file:/nowhere".parse().unwrap();
    let to: Address = "tcp:127.0.0.1:1".parse().unwrap();
    let send = |at: &Address| machine.send(at, parameters(), Capabilities::default(), Arc::new(())).err();

    assert!(matches!(send(&to), Some(StartError::Image(UnusableImage::NotArrived))));
    assert!(send(&file).is_some());
    assert!(machine.receive(&file, parameters(), Capabilities::default(), Arc::new(())).is_err());
    assert!(MemoryMachine::of(machine.ram().clone(), sterna_image::Shape::empty()).is_err());
}

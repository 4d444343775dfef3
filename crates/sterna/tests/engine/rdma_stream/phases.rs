//! Phases: commands, answers, and guest memory that is written in between.

use sterna::rdma::{DestinationStream, SourceStream, Written};
use sterna_ram::{Backing, RamBlock};
use sterna_transport::rdma::double::Settings;
use sterna_transport::rdma::{Access, CompletionStatus, Memory, RdmaError, Registration, Write};
use sterna_transport::{ByteStream, StreamError};
use sterna_wire::rdma::session::{Arrival, Command};
use sterna_wire::rdma::{
    BlockPlace, Message, MessageType, RegisterRequest, RegisterResult, ZeroRange, encode_file, encode_records,
};

use sterna_wire::WireError;

use super::{LIMIT, Lab, MIB, empty};
use crate::support::cause;

const HOOK: [u8; 8] = 0x80u64.to_be_bytes();

fn records<T: sterna_wire::rdma::Record>(records: &[T]) -> Vec<u8> {
    let mut message = Vec::new();
    encode_records(records, &mut message).unwrap();
    message
}

fn read_hook(stream: &DestinationStream) {
    let mut hook = [0; 8];
    let mut count = 0;
    while count < 8 {
        count += stream.read(&mut hook[count..], LIMIT).unwrap();
    }
    assert_eq!(hook, HOOK);
    stream.begin_phase().unwrap();
}

/// A destination with one block: performs the commands of one phase. Returns its registrations.
fn phase(stream: &DestinationStream, block: &RamBlock) -> Vec<Registration> {
    let place = BlockPlace {
        host_address: block.host_address() as u64,
        offset: 0,
        length_bytes: block.len_bytes(),
        key: 0,
    };
    let mut registered = Vec::new();
    read_hook(stream);
    loop {
        let (arrival, message) = stream.next_command(LIMIT).unwrap();
        match (arrival, Message::decode(&message).unwrap()) {
            (Arrival::Blocks, _) => {
                stream.answer(MessageType::RamBlocksResult, &records(&[place]), LIMIT).unwrap();
            }
            (Arrival::Clear, Message::Compress(ranges)) => {
                for (_, range) in ranges.iter() {
                    let window = block.slice(range.start, range.length as usize).unwrap();
                    window.fill_zero().unwrap();
                }
            }
            (Arrival::Register, Message::RegisterRequest(requests)) => {
                assert_eq!(requests.len(), 1);
                let memory = Memory::of_block(block, 0, block.len_bytes() as usize).unwrap();
                let adapter = stream.main().connection().adapter();
                let registration = adapter.register(memory, Access::REMOTE_WRITE).unwrap();
                let result = RegisterResult { key: registration.rkey(), host_address: place.host_address };
                registered.push(registration);
                stream.answer(MessageType::RegisterResult, &records(&[result]), LIMIT).unwrap();
            }
            (Arrival::PhaseOver, _) => return registered,
            (arrival, message) => panic!("{arrival:?}: {message:?}"),
        }
    }
}

fn exchange_blocks(source: &SourceStream) -> u64 {
    source.begin_phase(&HOOK, LIMIT).unwrap();
    let answer = source.command(Command::RamBlocks, &empty(MessageType::RamBlocksRequest), LIMIT).unwrap();
    let Message::RamBlocksResult(blocks) = Message::decode(answer.answer().unwrap()).unwrap() else {
        panic!("{answer:?}")
    };
    finish(source);
    blocks.iter().next().unwrap().1.host_address
}

fn finish(source: &SourceStream) {
    let over = source.command(Command::Finished, &empty(MessageType::RegisterFinished), LIMIT).unwrap();
    assert_eq!(over, Written::Sent);
}

fn register(source: &SourceStream) -> u32 {
    let request = records(&[RegisterRequest { key: 0, block: 0, more_chunks: 7 }]);
    let answer = source.command(Command::Register(1), &request, LIMIT).unwrap();
    let Message::RegisterResult(results) = Message::decode(answer.answer().unwrap()).unwrap() else {
        panic!("{answer:?}")
    };
    results.iter().next().unwrap().1.key
}

fn blocks() -> (RamBlock, RamBlock) {
    let block = |fill: bool| {
        let block = RamBlock::new("pc.ram", 8 * MIB as u64, Backing::Memfd).unwrap();
        if fill {
            let bytes: Vec<u8> = (0..8 * MIB).map(|at| (at % 239) as u8 + 1).collect();
            block.write(0, &bytes).unwrap();
        }
        block
    };
    (block(true), block(false))
}

fn bytes(block: &RamBlock) -> Vec<u8> {
    let mut bytes = vec![0; block.len_bytes() as usize];
    block.read(0, &mut bytes).unwrap();
    bytes
}

fn source_registration(source: &SourceStream, block: &RamBlock) -> Registration {
    let memory = Memory::of_block(block, 0, block.len_bytes() as usize).unwrap();
    source.main().connection().adapter().register(memory, Access::SOURCE).unwrap()
}

#[test]
fn memory_travels_in_phases_and_the_stream_around_them() {
    for seed in 1..=4 {
        println!("seed {seed}");
        let lab = Lab::new(Settings::seeded(seed));
        let joined = lab.join(true);
        let (from, to) = blocks();
        to.write(6 * MIB as u64, &[9; 5000]).unwrap();

        let registered = std::thread::scope(|scope| {
            let destination = scope.spawn(|| {
                assert!(phase(&joined.destination, &to).is_empty());
                let mut between = [0; 7];
                assert_eq!(joined.destination.read(&mut between, LIMIT).unwrap(), 7);
                assert_eq!(&between, b"between");
                let registered = phase(&joined.destination, &to);
                let mut after = [0; 5];
                assert_eq!(joined.destination.read(&mut after, LIMIT).unwrap(), 5);
                assert_eq!(&after, b"after");
                registered
            });
            let source = &joined.source;
            let host_address = exchange_blocks(source);
            source.write(b"between", LIMIT).unwrap();

            source.begin_phase(&HOOK, LIMIT).unwrap();
            let refused = source.write(b"stream", LIMIT).unwrap_err();
            let Some(WireError { rule, .. }) = cause(&refused) else { panic!("{refused:?}") };
            assert_eq!(rule, "a phase is open, in which stream data is not permitted");
            let zeros = ZeroRange { value: 0, block: 0, start: 6 * MIB as u64, length: 5000 };
            source.command(Command::Compress(1), &records(&[zeros]), LIMIT).unwrap();
            let rkey = register(source);
            let registration = source_registration(source, &from);
            // Lengths of every size, many in flight, across the chunks' borders.
            let mut offset = 0;
            for len in [4096, MIB + 8192, 512, 2 * MIB, 100_000].into_iter().cycle() {
                let len = len.min(6 * MIB - offset);
                let piece = registration.piece(offset, len as u32).unwrap();
                let write = Write { from: piece, address: host_address + offset as u64, rkey };
                source.write_memory(&[write], LIMIT).unwrap();
                offset += len;
                if offset == 6 * MIB {
                    break;
                }
            }
            source.flush_memory(LIMIT).unwrap();
            finish(source);
            source.write(b"after", LIMIT).unwrap();
            destination.join().unwrap()
        });

        assert!(bytes(&to)[..6 * MIB] == bytes(&from)[..6 * MIB]);
        assert!(bytes(&to)[6 * MIB..].iter().all(|byte| *byte == 0));
        let counts = lab.network.counts();
        assert_eq!((counts.rnrs, counts.stale_registrations, counts.write_bytes), (0, 0, 6 * MIB as u64));
        drop((registered, joined));
        lab.assert_empty();
    }
}

#[test]
fn phase_does_not_end_before_its_writes_are_complete() {
    let lab = Lab::new(Settings::new());
    let joined = lab.join(false);
    let (from, to) = blocks();
    std::thread::scope(|scope| {
        let destination = scope.spawn(|| [phase(&joined.destination, &to), phase(&joined.destination, &to)]);
        let source = &joined.source;
        let address = exchange_blocks(source);
        source.begin_phase(&HOOK, LIMIT).unwrap();
        let rkey = register(source);
        let registration = source_registration(source, &from);
        let write = Write { from: registration.piece(0, 4096).unwrap(), address, rkey };

        source.write_memory(&[write], LIMIT).unwrap();
        let refused =
            source.command(Command::Finished, &empty(MessageType::RegisterFinished), LIMIT).unwrap_err();

        let Some(WireError { rule, .. }) = cause(&refused) else { panic!("{refused:?}") };
        assert_eq!(rule, "1 WRITEs are not complete");
        source.flush_memory(LIMIT).unwrap();
        finish(source);
        destination.join().unwrap();
    });
}

#[test]
fn write_past_its_window_names_the_address_and_breaks_both_ends() {
    let lab = Lab::new(Settings::new());
    let joined = lab.join(false);
    let (from, to) = blocks();
    std::thread::scope(|scope| {
        let destination = scope.spawn(|| {
            let _none = phase(&joined.destination, &to);
            read_hook(&joined.destination);
            let (arrival, _) = joined.destination.next_command(LIMIT).unwrap();
            assert_eq!(arrival, Arrival::Register);
            // Less than was requested.
            let memory = Memory::of_block(&to, 0, MIB).unwrap();
            let adapter = joined.destination.main().connection().adapter();
            let window = adapter.register(memory, Access::REMOTE_WRITE).unwrap();
            let result = RegisterResult { key: window.rkey(), host_address: to.host_address() as u64 };
            joined.destination.answer(MessageType::RegisterResult, &records(&[result]), LIMIT).unwrap();
            joined.destination.next_command(LIMIT).unwrap_err()
        });
        let source = &joined.source;
        let address = exchange_blocks(source);
        source.begin_phase(&HOOK, LIMIT).unwrap();
        let rkey = register(source);
        let registration = source_registration(source, &from);
        let write = Write { from: registration.piece(0, 2 * MIB as u32).unwrap(), address, rkey };

        source.write_memory(&[write], LIMIT).unwrap();
        let failed = source.flush_memory(LIMIT).unwrap_err();

        assert!(
            matches!(failed, StreamError::Rdma(RdmaError::Failed {
                status: CompletionStatus::RemoteAccess, remote_address: Some(at), ..
            }) if at == address),
            "{failed}"
        );
        // The destination learns it from the disconnect at the latest.
        source.shutdown();
        let seen = destination.join().unwrap();
        assert!(matches!(&seen, StreamError::Rdma(error) if error.is_end()), "{seen}");
    });
    assert!(bytes(&to).iter().all(|byte| *byte == 0));
}

#[test]
fn rights_end_in_one_call_and_the_stream_goes_on() {
    let lab = Lab::new(Settings::new());
    let joined = lab.join(false);
    let (from, to) = blocks();
    std::thread::scope(|scope| {
        let destination = scope.spawn(|| {
            let _none = phase(&joined.destination, &to);
            let registered = phase(&joined.destination, &to);
            joined.destination.end_remote_writes().unwrap();
            let mut bytes = [0; 7];
            assert_eq!(joined.destination.read(&mut bytes, LIMIT).unwrap(), 7);
            registered
        });
        let source = &joined.source;
        let address = exchange_blocks(source);
        source.begin_phase(&HOOK, LIMIT).unwrap();
        let rkey = register(source);
        let registration = source_registration(source, &from);
        finish(source);
        source.write(b"devices", LIMIT).unwrap();
        let registered = destination.join().unwrap();

        // A misbehaving source, with a key that is still valid.
        let write = Write { from: registration.piece(0, 4096).unwrap(), address, rkey };
        assert!(matches!(source.write_memory(&[write], LIMIT), Err(StreamError::Protocol(_))));
        source.main().write(&[write], LIMIT).unwrap();
        let refused = source.main().flush(LIMIT).unwrap_err();

        let status = CompletionStatus::RemoteInvalidRequest;
        assert!(matches!(refused, RdmaError::Failed { status: of, .. } if of == status), "{refused}");
        assert!(bytes(&to).iter().all(|byte| *byte == 0));
        drop(registered);
    });
}

#[test]
fn bytes_after_a_hook_are_kept_until_the_phase_is_over() {
    let lab = Lab::new(Settings::new());
    let (source, destination) = lab.with_plain_source();
    let (_, block) = blocks();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut file = Vec::new();
            encode_file(&[&HOOK[..], b"later"].concat(), &mut file).unwrap();
            for message in [file, empty(MessageType::RamBlocksRequest), empty(MessageType::RegisterFinished)]
            {
                let ready = source.receive(LIMIT).unwrap().unwrap();
                assert_eq!(Message::decode(&ready).unwrap(), Message::Ready);
                source.post_receives(1).unwrap();
                source.send(&[&message], LIMIT).unwrap();
                if message.len() > 16 {
                    continue;
                }
                if Message::decode(&message).unwrap() == Message::RamBlocksRequest {
                    let answer = source.receive(LIMIT).unwrap().unwrap();
                    assert!(matches!(Message::decode(&answer).unwrap(), Message::RamBlocksResult(_)));
                    source.post_receives(1).unwrap();
                }
            }
        });
        assert!(phase(&destination, &block).is_empty());
        let mut bytes = [0; 20];
        assert_eq!(destination.read(&mut bytes, LIMIT).unwrap(), 5);
        assert_eq!(&bytes[..5], b"later");
    });
}

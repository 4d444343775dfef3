//! The thread that requests windows and clears ranges (`specs/rdma.md §4.2` to `§4.5`).
//!
//! It sends these commands to the destination.

use sterna_wire::rdma::session::Command;
use sterna_wire::rdma::{
    BlockRange, ChunkSize, MOST_REPEATED, Message, Record, UnregisterRequest, encode_records,
};

use super::super::main_channel::MainChannel;
use super::super::measure::Counters;
use super::blocks::unasked;
use super::source::Peer;
use super::work::{Task, Work};
use crate::error::MigrationError;
use sterna_ram::PAGE_SIZE;

const CHANNEL: &str = "RDMA connection";

/// Sends commands until no more pages follow.
pub(in crate::outgoing) fn ask(work: &Work, counters: &Counters) -> Result<(), MigrationError> {
    while let Some(task) = work.next_task() {
        perform(work, task, counters).inspect_err(|error| work.fail(error.clone()))?;
    }
    Ok(())
}

/// Sends commands as [`ask`] does, if lanes have their own connections.
///
/// The main connection is then used only by this thread and by writers of the stream. Therefore this thread opens
/// the phases: one phase for all pending commands.
pub(in crate::outgoing) fn ask_for_lanes(
    work: &Work,
    main: &MainChannel,
    counters: &Counters,
) -> Result<(), MigrationError> {
    work.let_ask(true)?;
    while let Some(task) = work.next_task() {
        phase(work, main, task, counters).inspect_err(|error| work.fail(error.clone()))?;
    }
    Ok(())
}

fn phase(work: &Work, main: &MainChannel, task: Task, counters: &Counters) -> Result<(), MigrationError> {
    work.rdma.begin_part(main)?;
    let mut next = Some(task);
    while let Some(task) = next {
        if let Err(error) = perform(work, task, counters) {
            // Threads that wait to write get an error, because the channel is unusable now.
            let _ = main.end_phase(|_| Ok(()));
            return Err(error);
        }
        next = if main.is_wanted() { None } else { work.task_at_once() };
    }
    work.rdma.end_part(main)
}

fn perform(work: &Work, task: Task, counters: &Counters) -> Result<(), MigrationError> {
    match task {
        Task::Probe(range) => probe(work, range),
        Task::Register(windows) => ask_for(work, &windows),
        Task::GiveBack(windows) => give_back(work, &windows),
        Task::Clear(ranges) => clear(work, &ranges, counters),
    }
}

fn probe(work: &Work, range: BlockRange) -> Result<(), MigrationError> {
    // A count of 0 registers the one chunk that contains the first byte.
    let keys = keys(work, &[BlockRange { length: 1, ..range }], ChunkSize::LEAST, range.length)?;
    let Some(key) = keys.first().copied() else { return Ok(()) };
    work.learn(|state| state.probed(key, &work.rdma, &work.ram))
}

fn ask_for(work: &Work, windows: &[BlockRange]) -> Result<(), MigrationError> {
    let bytes = windows.iter().map(|window| window.length).sum();
    let unit = work.state()?.unit();
    let keys = keys(work, windows, unit, bytes)?;
    windows.iter().for_each(|window| work.rdma.counts.window(window.length));
    work.learn(|state| state.granted(windows, &keys))
}

/// The keys in the destination's answer, in order.
fn keys(
    work: &Work,
    windows: &[BlockRange],
    unit: ChunkSize,
    bytes: u64,
) -> Result<Vec<u32>, MigrationError> {
    let (rdma, wire) = (&work.rdma, MigrationError::wire(CHANNEL));
    let places = rdma.places()?;
    let requests: Result<Vec<_>, _> = windows.iter().map(|window| places.request(*window, unit)).collect();
    let message = records(&requests.map_err(&wire)?)?;
    let answer = rdma.command(Command::Register(windows.len()), &message, bytes)?;
    let results = match Message::decode(answer.answer().unwrap_or_default()).map_err(&wire)? {
        Message::RegisterResult(results) => results,
        other => return Err(unasked(&other)),
    };
    let keys = windows.iter().zip(results.iter());
    keys.map(|(window, (at, result))| places.key(window.block, &result, at).map_err(&wire)).collect()
}

fn give_back(work: &Work, windows: &[BlockRange]) -> Result<(), MigrationError> {
    let Peer::Sterna(chunk) = work.rdma.peer else {
        return Err(MigrationError::Internal("a QEMU is to give memory back".to_owned()));
    };
    for windows in windows.chunks(MOST_REPEATED as usize) {
        let request = |window: &BlockRange| UnregisterRequest {
            chunk: window.start / chunk.bytes(),
            block: window.block as u32,
        };
        let message = records(&windows.iter().map(request).collect::<Vec<_>>())?;
        work.rdma.command(Command::Unregister(windows.len()), &message, 0)?;
        work.rdma.counts.given_back(windows.iter().map(|window| window.length).sum());
        work.learn(|state| {
            state.taken_back(windows);
            Ok(())
        })?;
    }
    Ok(())
}

fn clear(work: &Work, ranges: &[BlockRange], counters: &Counters) -> Result<(), MigrationError> {
    let places = work.rdma.places()?;
    let cleared: Result<Vec<_>, _> = ranges.iter().map(|range| places.zero_range(*range)).collect();
    let message = records(&cleared.map_err(MigrationError::wire(CHANNEL))?)?;
    work.rdma.command(Command::Compress(ranges.len()), &message, 0)?;
    counters.main(message.len() as u64);
    counters.pages(0, ranges.iter().map(|range| range.length / PAGE_SIZE as u64).sum());
    Ok(())
}

fn records<T: Record>(records: &[T]) -> Result<Vec<u8>, MigrationError> {
    let mut message = Vec::new();
    encode_records(records, &mut message).map_err(MigrationError::wire(CHANNEL))?;
    Ok(message)
}

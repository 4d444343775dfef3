//! Compares two barriers that tell a destination that pages have arrived: a short message after their WRITE,
//! or a WRITE with an immediate. Both use up a receive. The same WRITEs are timed with each in turn, between
//! memory that is resident and already registered.
#![allow(clippy::print_stdout)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_ram::RamBlock;
use sterna_transport::CancelFlag;
use sterna_transport::rdma::{
    Access, Connection, Endpoint, EndpointSizes, Operation, Piece, Queue, Registration, SendRequest, Wake,
};

use super::content::{Load, fill};
use super::raw::{joined, memory, registered, said};
use super::rows::median;
use super::{MEMORY_MIB, MIB, REPETITIONS};
use crate::Failure;

/// Bytes of a packet's pages.
const BATCHES: [u64; 2] = [MIB, 64 << 10];
/// Limit of batches that are not known to be complete.
const AHEAD: u64 = 16;
const RECEIVES: u32 = 64;
const MESSAGE_BYTES: u32 = 64;
const SIZES: EndpointSizes =
    EndpointSizes::messages(MESSAGE_BYTES, RECEIVES, 1).with_writes(2 * AHEAD as u32);
const LIMIT: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Barrier {
    Message,
    Immediate,
}

impl Barrier {
    const ALL: [Self; 2] = [Self::Message, Self::Immediate];

    fn name(self) -> &'static str {
        match self {
            Self::Message => "a message after each WRITE",
            Self::Immediate => "an immediate with each WRITE",
        }
    }
}

/// Times each barrier several times, alternating. Returns rows with medians.
pub(super) fn rows() -> Result<Vec<Value>, Failure> {
    let (source, destination) = joined(&SIZES)?;
    let bytes = MEMORY_MIB * MIB;
    let (from, into) = (memory("barrier-source", bytes)?, memory("barrier-destination", bytes)?);
    let register = |end: &Endpoint, block: &RamBlock, access| {
        fill(block, Load::Random)?;
        registered(&*end.connection().adapter(), block, 0, bytes, access)
    };
    let from = register(&source, &from, Access::SOURCE)?;
    let into = register(&destination, &into, Access::REMOTE_WRITE)?;
    let table = memory("barrier-messages", MIB)?;
    let messages = registered(&*source.connection().adapter(), &table, 0, MIB, Access::SOURCE)?;
    let receives = registered(&*destination.connection().adapter(), &table, 0, MIB, Access::RECEIVE)?;
    for number in 0..RECEIVES {
        post(&destination, &receives, number)?;
    }
    let mut rows = Vec::new();
    for batch in BATCHES {
        let mut found = Barrier::ALL.map(|_| Vec::new());
        for repetition in 0..REPETITIONS {
            // The order alternates, because the machine may become slower.
            for at in [repetition % 2, (repetition + 1) % 2] {
                let (barrier, found) = (Barrier::ALL[at], &mut found[at]);
                let way = Way { source: &source, destination: &destination, from: &from, into: &into };
                let seconds = way.write_all(bytes, batch, barrier, &messages, &receives)?;
                println!(
                    "LAB {}, {} KiB: {:.1} MiB/s",
                    barrier.name(),
                    batch >> 10,
                    MEMORY_MIB as f64 / seconds
                );
                found.push(MEMORY_MIB as f64 / seconds);
            }
        }
        rows.extend(Barrier::ALL.into_iter().zip(&found).map(|(barrier, found)| {
            println!("LAB {}, {} KiB: median {:.1} MiB/s", barrier.name(), batch >> 10, median(found));
            json!({
                "barrier": barrier.name(), "batch_kib": batch >> 10, "mib_s": median(found), "all_mib_s": found,
            })
        }));
    }
    Ok(rows)
}

struct Way<'a> {
    source: &'a Endpoint,
    destination: &'a Endpoint,
    from: &'a Registration,
    into: &'a Registration,
}

impl Way<'_> {
    /// Writes all batches. Returns the seconds until the destination knows of all of them.
    fn write_all(
        &self,
        bytes: u64,
        batch: u64,
        barrier: Barrier,
        messages: &Registration,
        receives: &Registration,
    ) -> Result<f64, Failure> {
        let (batches, taken) = (bytes / batch, AtomicU64::new(0));
        let began = Instant::now();
        std::thread::scope(|scope| {
            let taking = scope.spawn(|| {
                while taken.load(Ordering::Relaxed) < batches {
                    for id in done(self.destination, Queue::Receive)? {
                        post(self.destination, receives, id as u32)?;
                        taken.fetch_add(1, Ordering::Relaxed);
                    }
                }
                Ok::<_, Failure>(())
            });
            let mut complete = 0;
            for number in 0..batches {
                // Limits the batches to the posted receives, as credits do in the real protocol.
                while number - complete >= AHEAD {
                    complete += done(self.source, Queue::Send)?.len() as u64;
                }
                while number - taken.load(Ordering::Relaxed) >= u64::from(RECEIVES) {
                    std::thread::yield_now();
                }
                self.source
                    .connection()
                    .post_send(&self.requests(number, batch, barrier, messages)?)
                    .map_err(said)?;
            }
            while complete < batches {
                complete += done(self.source, Queue::Send)?.len() as u64;
            }
            taking.join().map_err(|_| "taking panicked".to_owned())?
        })?;
        Ok(began.elapsed().as_secs_f64())
    }

    fn requests(
        &self,
        number: u64,
        batch: u64,
        barrier: Barrier,
        messages: &Registration,
    ) -> Result<Vec<SendRequest>, Failure> {
        let from = self.from.piece((number * batch) as usize, batch as u32).ok_or("outside of the source")?;
        let (address, rkey) = (self.into.memory().address() + number * batch, self.into.rkey());
        let request =
            |operation, from: Piece, is_signalled| SendRequest { id: number, operation, from, is_signalled };
        Ok(match barrier {
            Barrier::Immediate => {
                let immediate = number as u32;
                vec![request(Operation::WriteWithImmediate { address, rkey, immediate }, from, true)]
            }
            Barrier::Message => {
                let message = messages.piece(0, MESSAGE_BYTES).ok_or("no message")?;
                vec![
                    request(Operation::Write { address, rkey }, from, false),
                    request(Operation::Send, message, true),
                ]
            }
        })
    }
}

/// Waits for completions of a queue, and returns their requests.
fn done(end: &Endpoint, queue: Queue) -> Result<Vec<u64>, Failure> {
    let (connection, mut found): (&Arc<dyn Connection>, _) = (end.connection(), Vec::new());
    loop {
        if connection.poll(queue, &mut found, RECEIVES as usize).map_err(said)? > 0 {
            break;
        }
        match connection.wait(queue, Some(Instant::now() + LIMIT), &CancelFlag::new()).map_err(said)? {
            Wake::Completion => {}
            other => return Err(format!("{queue:?}: {other:?}")),
        }
    }
    match found.iter().find(|completion| !completion.status.is_success()) {
        Some(failed) => Err(format!("{queue:?}: {}", failed.status)),
        None => Ok(found.iter().map(|completion| completion.id).collect()),
    }
}

fn post(end: &Endpoint, into: &Registration, number: u32) -> Result<(), Failure> {
    let place = into.piece((number * MESSAGE_BYTES) as usize, MESSAGE_BYTES).ok_or("no place")?;
    end.connection().post_receive(u64::from(number), place).map_err(said)
}

//! Shared parts of the cases: two connected sides, and memory with a pattern.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_ram::{Backing, RamBlock};

use super::Setup;
use crate::CancelFlag;
use crate::rdma::{
    Access, Adapter, Completion, CompletionStatus, ConnectParameters, Connection, Listener, Memory,
    Operation, Piece, Queue, QueuePairAttributes, Registration, SendRequest, Wake,
};

/// Limit for operations that must succeed, far longer than any of them takes.
pub(super) const LONG: Duration = Duration::from_secs(60);
/// Wait after which an operation counts as blocked.
pub(super) const SHORT: Duration = Duration::from_millis(60);
pub(super) const MIB: usize = 1 << 20;
pub(super) const QUEUES: QueuePairAttributes = QueuePairAttributes::new(64, 16).with_remote_write();

/// The two sides of an established connection.
pub(super) struct Joined {
    pub(super) source: Arc<dyn Connection>,
    pub(super) destination: Arc<dyn Connection>,
}

impl Setup {
    pub(super) fn listen(&self) -> Arc<dyn Listener> {
        self.destination.listen(SocketAddr::new(self.address, 0), 16).expect("listening")
    }

    /// A connection of the source that is not established yet.
    pub(super) fn dial(&self, listener: &dyn Listener) -> Arc<dyn Connection> {
        let to = SocketAddr::new(self.address, listener.local_address().port());
        let route = self.source.resolve(to, LONG, &CancelFlag::new()).expect("resolving");
        route.open(&QUEUES).expect("a queue pair")
    }

    /// Connects as QEMU does: without RNR retries.
    pub(super) fn join(&self) -> Joined {
        self.join_with(0)
    }

    /// Connects with `rnr_retries` RNR retries on both sides.
    pub(super) fn join_with(&self, rnr_retries: u8) -> Joined {
        self.join_as(&QUEUES, rnr_retries)
    }

    /// Connects with the attributes `opens` for the destination's queue pair.
    pub(super) fn join_as(&self, opens: &QueuePairAttributes, rnr_retries: u8) -> Joined {
        let listener = self.listen();
        let source = self.dial(&*listener);
        let mut asks = ConnectParameters::connect(b"");
        asks.rnr_retry_count = rnr_retries;
        let mut answers = ConnectParameters::accept(b"");
        answers.rnr_retry_count = rnr_retries;
        let flag = CancelFlag::new();
        let destination = std::thread::scope(|scope| {
            let accepted = scope.spawn(|| {
                let request = listener.accept(Some(LONG), &flag).expect("a request");
                let connection = request.open(opens).expect("a queue pair");
                connection.establish(&answers, LONG, &flag).expect("accepting");
                connection
            });
            source.establish(&asks, LONG, &flag).expect("connecting");
            accepted.join().expect("the accepting side")
        });
        Joined { source, destination }
    }
}

/// Registered memory of one side.
pub(super) struct Buffer {
    pub(super) block: RamBlock,
    pub(super) registration: Registration,
}

impl Buffer {
    pub(super) fn of(adapter: &dyn Adapter, len: usize, access: Access) -> Self {
        let block = RamBlock::new("conformance", len as u64, Backing::Anonymous).expect("memory");
        let memory = Memory::of_block(&block, 0, len).expect("a range of the block");
        let registration = adapter.register(memory, access).expect("a registration");
        Self { block, registration }
    }

    /// Memory with a pattern in which each byte depends on its position.
    pub(super) fn filled(adapter: &dyn Adapter, len: usize) -> Self {
        let buffer = Self::of(adapter, len, Access::SOURCE);
        let bytes: Vec<u8> = (0..len).map(|at| (at % 251 + 1) as u8).collect();
        buffer.block.write(0, &bytes).expect("writing");
        buffer
    }

    pub(super) fn piece(&self, offset: usize, len: usize) -> Piece {
        self.registration.piece(offset, len as u32).expect("a piece inside")
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.block.len_bytes() as usize];
        self.block.read(0, &mut bytes).expect("reading");
        bytes
    }

    pub(super) fn is_untouched(&self) -> bool {
        self.bytes().iter().all(|byte| *byte == 0)
    }

    pub(super) fn address(&self) -> u64 {
        self.registration.memory().address()
    }

    pub(super) fn rkey(&self) -> u32 {
        self.registration.rkey()
    }

    /// A request that writes `from` to the start of this memory.
    pub(super) fn write(&self, id: u64, from: Piece) -> SendRequest {
        write(id, from, self.address(), self.rkey())
    }
}

pub(super) fn write(id: u64, from: Piece, address: u64, rkey: u32) -> SendRequest {
    SendRequest { id, operation: Operation::Write { address, rkey }, from, is_signalled: true }
}

pub(super) fn send(id: u64, from: Piece) -> SendRequest {
    SendRequest { id, operation: Operation::Send, from, is_signalled: true }
}

/// Waits for the next completion and returns it.
pub(super) fn complete(connection: &dyn Connection, queue: Queue) -> Completion {
    let deadline = Instant::now().checked_add(LONG);
    let woken = connection.wait(queue, deadline, &CancelFlag::new()).expect("waiting");
    assert_eq!(woken, Wake::Completion, "of {queue:?}");
    let mut completions = Vec::new();
    connection.poll(queue, &mut completions, 1).expect("polling");
    completions.pop().expect("a completion that the wait found")
}

/// Posts one request and returns the status of its completion.
pub(super) fn status_of(connection: &dyn Connection, request: SendRequest) -> CompletionStatus {
    connection.post_send(&[request]).expect("posting");
    let completion = complete(connection, Queue::Send);
    assert_eq!(completion.id, request.id);
    completion.status
}

/// A posted receive, whose flush shows that a queue pair is in the error state. Receives that are posted later may
/// never be flushed.
pub(super) struct Watch {
    scratch: Buffer,
}

impl Watch {
    pub(super) fn on(connection: &dyn Connection) -> Self {
        let scratch = Buffer::of(&*connection.adapter(), 4096, Access::RECEIVE);
        connection.post_receive(77, scratch.piece(0, 4096)).expect("posting");
        Self { scratch }
    }

    /// Asserts that the queue pair is in the error state.
    pub(super) fn assert_in_error(self, connection: &dyn Connection) {
        let flushed = complete(connection, Queue::Receive);
        assert_eq!((flushed.id, flushed.status), (77, CompletionStatus::WorkRequestFlushed));
        assert!(self.scratch.is_untouched());
    }
}

/// Asserts that both queue pairs fail. The source's fails immediately; the destination's at the latest when the
/// source disconnects.
pub(super) fn assert_break([ours, theirs]: [Watch; 2], joined: &Joined) {
    ours.assert_in_error(&*joined.source);
    joined.source.disconnect();
    theirs.assert_in_error(&*joined.destination);
}

//! A model of a migration in virtual time: a link, and two sides that register memory.

use std::collections::{BTreeMap, HashMap};
use sterna_wire::rdma::{
    BlockPlace, BlockPlaces, BlockRange, ChunkSize, RegisterRequest, RegisterResult, UnregisterRequest,
};

/// Virtual time, in nanoseconds.
pub type Time = u64;

pub const MIB: u64 = 1 << 20;

/// Cost of registering memory at one side.
#[derive(Debug, Clone, Copy)]
pub struct Registering {
    /// Cost of each call.
    pub call: Time,
    /// Cost of each MiB.
    pub mib: Time,
}

impl Registering {
    pub fn time(&self, bytes: u64) -> Time {
        self.call + (self.mib * bytes).div_ceil(MIB)
    }

    /// Cost of deregistering: one tenth of registering. No measurement is published. Deregistering only
    /// releases pages, and neither finds nor populates them.
    pub fn time_back(&self, bytes: u64) -> Time {
        self.time(bytes) / 10
    }
}

#[derive(Debug, Clone, Copy)]
pub struct Costs {
    pub bytes_per_second: u64,
    /// Time from a request's last byte to its completion.
    pub round_trip: Time,
    /// Fixed cost of each request, in addition to its bytes.
    pub request: Time,
    pub source: Registering,
    pub destination: Registering,
}

/// The default costs of the test adapters in `sterna-transport`: a fast adapter (ConnectX-7).
pub const DEFAULT: Costs = {
    let registering = Registering { call: 2_021_500, mib: 224_600 };
    Costs {
        bytes_per_second: 12_500_000_000,
        round_trip: 20_000,
        request: 200,
        source: registering,
        destination: registering,
    }
};

impl Costs {
    pub fn transfer(&self, bytes: u64) -> Time {
        self.request + (u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_second)) as Time
    }

    /// Lower bound for the time of any program.
    ///
    /// It is the time of the slowest of both sides and the link, for all bytes in one call.
    pub fn least(&self, bytes: u64) -> Time {
        self.transfer(bytes).max(self.source.time(bytes)).max(self.destination.time(bytes))
    }

    /// Time of a program that registers, waits and writes chunk by chunk, as QEMU's source does. It asks the
    /// destination, registers its own memory after the answer, writes, and waits for the completion.
    pub fn chunk_by_chunk(&self, bytes: u64, chunk: ChunkSize) -> Time {
        let chunk = chunk.bytes();
        let exchange = 2 * self.request + self.round_trip + self.destination.time(chunk);
        let write = self.transfer(chunk) + self.round_trip;
        bytes.div_ceil(chunk) * (exchange + self.source.time(chunk) + write)
    }
}

/// An event of the model.
#[derive(Debug)]
pub enum Event {
    /// The source has found more pages to write.
    Scanned,
    /// The source has registered its window.
    OwnRegistered,
    /// The source has deregistered its windows.
    OwnGivenBack,
    /// A request has reached the destination.
    Requested(Vec<RegisterRequest>),
    /// A request to deregister windows has reached the destination.
    Returned(Vec<UnregisterRequest>),
    /// The answer to such a request has reached the source.
    TakenBack,
    /// The keys have reached the source.
    Answered(Vec<RegisterResult>),
    /// A READY has reached the source.
    Ready,
    /// The oldest WRITE is complete.
    Written,
}

/// A clock, and a link that carries one request after the other. A SEND waits for the WRITEs that were posted
/// before it.
#[derive(Debug, Default)]
pub struct World {
    pub now: Time,
    events: BTreeMap<(Time, u64), Event>,
    happened: u64,
    link_busy_until: Time,
}

impl World {
    /// Returns the next event and sets the clock to its time.
    pub fn next_event(&mut self) -> Option<Event> {
        let ((at, _), event) = self.events.pop_first()?;
        self.now = at;
        Some(event)
    }

    pub fn at(&mut self, time: Time, event: Event) {
        assert!(time >= self.now, "the past");
        self.happened += 1;
        self.events.insert((time, self.happened), event);
    }

    /// The source posts a request of so many bytes. Returns the time at which the last byte has left.
    pub fn post(&mut self, bytes: u64, costs: &Costs) -> Time {
        self.link_busy_until = self.link_busy_until.max(self.now) + costs.transfer(bytes);
        self.link_busy_until
    }
}

/// A destination that performs one request after the other. It remembers a registration under its first chunk.
pub struct Destination {
    pub places: BlockPlaces,
    chunk: ChunkSize,
    known: HashMap<(usize, u64), RegisterResult>,
    /// The range of key n + 1, at index n.
    keys: Vec<BlockRange>,
    registered: u64,
    most_registered: u64,
    busy_until: Time,
}

const HOST_ADDRESS: u64 = 1 << 40;

impl Destination {
    /// A destination with blocks of these lengths, which registers whole chunks.
    pub fn new(blocks: &[u64], chunk: ChunkSize) -> Self {
        let place = |length: &u64| BlockPlace {
            host_address: HOST_ADDRESS,
            offset: 0,
            length_bytes: *length,
            key: 0,
        };
        let places = BlockPlaces::new(blocks.iter().map(place).collect()).unwrap();
        Self {
            places,
            chunk,
            known: HashMap::new(),
            keys: Vec::new(),
            registered: 0,
            most_registered: 0,
            busy_until: 0,
        }
    }

    /// Registers memory. The answer leaves afterwards, followed by a READY.
    pub fn requested(&mut self, requests: &[RegisterRequest], world: &mut World, costs: &Costs) {
        self.busy_until = self.busy_until.max(world.now);
        let results = requests.iter().map(|request| self.register(request, costs)).collect();
        let arrives = self.busy_until + costs.request + costs.round_trip / 2;
        world.at(arrives, Event::Answered(results));
        world.at(arrives + costs.request, Event::Ready);
    }

    /// Deregisters memory. The answer leaves afterwards, followed by a READY.
    pub fn returned(&mut self, requests: &[UnregisterRequest], world: &mut World, costs: &Costs) {
        self.busy_until = self.busy_until.max(world.now);
        for request in requests {
            let is_registered = |range: BlockRange| self.known.contains_key(&(range.block, range.start));
            let range = self.places.given_back(request, self.chunk, is_registered, 0).unwrap();
            let key = self.known.remove(&(range.block, range.start)).unwrap().key;
            let window = std::mem::replace(&mut self.keys[key as usize - 1].length, 0);
            self.registered -= window;
            self.busy_until += costs.destination.time_back(window);
        }
        let arrives = self.busy_until + costs.request + costs.round_trip / 2;
        world.at(arrives, Event::TakenBack);
        world.at(arrives + costs.request, Event::Ready);
    }

    fn register(&mut self, request: &RegisterRequest, costs: &Costs) -> RegisterResult {
        let range = self.places.requested(request, self.chunk, 0).unwrap();
        *self.known.entry((range.block, range.start)).or_insert_with(|| {
            self.busy_until += costs.destination.time(range.length);
            self.keys.push(range);
            self.registered += range.length;
            self.most_registered = self.most_registered.max(self.registered);
            RegisterResult { key: self.keys.len() as u32, host_address: HOST_ADDRESS }
        })
    }

    /// Checks a WRITE as an adapter does: it must lie inside the range of its key.
    pub fn check_write(&self, write: &BlockRange, key: u32) {
        let covered = self.keys[key as usize - 1];
        let is_inside =
            covered.block == write.block && covered.start <= write.start && write.end() <= covered.end();
        assert!(is_inside, "remote access error: {write:?} with the key of {covered:?}");
    }

    pub fn registrations(&self) -> usize {
        self.keys.len()
    }

    pub fn registered_bytes(&self) -> u64 {
        self.registered
    }

    /// Most bytes that were registered at the same time.
    pub fn most_registered_bytes(&self) -> u64 {
        self.most_registered
    }
}

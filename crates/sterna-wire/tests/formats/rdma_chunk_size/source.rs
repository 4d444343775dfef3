//! The memory part of Sterna's source in virtual time: the real plan, lookahead, probe and session.

use super::model::{Costs, Destination, Event, Time, World};
use std::collections::{HashMap, VecDeque};
use sterna_wire::rdma::session::{Command, Peer, SourceSession};
use sterna_wire::rdma::{
    self, BlockRange, ChunkProbe, ChunkSize, Lookahead, Message, MessageType, PlanLimits, RegistrationPlan,
    Step, UnregisterRequest, encode_empty, encode_records, next_write,
};

/// Longest WRITE, and most bytes in flight. A request for more windows waits for the WRITEs in flight.
const WRITE_BYTES: u64 = 2 << 20;
const IN_FLIGHT_BYTES: u64 = 8 << 20;
/// Most bytes in flight if windows are deregistered, because twice as many requests wait.
const IN_FLIGHT_BELOW_LIMIT: u64 = 2 << 20;
/// The engine finds pages in pieces, at 21 GB/s: it reads the first bytes of each page.
const SCAN_BYTES: u64 = 2 << 20;
const SCAN_TIME: Time = 100_000;
/// Length of a control message with a few records.
const MESSAGE_BYTES: u64 = 64;

/// The destination of the migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum To {
    /// A QEMU whose chunk size a monitor provides.
    KnownQemu,
    UnknownQemu,
    Sterna,
}

/// A bug that is planted in the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Planted {
    Nothing,
    /// The source requests a window only after all previous windows have been written.
    WaitsForEachWindow,
    /// Windows towards a QEMU are one chunk long.
    WindowsOfOneChunk,
    /// The source requests long windows from an unknown QEMU, in units of 1 MiB.
    CountsInMib,
    /// The source decides on windows as soon as it finds a piece of memory.
    PlansAtOnce,
}

#[derive(Debug, Clone, Copy)]
pub struct Migration {
    pub to: To,
    pub source_chunk: ChunkSize,
    pub destination_chunk: ChunkSize,
    /// Most bytes that are registered at the same time, on each side.
    pub pinned: Option<u64>,
    pub planted: Planted,
}

/// Measurements of one migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    pub time: Time,
    pub exchanges: usize,
    pub registrations: usize,
    pub registered_bytes: u64,
    /// Most bytes that were registered at the same time, at source and destination.
    pub most_registered_bytes: [u64; 2],
}

struct Source {
    migration: Migration,
    blocks: Vec<u64>,
    session: SourceSession,
    own: Lookahead,
    probe: Option<ChunkProbe>,
    /// `None` while the probe runs.
    remote: Option<Lookahead>,
    /// The unit in which requests count.
    unit: ChunkSize,
    asked: Vec<BlockRange>,
    /// Steps that were decided before they could be performed.
    planned: VecDeque<Step>,
    /// Memory that the source has not scanned yet.
    unseen: VecDeque<BlockRange>,
    seen: Vec<BlockRange>,
    keys: HashMap<(usize, u64), u32>,
    is_registering: bool,
    /// Bytes of own windows now, and the most at any time.
    own_registered: [u64; 2],
    in_flight: u64,
    exchanges: usize,
}

/// Migrates a guest: writes all pages of `blocks` once.
pub fn migrate(migration: Migration, blocks: &[u64], costs: &Costs) -> Outcome {
    let granted = match migration.to {
        To::Sterna => migration.destination_chunk.min(migration.source_chunk),
        To::KnownQemu | To::UnknownQemu => migration.destination_chunk,
    };
    let mut destination = Destination::new(blocks, granted);
    let mut world = World::default();
    let mut source = Source::new(migration, blocks, &destination, granted);
    world.at(costs.round_trip / 2, Event::Ready);
    world.at(SCAN_TIME, Event::Scanned);
    source.go_on(&destination, &mut world, costs);
    while !source.is_done() {
        match world.next_event().expect("the source waits, and nothing will happen") {
            Event::Requested(requests) => destination.requested(&requests, &mut world, costs),
            Event::Returned(requests) => destination.returned(&requests, &mut world, costs),
            event => source.take(event, &mut world),
        }
        source.go_on(&destination, &mut world, costs);
    }
    let _ = source.session.send(Command::Finished).unwrap();
    Outcome {
        time: world.now,
        exchanges: source.exchanges,
        registrations: destination.registrations(),
        registered_bytes: destination.registered_bytes(),
        most_registered_bytes: [source.own_registered[1], destination.most_registered_bytes()],
    }
}

impl Source {
    fn new(migration: Migration, blocks: &[u64], destination: &Destination, granted: ChunkSize) -> Self {
        let chunk = migration.source_chunk;
        let own = Lookahead::new(
            plan(blocks, rdma::Destination::Sterna(chunk), chunk, migration.pinned),
            Lookahead::MOST_AHEAD,
        );
        let peer = if migration.to == To::Sterna { Peer::Sterna } else { Peer::Qemu };
        let mut source = Self {
            migration,
            blocks: blocks.to_vec(),
            session: in_second_phase(peer, destination),
            own,
            probe: None,
            remote: None,
            unit: granted,
            asked: Vec::new(),
            planned: VecDeque::new(),
            unseen: pieces(blocks).collect(),
            seen: Vec::new(),
            keys: HashMap::new(),
            is_registering: false,
            own_registered: [0; 2],
            in_flight: 0,
            exchanges: 0,
        };
        match (migration.to, migration.planted) {
            (To::Sterna, _) => source.begin_asking(rdma::Destination::Sterna(migration.destination_chunk)),
            (To::KnownQemu, _) => source.begin_asking(rdma::Destination::Qemu(source.window())),
            (To::UnknownQemu, Planted::Nothing | Planted::WaitsForEachWindow) => {
                source.probe = Some(ChunkProbe::new(blocks));
            }
            (To::UnknownQemu, _) => {
                source.unit = ChunkSize::LEAST;
                source.begin_asking(rdma::Destination::Qemu(source.window()));
            }
        }
        source
    }

    fn window(&self) -> ChunkSize {
        match self.migration.planted {
            Planted::WindowsOfOneChunk => self.unit,
            _ => self.unit.window(),
        }
    }

    fn begin_asking(&mut self, kind: rdma::Destination) {
        let mut plan = plan(&self.blocks, kind, self.migration.source_chunk, self.migration.pinned);
        for (window, key) in self.probe.iter().flat_map(ChunkProbe::windows) {
            plan.registered(window);
            self.keys.insert((window.block, window.start), key);
        }
        let is_waiting = self.migration.planted == Planted::WaitsForEachWindow;
        let mut remote = Lookahead::new(plan, if is_waiting { 1 } else { Lookahead::MOST_AHEAD });
        remote.add(self.seen.iter().copied()).unwrap();
        self.remote = Some(remote);
    }

    fn is_done(&self) -> bool {
        let is_done = self.remote.as_ref().is_some_and(Lookahead::is_done) && self.own.is_done();
        is_done && self.unseen.is_empty() && self.session.may_send()
    }

    fn take(&mut self, event: Event, world: &mut World) {
        match event {
            Event::Scanned => {
                let Some(piece) = self.unseen.pop_front() else { return };
                self.seen.push(piece);
                self.own.add([piece]).unwrap();
                if let Some(remote) = &mut self.remote {
                    remote.add([piece]).unwrap();
                    if self.migration.planted == Planted::PlansAtOnce && remote.has_step() {
                        self.planned.push_back(remote.next_step(1));
                    }
                }
                world.at(world.now + SCAN_TIME, Event::Scanned);
            }
            Event::OwnRegistered => {
                self.own.registered(1).unwrap();
                self.is_registering = false;
            }
            Event::OwnGivenBack => self.is_registering = false,
            Event::TakenBack => {
                let mut message = Vec::new();
                encode_empty(MessageType::UnregisterFinished, 1, &mut message).unwrap();
                self.session.received(&Message::decode(&message).unwrap()).unwrap();
            }
            Event::Ready => {
                self.session.received(&Message::Ready).unwrap();
            }
            Event::Answered(results) => {
                let mut message = Vec::new();
                encode_records(&results, &mut message).unwrap();
                self.session.received(&Message::decode(&message).unwrap()).unwrap();
                match (&mut self.probe, &mut self.remote) {
                    (Some(probe), None) => probe.answered(results[0].key),
                    (_, remote) => {
                        let windows = self.asked.iter().map(|window| (window.block, window.start));
                        self.keys.extend(windows.zip(results.iter().map(|result| result.key)));
                        remote.as_mut().unwrap().registered(results.len()).unwrap();
                    }
                }
            }
            Event::Written => {
                let write = self.own.written().unwrap();
                assert_eq!(self.remote.as_mut().unwrap().written().unwrap(), write);
                self.session.completed(1).unwrap();
                self.in_flight -= write.length;
            }
            Event::Requested(_) | Event::Returned(_) => unreachable!("that is the destination's"),
        }
    }

    /// Performs all actions that are possible now.
    fn go_on(&mut self, destination: &Destination, world: &mut World, costs: &Costs) {
        if !self.is_registering {
            self.register(world, costs);
        }
        if self.session.may_send() {
            self.ask(destination, world, costs);
        }
        let Some(remote) = &mut self.remote else { return };
        let most = if self.migration.pinned.is_some() { IN_FLIGHT_BELOW_LIMIT } else { IN_FLIGHT_BYTES };
        while self.in_flight < most {
            let Some(write) = next_write(&mut self.own, remote, WRITE_BYTES) else { return };
            let window = remote.plan().window(write.block, write.start).unwrap();
            destination.check_write(&write, self.keys[&(window.block, window.start)]);
            self.session.write().unwrap();
            self.in_flight += write.length;
            let left = world.post(write.length, costs);
            world.at(left + costs.round_trip, Event::Written);
        }
    }

    /// Registers one own window, or deregisters some.
    fn register(&mut self, world: &mut World, costs: &Costs) {
        let (time, event) = match self.own.next_step(1) {
            Step::Register(windows) => {
                self.own_registered[0] += windows[0].length;
                (costs.source.time(windows[0].length), Event::OwnRegistered)
            }
            Step::GiveBack(windows) => {
                self.own_registered[0] -= windows.iter().map(|window| window.length).sum::<u64>();
                let time = windows.iter().map(|window| costs.source.time_back(window.length)).sum();
                (time, Event::OwnGivenBack)
            }
            Step::Wait => return,
        };
        self.own_registered[1] = self.own_registered[1].max(self.own_registered[0]);
        world.at(world.now + time, event);
        self.is_registering = true;
    }

    /// Asks the destination to deregister windows.
    fn give_back(&mut self, windows: &[BlockRange], world: &mut World, costs: &Costs) {
        let request = |window: &BlockRange| UnregisterRequest {
            chunk: window.start / self.unit.bytes(),
            block: window.block as u32,
        };
        let requests: Vec<_> = windows.iter().map(request).collect();
        let _ = self.session.send(Command::Unregister(requests.len())).unwrap();
        self.exchanges += 1;
        let left = world.post(MESSAGE_BYTES * requests.len() as u64, costs);
        world.at(left + costs.round_trip / 2, Event::Returned(requests));
    }

    fn ask(&mut self, destination: &Destination, world: &mut World, costs: &Costs) {
        if let (Some(probe), None) = (&self.probe, &self.remote) {
            self.unit = probe.unit();
            match probe.next_ask() {
                Some(range) => self.asked = vec![range],
                None => self.begin_asking(rdma::Destination::Qemu(self.unit.window())),
            }
        }
        if let Some(remote) = &mut self.remote {
            let most = if self.migration.to == To::Sterna { rdma::MOST_REPEATED as usize } else { 1 };
            let step = self.planned.pop_front().unwrap_or_else(|| remote.next_step(most));
            match step {
                Step::Register(windows) => self.asked = windows,
                Step::Wait => return,
                Step::GiveBack(windows) => return self.give_back(&windows, world, costs),
            }
        }
        let request = |window| destination.places.request(window, self.unit).unwrap();
        let requests: Vec<_> = self.asked.iter().copied().map(request).collect();
        let _ = self.session.send(Command::Register(requests.len())).unwrap();
        self.exchanges += 1;
        let left = world.post(MESSAGE_BYTES * requests.len() as u64, costs);
        world.at(left + costs.round_trip / 2, Event::Requested(requests));
    }
}

fn plan(
    blocks: &[u64],
    kind: rdma::Destination,
    own_chunk: ChunkSize,
    pinned: Option<u64>,
) -> RegistrationPlan {
    let limits = PlanLimits { own_chunk, most_message: 1 << 30, pinned };
    RegistrationPlan::new(blocks, kind, limits).unwrap()
}

fn pieces(blocks: &[u64]) -> impl Iterator<Item = BlockRange> {
    blocks.iter().enumerate().flat_map(|(block, length)| {
        (0..*length).step_by(SCAN_BYTES as usize).map(move |start| BlockRange {
            block,
            start,
            length: SCAN_BYTES.min(length - start),
        })
    })
}

/// A session that has exchanged blocks and opened the phase of its first round. It waits for a READY.
fn in_second_phase(peer: Peer, destination: &Destination) -> SourceSession {
    let mut session = SourceSession::new(peer);
    let _ = session.starting();
    let mut blocks = Vec::new();
    encode_records(destination.places.blocks(), &mut blocks).unwrap();
    let hook = Command::File { bytes: 8, hook_ends_at: Some(8) };
    for command in [hook, Command::RamBlocks, Command::Finished, hook] {
        session.received(&Message::Ready).unwrap();
        let _ = session.send(command).unwrap();
        if command.kind() == MessageType::RamBlocksRequest {
            session.received(&Message::decode(&blocks).unwrap()).unwrap();
        }
    }
    session
}

//! Two sessions over carriers that are cut at random: every flow's bytes arrive complete, in order and once.

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use sterna_relay::frame::{Frame, Head, ResetReason, Rule, SessionId, Verdict};
use sterna_relay::session::{
    CarrierId, Delivery, Event, Opening, OutgoingFrame, Piece, Planted, Priority, Role, Session, Settings,
};

const BUFFER: u64 = Settings::LEAST_BUFFER;

/// The byte at `offset` of a direction of a flow.
fn byte(flow: u32, from_source: bool, offset: u64) -> u8 {
    let stream = u64::from(flow) * 17 + u64::from(from_source) * 101;
    (offset.wrapping_mul(31) ^ (offset >> 9) ^ stream) as u8
}

/// One VMM's end of a flow.
#[derive(Default)]
struct Plug {
    /// Bytes that the VMM will send, and that it has sent.
    total: u64,
    sent: u64,
    breaks: bool,
    ended: bool,
    /// Bytes and the end that it has received.
    received: u64,
    finished: bool,
    broken: bool,
    /// It does not read until this step.
    deaf_until: u64,
    gone: bool,
}

struct Side {
    session: Session,
    plugs: BTreeMap<u32, Plug>,
    connects: Vec<u32>,
}

/// A carrier: a queue in each direction, and what each side calls it.
struct Carrier {
    lane: u8,
    ends: [Option<CarrierId>; 2],
    /// Frames to side 0 and to side 1.
    ways: [VecDeque<OutgoingFrame>; 2],
    is_cut: bool,
}

struct World {
    random: fastrand::Rng,
    now: Duration,
    step: u64,
    lanes: u8,
    sides: [Side; 2],
    carriers: Vec<Carrier>,
    cuts: u32,
    misses: u32,
}

impl World {
    fn new(seed: u64, planted: Option<Planted>) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let packs = random.bool();
        let side = |role| {
            let mut settings = Settings::new(BUFFER);
            settings.planted = planted;
            let mut session = Session::new(SessionId([7; 16]), role, settings);
            if packs {
                session.agree();
            }
            Side { session, plugs: BTreeMap::new(), connects: vec![] }
        };
        let lanes = random.u8(1..=3);
        let cuts = if random.bool() { 0 } else { random.u32(0..40) };
        let sides = [side(Role::Dialer), side(Role::Acceptor)];
        Self { random, now: Duration::ZERO, step: 0, lanes, sides, carriers: Vec::new(), cuts, misses: 0 }
    }

    fn run(&mut self) {
        for _ in 0..self.random.u32(1..6) {
            self.open();
        }
        while self.sides.iter().any(|side| side.plugs.values().any(|plug| !plug.gone)) || self.step == 0 {
            self.step += 1;
            assert!(self.step < 400_000, "no end: {}", self.state());
            self.now += Duration::from_micros(self.random.u64(1..200));
            self.act();
            for side in 0..2 {
                self.take_events(side);
                let (stored, waiting) = self.sides[side].session.held_bytes();
                assert!(
                    stored <= BUFFER && waiting <= BUFFER,
                    "side {side} holds {stored} and {waiting} bytes"
                );
            }
        }
        for side in &self.sides {
            assert_eq!(side.session.open_flows(), 0, "{}", self.state());
            assert_eq!(side.session.held_bytes(), (0, 0));
        }
        let connects = &self.sides[1].connects;
        assert!(connects.is_sorted() && connects.len() == self.sides[0].plugs.len(), "order: {connects:?}");
    }

    fn act(&mut self) {
        match self.random.u32(0..100) {
            0..30 => self.send(),
            30..60 => self.receive(),
            60..75 => self.vmm_sends(),
            75..92 => self.vmm_receives(),
            92..96 => self.connect(),
            96 if self.cuts > 0 => self.cut(),
            97 if self.step < 3000 && self.random.u32(0..20) == 0 => self.open(),
            98 => self.notice(),
            99 => {
                let side = self.random.usize(0..2);
                self.sides[side].session.tick(self.now);
            }
            _ => {}
        }
    }

    fn open(&mut self) {
        let Opening::Flow(flow) = self.sides[0].session.open(self.now) else { panic!("refused") };
        let plug = self.plug();
        self.sides[0].plugs.insert(flow, plug);
        if self.random.bool() {
            self.sides[0].session.set_priority(flow, Priority::Urgent);
        }
    }

    fn plug(&mut self) -> Plug {
        let total = match self.random.u32(0..4) {
            0 => 0,
            1 => self.random.u64(0..100),
            _ => self.random.u64(0..600_000),
        };
        let deaf_until = if self.random.u32(0..4) == 0 { self.random.u64(0..20_000) } else { 0 };
        Plug { total, deaf_until, breaks: self.random.u32(0..8) == 0, ..Plug::default() }
    }

    fn take_events(&mut self, side: usize) {
        for event in self.sides[side].session.take_events() {
            match event {
                Event::Connect(flow) if self.random.u32(0..20) == 0 => {
                    self.sides[side].connects.push(flow);
                    self.sides[side].session.reset(flow, ResetReason::Unreachable);
                    let plug = Plug { ended: true, broken: true, finished: true, ..Plug::default() };
                    self.sides[side].plugs.insert(flow, plug);
                }
                Event::Connect(flow) => {
                    self.sides[side].connects.push(flow);
                    let plug = self.plug();
                    self.sides[side].plugs.insert(flow, plug);
                }
                Event::Gone(flow) => {
                    if let Some(plug) = self.sides[side].plugs.get_mut(&flow) {
                        assert!(!plug.gone, "gone twice");
                        plug.gone = true;
                    }
                }
                Event::Close(id) => self.lose(side, id),
                Event::Stopped(flow) => {
                    if let Some(plug) = self.sides[side].plugs.get_mut(&flow) {
                        plug.ended = true;
                    }
                }
                Event::Over(..) => panic!("no side ended the session"),
                Event::Deliver(_) | Event::Room | Event::Send => {}
            }
        }
    }

    fn pick(&mut self) -> Option<usize> {
        (!self.carriers.is_empty()).then(|| self.random.usize(0..self.carriers.len()))
    }

    fn send(&mut self) {
        let Some(at) = self.pick() else { return };
        let side = self.random.usize(0..2);
        let carrier = &mut self.carriers[at];
        let Some(id) = carrier.ends[side] else { return };
        for _ in 0..self.random.u32(1..4) {
            if carrier.ways[1 - side].len() > 6 {
                return;
            }
            let Some(frame) = self.sides[side].session.next_frame(id, self.now) else { return };
            if !carrier.is_cut {
                carrier.ways[1 - side].push_back(frame);
            }
        }
    }

    fn receive(&mut self) {
        let Some(at) = self.pick() else { return };
        let side = self.random.usize(0..2);
        let carrier = &mut self.carriers[at];
        let Some(id) = carrier.ends[side] else { return };
        let Some(OutgoingFrame { frame, payload, packing }) = carrier.ways[side].pop_front() else { return };
        let mut bytes = Vec::new();
        frame.encode(&mut bytes).expect("the protocol permits it");
        let head = Head::decode(bytes.first_chunk().unwrap()).unwrap();
        let back: Frame = head.body(&bytes[Head::BYTES..]).unwrap();
        assert_eq!(back, frame);
        // The packer uses references only in bytes that go for the first time.
        if let (Frame::Data { flow, offset, length }, Some(packing)) = (&frame, packing)
            && !packing.is_again
            && self.random.u32(0..8) == 0
        {
            if let Err(error) = self.sides[side].session.missing(id, *flow, *offset, *length, self.now) {
                panic!("side {side} refuses: {error}");
            }
            self.misses += 1;
            return;
        }
        let payload = payload.map(|payload| Piece::from(payload.to_vec()));
        if let Err(error) = self.sides[side].session.receive(id, frame, payload, self.now) {
            panic!("side {side} refuses: {error}");
        }
    }

    fn vmm_sends(&mut self) {
        let side = self.random.usize(0..2);
        let Some(flow) = self.choose(side) else { return };
        let most = self.random.u64(1..100_000);
        let Side { session, plugs, .. } = &mut self.sides[side];
        let Some(plug) = plugs.get_mut(&flow) else { return };
        if plug.ended || plug.gone {
            return;
        }
        let count = session.room(flow, self.now).min(plug.total - plug.sent).min(most);
        if count > 0 {
            let bytes: Vec<u8> = (plug.sent..plug.sent + count).map(|at| byte(flow, side == 0, at)).collect();
            let pages: Vec<u64> = (plug.sent..plug.sent + count).filter(|at| at % 4104 == 8).collect();
            session.note_pages(flow, &pages);
            session.take(flow, bytes.into(), self.now);
            plug.sent += count;
        } else if plug.sent == plug.total {
            plug.ended = true;
            if plug.breaks {
                session.reset(flow, ResetReason::Broken);
                (plug.broken, plug.finished) = (true, true);
            } else {
                session.finish(flow);
            }
        }
    }

    fn vmm_receives(&mut self) {
        let side = self.random.usize(0..2);
        let Some(flow) = self.choose(side) else { return };
        let most = self.random.u64(1..200_000);
        let step = self.step;
        let other = self.sides[1 - side].plugs.get(&flow).map(|plug| (plug.sent, plug.ended));
        let Side { session, plugs, .. } = &mut self.sides[side];
        let Some(plug) = plugs.get_mut(&flow) else { return };
        if step < plug.deaf_until {
            return;
        }
        match session.next_delivery(flow) {
            Some(Delivery::Bytes(piece)) => {
                assert!(!plug.broken && !plug.finished, "bytes after the end");
                let count = (piece.len() as u64).min(most);
                for (at, value) in (plug.received..).zip(&piece[..count as usize]) {
                    assert_eq!(*value, byte(flow, side == 1, at), "flow {flow}, offset {at}");
                }
                plug.received += count;
                session.delivered(flow, count);
            }
            Some(Delivery::Finish) => {
                assert!(!plug.finished, "the end comes once");
                plug.finished = true;
                let (sent, ended) = other.expect("the other side knows the flow");
                assert!(ended && plug.received == sent, "flow {flow}: {} of {sent} bytes", plug.received);
                session.end_delivered(flow);
            }
            Some(Delivery::Reset(_)) => {
                (plug.finished, plug.broken) = (true, true);
                session.end_delivered(flow);
                if !plug.ended {
                    plug.ended = true;
                    session.reset(flow, ResetReason::Broken);
                }
            }
            None => {}
        }
    }

    fn choose(&mut self, side: usize) -> Option<u32> {
        let flows: Vec<u32> = self.sides[side].plugs.keys().copied().collect();
        (!flows.is_empty()).then(|| flows[self.random.usize(0..flows.len())])
    }

    fn connect(&mut self) {
        let lane = self.random.u8(0..self.lanes);
        let has = self.carriers.iter().any(|it| it.lane == lane && it.ends[0].is_some() && !it.is_cut);
        // Without further cuts every carrier stays, so that no repetition hides a frame that was never sent.
        if has && (self.cuts == 0 || self.random.u32(0..20) > 0) {
            return;
        }
        let ends = [0, 1].map(|side| Some(self.sides[side].session.carrier_up(lane, self.now)));
        self.carriers.push(Carrier { lane, ends, ways: [VecDeque::new(), VecDeque::new()], is_cut: false });
    }

    /// Cuts a carrier: some of its frames still arrive, and each side notices the loss later.
    fn cut(&mut self) {
        self.cuts -= 1;
        let all = self.random.u32(0..4) == 0;
        let Some(one) = self.pick() else { return };
        for at in 0..self.carriers.len() {
            if all || at == one {
                let left = [0, 1].map(|side: usize| self.carriers[at].ways[side].len());
                let carrier = &mut self.carriers[at];
                carrier.is_cut = true;
                for (way, length) in carrier.ways.iter_mut().zip(left) {
                    way.truncate(self.random.usize(0..=length));
                }
            }
        }
    }

    fn notice(&mut self) {
        let side = self.random.usize(0..2);
        let cut: Vec<CarrierId> =
            self.carriers.iter().filter(|it| it.is_cut).filter_map(|it| it.ends[side]).collect();
        if let Some(id) = cut.first() {
            self.lose(side, *id);
        }
    }

    fn lose(&mut self, side: usize, id: CarrierId) {
        for carrier in self.carriers.iter_mut().filter(|it| it.ends[side] == Some(id)) {
            carrier.ends[side] = None;
            carrier.is_cut = true;
            carrier.ways[side].clear();
        }
        self.sides[side].session.carrier_down(id, self.now);
        self.carriers.retain(|carrier| carrier.ends != [None, None]);
    }

    fn state(&self) -> String {
        let plug = |plug: &Plug| {
            format!(
                "{}/{} {}{}{} ",
                plug.sent,
                plug.total,
                plug.received,
                if plug.ended { " ended" } else { "" },
                if plug.gone { " gone" } else { "" }
            )
        };
        let sides = self.sides.iter().map(|side| {
            let plugs: String =
                side.plugs.iter().map(|(flow, it)| format!("[{flow}: {}]", plug(it))).collect();
            format!("{plugs} {:?}", side.session.counters())
        });
        sides.collect::<Vec<_>>().join("; ")
    }
}

#[test]
fn sessions_deliver_every_byte_once_whatever_is_cut() {
    let seed = sterna_testing::seed("sessions_deliver_every_byte_once_whatever_is_cut");
    for round in 0..u64::from(sterna_testing::rounds(300)) {
        let seed = seed.wrapping_add(round);
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| World::new(seed, None).run())) {
            let why = panic.downcast_ref::<String>().cloned().unwrap_or_default();
            panic!("STERNA_SEED={seed} STERNA_ROUNDS=1 repeats it: {why}");
        }
    }
}

#[test]
fn sessions_with_a_planted_bug_are_found() {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let missed: Vec<Planted> = Planted::ALL
        .into_iter()
        // These two have tests of their own.
        .filter(|bug| !matches!(bug, Planted::GrantsWithoutLimit | Planted::ForgetsMiss))
        .filter(|bug| {
            let finds = |seed| catch_unwind(AssertUnwindSafe(|| World::new(seed, Some(*bug)).run())).is_err();
            !(0..400).any(finds)
        })
        .collect();
    std::panic::set_hook(hook);
    assert!(missed.is_empty(), "the simulator does not notice {missed:?}");
}

#[test]
fn session_that_ends_says_its_verdict_on_every_carrier() {
    let mut session = Session::new(SessionId([1; 16]), Role::Dialer, Settings::new(BUFFER));
    let ids = [0, 1].map(|lane| session.carrier_up(lane, Duration::ZERO));
    session.end(Verdict::Never, "the window ended");
    for id in ids {
        let frame = session.next_frame(id, Duration::ZERO).expect("OVER").frame;
        assert_eq!(frame, Frame::Over { verdict: Verdict::Never, text: "the window ended".into() });
        assert!(session.next_frame(id, Duration::ZERO).is_none(), "nothing follows");
    }
    assert_eq!(session.open(Duration::ZERO), Opening::Refused);
}

/// A peer that uses all credit of many flows whose VMMs read at first and then do not. Returns the bytes that wait.
fn fill(planted: Option<Planted>) -> u64 {
    let mut settings = Settings::new(BUFFER);
    settings.planted = planted;
    let mut session = Session::new(SessionId([1; 16]), Role::Acceptor, settings);
    let now = Duration::ZERO;
    let carrier = session.carrier_up(0, now);
    session.receive(carrier, Frame::Sync, None, now).unwrap();
    let mut sent = [0; 65];
    // Bytes of each flow that its VMM still reads.
    let mut read = [1_000_000; 65];
    for flow in 1..=64 {
        session.receive(carrier, Frame::Open { flow, credit: 0 }, None, now).unwrap();
    }
    for _ in 0..4000 {
        while let Some(OutgoingFrame { frame, .. }) = session.next_frame(carrier, now) {
            let Frame::Ack { flow, credit, .. } = frame else { continue };
            let at = flow as usize;
            let length = (credit - sent[at]).min(262_144) as usize;
            if length == 0 {
                continue;
            }
            let frame = Frame::Data { flow, offset: sent[at], length };
            session.receive(carrier, frame, Some(Piece::from(vec![0; length])), now).unwrap();
            sent[at] += length as u64;
            while read[at] > 0
                && let Some(Delivery::Bytes(piece)) = session.next_delivery(flow)
            {
                read[at] = u64::saturating_sub(read[at], piece.len() as u64);
                session.delivered(flow, piece.len() as u64);
            }
            if session.held_bytes().1 > 2 * BUFFER {
                return session.held_bytes().1;
            }
        }
        session.take_events();
    }
    session.held_bytes().1
}

#[test]
fn session_grants_no_more_than_its_buffer() {
    let waiting = fill(None);
    assert!(waiting <= BUFFER && waiting > BUFFER / 4, "{waiting} bytes wait");
    let waiting = fill(Some(Planted::GrantsWithoutLimit));
    assert!(waiting > BUFFER, "the test notices the planted bug: {waiting} bytes wait");
}

#[test]
fn session_refuses_a_peer_that_breaks_its_rules() {
    let now = Duration::ZERO;
    let start = || {
        let mut session = Session::new(SessionId([1; 16]), Role::Acceptor, Settings::new(BUFFER));
        let carrier = session.carrier_up(0, now);
        session.receive(carrier, Frame::Sync, None, now).unwrap();
        session.receive(carrier, Frame::Open { flow: 1, credit: 100 }, None, now).unwrap();
        (session, carrier)
    };
    let ack = |received, delivered, credit, has_end| Frame::Ack {
        flow: 1,
        received,
        delivered,
        credit,
        has_end,
        has_stop: false,
    };
    let (flow, reason) = (1, ResetReason::Broken);
    type Expected = fn(&Rule) -> bool;
    let cases: [(Frame, Expected); 15] = [
        (Frame::Sync, |rule| matches!(rule, Rule::SyncTwice)),
        (Frame::Open { flow, credit: 0 }, |rule| matches!(rule, Rule::FlowTwice)),
        (Frame::Open { flow: 5000, credit: 0 }, |rule| matches!(rule, Rule::TooManyFlows(_))),
        (Frame::Open { flow: 2, credit: 1 << 40 }, |rule| matches!(rule, Rule::Credit { .. })),
        (Frame::Data { flow: 2, offset: 0, length: 1 }, |rule| matches!(rule, Rule::UnknownFlow)),
        (Frame::Data { flow, offset: 5, length: 1 }, |rule| {
            matches!(rule, Rule::Gap { begins: 5, received: 0 })
        }),
        (Frame::Data { flow, offset: 1 << 30, length: 1 }, |rule| matches!(rule, Rule::BeyondCredit { .. })),
        (Frame::Finish { flow, offset: 7 }, |rule| matches!(rule, Rule::Gap { .. })),
        (Frame::Reset { flow: 3, offset: 0, reason }, |rule| matches!(rule, Rule::UnknownFlow)),
        (Frame::Stop { flow: 9, reason }, |rule| matches!(rule, Rule::UnknownFlow)),
        (ack(1, 0, 1, false), |rule| matches!(rule, Rule::NeverSent { acknowledged: 1, sent: 0 })),
        (ack(0, 1, 1, false), |rule| matches!(rule, Rule::Delivered { .. })),
        (ack(0, 0, 1 << 40, false), |rule| matches!(rule, Rule::Credit { .. })),
        (ack(0, 0, 1, true), |rule| matches!(rule, Rule::EndNeverSent)),
        (Frame::Pong(3), |rule| matches!(rule, Rule::Pong(3))),
    ];
    for (frame, is_expected) in cases {
        let (mut session, carrier) = start();
        let payload = matches!(frame, Frame::Data { .. }).then(|| Piece::from(vec![0]));
        let error = session.receive(carrier, frame.clone(), payload, now).unwrap_err();
        assert!(is_expected(&error.source.rule), "{frame:?}: {error}");
        assert!(error.to_string().starts_with("session 0101010101010101, carrier 0: frame "), "{error}");
    }
    let (mut session, carrier) = start();
    session.receive(carrier, Frame::Finish { flow: 1, offset: 0 }, None, now).unwrap();
    let late = Frame::Data { flow: 1, offset: 0, length: 1 };
    let error = session.receive(carrier, late, Some(Piece::from(vec![0])), now).unwrap_err();
    assert!(matches!(error.source.rule, Rule::End { .. }), "{error}");
    let early = session.carrier_up(1, now);
    let error = session.receive(early, Frame::Ping(1), None, now).unwrap_err();
    assert!(matches!(error.source.rule, Rule::BeforeSync), "{error}");
    let error = session.missing(early, 1, 0, 10, now).unwrap_err();
    assert!(matches!(error.source.rule, Rule::BeforeSync), "{error}");
}

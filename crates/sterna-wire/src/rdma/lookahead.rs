//! Registers memory ahead of the WRITEs, because each call is expensive (`specs/rdma.md §6.6`).

use super::places::BlockRange;
use super::plan::{Batch, RegistrationPlan};
use crate::error::WireError;
use std::collections::{BTreeMap, VecDeque};

const SPEC: &str = "specs/rdma.md §6.6";

/// Registers memory of one side ahead of the WRITEs that need it.
///
/// A source has one for the destination's memory, which it requests, and one for its own. Both get the same
/// runs. Both sides therefore register in parallel, each at its own speed and window size. [`next_write`]
/// returns bytes that both have registered. The owner of the connection performs each [`Step`] and reports the
/// result.
#[derive(Debug, Clone)]
pub struct Lookahead {
    plan: RegistrationPlan,
    runs: VecDeque<BlockRange>,
    most_ahead: u64,
    /// Batches with windows that are not registered yet, and the batches after them.
    batches: VecDeque<Scheduled>,
    /// Number of windows that a step has returned and that are not registered yet.
    due: usize,
    /// Ranges whose windows are registered and that may be written.
    ready: VecDeque<BlockRange>,
    posted: VecDeque<BlockRange>,
    /// Ranges posted by one of several lanes: the end of each, by block and start.
    taken: BTreeMap<(usize, u64), u64>,
    /// Bytes that are planned and not written yet.
    open: u64,
}

/// The next action for registration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Register these windows, in this order. Then call [`Lookahead::registered`].
    Register(Vec<BlockRange>),
    /// Deregister these windows. No current or future WRITE uses them.
    GiveBack(Vec<BlockRange>),
    /// Wait until a window is registered, a WRITE completes, or more runs are added.
    Wait,
}

#[derive(Debug, Clone)]
struct Scheduled {
    batch: Batch,
    /// Number of windows at the front of `batch.ask` that a step has returned.
    handed_out: usize,
}

impl Lookahead {
    /// Most bytes registered ahead of WRITEs: two windows, one registered while the other is written.
    pub const MOST_AHEAD: u64 = 2 << 30;

    /// A schedule that registers `most_ahead` bytes ahead, and at least one batch.
    pub fn new(plan: RegistrationPlan, most_ahead: u64) -> Self {
        Self {
            plan,
            runs: VecDeque::new(),
            most_ahead,
            batches: VecDeque::new(),
            due: 0,
            ready: VecDeque::new(),
            posted: VecDeque::new(),
            taken: BTreeMap::new(),
            open: 0,
        }
    }

    /// Adds runs of pages to write, after the runs that were added before.
    ///
    /// # Errors
    /// [`Fault::Local`](crate::Fault::Local) for an empty run or one outside its block. Earlier runs are added.
    pub fn add(&mut self, runs: impl IntoIterator<Item = BlockRange>) -> Result<(), WireError> {
        for run in runs {
            self.plan.check(&run)?;
            self.runs.push_back(run);
        }
        self.settle();
        Ok(())
    }

    /// Declares a block as registered without being pinned, see [`RegistrationPlan::on_demand`].
    pub fn on_demand(&mut self, block: usize) {
        self.plan.on_demand(block);
    }

    /// The plan, with all windows that are registered or will be.
    pub fn plan(&self) -> &RegistrationPlan {
        &self.plan
    }

    /// Whether everything that was added has been written.
    pub fn is_done(&self) -> bool {
        self.runs.is_empty() && self.open == 0
    }

    /// The next action, with at most `most` windows. Use 1 towards a QEMU.
    ///
    /// Call it when the step can be performed immediately. A step's windows are as long as the known runs
    /// allow. The runs for the next step gather during the current one.
    pub fn next_step(&mut self, most: usize) -> Step {
        loop {
            let Some(index) = self.waiting_batch() else {
                if !self.may_plan() || !self.plan_batch(true) {
                    return Step::Wait;
                }
                continue;
            };
            if !self.may_hand_out(index) {
                return Step::Wait;
            }
            let of = &mut self.batches[index];
            if !of.batch.give_back.is_empty() {
                return Step::GiveBack(std::mem::take(&mut of.batch.give_back));
            }
            let windows: Vec<_> = of.batch.ask[of.handed_out..].iter().copied().take(most.max(1)).collect();
            of.handed_out += windows.len();
            self.due += windows.len();
            return Step::Register(windows);
        }
    }

    /// Whether [`Self::next_step`] would return an action other than [`Step::Wait`].
    pub fn has_step(&self) -> bool {
        self.waiting_batch().map_or_else(|| self.may_plan(), |index| self.may_hand_out(index))
    }

    /// Reports that the first `windows` of the returned windows are registered.
    ///
    /// # Errors
    /// [`Fault::Local`](crate::Fault::Local) for more windows than were returned and not reported yet.
    pub fn registered(&mut self, windows: usize) -> Result<(), WireError> {
        let Some(due) = self.due.checked_sub(windows) else {
            let rule = format!("{windows} windows are registered, but {} were assigned", self.due);
            return Err(WireError::local("RDMA window", 0, SPEC, rule));
        };
        self.due = due;
        let mut left = windows;
        for of in &mut self.batches {
            let count = left.min(of.handed_out);
            of.batch.ask.drain(..count);
            of.handed_out -= count;
            left -= count;
        }
        self.promote();
        self.settle();
        Ok(())
    }

    /// The next range that may be written, by this side's registrations.
    pub fn ready(&self) -> Option<BlockRange> {
        self.ready.front().copied()
    }

    /// Records that the first `bytes` of the ready ranges have been posted.
    fn post(&mut self, bytes: u64) {
        let Some(first) = self.ready.front_mut() else { return };
        let length = bytes.min(first.length);
        self.posted.push_back(BlockRange { length, ..*first });
        first.start += length;
        first.length -= length;
        if first.length == 0 {
            self.ready.pop_front();
        }
    }

    /// Reports that the oldest posted WRITE is complete. Returns its range.
    ///
    /// # Errors
    /// [`Fault::Local`](crate::Fault::Local) when no WRITE is posted.
    pub fn written(&mut self) -> Result<BlockRange, WireError> {
        let Some(write) = self.posted.pop_front() else {
            let rule = "a WRITE is complete, but none was posted";
            return Err(WireError::local("WRITE", 0, SPEC, rule.to_owned()));
        };
        self.open -= write.length;
        self.settle();
        Ok(write)
    }

    /// Whether a part of `range` may be written, by this side's registrations.
    pub fn has_ready(&self, range: &BlockRange) -> bool {
        self.ready.iter().any(|ready| overlap(ready, range).is_some())
    }

    /// The parts of `range` that may be written, by this side's registrations.
    fn ready_parts(&self, range: &BlockRange) -> Vec<BlockRange> {
        let (mut parts, mut missing) = (Vec::new(), range.length);
        for part in self.ready.iter().filter_map(|ready| overlap(ready, range)) {
            parts.push(part);
            missing -= part.length;
            if missing == 0 {
                break;
            }
        }
        parts
    }

    /// Takes a ready part from any position, because lanes differ in their order. It counts as posted.
    fn take(&mut self, range: BlockRange) {
        let Some(first) = self.ready.iter().position(|ready| overlap(ready, &range).is_some()) else {
            return;
        };
        let mut missing = range.length;
        let mut left = self.ready.split_off(first);
        while missing > 0 {
            let Some(ready) = left.pop_front() else { break };
            let Some(part) = overlap(&ready, &range) else {
                self.ready.push_back(ready);
                continue;
            };
            missing -= part.length;
            for (start, end) in [(ready.start, part.start), (part.end(), ready.end())] {
                if start < end {
                    self.ready.push_back(BlockRange { block: ready.block, start, length: end - start });
                }
            }
            self.taken.insert((part.block, part.start), part.end());
        }
        self.ready.append(&mut left);
    }

    /// Reports that a range from [`take_ready`] is complete.
    ///
    /// # Errors
    /// [`Fault::Local`](crate::Fault::Local) when [`take_ready`] did not return the range.
    pub fn completed(&mut self, range: BlockRange) -> Result<(), WireError> {
        let (block, mut at) = (range.block, range.start);
        while let Some(end) = self.taken.get(&(block, at)).copied().filter(|end| *end <= range.end()) {
            self.taken.remove(&(block, at));
            at = end;
        }
        if at != range.end() {
            let rule = format!("{range:?} is complete, but it was posted up to {at:#x}");
            return Err(WireError::local("WRITE", 0, SPEC, rule));
        }
        self.open -= range.length;
        self.settle();
        Ok(())
    }

    /// The first batch with windows that no step has returned yet.
    fn waiting_batch(&self) -> Option<usize> {
        let waits = |of: &Scheduled| !of.batch.give_back.is_empty() || of.handed_out < of.batch.ask.len();
        self.batches.iter().position(waits)
    }

    /// Whether no WRITE uses the windows that batch `index` deregisters.
    fn may_hand_out(&self, index: usize) -> bool {
        !self.batches[index].batch.give_back.iter().any(|window| self.is_used(window, index))
    }

    fn may_plan(&self) -> bool {
        !self.runs.is_empty() && (self.open == 0 || self.open < self.most_ahead)
    }

    /// Plans the first runs in windows that are or will be registered: they need no step.
    fn settle(&mut self) {
        while self.may_plan() && self.plan_batch(false) {}
    }

    /// Plans one batch, without `may_ask` only in planned windows. Returns whether it has any bytes.
    fn plan_batch(&mut self, may_ask: bool) -> bool {
        let mut batch = self.plan.take(&mut self.runs, self.plan.step(), may_ask);
        let bytes = batch.writes.iter().map(|write| write.length).sum::<u64>();
        let needs_none = batch.ask.is_empty() && batch.give_back.is_empty();
        self.open += bytes;
        match self.batches.back_mut() {
            // The batch needs no window of its own, so it is written with the previous batch.
            Some(last) if needs_none => last.batch.writes.append(&mut batch.writes),
            _ if bytes > 0 => self.batches.push_back(Scheduled { batch, handed_out: 0 }),
            _ => {}
        }
        self.promote();
        bytes > 0
    }

    /// Moves the batches whose windows are all registered to `ready`, in order.
    fn promote(&mut self) {
        while let Some(first) = self.batches.front() {
            if !first.batch.ask.is_empty() || !first.batch.give_back.is_empty() {
                return;
            }
            self.ready.extend(self.batches.pop_front().into_iter().flat_map(|of| of.batch.writes));
        }
    }

    /// Whether a WRITE that precedes batch `index` uses the window.
    fn is_used(&self, window: &BlockRange, index: usize) -> bool {
        let earlier = self.batches.iter().take(index).flat_map(|of| &of.batch.writes);
        let mut writes = self.posted.iter().chain(&self.ready).chain(earlier);
        let last_before = self.taken.range(..(window.block, window.end())).next_back();
        let is_taken =
            last_before.is_some_and(|(&(block, _), end)| block == window.block && *end > window.start);
        is_taken || writes.any(|write| overlap(write, window).is_some())
    }
}

/// The intersection of two ranges.
fn overlap(one: &BlockRange, other: &BlockRange) -> Option<BlockRange> {
    let (start, end) = (one.start.max(other.start), one.end().min(other.end()));
    (one.block == other.block && start < end).then(|| BlockRange {
        block: one.block,
        start,
        length: end - start,
    })
}

/// The next WRITE of at most `most` bytes, registered on both sides. It counts as posted.
pub fn next_write(own: &mut Lookahead, remote: &mut Lookahead, most: u64) -> Option<BlockRange> {
    let (here, there) = (own.ready()?, remote.ready()?);
    let length = here.length.min(there.length).min(most);
    own.post(length);
    remote.post(length);
    Some(BlockRange { length, ..there })
}

/// Takes the parts of `range` that both sides have registered. Each lies in one window of the smaller size. The
/// rest becomes ready later. A lane must not wait for all of its pages, because together they may exceed the
/// limit on registered memory.
pub fn take_ready(own: &mut Lookahead, remote: &mut Lookahead, range: BlockRange) -> Vec<BlockRange> {
    let here = own.ready_parts(&range);
    let parts: Vec<_> = here.iter().flat_map(|part| remote.ready_parts(part)).collect();
    for part in &parts {
        own.take(*part);
        remote.take(*part);
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::super::chunk::ChunkSize;
    use super::super::plan::{Destination, PlanLimits};
    use super::*;
    use crate::Fault;

    const MIB: u64 = 1 << 20;

    fn range(start: u64, length: u64) -> BlockRange {
        BlockRange { block: 0, start: start * MIB, length: length * MIB }
    }

    fn lookahead(kind: Destination, pinned: Option<u64>, most_ahead: u64) -> Lookahead {
        let limits = PlanLimits { own_chunk: ChunkSize::LEAST, most_message: 1 << 30, pinned };
        Lookahead::new(RegistrationPlan::new(&[1 << 30], kind, limits).unwrap(), most_ahead)
    }

    /// A side whose memory is already registered completely.
    fn other() -> Lookahead {
        lookahead(Destination::PinAll, None, u64::MAX)
    }

    fn qemu(mib: u64) -> Destination {
        Destination::Qemu(ChunkSize::new(mib * MIB).unwrap())
    }

    #[test]
    fn windows_are_registered_ahead_and_written_when_they_are_there() {
        let (mut own, mut remote) = (other(), lookahead(qemu(16), None, 48 * MIB));
        for side in [&mut own, &mut remote] {
            side.add([range(0, 128)]).unwrap();
        }
        assert_eq!(own.next_step(1), Step::Wait, "pin-all registers nothing");

        for index in 0..3 {
            assert_eq!(remote.next_step(1), Step::Register(vec![range(index * 16, 16)]));
        }
        assert_eq!(remote.next_step(1), Step::Wait, "48 MiB ahead");
        assert_eq!(next_write(&mut own, &mut remote, u64::MAX), None, "nothing is there");
        remote.registered(1).unwrap();
        assert_eq!(next_write(&mut own, &mut remote, 12 * MIB), Some(range(0, 12)));
        assert_eq!(next_write(&mut own, &mut remote, 12 * MIB), Some(range(12, 4)));
        assert_eq!(next_write(&mut own, &mut remote, 12 * MIB), None);
        assert_eq!(remote.next_step(1), Step::Wait, "posted is not written");
        assert_eq!(remote.written().unwrap(), range(0, 12));
        assert_eq!(remote.next_step(1), Step::Register(vec![range(48, 16)]));
        assert!(!remote.is_done());
    }

    #[test]
    fn one_step_asks_for_as_many_windows_as_a_message_takes() {
        let mut remote = lookahead(Destination::Sterna(ChunkSize::LEAST), None, u64::MAX);
        remote.add((0..5).map(|at| range(at * 8, 1))).unwrap();

        assert_eq!(remote.next_step(3), Step::Register(vec![range(0, 1), range(8, 1), range(16, 1)]));
        assert_eq!(remote.next_step(3), Step::Register(vec![range(24, 1), range(32, 1)]));
        remote.registered(4).unwrap();
        assert_eq!(remote.ready(), None, "a batch waits for all of its windows");
        remote.registered(1).unwrap();
        assert_eq!(remote.ready(), Some(range(0, 1)));
    }

    #[test]
    fn runs_that_come_while_a_window_is_registered_make_one_window() {
        let (mut own, mut remote) =
            (other(), lookahead(Destination::Sterna(ChunkSize::LEAST), None, u64::MAX));
        let mut add = |remote: &mut Lookahead, at| {
            own.add([range(at, 2)]).unwrap();
            remote.add([range(at, 2)]).unwrap();
        };
        assert!(!remote.has_step());
        add(&mut remote, 0);
        assert!(remote.has_step());
        assert_eq!(remote.next_step(1), Step::Register(vec![range(0, 2)]));
        (1..100).for_each(|at| add(&mut remote, 2 * at));
        remote.registered(1).unwrap();
        assert_eq!(remote.next_step(1), Step::Register(vec![range(2, 198)]));
        assert!(!remote.has_step());

        // A run in a window that is or will be registered needs no step.
        add(&mut remote, 4);
        assert!(!remote.has_step());
        assert_eq!(remote.next_step(1), Step::Wait);
    }

    #[test]
    fn runs_that_wait_for_a_window_that_is_due_wait_in_one_batch() {
        let mut remote = lookahead(Destination::Sterna(ChunkSize::LEAST), None, u64::MAX);
        let page = |at: u64| BlockRange { block: 0, start: at * 8192, length: 4096 };
        remote.add([page(0)]).unwrap();
        assert_eq!(remote.next_step(1), Step::Register(vec![range(0, 1)]));
        (1..100).for_each(|at| remote.add([page(at)]).unwrap());
        assert_eq!(remote.batches.len(), 1, "each look at the batches takes that many steps");
        remote.registered(1).unwrap();
        assert!((0..100).all(|at| remote.has_ready(&page(at))));
    }

    /// Performs all steps, one WRITE at a time. Returns the largest number of registered bytes, and the number
    /// of deregistered windows.
    fn carry_out(remote: &mut Lookahead) -> (u64, usize) {
        let mut own = other();
        own.add([range(0, 1024)]).unwrap();
        let (mut windows, mut most, mut given_back) = (Vec::<BlockRange>::new(), 0, 0);
        let mut at = 0;
        while !remote.is_done() {
            match remote.next_step(1) {
                Step::Register(more) => {
                    windows.extend(&more);
                    remote.registered(more.len()).unwrap();
                }
                Step::GiveBack(some) => {
                    given_back += some.len();
                    windows.retain(|window| !some.contains(window));
                }
                Step::Wait => {
                    own.next_step(1);
                    let write = next_write(&mut own, remote, 4 * MIB).expect("no progress");
                    assert_eq!(write.start, at, "in order");
                    at = write.end();
                    let holds =
                        |window: &BlockRange| window.start <= write.start && write.end() <= window.end();
                    assert!(windows.iter().any(holds), "{write:?} in none of {windows:?}");
                    own.written().unwrap();
                    remote.written().unwrap();
                }
            }
            most = most.max(windows.iter().map(|window| window.length).sum());
        }
        assert_eq!(at, 1 << 30);
        (most, given_back)
    }

    #[test]
    fn limit_is_kept_and_what_is_given_back_is_written_before() {
        for (limit, windows) in [(64, 32), (2, 1024), (1, 1024), (300, 8)] {
            let kind = Destination::Sterna(ChunkSize::LEAST);
            let mut remote = lookahead(kind, Some(limit * MIB), Lookahead::MOST_AHEAD);
            remote.add([range(0, 1024)]).unwrap();

            let (most, given_back) = carry_out(&mut remote);

            assert!(most <= limit * MIB, "{most} bytes with a limit of {limit} MiB");
            let kept = remote.plan().pinned() / (1024 / windows * MIB);
            assert_eq!(given_back as u64 + kept, windows, "limit {limit} MiB");
        }
    }

    #[test]
    fn while_one_window_is_written_the_next_is_registered_below_a_limit() {
        let (mut own, kind) = (other(), Destination::Sterna(ChunkSize::LEAST));
        let mut remote = lookahead(kind, Some(64 * MIB), Lookahead::MOST_AHEAD);
        for side in [&mut own, &mut remote] {
            side.add([range(0, 1024)]).unwrap();
        }
        own.next_step(1);
        for at in [0, 32] {
            assert_eq!(remote.next_step(1), Step::Register(vec![range(at, 32)]));
        }
        remote.registered(2).unwrap();
        assert_eq!(remote.next_step(1), Step::Wait);

        next_write(&mut own, &mut remote, 32 * MIB).unwrap();
        next_write(&mut own, &mut remote, 32 * MIB).unwrap();
        remote.written().unwrap();

        assert_eq!(remote.next_step(1), Step::GiveBack(vec![range(0, 32)]));
        assert_eq!(remote.next_step(1), Step::Register(vec![range(64, 32)]));
    }

    /// The rest of `range` without `parts`.
    fn without(range: BlockRange, parts: &[BlockRange]) -> Vec<BlockRange> {
        let mut left = vec![range];
        for part in parts {
            left = left
                .into_iter()
                .flat_map(|range| {
                    let Some(part) = overlap(&range, part) else { return vec![range] };
                    [(range.start, part.start), (part.end(), range.end())]
                        .into_iter()
                        .filter(|(start, end)| start < end)
                        .map(|(start, end)| BlockRange { start, length: end - start, ..range })
                        .collect()
                })
                .collect();
        }
        left
    }

    #[test]
    fn lanes_take_what_is_theirs_in_any_order_below_any_limit() {
        for seed in 0..300 {
            let mut random = fastrand::Rng::with_seed(seed);
            let limit = |random: &mut fastrand::Rng| {
                [None, Some(32 * MIB), Some(2 * MIB), Some(MIB)][random.usize(..4)]
            };
            let kind = Destination::Sterna(ChunkSize::LEAST);
            let limits = [limit(&mut random), limit(&mut random)];
            let mut sides = limits.map(|limit| lookahead(kind, limit, 64 * MIB));
            // Packets of four lanes. Their pieces begin and end inside windows, or cross a border.
            let mut packets: Vec<VecDeque<Vec<BlockRange>>> = vec![VecDeque::new(); 4];
            let mut at = 0;
            for _ in 0..20 {
                let pieces = (0..1 + random.u64(..6)).map(|_| {
                    let start = at * MIB + 4096 * random.u64(..100);
                    at += 1 + random.u64(..3);
                    BlockRange { block: 0, start, length: 4096 * (1 + random.u64(..150)) }
                });
                let pieces: Vec<_> = pieces.collect();
                sides.iter_mut().for_each(|side| side.add(pieces.clone()).unwrap());
                packets[random.usize(..4)].push_back(pieces);
            }
            let mut posted: Vec<BlockRange> = Vec::new();
            let mut idle = 0;
            while !(sides[0].is_done() && sides[1].is_done()) {
                for (side, limit) in sides.iter_mut().zip(limits) {
                    match side.next_step(2) {
                        Step::Register(windows) => side.registered(windows.len()).unwrap(),
                        Step::GiveBack(windows) => {
                            let is_used =
                                |of: &BlockRange| windows.iter().any(|window| overlap(of, window).is_some());
                            assert!(!posted.iter().any(is_used), "seed {seed}");
                        }
                        Step::Wait => {}
                    }
                    assert!(limit.is_none_or(|limit| side.plan().pinned() <= limit), "seed {seed}");
                }
                let [own, remote] = &mut sides;
                // Each lane is at its first packet.
                let lane = &mut packets[random.usize(..4)];
                if let Some(mut packet) = lane.pop_front() {
                    let before = posted.len();
                    let mut left = Vec::new();
                    for piece in packet.drain(..) {
                        let parts = take_ready(own, remote, piece);
                        left.extend(without(piece, &parts));
                        posted.extend(parts);
                    }
                    idle = if posted.len() > before { 0 } else { idle + 1 };
                    if !left.is_empty() {
                        lane.push_front(left);
                    }
                }
                if random.bool() && !posted.is_empty() {
                    let complete = posted.swap_remove(random.usize(..posted.len()));
                    own.completed(complete).unwrap();
                    remote.completed(complete).unwrap();
                    idle = 0;
                }
                assert!(idle < 1000, "seed {seed}: nothing moves any more below {limits:?}");
            }
            let [own, remote] = &mut sides;
            assert_eq!(take_ready(own, remote, range(0, 1)), []);
            assert!(own.completed(range(0, 1)).is_err(), "seed {seed}");
        }
    }

    #[test]
    fn reports_of_what_never_was_are_our_fault() {
        let mut remote = lookahead(qemu(16), None, u64::MAX);
        assert_eq!(remote.registered(1).unwrap_err().fault, Fault::Local);
        assert_eq!(remote.written().unwrap_err().fault, Fault::Local);
        let outside = BlockRange { block: 1, start: 0, length: MIB };
        assert_eq!(remote.add([outside]).unwrap_err().fault, Fault::Local);
        assert!(!remote.has_step());
    }
}

//! A protected guest's state besides memory: a disk whose content is sent, and packets.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use sterna::ram::{DirtySource, GuestRam};
use sterna::{
    AskCheckpoint, Device, DeviceStream, EpochStream, Hook, RemainingState, RunState, SettingsError,
    SourceVm, StartError, TargetVm, Vm, VmError,
};
use sterna_guests::process::ProcessGuest;
use sterna_standby::machines::{primary, standby};
use sterna_standby::{NoOutput, PacketGate, ProtectError, Terms};

use crate::common::{assert_lives_on, pair};
use crate::protected::{PATIENCE, PLAIN, Pair, TERMS, Way, join, protect, short_lease, wait_for, writer};
use crate::support::bank::Bank;

const BLOCK: usize = 4096;
const BLOCKS: u64 = 32;

/// A disk. While the guest runs, a thread writes consecutive numbers into consecutive blocks. Its section contains
/// the last number.
#[derive(Default)]
struct Disk(Mutex<State>);

#[derive(Default)]
struct State {
    is_running: bool,
    number: u64,
    content: Vec<u64>,
    dirty: BTreeSet<u64>,
    limit: Option<(u64, AskCheckpoint)>,
    is_saved: bool,
    /// Whether its stream contains bytes of no disk.
    lies: bool,
    /// Whether saving and loading its section fail.
    is_broken: bool,
    /// Bytes of a record that has arrived in part.
    rest: Vec<u8>,
}

impl State {
    fn has_room(&self) -> bool {
        let dirty = self.dirty.len() as u64 * BLOCK as u64;
        self.limit.as_ref().is_none_or(|(most, _)| dirty < *most)
    }
}

impl Disk {
    fn new() -> Arc<Self> {
        let this = Arc::new(Self::default());
        this.0.lock().content = vec![0; BLOCKS as usize];
        this
    }

    /// Writes in a new thread, until all other handles of the disk are dropped.
    fn write_all_the_time(self: &Arc<Self>) {
        let disk = Arc::downgrade(self);
        std::thread::spawn(move || {
            while let Some(disk) = disk.upgrade() {
                let mut state = disk.0.lock();
                let ask = state.limit.as_ref().map(|(_, ask)| ask.clone());
                if state.is_running && state.has_room() {
                    state.number += 1;
                    let (number, block) = (state.number, state.number % BLOCKS);
                    state.content[block as usize] = number;
                    state.dirty.insert(block);
                } else if let Some(ask) = ask.filter(|_| state.is_running) {
                    drop(state);
                    ask();
                }
                std::thread::sleep(Duration::from_micros(200));
            }
        });
    }

    fn run(&self, is_running: bool) {
        self.0.lock().is_running = is_running;
    }

    fn check(&self) -> Result<(), VmError> {
        if self.0.lock().is_broken { Err(VmError::new("disk", "told to fail")) } else { Ok(()) }
    }

    fn number(&self) -> u64 {
        self.0.lock().number
    }

    /// Asserts that every block has the last number that belongs there, according to the section.
    fn assert_of_one_moment(&self) {
        let state = self.0.lock();
        let last = |block: u64| (0..=state.number).rev().find(|number| number % BLOCKS == block).unwrap_or(0);
        let wanted: Vec<_> = (0..BLOCKS).map(last).collect();
        assert_eq!(state.content, wanted, "after {}", state.number);
    }
}

impl Device for Disk {
    fn name(&self) -> String {
        "disk".into()
    }
    fn version(&self) -> u32 {
        1
    }
    fn save(&self) -> Result<Vec<u8>, VmError> {
        self.check()?;
        Ok(self.number().to_be_bytes().to_vec())
    }
    fn load(&self, _: u32, body: &[u8]) -> Result<(), VmError> {
        self.check()?;
        let number = body.try_into().map_err(|_| VmError::new("disk", "not 8 bytes"))?;
        self.0.lock().number = u64::from_be_bytes(number);
        Ok(())
    }
}

impl DeviceStream for Disk {
    fn begin_save(&self) -> Result<(), VmError> {
        let mut state = self.0.lock();
        state.dirty = (0..BLOCKS).collect();
        (state.is_saved, state.limit) = (true, None);
        Ok(())
    }
    fn remaining(&self) -> Result<RemainingState, VmError> {
        let dirty_bytes = self.0.lock().dirty.len() as u64 * BLOCK as u64;
        Ok(RemainingState { dirty_bytes, ..RemainingState::default() })
    }
    fn read(&self, to: &mut [u8]) -> Result<usize, VmError> {
        let mut state = self.0.lock();
        let mut read = 0;
        while to.len() - read >= 16 + BLOCK
            && let Some(block) = state.dirty.pop_first()
        {
            let number = state.content[block as usize];
            let block = if state.lies { BLOCKS } else { block };
            to[read..read + 8].copy_from_slice(&block.to_be_bytes());
            to[read + 8..read + 16].copy_from_slice(&number.to_be_bytes());
            // Bytes that look like footers of sections.
            to[read + 16..read + 16 + BLOCK].fill(0x7e);
            read += 16 + BLOCK;
        }
        Ok(read)
    }
    fn stop(&self) -> Result<(), VmError> {
        Ok(())
    }
    fn end_save(&self) -> Result<(), VmError> {
        let mut state = self.0.lock();
        (state.is_saved, state.limit) = (false, None);
        Ok(())
    }
    fn begin_load(&self) -> Result<(), VmError> {
        let mut state = self.0.lock();
        state.content = vec![u64::MAX; BLOCKS as usize];
        state.rest.clear();
        Ok(())
    }
    fn write(&self, bytes: &[u8]) -> Result<(), VmError> {
        let mut state = self.0.lock();
        state.rest.extend_from_slice(bytes);
        while state.rest.len() >= 16 + BLOCK {
            let word = |at: usize| u64::from_be_bytes(state.rest[at..at + 8].try_into().unwrap());
            let (block, number) = (word(0), word(8));
            state.content[block as usize] = number;
            state.rest.drain(..16 + BLOCK);
        }
        Ok(())
    }
    fn finish_load(&self, _: &[u8]) -> Result<(), VmError> {
        assert!(self.0.lock().rest.is_empty(), "half a record");
        Ok(())
    }
    fn end_load(&self) -> Result<(), VmError> {
        self.0.lock().rest.clear();
        Ok(())
    }
    fn run(&self) -> Result<(), VmError> {
        Ok(())
    }
    fn epochs(&self) -> Option<&dyn EpochStream> {
        Some(self)
    }
}

impl EpochStream for Disk {
    fn limit(&self, limit_bytes: u64, ask: AskCheckpoint) {
        self.0.lock().limit = Some((limit_bytes, ask));
    }
    fn check_epoch(&self, bytes: &[u8]) -> Result<(), VmError> {
        let blocks =
            bytes.chunks(16 + BLOCK).map(|record| record.first_chunk().map(|b| u64::from_be_bytes(*b)));
        let are_whole = bytes.len().is_multiple_of(16 + BLOCK);
        match blocks.into_iter().all(|block| block.is_some_and(|block| block < BLOCKS)) && are_whole {
            true => Ok(()),
            false => Err(VmError::new("disk", "no whole blocks")),
        }
    }
}

/// A second handle of a device.
struct Handle(Arc<Disk>);

impl Device for Handle {
    fn name(&self) -> String {
        self.0.name()
    }
    fn version(&self) -> u32 {
        self.0.version()
    }
    fn save(&self) -> Result<Vec<u8>, VmError> {
        self.0.save()
    }
    fn load(&self, version: u32, body: &[u8]) -> Result<(), VmError> {
        Device::load(&*self.0, version, body)
    }
    fn stream(&self) -> Option<Arc<dyn DeviceStream>> {
        Some(self.0.clone())
    }
}

/// A guest with further devices. One of them may be a disk that runs and stops with the guest.
struct Extended {
    guest: Arc<ProcessGuest>,
    disk: Option<Arc<Disk>>,
    more: Vec<Arc<dyn Device>>,
}

impl Extended {
    fn with_disk(guest: &Arc<ProcessGuest>, disk: &Arc<Disk>) -> Arc<Self> {
        let (guest, disk) = (Arc::clone(guest), Some(Arc::clone(disk)));
        Arc::new(Self { guest, disk, more: Vec::new() })
    }
    fn run_disk(&self, is_running: bool) {
        self.disk.iter().for_each(|disk| disk.run(is_running));
    }
}

impl Vm for Extended {
    fn machine_type(&self) -> String {
        self.guest.machine_type()
    }
    fn uuid(&self) -> Option<[u8; 16]> {
        self.guest.uuid()
    }
    fn ram(&self) -> GuestRam {
        self.guest.ram()
    }
    fn devices(&self) -> Vec<Arc<dyn Device>> {
        let disk = self.disk.iter().map(|disk| Arc::new(Handle(Arc::clone(disk))) as Arc<dyn Device>);
        self.guest.devices().into_iter().chain(disk).chain(self.more.iter().cloned()).collect()
    }
    fn hooks(&self) -> Vec<Arc<dyn Hook>> {
        self.guest.hooks()
    }
}

impl SourceVm for Extended {
    fn dirty_source(&self) -> &dyn DirtySource {
        self.guest.dirty_source()
    }
    fn run_state(&self) -> RunState {
        self.guest.run_state()
    }
    fn stop(&self) -> Result<(), VmError> {
        self.run_disk(false);
        SourceVm::stop(&*self.guest)
    }
    fn resume(&self) -> Result<(), VmError> {
        self.run_disk(true);
        self.guest.resume()
    }
    fn may_hold_writes(&self) -> bool {
        self.guest.may_hold_writes()
    }
}

impl TargetVm for Extended {
    fn start(&self) -> Result<(), VmError> {
        self.guest.start()
    }
    fn take_over_paused(&self) -> Result<(), VmError> {
        self.guest.take_over_paused()
    }
    fn reset(&self) {
        self.guest.reset();
    }
}

/// Protects a guest with a disk. Its standby has a disk, too.
fn protect_disk(way: &Way, terms: Terms) -> Result<(Pair, [Arc<Disk>; 2]), ProtectError> {
    let (guest, _) = pair(&writer());
    let there = ProcessGuest::waiting(writer()).expect("destination");
    let disks = [Disk::new(), Disk::new()];
    disks[0].write_all_the_time();
    disks[0].run(true);
    let vms = (
        Extended::with_disk(&guest, &disks[0]) as Arc<dyn SourceVm>,
        Extended::with_disk(&there, &disks[1]) as Arc<dyn TargetVm>,
    );
    join((guest, there), vms, way, terms, Arc::new(NoOutput)).map(|pair| (pair, disks))
}

#[test]
fn disk_of_the_survivor_is_of_the_moment_of_its_devices_wherever_the_connection_breaks() {
    let mut random = sterna_testing::random("disk_of_the_survivor_is_of_the_moment_of_its_devices");
    let terms = Terms { lease: Duration::from_millis(600), ..TERMS };
    let mut survived = 0;
    for turn in 0..10 {
        let cut_after = Some(random.i64(200..2500));
        let way = Way { lanes: [0, 2][turn % 2], cut_after, ..PLAIN };
        let Ok((pair, [here, there])) = protect_disk(&way, terms) else { continue };
        // A standby without a held checkpoint never asks for the claim.
        let holds = || pair.primary.statistics().held > 0;
        wait_for("a checkpoint, or the end", || holds() || pair.primary.state().outcome.is_some());
        if turn % 4 != 3 && holds() {
            pair.arbiter.0.lock().get_or_insert("standby");
        }
        match pair.primary.wait() {
            primary::Outcome::Lost => {
                let ended = pair.ended_there();
                assert!(matches!(ended, standby::Outcome::Running(_)), "{ended:?}, {way:?}");
                there.assert_of_one_moment();
                assert!(there.number() <= here.number());
                survived += 1;
            }
            primary::Outcome::Alone(_) | primary::Outcome::Failed(_) => {
                let before = here.number();
                wait_for("the disk", || here.number() > before + 2 * BLOCKS);
                here.assert_of_one_moment();
            }
            other => panic!("{way:?}: {other:?}"),
        }
        wait_for("the end", || !here.0.lock().is_saved);
    }
    assert!(survived > 0);
}

#[test]
fn checkpoint_whose_disk_is_none_is_not_held_and_the_one_before_is_taken_over() {
    for lanes in [0, 2] {
        let terms = Terms { lease: short_lease(), ..TERMS };
        let (pair, [here, there]) = protect_disk(&Way { lanes, ..PLAIN }, terms).expect("protected");
        pair.wait_for_held(10);
        *pair.arbiter.0.lock() = Some("standby");
        here.0.lock().lies = true;
        assert_eq!(pair.primary.wait(), primary::Outcome::Lost);
        assert!(matches!(pair.ended_there(), standby::Outcome::Running(_)));
        there.assert_of_one_moment();
        assert!(there.number() > 0);
        assert_lives_on(&pair.there);
    }
}

#[test]
fn device_that_cannot_be_saved_for_a_checkpoint_leaves_a_whole_guest_on_one_side() {
    for (owner, lanes) in [("primary", 0), ("standby", 0), ("primary", 2)] {
        let terms = Terms { lease: short_lease(), ..TERMS };
        let (pair, [here, there]) = protect_disk(&Way { lanes, ..PLAIN }, terms).expect("protected");
        pair.wait_for_held(10);
        *pair.arbiter.0.lock() = Some(owner);

        here.0.lock().is_broken = true;

        let outcome = pair.primary.wait();
        let trouble = pair.primary.state().trouble.unwrap_or_default();
        if owner == "primary" {
            assert_eq!(outcome, primary::Outcome::Alone(primary::Because::Claim));
            assert!(trouble.contains("disk") && trouble.contains("told to fail"), "{trouble}");
            assert_lives_on(&pair.guest);
        } else {
            assert_eq!(outcome, primary::Outcome::Lost);
            assert!(matches!(pair.ended_there(), standby::Outcome::Running(_)));
            there.assert_of_one_moment();
            assert_lives_on(&pair.there);
        }
    }
}

#[test]
fn device_that_cannot_be_loaded_claims_nothing_and_is_taken_over_when_it_can() {
    let terms = Terms { lease: short_lease(), ..TERMS };
    let (pair, [_, there]) = protect_disk(&PLAIN, terms).expect("protected");
    pair.wait_for_held(10);
    there.0.lock().is_broken = true;
    // The primary's guest is paused, because the primary does not reach the arbiter.
    *pair.arbiter.0.lock() = Some("standby");

    pair.link.knobs.cut.store(0, Ordering::SeqCst);

    let contact = pair.standby.contact().expect("a contact");
    wait_for("the failure", || contact.state().state == standby::State::Unready);
    let trouble = contact.state().trouble.unwrap_or_default();
    assert!(trouble.contains("disk") && trouble.contains("told to fail"), "{trouble}");

    there.0.lock().is_broken = false;
    contact.retry().expect("it waits for its operator");
    assert!(matches!(pair.ended_there(), standby::Outcome::Running(_)));
    there.assert_of_one_moment();
    assert_lives_on(&pair.there);
}

#[test]
fn disk_is_handed_over_with_its_last_checkpoint() {
    for lanes in [0, 2] {
        let (pair, [here, there]) = protect_disk(&Way { lanes, ..PLAIN }, TERMS).expect("protected");
        pair.wait_for_held(20);
        assert!(here.number() > 0);
        pair.primary.hand_over().expect("protected");
        assert_eq!(pair.primary.wait(), primary::Outcome::HandedOver);
        assert!(matches!(pair.ended_there(), standby::Outcome::Running(_)));
        assert_eq!(there.number(), here.number(), "nothing is lost");
        there.assert_of_one_moment();
        assert_eq!(there.0.lock().content, here.0.lock().content);
    }
}

#[test]
fn disk_at_its_limit_asks_for_the_checkpoint_that_lets_it_go_on() {
    // No checkpoint is due for ten minutes.
    let way = Way { delay: Duration::from_secs(600), buffer_bytes: 2 * BLOCK as u64, ..PLAIN };
    let (pair, [here, _]) = protect_disk(&way, TERMS).expect("protected");
    pair.wait_for_held(10);
    let before = here.number();
    wait_for("writes", || here.number() > before + 20);
    assert!(here.0.lock().dirty.len() <= 2);
    pair.primary.unprotect().expect("protected");
    assert!(matches!(pair.primary.wait(), primary::Outcome::Alone(_)));
    let before = here.number();
    wait_for("a disk without a limit", || here.number() > before + 2 * BLOCKS);
}

#[test]
fn standby_without_the_disk_is_refused_and_the_guest_runs_on() {
    let (guest, _) = pair(&writer());
    let there = ProcessGuest::waiting(writer()).expect("destination");
    let disk = Disk::new();
    let vms =
        (Extended::with_disk(&guest, &disk) as Arc<dyn SourceVm>, Arc::clone(&there) as Arc<dyn TargetVm>);
    let pair = join((guest, there), vms, &PLAIN, TERMS, Arc::new(NoOutput)).expect("greeted");
    assert!(matches!(pair.primary.wait(), primary::Outcome::Failed(_)));
    wait_for("the refusal", || format!("{:?}", pair.standby.state()).contains("copies device"));
    assert_lives_on(&pair.guest);
    assert!(!disk.0.lock().is_saved);
}

#[test]
fn device_whose_stream_knows_no_epochs_is_refused_by_name() {
    let (guest, _) = pair(&writer());
    let there = ProcessGuest::waiting(writer()).expect("destination");
    let bank: Arc<dyn Device> = Arc::new(BankDevice(Arc::new(Bank::new(0, 1, 1 << 20, 0, &Arc::default()))));
    let vm = Extended { guest: Arc::clone(&guest), disk: None, more: vec![bank] };
    let vms = (Arc::new(vm) as Arc<dyn SourceVm>, Arc::clone(&there) as Arc<dyn TargetVm>);
    let refused = join((guest.clone(), there), vms, &PLAIN, TERMS, Arc::new(NoOutput)).map(drop);
    let error = refused.expect_err("refused");
    let ProtectError::Start(StartError::Settings(SettingsError::DeviceCannotBeProtected { device })) = &error
    else {
        panic!("{error}");
    };
    assert_eq!(device, "bank");
    assert_lives_on(&guest);
}

/// Another handle of a bank, like [`Handle`].
struct BankDevice(Arc<Bank>);

impl Device for BankDevice {
    fn name(&self) -> String {
        "bank".into()
    }
    fn version(&self) -> u32 {
        1
    }
    fn save(&self) -> Result<Vec<u8>, VmError> {
        Ok(Vec::new())
    }
    fn load(&self, _: u32, _: &[u8]) -> Result<(), VmError> {
        Ok(())
    }
    fn stream(&self) -> Option<Arc<dyn DeviceStream>> {
        Some(self.0.clone())
    }
}

#[test]
fn planned_takeover_lets_every_packet_out_before_the_other_side_has_the_guest() {
    let gate = PacketGate::new(1 << 20).unwrap();
    let sent = Arc::<Mutex<Vec<u8>>>::default();
    let sends = Arc::clone(&sent);
    // Sending a packet needs time, as on a slow network.
    let send = move |packet: &[u8]| {
        std::thread::sleep(Duration::from_millis(20));
        sends.lock().push(packet[0]);
    };
    let lane = gate.lane(send, || {});
    let pair = protect(writer(), &Way { delay: Duration::from_secs(600), ..PLAIN }, TERMS, Arc::new(gate));
    pair.wait_for_held(1);
    (0..10).for_each(|packet| lane.put(&[packet]));
    pair.primary.hand_over().expect("protected");
    assert_eq!(pair.primary.wait(), primary::Outcome::HandedOver);
    assert_eq!(*sent.lock(), (0..10).collect::<Vec<u8>>());
}

#[test]
fn full_gate_of_packets_asks_for_the_checkpoint_that_lets_them_leave() {
    let gate = PacketGate::new(1).unwrap();
    let [sent, told] = [0, 1].map(|_| Arc::<AtomicU64>::default());
    let (sends, tells) = (Arc::clone(&sent), Arc::clone(&told));
    let send = move |packet: &[u8]| {
        sends.fetch_add(packet.len() as u64, Ordering::SeqCst);
    };
    let lane = gate.lane(send, move || {
        tells.fetch_add(1, Ordering::SeqCst);
    });
    // After the first checkpoint, none is due for ten minutes.
    let way = Way { delay: Duration::from_secs(600), ..PLAIN };
    let pair = protect(writer(), &way, TERMS, Arc::new(gate));
    pair.wait_for_held(1);
    for packet in 1..=5 {
        wait_for("room", || lane.has_room());
        let held = pair.primary.statistics().held;
        lane.put(&[0; 100]);
        assert!(!lane.has_room());
        wait_for("the packet", || sent.load(Ordering::SeqCst) == packet * 100);
        assert!(pair.primary.statistics().held > held, "it left behind its checkpoint");
    }
    assert!(told.load(Ordering::SeqCst) >= 5);
    assert!(pair.primary.statistics().taken < 20);
    pair.primary.unprotect().expect("protected");
    assert!(matches!(pair.primary.wait(), primary::Outcome::Alone(_)));
    let begin = std::time::Instant::now();
    while !lane.is_open() {
        assert!(begin.elapsed() < PATIENCE);
    }
}

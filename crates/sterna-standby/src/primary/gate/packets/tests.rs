//! Tests of packets in the gate.

use super::super::waiting::LOOK;
use super::*;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);

/// Sent packets, each with its lane.
type Sent = Arc<Mutex<Vec<(usize, Vec<u8>)>>>;

/// A gate with two lanes, the packets that have left, and the number of `has_room` calls.
struct World {
    gate: PacketGate,
    lanes: [PacketLane; 2],
    sent: Sent,
    told: Arc<AtomicU64>,
}

impl World {
    fn new(limit_bytes: u64) -> Self {
        let gate = PacketGate::new(limit_bytes).unwrap();
        let (sent, told) = (Sent::default(), Arc::<AtomicU64>::default());
        let lanes = [0, 1].map(|index| {
            let (sent, told) = (Arc::clone(&sent), Arc::clone(&told));
            let send = move |bytes: &[u8]| sent.lock().push((index, bytes.to_vec()));
            gate.lane(send, move || {
                told.fetch_add(1, Ordering::SeqCst);
            })
        });
        Self { gate, lanes, sent, told }
    }

    fn left(&self, count: usize) -> Vec<(usize, Vec<u8>)> {
        wait("packets", || self.sent.lock().len() >= count);
        self.sent.lock().clone()
    }
}

fn wait(what: &str, mut is_so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < PATIENCE, "{what} did not come");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn packet_leaves_once_and_not_before_its_epoch_is_held_and_the_claim_is_looked_at() {
    let world = World::new(1 << 20);
    let held = Arc::new(AtomicU64::new(0));
    let asked = Arc::clone(&held);
    assert!(world.lanes[0].is_open());
    world.gate.close(Box::new(move |epoch| epoch <= asked.load(Ordering::SeqCst)));
    assert!(!world.lanes[0].is_open() && !world.lanes[1].is_open());
    world.lanes[0].put(b"first");
    world.lanes[1].put(b"second");
    world.gate.end_epoch(1);
    world.lanes[0].put(b"third");
    world.gate.end_epoch(2);

    // The epoch was released, but the lease has ended since.
    world.gate.release(1);
    std::thread::sleep(3 * LOOK);
    assert!(world.sent.lock().is_empty());
    held.store(9, Ordering::SeqCst);
    let first = vec![(0, b"first".to_vec()), (1, b"second".to_vec())];
    assert_eq!(world.left(2), first);
    std::thread::sleep(3 * LOOK);
    assert_eq!(*world.sent.lock(), first, "the third is of another epoch");
    assert_eq!(world.gate.statistics().waiting, 1);

    world.gate.release(2);
    world.gate.release(2);
    assert_eq!(world.left(3)[2], (0, b"third".to_vec()));
    world.gate.open();
    wait("the open gate", || world.lanes[0].is_open());
    assert_eq!(world.sent.lock().len(), 3);
}

#[test]
fn what_is_sent_while_the_gate_opens_comes_after_what_waits() {
    let gate = PacketGate::new(1 << 20).unwrap();
    let (begun, has_begun) = std::sync::mpsc::channel();
    let (go, may_go) = std::sync::mpsc::channel::<()>();
    let (may_go, sent) = (Mutex::new(may_go), Arc::<Mutex<Vec<Vec<u8>>>>::default());
    let sends = Arc::clone(&sent);
    let send = move |bytes: &[u8]| {
        let _ = begun.send(());
        let _ = may_go.lock().recv();
        sends.lock().push(bytes.to_vec());
    };
    let lane = gate.lane(send, || {});
    gate.close(Box::new(|_| false));
    lane.put(b"one");
    gate.open();
    has_begun.recv_timeout(PATIENCE).expect("it leaves");
    assert!(!lane.is_open(), "the first one is still on its way");
    lane.put(b"two");
    drop(go);
    wait("the open gate", || lane.is_open());
    assert_eq!(*sent.lock(), [b"one", b"two"]);
}

#[test]
fn full_gate_asks_once_in_an_epoch_and_says_when_there_is_room() {
    let world = World::new(1);
    let asked = Arc::<AtomicU64>::default();
    let asks = Arc::clone(&asked);
    world.gate.ask_when_full(Arc::new(move || {
        asks.fetch_add(1, Ordering::SeqCst);
    }));
    world.gate.close(Box::new(|_| true));
    assert!(world.lanes[0].has_room());
    // A single packet above the limit is accepted.
    world.lanes[0].put(b"packet");
    assert!(!world.lanes[0].has_room() && !world.lanes[1].has_room());
    assert_eq!((asked.load(Ordering::SeqCst), world.told.load(Ordering::SeqCst)), (1, 0));
    world.gate.end_epoch(1);
    assert!(!world.lanes[0].has_room());
    assert_eq!(asked.load(Ordering::SeqCst), 2, "what waits may be of two epochs");

    world.gate.release(1);
    wait("room", || world.told.load(Ordering::SeqCst) == 2);
    assert!(world.lanes[0].has_room());
    assert_eq!(world.left(1).len(), 1);
}

#[test]
fn lost_claim_drops_what_waits_for_ever() {
    let world = World::new(1);
    world.gate.close(Box::new(|_| false));
    world.lanes[0].put(b"never");
    assert!(!world.lanes[1].has_room());
    world.gate.release(7);
    world.gate.drop_output();
    wait("room", || world.told.load(Ordering::SeqCst) == 2);
    assert_eq!(world.gate.statistics().waiting_bytes, 0);
    drop(world.gate);
    assert!(world.sent.lock().is_empty());
}

#[test]
fn gates_of_one_guest_go_by_the_same_epochs() {
    use super::super::{ByteGate, JoinedGate};
    let world = World::new(1);
    let said = Arc::<Mutex<Vec<u8>>>::default();
    let says = Arc::clone(&said);
    let console = ByteGate::new(1 << 20, move |bytes| says.lock().extend_from_slice(bytes)).unwrap();
    let (console, lane) = (Arc::new(console), &world.lanes[0]);
    let packets: Arc<dyn EpochGate> = Arc::new(world.gate);
    let gate = JoinedGate::new(console.clone(), vec![packets]);
    let held = Arc::new(AtomicU64::new(0));
    let asked = Arc::clone(&held);
    gate.close(Box::new(move |epoch| epoch <= asked.load(Ordering::SeqCst)));
    console.put(b"said");
    lane.put(b"sent");
    assert_eq!(gate.unsaid(), (0, b"said".to_vec()), "packets are not said again");
    assert_eq!((gate.statistics().waiting, gate.statistics().waiting_bytes), (2, 8));
    gate.end_epoch(1);
    console.put(b" later");
    held.store(1, Ordering::SeqCst);
    gate.release(1);
    wait("both", || said.lock().as_slice() == b"said" && world.sent.lock().len() == 1);
    gate.drop_output();
    gate.open();
    wait("the open gate", || lane.is_open());
    assert_eq!(said.lock().as_slice(), b"said");
}

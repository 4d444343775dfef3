//! A gate between two sockets that play QEMU's redirectors.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::*;

struct Lab {
    gate: OutputGate,
    guest: UnixStream,
    network: UnixStream,
    /// The highest epoch whose packets `may_say` allows.
    may: Arc<AtomicU64>,
}

fn lab(most_bytes: u64) -> Lab {
    let (guest, from_guest) = UnixStream::pair().unwrap();
    let (to_network, network) = UnixStream::pair().unwrap();
    let may = Arc::new(AtomicU64::new(u64::MAX));
    let asked = Arc::clone(&may);
    let gate = OutputGate::new(from_guest, to_network, most_bytes, move |epoch| {
        epoch <= asked.load(Ordering::SeqCst)
    });
    network.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    Lab { gate: gate.unwrap(), guest, network, may }
}

impl Lab {
    fn says(&mut self, number: u64) {
        let mut packet = 8_u32.to_be_bytes().to_vec();
        packet.extend_from_slice(&number.to_be_bytes());
        self.guest.write_all(&packet).unwrap();
    }

    fn hears(&mut self) -> u64 {
        let mut packet = [0; 12];
        self.network.read_exact(&mut packet).unwrap();
        assert_eq!(packet[..4], 8_u32.to_be_bytes());
        u64::from_be_bytes(packet[4..].try_into().unwrap())
    }

    fn hears_nothing(&mut self) {
        self.network.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        let heard = self.network.read(&mut [0; 1]);
        assert!(heard.is_err(), "{heard:?}");
        self.network.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    }
}

#[test]
fn packets_wait_for_their_epoch_and_keep_their_order() {
    let mut lab = lab(1 << 20);
    lab.says(1);
    assert_eq!(lab.hears(), 1, "it is open at first");
    lab.says(2);
    lab.gate.close();
    assert_eq!(lab.hears(), 2, "said before it was closed");
    (3..6).for_each(|number| lab.says(number));
    assert_eq!(lab.gate.end_epoch(), 2);
    (6..9).for_each(|number| lab.says(number));
    assert_eq!(lab.gate.end_epoch(), 3);
    lab.says(9);
    lab.hears_nothing();

    lab.gate.release(2);
    assert_eq!([lab.hears(), lab.hears(), lab.hears()], [3, 4, 5]);
    lab.hears_nothing();
    lab.gate.release(3);
    assert_eq!([lab.hears(), lab.hears(), lab.hears()], [6, 7, 8]);
    lab.hears_nothing();
    lab.gate.open();
    assert_eq!(lab.hears(), 9);
    assert!(lab.gate.wait_until_empty(Duration::from_secs(30)));
}

#[test]
fn what_was_released_is_asked_for_again_when_it_leaves() {
    let mut lab = lab(1 << 20);
    lab.gate.close();
    lab.says(1);
    lab.gate.end_epoch();
    lab.may.store(1, Ordering::SeqCst);

    lab.gate.release(2);
    lab.hears_nothing();
    assert_eq!(lab.gate.statistics().waiting, 1);

    lab.may.store(2, Ordering::SeqCst);
    assert_eq!(lab.hears(), 1);
}

#[test]
fn border_of_an_epoch_is_exact_whatever_the_threads_do() {
    let mut lab = lab(1 << 20);
    lab.gate.close();
    for epoch in 2..200 {
        // The packet is written and not read yet. It belongs to the epoch that ends now.
        lab.says(epoch);
        assert_eq!(lab.gate.end_epoch(), epoch);
        lab.gate.release(epoch);
        assert_eq!(lab.hears(), epoch);
    }
}

#[test]
fn gate_reads_on_when_too_much_waits_and_drops_what_comes_then() {
    let mut lab = lab(120);
    lab.gate.close();
    // More than the socket buffers can store.
    let is_written = Arc::new(AtomicBool::new(false));
    let writer = std::thread::spawn({
        let (mut guest, is_written) = (lab.guest.try_clone().unwrap(), Arc::clone(&is_written));
        move || {
            let packet = [&1000_u32.to_be_bytes()[..], &[7; 1000]].concat();
            for number in 0..10_u64 {
                guest.write_all(&[&8_u32.to_be_bytes()[..], &number.to_be_bytes()].concat()).unwrap();
            }
            (0..5_000).for_each(|_| guest.write_all(&packet).unwrap());
            is_written.store(true, Ordering::SeqCst);
        }
    });
    writer.join().unwrap();
    assert!(is_written.load(Ordering::SeqCst), "the writer was never held up for good");
    lab.gate.end_epoch();
    assert_eq!((lab.gate.statistics().waiting, lab.gate.statistics().dropped), (10, 5_000));
    lab.gate.release(2);
    (0..10).for_each(|number| assert_eq!(lab.hears(), number));
    lab.says(10);
    lab.gate.drop_waiting();
    lab.gate.open();
    lab.says(11);
    assert_eq!(lab.hears(), 11, "10 was dropped");
}

#[test]
fn gate_that_is_broken_lets_nothing_out() {
    let mut closed = lab(1 << 20);
    closed.gate.close();
    closed.says(1);
    closed.guest.shutdown(Shutdown::Both).unwrap();
    while closed.gate.ended().is_none() {
        std::thread::sleep(Duration::from_millis(1));
    }
    closed.gate.open();
    let mut rest = Vec::new();
    closed.network.read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty(), "{rest:?}");

    let mut lies = lab(1 << 20);
    lies.guest.write_all(&[0xff; 8]).unwrap();
    let mut rest = Vec::new();
    lies.network.read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty(), "{rest:?}");
    assert!(lies.gate.ended().unwrap().contains("4294967295 bytes"));
}

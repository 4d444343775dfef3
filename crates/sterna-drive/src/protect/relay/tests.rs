//! A relay between two ends that play QEMU and the standby.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicU32;
use std::sync::mpsc::{Receiver, Sender, channel};

use super::*;

mod kept;

const PATIENCE: Duration = Duration::from_secs(60);
const PONG: [u8; 8] = [0, 2, 0, 4, 0, 0, 0, 1];
const SHUT: [u8; 8] = [0, 1, 0, 4, 0, 0, 0, 0];
const READY: [u8; 4] = [0, 0, 0, 0];
const REPLY: [u8; 4] = [0, 0, 0, 2];
const RECEIVED: [u8; 4] = [0, 0, 0, 5];
const LOADED: [u8; 4] = [0, 0, 0, 6];

/// Sends the name of each step to the test. A step returns when the test allows it.
struct Recorder {
    steps: Mutex<Sender<String>>,
    go: Mutex<Receiver<bool>>,
    /// Number of calls of `qemu_ended`.
    ends: AtomicU32,
    /// Every checkpoint is the last one of a planned takeover.
    is_last: AtomicBool,
}

impl Recorder {
    fn step(&self, what: String) -> bool {
        self.steps.lock().send(what).unwrap();
        self.go.lock().recv_timeout(PATIENCE).unwrap()
    }
}

impl Steps for Recorder {
    fn ready(&self) {
        self.step("ready".to_owned());
    }
    fn reply(&self, number: u64) -> Result<(), String> {
        match self.step(format!("reply {number}")) {
            true => Ok(()),
            false => Err("it may not be taken".to_owned()),
        }
    }
    fn may_answer(&self, _: u64) -> bool {
        !self.is_last.load(Ordering::SeqCst)
    }
    fn received(&self, number: u64) -> bool {
        self.step(format!("received {number}"))
    }
    fn check_disks(&self) -> Result<(), String> {
        match self.step("disks".to_owned()) {
            true => Ok(()),
            false => Err("a disk lacks its child".to_owned()),
        }
    }
    fn qemu_ended(&self) {
        // No end of the standby's side is reported before this.
        self.ends.fetch_add(1, Ordering::SeqCst);
    }
    fn ended(&self, why: String, is_standbys_fault: bool) {
        self.steps.lock().send(format!("ended, {is_standbys_fault}: {why}")).unwrap();
    }
}

struct Lab {
    relay: Relay,
    steps: Receiver<String>,
    go: Sender<bool>,
    qemu: UnixStream,
    standby: UnixStream,
    listener: UnixListener,
    recorder: Arc<Recorder>,
    directory: tempfile::TempDir,
}

/// A relay that keeps no checkpoints in memory.
fn lab() -> Lab {
    lab_that_keeps(0, 1)
}

fn lab_that_keeps(most_bytes: u64, channels: u8) -> Lab {
    let directory = tempfile::tempdir().unwrap();
    let (at, path) = (directory.path().join("standby"), directory.path().join("stream"));
    let listener = UnixListener::bind(&at).unwrap();
    let ((tells, steps), (go, goes)) = (channel(), channel());
    let recorder = Arc::new(Recorder {
        steps: Mutex::new(tells),
        go: Mutex::new(goes),
        ends: AtomicU32::new(0),
        is_last: AtomicBool::new(false),
    });
    let weak = Arc::downgrade(&(Arc::clone(&recorder) as Arc<dyn Steps>));
    let relay = Relay::listen(&path, Address::Unix(at), None, channels, most_bytes, weak).unwrap();
    let mut qemu = UnixStream::connect(&path).unwrap();
    qemu.write_all(b"QEVM").unwrap();
    let (mut standby, _) = listener.accept().unwrap();
    for end in [&qemu, &standby] {
        end.set_read_timeout(Some(PATIENCE)).unwrap();
    }
    assert_eq!(read(&mut standby), *b"QEVM");
    Lab { relay, steps, go, qemu, standby, listener, recorder, directory }
}

fn read<const N: usize>(from: &mut UnixStream) -> [u8; N] {
    let mut bytes = [0; N];
    from.read_exact(&mut bytes).unwrap();
    bytes
}

impl Lab {
    fn say(&mut self, bytes: &[&[u8]]) {
        self.standby.write_all(&bytes.concat()).unwrap();
    }

    /// The next step that the relay calls.
    fn step(&self) -> String {
        self.steps.recv_timeout(PATIENCE).unwrap()
    }

    /// Opens a disk's connection: QEMU's end, and the standby's end.
    fn disk(&self) -> (UnixStream, UnixStream) {
        let path = self.directory.path().join("disk");
        self.relay.listen_for_disk(&path).unwrap();
        let mut qemu = UnixStream::connect(&path).unwrap();
        let (mut standby, _) = self.listener.accept().unwrap();
        for end in [&qemu, &standby] {
            end.set_read_timeout(Some(PATIENCE)).unwrap();
        }
        assert_eq!(read(&mut standby), *b"STND\0\0\0\x01");
        // Uses both directions. This also proves that the relay has recorded the connection.
        standby.write_all(b"NBDMAGIC").unwrap();
        assert_eq!(read(&mut qemu), *b"NBDMAGIC");
        (qemu, standby)
    }

    fn hears_nothing(&mut self) {
        self.qemu.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let heard = self.qemu.read(&mut [0; 1]);
        assert!(heard.is_err(), "{heard:?}");
        self.qemu.set_read_timeout(Some(PATIENCE)).unwrap();
    }

    /// Runs the protocol up to checkpoint 1, which is held.
    fn first_checkpoint(&mut self) {
        self.say(&[&SHUT, &READY, &REPLY]);
        assert_eq!(self.step(), "ready");
        self.go.send(true).unwrap();
        assert_eq!(self.step(), "reply 1");
        self.go.send(true).unwrap();
        assert_eq!(read::<16>(&mut self.qemu)[..], [&SHUT[..], &READY, &REPLY].concat());
        self.say(&[&RECEIVED, &LOADED]);
        assert_eq!(self.step(), "received 1");
    }
}

#[test]
fn last_piece_of_a_checkpoint_waits_until_qemu_has_answered_about_its_disks() {
    for is_whole in [true, false] {
        let mut lab = lab();
        let _disk = lab.disk();
        lab.say(&[&SHUT, &READY, &REPLY]);
        for step in ["ready", "reply 1"] {
            assert_eq!(lab.step(), step);
            lab.go.send(true).unwrap();
        }
        assert_eq!(read::<16>(&mut lab.qemu)[..], [&SHUT[..], &READY, &REPLY].concat());

        // The guest is paused. Pieces with a successor are forwarded, because QEMU would not answer otherwise.
        lab.qemu.write_all(b"SEND").unwrap();
        assert_eq!(lab.step(), "disks");
        let mut sent = Vec::new();
        while lab.relay.bytes() < 8 + 3 * PIECE_BYTES as u64 {
            sent.extend_from_slice(&[7; PIECE_BYTES]);
            lab.qemu.write_all(&[7; PIECE_BYTES]).unwrap();
            let mut come = vec![0; PIECE_BYTES / 2];
            lab.standby.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
            while lab.standby.read(&mut come).is_ok_and(|length| length > 0) {}
        }
        lab.qemu.write_all(b"LAST").unwrap();
        let begin = Instant::now();
        let mut heard = Vec::new();
        while begin.elapsed() < Duration::from_millis(300) {
            let mut come = [0; 4096];
            if let Ok(length) = lab.standby.read(&mut come) {
                heard.extend_from_slice(&come[..length]);
            }
        }
        assert!(!heard.ends_with(b"LAST"), "it did not wait");

        lab.standby.set_read_timeout(Some(PATIENCE)).unwrap();
        lab.go.send(is_whole).unwrap();

        let mut rest = Vec::new();
        if is_whole {
            while !rest.ends_with(b"LAST") {
                let mut come = [0; 4096];
                let length = lab.standby.read(&mut come).unwrap();
                assert!(length > 0, "it ended");
                rest.extend_from_slice(&come[..length]);
            }
            // Until the next checkpoint no piece is held back.
            lab.qemu.write_all(b"NEXT").unwrap();
            assert_eq!(read(&mut lab.standby), *b"NEXT");
        } else {
            lab.standby.read_to_end(&mut rest).unwrap();
            assert!(!rest.ends_with(b"LAST"), "what the standby must not have");
            let known = lab.relay.ended_because();
            assert_eq!(known.as_deref(), Some("a disk lacks its child"), "whoever sees the end can say why");
            assert_eq!(lab.step(), "ended, false: a disk lacks its child");
        }
    }
}

#[test]
fn each_answer_waits_for_its_step() {
    let mut lab = lab();
    lab.say(&[&PONG]);
    assert_eq!(read(&mut lab.qemu), PONG);
    lab.say(&[&SHUT]);
    lab.hears_nothing();
    lab.say(&[&READY]);
    assert_eq!(lab.step(), "ready");
    lab.hears_nothing();
    lab.go.send(true).unwrap();
    assert_eq!(read(&mut lab.qemu), [0, 1, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0]);

    for number in 1..4 {
        lab.say(&[&REPLY]);
        assert_eq!(lab.step(), format!("reply {number}"));
        lab.hears_nothing();
        lab.go.send(true).unwrap();
        assert_eq!(read(&mut lab.qemu), REPLY);
        lab.say(&[&RECEIVED, &LOADED]);
        assert_eq!(lab.step(), format!("received {number}"));
        lab.hears_nothing();
        lab.go.send(true).unwrap();
        assert_eq!(read(&mut lab.qemu), [0, 0, 0, 5, 0, 0, 0, 6]);
    }
}

#[test]
fn last_checkpoint_is_kept_from_qemu_and_its_side_is_closed_alone() {
    let mut lab = lab();
    lab.first_checkpoint();
    lab.go.send(false).unwrap();
    lab.hears_nothing();

    lab.relay.close_qemu();
    assert_eq!(lab.qemu.read(&mut [0; 1]).unwrap(), 0);
    lab.standby.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    assert!(lab.standby.read(&mut [0; 1]).is_err(), "the standby's side is open");
    assert!(lab.steps.try_recv().is_err(), "an end that was wanted is none");
    lab.relay.close();
    assert_eq!(lab.standby.read(&mut [0; 1]).unwrap(), 0);
}

#[test]
fn qemu_that_writes_to_a_silent_standby_is_freed() {
    let mut lab = lab();
    let mut qemu = lab.qemu.try_clone().unwrap();
    // More than all buffers between QEMU and the standby can store.
    let writer = std::thread::spawn(move || qemu.write_all(&vec![0; 64 << 20]));
    let begin = Instant::now();
    while lab.relay.stalled() < Duration::from_millis(50) {
        assert!(begin.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(1));
    }
    lab.relay.close_qemu();
    writer.join().unwrap().unwrap_err();
    let _ = &mut lab.standby;
}

#[test]
fn all_of_a_long_stream_arrives() {
    let mut lab = lab();
    let sent: Vec<u8> = (0..5_000_003_u32).map(|index| (index / 7) as u8).collect();
    let mut qemu = lab.qemu.try_clone().unwrap();
    let (whole, expected) = (sent.clone(), sent.len());
    let writer = std::thread::spawn(move || qemu.write_all(&whole));
    let mut came = vec![0; expected];
    lab.standby.read_exact(&mut came).unwrap();
    writer.join().unwrap().unwrap();
    assert!(came == sent, "bytes differ");
    // The last piece is counted after it was written.
    let begin = Instant::now();
    while lab.relay.bytes() != expected as u64 + 4 {
        assert!(begin.elapsed() < PATIENCE, "{}", lab.relay.bytes());
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn end_is_told_with_who_is_at_fault() {
    let mut wrong = lab();
    wrong.say(&[&SHUT, &READY]);
    assert_eq!(wrong.step(), "ready");
    wrong.go.send(true).unwrap();
    wrong.say(&[&RECEIVED]);
    let ended = wrong.step();
    assert!(ended.starts_with("ended, true: ") && ended.contains("VMSTATE_RECEIVED"), "{ended}");
    read::<12>(&mut wrong.qemu);
    assert_eq!(wrong.qemu.read(&mut [0; 1]).unwrap(), 0, "QEMU's side is closed");

    let gone = lab();
    drop(gone.standby);
    let ended = gone.steps.recv_timeout(PATIENCE).unwrap();
    assert!(ended.starts_with("ended, false: the standby"), "{ended}");

    let mut refused = lab();
    refused.say(&[&SHUT, &READY, &REPLY]);
    for (step, may) in [("ready", true), ("reply 1", false)] {
        assert_eq!(refused.step(), step);
        refused.go.send(may).unwrap();
    }
    assert_eq!(refused.step(), "ended, false: it may not be taken");
}

#[test]
fn relay_that_goes_late_leaves_the_next_ones_socket() {
    let lab = lab();
    let path = lab.directory.path().join("stream");
    // An ended protection removes its directory before its relay ends, and another one may use the path by then.
    std::fs::remove_file(&path).unwrap();
    let _next = UnixListener::bind(&path).unwrap();
    drop(lab.relay);
    UnixStream::connect(&path).unwrap();
}

#[test]
fn second_main_channel_is_refused() {
    let lab = lab();
    let mut second = UnixStream::connect(&lab.relay.path).unwrap();
    second.write_all(b"QEVM").unwrap();
    let ended = lab.step();
    assert!(ended.contains("two main channels"), "{ended}");
}

#[test]
fn standby_hears_nothing_that_qemu_says_after_it_has_lost_a_disk() {
    // First case: the standby's side of the disk ends.
    let mut lab = lab();
    let (mut qemu, standby) = lab.disk();
    // `shutdown`, not `drop`: a process that another test starts may have inherited the descriptor for a moment.
    standby.shutdown(std::net::Shutdown::Both).unwrap();
    assert_eq!(qemu.read(&mut [0; 1]).unwrap(), 0, "QEMU learns it");
    // The stream is closed already, so these bytes are lost.
    let _ = lab.qemu.write_all(b"VMSTATE_SEND");
    let mut heard = Vec::new();
    lab.standby.read_to_end(&mut heard).unwrap();
    assert_eq!(heard, b"");
    assert!(lab.step().contains("the connection for a disk"));

    // Second case: QEMU's side ends, and QEMU continues its stream immediately.
    for _ in 0..50 {
        let mut lab = self::lab();
        let (qemu, _standby) = lab.disk();
        qemu.shutdown(std::net::Shutdown::Both).unwrap();
        let _ = lab.qemu.write_all(b"VMSTATE_SEND");
        let mut heard = Vec::new();
        lab.standby.read_to_end(&mut heard).unwrap();
        assert_eq!(heard, b"");
    }
}

#[test]
fn disk_that_gets_no_answer_is_seen() {
    let lab = lab();
    let (mut qemu, mut standby) = lab.disk();
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(lab.relay.disk_stalled(), Duration::ZERO, "nothing was asked");
    qemu.write_all(b"a request").unwrap();
    assert_eq!(read(&mut standby), *b"a request");
    std::thread::sleep(Duration::from_millis(20));
    assert!(lab.relay.disk_stalled() >= Duration::from_millis(20));
    standby.write_all(b"a reply").unwrap();
    assert_eq!(read(&mut qemu), *b"a reply");
    assert_eq!(lab.relay.disk_stalled(), Duration::ZERO);
}

#[test]
fn end_of_qemu_is_told_once_and_that_of_the_standby_is_none() {
    let of_qemu = lab();
    of_qemu.qemu.shutdown(std::net::Shutdown::Both).unwrap();
    assert_eq!(of_qemu.step(), "ended, false: QEMU has closed the stream");
    assert_eq!(of_qemu.recorder.ends.load(Ordering::SeqCst), 1);

    let of_standby = lab();
    of_standby.standby.shutdown(std::net::Shutdown::Both).unwrap();
    assert!(of_standby.step().starts_with("ended, false: the standby"));
    assert_eq!(of_standby.recorder.ends.load(Ordering::SeqCst), 0);
}
